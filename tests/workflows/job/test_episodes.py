"""Episodes of a job: tokens of the environment are no tokens of the model, and a row leaves as soon as it is over."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import transferqueue as tq
from tests.workflows.job.policies import job_of, table_of
from transferqueue.adapters.protocols import Completion, PartialResult, Prompt, Sampling
from transferqueue.adapters.stages.environments import Episodes
from transferqueue.errors import UsageError
from transferqueue.workflows.flow.loop.runner import StageFailedInProcess
from transferqueue.workflows.job import names
from transferqueue.workflows.job.reward_terms import call_thread, tries
from transferqueue.workflows.job.reward_terms.call_thread import CallThread, HungCalls
from transferqueue.workflows.job.reward_terms.tries import TRIES_MAX
from transferqueue.workflows.job.settings.job import Job
from transferqueue.workflows.job.stages.episodes import FAILED, EnvironmentFailed, JobEpisodes
from transferqueue.workflows.job.stages.policy_weights import FixedWeights
from transferqueue.workflows.job.stages.samples import SampleReporter
from transferqueue.workflows.job.tiny_model.tokenizer import build_tokenizer

pytest.importorskip("transformers")
TEXT = {"calculator": "examples/jobs/environments.py:calculator", "guess": "examples/jobs/environments.py:guess_number"}


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tries, "PAUSE_S", 0.0)


class SaysItsSeed:
    """An environment of one turn whose reward is made from its seed."""

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[None, dict[str, Any]]:
        self.seed = seed
        return None, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", float(self.seed % 1009), True, False, {}

    def close(self) -> None:
        pass


class Scripted:
    """A generator that says what it is told, one text a turn; the end token is its last."""

    version = 3

    def __init__(self, tokenizer: Any, says: Mapping[str, Sequence[str]], *, end: bool = True) -> None:
        self.tokenizer, self.says, self.end = tokenizer, says, end
        self.requests: list[tuple[str, int | None, int]] = []
        self.lock = threading.Lock()

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, *, timeout_s: float) -> Iterator[Completion]:
        (prompt,) = prompts
        text = self.tokenizer.decode(prompt.ids.tolist())
        with self.lock:
            self.requests.append((text, prompt.seed, sampling.tokens_max))
        said = next(answers for question, answers in self.says.items() if question in text)
        turn = text.count("<|im_start|>assistant") - 1
        ids = self.tokenizer([said[turn]])["input_ids"][0] + [self.tokenizer.eos_token_id] * self.end
        ids = np.array(ids[: sampling.tokens_max], np.int32)
        logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32)
        yield Completion(
            prompt=0,
            sample=0,
            ids=ids,
            logprobs=logprobs,
            finish_reason="stop",
            spans=((3, len(ids)),) if len(ids) else (),
        )


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer()


def job(environment: str, **changes: Any) -> Job:
    reward = {"environment": environment, "weight": 2.0} | changes.pop("reward", {})
    return job_of(Path("nowhere"), reward=[reward], sampling={"group_size": 1, "tokens_max": 60, **changes})


def episodes_of(settings: Job, engine: Scripted, tokenizer: Any, slots: int = 8, **more: Any) -> JobEpisodes:
    sampling = Sampling(tokens_max=settings.sampling.tokens_max, stop_ids=(tokenizer.eos_token_id,))
    more |= {"slots": slots, "tokenizer": tokenizer}
    return JobEpisodes(settings.reward[0], engine, FixedWeights(), sampling, settings, **more)  # type: ignore[arg-type]


class KeepsSamples:
    """The context of a stage, for the figures that it reports."""

    def __init__(self, settings: Job) -> None:
        self._settings = settings
        self.samples: list[dict[str, Any]] = []

    def settings(self, kind: type[Job]) -> Job:
        return self._settings

    def figures(self, kind: str, *, samples: list[dict[str, Any]]) -> None:
        self.samples += samples


def test_episodes_are_among_the_samples_of_a_run(tokenizer: Any) -> None:
    settings = job("tests/workflows/job/test_episodes.py:SaysItsSeed")
    kept = KeepsSamples(settings)
    engine = Scripted(tokenizer, {"first?": ["x"], "second?": ["y"]})
    reporter = SampleReporter(kept, tokenizer)  # type: ignore[arg-type]
    played(episodes_of(settings, engine, tokenizer, samples=reporter), settings, tokenizer, ["first?", "second?"])
    assert {sample["prompt"]: sample["response"][:1] for sample in kept.samples} == {"first?": "x", "second?": "y"}
    assert all(sample["reward"] % 2 == 0 for sample in kept.samples)  # as the row has it: times the weight


def played(episodes: JobEpisodes, settings: Job, tokenizer: Any, questions: Sequence[str]) -> dict[int, PartialResult]:
    with tq.connect() as queue:
        table = queue.create_table(
            "t", fields=[tq.Field(names.DATA, "value")], tasks=[tq.Task("play", needs=["prompt_ids", names.DATA])]
        )
        prompts = [
            tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)["input_ids"]
            for text in questions
        ]
        table.put(
            prompt_ids=[np.array(ids, np.int32) for ids in prompts],
            data=[{"prompt": text, "question": text} for text in questions],
            ordinal=np.arange(len(questions)),
        )
        with table.lease("play", rows=len(questions), timeout_s=10) as batch:
            return {int(part.at[0]): part for part in episodes(batch)}  # type: ignore[index]


def test_an_episode_is_one_sequence_with_the_tokens_of_the_tool_masked(tokenizer: Any) -> None:
    settings = job(TEXT["calculator"])
    engine = Scripted(tokenizer, {"12+34=": ["<12+34>", "46"]})
    part = played(episodes_of(settings, engine, tokenizer), settings, tokenizer, ["12+34="])[0]
    response, mask = part.columns["response_ids"][0], part.columns["loss_mask"][0]
    assert tokenizer.decode(response.tolist()) == (
        "<12+34><|im_end|>\n<|im_start|>tool\n46<|im_end|>\n<|im_start|>assistant\n46<|im_end|>"
    )
    assert tokenizer.decode(response[mask].tolist()) == "<12+34><|im_end|>46<|im_end|>"
    assert part.columns["token_versions"][0].tolist() == np.where(mask, 3, -1).tolist()
    assert (part.columns["rollout_logprobs"][0] != 0).tolist() == mask.tolist()
    assert part.columns["turn_rewards"][0].tolist() == pytest.approx([0.2, 1.0])
    assert part.columns["rewards"].tolist() == pytest.approx([2.4])
    assert part.columns["finish_reason"] == ["stop"]
    assert part.facts == {"policy_version": 3, "policy_version_max": 3, "tokens": len(response)}
    assert engine.requests[1][0] == engine.requests[0][0] + tokenizer.decode(response[:-3].tolist())
    assert len({seed for _, seed, _ in engine.requests}) == 2


def test_the_responses_to_a_prompt_begin_alike_and_draw_differently(tokenizer: Any) -> None:
    settings = job("tests.workflows.job.test_episodes:SaysItsSeed", group_size=2)
    engine = Scripted(tokenizer, {"game": ["0", "1"]})
    parts = played(episodes_of(settings, engine, tokenizer), settings, tokenizer, ["game"] * 4)
    seeds = [parts[row].columns["turn_rewards"][0][0] for row in range(4)]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]
    assert len({seed for _, seed, _ in engine.requests}) == 4


def test_an_answer_that_was_cut_gets_its_end_token_from_the_environment(tokenizer: Any) -> None:
    settings = job(TEXT["guess"])
    engine = Scripted(tokenizer, {"guess": ["0", "1", "2", "3", "4"]}, end=False)
    part = played(episodes_of(settings, engine, tokenizer), settings, tokenizer, ["guess"])[0]
    response, mask = part.columns["response_ids"][0], part.columns["loss_mask"][0]
    text = tokenizer.decode(response.tolist())
    assert (
        text.startswith("0<|im_end|>\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n1<|im_end|>")
        or len(response) == 1
    )
    assert not mask[response == tokenizer.eos_token_id].any()


def test_a_response_is_bounded_with_the_tokens_of_the_environment(tokenizer: Any) -> None:
    settings = job(TEXT["calculator"], tokens_max=16)
    engine = Scripted(tokenizer, {"12+34=": ["<12+34>", "46"], "1+1=": ["<1+1>", "2"]})
    part = played(episodes_of(settings, engine, tokenizer), settings, tokenizer, ["12+34="])[0]
    assert tokenizer.decode(part.columns["response_ids"][0].tolist()) == "<12+34><|im_end|>"
    assert part.columns["finish_reason"] == ["length"]
    assert part.columns["turn_rewards"][0].tolist() == pytest.approx([0.2])
    assert engine.requests[0][2] == 16


def test_a_row_leaves_while_another_is_played(tokenizer: Any) -> None:
    settings, left = job("tests.workflows.job.test_episodes:Gated"), threading.Event()
    Gated.gate, Gated.slow = left, "1+1="
    episodes = episodes_of(settings, Scripted(tokenizer, {"1+1=": ["2"], "2+2=": ["4"]}), tokenizer)
    with tq.connect() as queue:
        table = queue.create_table(
            "t", fields=[tq.Field(names.DATA, "value")], tasks=[tq.Task("play", needs=["prompt_ids", names.DATA])]
        )
        ids = [np.array(tokenizer([text])["input_ids"][0], np.int32) for text in ("1+1=", "2+2=")]
        table.put(prompt_ids=ids, data=[{"question": "1+1="}, {"question": "2+2="}], ordinal=[0, 1])
        order = []
        with table.lease("play", rows=2, timeout_s=10) as batch:
            for part in episodes(batch):
                order.append(int(part.at[0]))  # type: ignore[index]
                left.set()
    assert order == [1, 0]


class Gated:
    """Ends at once; the slow question waits until a row has left."""

    gate, slow = threading.Event(), ""

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[None, dict[str, Any]]:
        self.question = options["question"]
        return None, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        assert self.question != Gated.slow or Gated.gate.wait(20)
        return "", 1.0, True, False, {}

    def close(self) -> None:
        """Nothing."""


class Broken(Gated):
    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self.question == "1+1=":
            raise RuntimeError("the tool is gone")
        return super().step(action)


def test_an_environment_that_raises_names_its_row(tokenizer: Any) -> None:
    settings = job("tests.workflows.job.test_episodes:Broken")
    episodes = episodes_of(settings, Scripted(tokenizer, {"+": ["2"]}), tokenizer)
    with pytest.raises(
        EnvironmentFailed,
        match=(
            r"ordinal 1 failed with RuntimeError: the tool is gone \(try 2\); the policy had said '2'; .*1\+1=.* "
            r"on_error = \"drop\""
        ),
    ) as failed:
        played(episodes, settings, tokenizer, ["2+2=", "1+1="])
    assert isinstance(failed.value, StageFailedInProcess)  # which ends the run, whatever other rows do


class Shaky(Gated):
    """Fails each time with other words, as often as `failures` says."""

    failures, failed = 0, 0

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if Shaky.failed < Shaky.failures:
            Shaky.failed += 1
            raise RuntimeError(f"timeout {Shaky.failed}")
        return super().step(action)


@pytest.mark.parametrize("failures", [TRIES_MAX - 1, TRIES_MAX])
def test_an_environment_that_fails_otherwise_each_time_gets_as_many_tries_as_a_row(
    tokenizer: Any, failures: int
) -> None:
    settings = job("tests.workflows.job.test_episodes:Shaky")
    episodes = episodes_of(settings, Scripted(tokenizer, {"+": ["2"]}), tokenizer)
    Shaky.failures, Shaky.failed = failures, 0
    if failures < TRIES_MAX:
        assert played(episodes, settings, tokenizer, ["2+2="])[0].columns["rewards"].tolist() == [2.0]
        return
    with pytest.raises(EnvironmentFailed, match=rf"timeout {failures} \(try {failures}\)"):
        played(episodes, settings, tokenizer, ["2+2="])


def test_a_job_whose_environment_always_fails_ends(tokenizer: Any) -> None:
    settings = job("tests.workflows.job.test_episodes:Broken", reward={"on_error": "drop"})
    settings = msgspec.structs.replace(settings, trainer=msgspec.structs.replace(settings.trainer, prompts_per_step=1))
    episodes = episodes_of(settings, Scripted(tokenizer, {"+": ["2"]}), tokenizer)
    with pytest.raises(StageFailedInProcess, match="20 batches, were all dropped: their environments failed"):
        played(episodes, settings, tokenizer, ["1+1="] * 20)


def test_rows_of_an_environment_that_raises_are_dropped_if_the_job_says_so(tokenizer: Any) -> None:
    settings = job("tests.workflows.job.test_episodes:Broken", reward={"on_error": "drop"})
    failed: dict[int, str] = {}
    engine = Scripted(tokenizer, {"+": ["2"]})
    episodes = episodes_of(settings, engine, tokenizer, failed=failed.__setitem__)
    parts = played(episodes, settings, tokenizer, ["2+2=", "1+1="])
    assert (parts[0].drop, parts[1].drop) == ("", FAILED)
    assert re.search(r"ordinal 1 failed with RuntimeError: the tool is gone .*1\+1=", failed[1])


@pytest.mark.slow
def test_a_step_that_hangs_fails_its_episode_alone(tokenizer: Any) -> None:
    settings = job("tests.workflows.job.test_episodes:Gated", reward={"on_error": "drop", "timeout_s": 0.2})
    Gated.gate, Gated.slow = threading.Event(), "1+1="
    failed: dict[int, str] = {}
    engine = Scripted(tokenizer, {"+": ["2"]})
    episodes = episodes_of(settings, engine, tokenizer, failed=failed.__setitem__)
    try:
        parts = played(episodes, settings, tokenizer, ["2+2=", "1+1="])
    finally:
        Gated.gate.set()
    assert (parts[0].drop, parts[1].drop) == ("", FAILED)
    assert re.search(
        r"ordinal 1 failed with TimeoutError: step did not return within reward.0.timeout_s=0.2 s; .* \(try 2\); "
        r"it is in wait, line \d+ of .*threading.py; the policy had said '2'; its data is \{.*1\+1=",
        failed[1],
    )


def test_a_process_in_which_many_calls_hang_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_thread, "HUNG_MAX", 2)
    hung, gate = HungCalls(), threading.Event()
    try:
        with CallThread(0.01, hung) as calls, pytest.raises(TimeoutError, match="step did not return"):
            calls.call("step", gate.wait)
        with CallThread(0.01, hung) as calls:
            with pytest.raises(StageFailedInProcess, match=r"2 calls of environments hang in this process; .*reset"):
                calls.call("reset", gate.wait)
            with pytest.raises(TimeoutError, match="an earlier call of the environment hangs"):
                calls.call("close", gate.wait)
    finally:
        gate.set()


def test_an_observation_that_is_no_text_is_refused(tokenizer: Any) -> None:
    settings = job("tests.workflows.job.test_episodes:Numbers")
    episodes = episodes_of(settings, Scripted(tokenizer, {"+": ["2"]}), tokenizer)
    with pytest.raises(EnvironmentFailed, match="observation of int in turn 0; give a text"):
        played(episodes, settings, tokenizer, ["2+2="])


class Numbers(Gated):
    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return 7, {}


def test_a_factory_that_is_nowhere_is_named(tokenizer: Any) -> None:
    settings = job("nowhere_at_all:make")
    with pytest.raises(tq.NotFound, match="nowhere_at_all"):
        episodes_of(settings, Scripted(tokenizer, {}), tokenizer)


def test_the_columns_are_those_of_the_graph(tokenizer: Any) -> None:
    """What the graph declares for play is what the stage gives."""
    settings = job(TEXT["calculator"])
    with tq.connect() as queue:
        table = table_of(queue, settings)
        engine = Scripted(tokenizer, {"12+34=": ["<12+34>", "46"]})
        part = played(episodes_of(settings, engine, tokenizer), settings, tokenizer, ["12+34="])[0]
        assert set(table.tasks[names.PLAY].gives) == set(part.columns)
    assert sys.modules.get("gymnasium") is None


def test_episodes_of_the_stage_leave_as_they_end() -> None:
    class Steps:
        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
            self.left = seed or 0
            return 0, {}

        def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
            self.left -= 1
            return 0, 0.5, self.left == 0, False, {}

        def close(self) -> None:
            """Nothing."""

    class One:
        version = 0

        def generate(self, prompts: Sequence[Prompt], sampling: Sampling, *, timeout_s: float) -> Iterator[Completion]:
            yield Completion(
                prompt=0,
                sample=0,
                ids=np.array([7], np.int32),
                logprobs=np.zeros(1, np.float32),
                finish_reason="stop",
                spans=((0, 1),),
            )

    stage = Episodes(
        Steps,
        One(),
        Sampling(tokens_max=1),
        encode=lambda *_: [1],
        decode=lambda ids: int(ids[0]),
        turns_max=9,
        seed="s",
    )  # type: ignore[arg-type]
    with tq.connect() as queue:
        table = queue.create_table("t", tasks=[tq.Task("play", needs=["s"], gives=list(stage.gives))])
        table.put(s=np.array([5, 1, 3]))
        with table.lease("play", rows=3, timeout_s=10) as batch:
            turns = {}
            for part in stage(batch):
                turns[int(part.at[0])] = part.columns["turns"][0]  # type: ignore[index]
                assert part.columns["turn_rewards"][0].tolist() == [0.5] * turns[int(part.at[0])]  # type: ignore[index]
            batch.release()
    assert turns == {0: 5, 1: 1, 2: 3}


def test_an_environment_is_asked_for() -> None:
    from transferqueue.workflows.job.stages.episodes import environment_of

    with pytest.raises(UsageError, match="the job has no environment"):
        environment_of(job_of(Path("nowhere")))
