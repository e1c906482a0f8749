"""Episodes of a job: tokens of the environment are no tokens of the model, and a row leaves as soon as it is over."""

from __future__ import annotations

import dataclasses
import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import transferqueue as tq
from tests.workflows.job.policies import job_of, table_of
from transferqueue.adapters.protocols import Completion, PartialResult, Prompt, Sampling
from transferqueue.adapters.stages.environments import Episodes
from transferqueue.workflows.flow.loop.runner import StageFailedInProcess
from transferqueue.workflows.flow.loop.serving import serve
from transferqueue.workflows.job import names
from transferqueue.workflows.job.data.sequence import NumberedPrompt
from transferqueue.workflows.job.reward_terms import environment_host, tries
from transferqueue.workflows.job.reward_terms.environment_call import CallFailed
from transferqueue.workflows.job.reward_terms.environment_host import EnvironmentHost
from transferqueue.workflows.job.reward_terms.tries import TRIES_MAX
from transferqueue.workflows.job.settings.job import Job, LogSettings, PacingSettings
from transferqueue.workflows.job.stages.all_dropped_guard import BATCHES_MAX
from transferqueue.workflows.job.stages.episodes import EnvironmentFailed, FailedEpisode, JobEpisodes
from transferqueue.workflows.job.stages.measures import EpisodeReward
from transferqueue.workflows.job.stages.policy_weights import FixedWeights
from transferqueue.workflows.job.stages.samples import SampleReporter
from transferqueue.workflows.job.tiny_model.tokenizer import build_tokenizer

pytest.importorskip("transformers")
ENVIRONMENTS = "tests.workflows.job.episode_environments:"
TEXT = {"calculator": "examples/jobs/environments.py:calculator", "guess": "examples/jobs/environments.py:guess_number"}


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tries, "PAUSE_S", 0.0)


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
            finish_reason="stop" if len(ids) and ids[-1] == self.tokenizer.eos_token_id else "length",
            spans=((3, len(ids)),) if len(ids) else (),
        )


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer()


def job(factory: str, /, **changes: Any) -> Job:
    settings = {"factory": factory, "weight": 2.0} | changes.pop("environment", {})
    sampling = {"group_size": 1, "tokens_max": 60, **changes}
    return job_of(Path("nowhere"), reward=[], environment=[settings], sampling=sampling)


opened: list[JobEpisodes] = []
"""Those of a test, which its end closes."""


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while opened:
        opened.pop().close()


def episodes_of(settings: Job, engine: Scripted, tokenizer: Any, slots: int = 8, **more: Any) -> JobEpisodes:
    sampling = Sampling(tokens_max=settings.sampling.tokens_max, stop_ids=(tokenizer.eos_token_id,))
    more |= {"slots": slots, "tokenizer": tokenizer}
    opened.append(JobEpisodes(engine, FixedWeights(), sampling, settings, **more))  # type: ignore[arg-type]
    return opened[-1]


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
    settings = job("tests/workflows/job/episode_environments.py:SaysItsSeed")
    kept = KeepsSamples(settings)
    engine = Scripted(tokenizer, {"first?": ["x"], "second?": ["y"]})
    reporter = SampleReporter(kept, tokenizer)  # type: ignore[arg-type]
    played(episodes_of(settings, engine, tokenizer, samples=reporter), settings, tokenizer, ["first?", "second?"])
    assert {sample["prompt"]: sample["response"][:1] for sample in kept.samples} == {"first?": "x", "second?": "y"}
    assert all(sample["reward"] % 2 == 0 for sample in kept.samples)  # as the row has it: times the weight


def test_each_step_has_its_samples_of_episodes_though_leases_of_two_clocks_end_in_turn(tokenizer: Any) -> None:
    settings = msgspec.structs.replace(job(ENVIRONMENTS + "SaysItsSeed"), log=LogSettings(samples=1))
    kept = KeepsSamples(settings)
    reporter = SampleReporter(kept, tokenizer)  # type: ignore[arg-type]
    episodes = episodes_of(settings, Scripted(tokenizer, {"game": ["x"]}), tokenizer, samples=reporter)
    for clock in (0, 2, 1, 2):
        played(episodes, settings, tokenizer, ["game"], clock=clock)
    assert [(sample["step"], sample["version"]) for sample in kept.samples] == [(1, 0), (3, 2)]


def played(
    episodes: JobEpisodes, settings: Job, tokenizer: Any, questions: Sequence[str], *, clock: int = 0
) -> dict[int, PartialResult]:
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
        if clock:
            table.advance(clock)
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


def test_an_episode_is_judged_by_the_mean_version_of_the_tokens_that_the_model_drew(tokenizer: Any) -> None:
    """Its first answer has seven tokens of version 3, its second three of version 8."""

    class NewWeights(Scripted):
        def generate(self, prompts: Sequence[Prompt], sampling: Sampling, *, timeout_s: float) -> Iterator[Completion]:
            version = 3 + 5 * len(self.requests)
            for drawn in super().generate(prompts, sampling, timeout_s=timeout_s):
                yield dataclasses.replace(drawn, spans=((version, len(drawn.ids)),))

    found = {}
    for of in ("oldest", "newest", "mean"):
        settings = job(TEXT["calculator"])
        pacing = PacingSettings(staleness_of=of)  # type: ignore[arg-type]
        settings = msgspec.structs.replace(settings, pacing=pacing)
        engine = NewWeights(tokenizer, {"12+34=": ["<12+34>", "46"]})
        part = played(episodes_of(settings, engine, tokenizer), settings, tokenizer, ["12+34="])[0]
        versions = part.columns["token_versions"][0]
        found[of] = part.facts["policy_version"]
        assert part.facts["policy_version_max"] == 8
    drawn = [version for version in versions.tolist() if version >= 0]
    assert found == {"oldest": 3, "newest": 8, "mean": sum(drawn) // len(drawn)}
    assert set(drawn) == {3, 8}


def chat_ids(tokenizer: Any, *said: tuple[str, str]) -> list[int]:
    messages = [{"role": role, "content": content} for role, content in said]
    ids: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    return ids


@pytest.mark.parametrize(
    ("said", "system", "whole"),
    [
        ("look", "", [("user", "2+2=look")]),
        ("look", "Be short.", [("system", "Be short."), ("user", "2+2=look")]),
        ([{"role": "tool", "content": "a map"}], "", [("user", "2+2="), ("tool", "a map")]),
    ],
)
def test_a_first_observation_is_part_of_the_prompt(said: Any, system: str, whole: Any, tokenizer: Any) -> None:
    settings = job(ENVIRONMENTS + "Begins", environment={"args": {"said": said}})
    settings = msgspec.structs.replace(settings, data=msgspec.structs.replace(settings.data, system=system))
    engine, kept = Scripted(tokenizer, {"2+2=": ["4"]}), KeepsSamples(settings)
    reporter = SampleReporter(kept, tokenizer)  # type: ignore[arg-type]
    episodes = episodes_of(settings, engine, tokenizer, samples=reporter)
    part = played(episodes, settings, tokenizer, ["2+2="])[0]
    response = part.columns["response_ids"][0]
    assert part.columns["prompt_ids"][0].tolist() == chat_ids(tokenizer, *whole)
    assert (tokenizer.decode(response.tolist()), part.columns["loss_mask"][0].all()) == ("4<|im_end|>", True)
    assert part.facts["tokens"] == len(response) == len(part.columns["rollout_logprobs"][0])
    assert [request[0] for request in engine.requests] == [tokenizer.decode(chat_ids(tokenizer, *whole))]
    assert kept.samples[0]["prompt"] == engine.requests[0][0]


def test_the_tokens_of_a_first_observation_are_tokens_of_its_episode(tokenizer: Any) -> None:
    settings = job(ENVIRONMENTS + "Begins", tokens_max=10, environment={"args": {"said": "12345678"}})
    engine = Scripted(tokenizer, {"2+2=": ["4567"]})
    part = played(episodes_of(settings, engine, tokenizer), settings, tokenizer, ["2+2="])[0]
    assert engine.requests[0][2] == 2
    assert tokenizer.decode(part.columns["response_ids"][0].tolist()) == "45"


def put_two_questions(table: tq.Table, tokenizer: Any) -> None:
    """Rows of two prompts, twice each, as the source of a job puts them."""
    questions = ["1+1=", "2+2="]
    table.put(
        prompt_ids=tq.Repeat([np.array(chat_ids(tokenizer, ("user", each)), np.int32) for each in questions], 2),
        data=tq.Repeat([{"prompt": each, "question": each} for each in questions], 2),
        episode=[None] * 4,
        ordinal=np.arange(4),
        group_id=[0, 0, 1, 1],
        group_size=2,
    )


def test_trained_rows_have_their_first_observation_in_the_prompt(tokenizer: Any) -> None:
    """The rows of a prompt share its tokens; one that begins with an observation has its own, however often it is
    played."""
    settings = job(ENVIRONMENTS + "BeginsOne", group_size=2)
    episodes = episodes_of(settings, Scripted(tokenizer, {"=": ["4"]}), tokenizer)
    with tq.connect() as queue:
        table = table_of(queue, settings)
        put_two_questions(table, tokenizer)
        for time_played in range(2):
            with table.lease(names.PLAY, rows=4, timeout_s=10) as batch:
                for part in episodes(batch):
                    if time_played == 0:
                        columns = {name: value for name, value in part.columns.items() if name == "prompt_ids"}
                        batch.release(batch.rows[part.at], **columns)
                    else:
                        batch.ack(batch.rows[part.at], **part.facts, **part.columns)
        with table.read(range(4), fields=["prompt_ids", "response_ids"]) as read:
            assert [row.tolist() for row in read["prompt_ids"]] == [
                chat_ids(tokenizer, ("user", text)) for text in ("1+1=look", "1+1=look", "2+2=", "2+2=")
            ]
            assert [tokenizer.decode(row.tolist()) for row in read["response_ids"]] == ["4<|im_end|>"] * 4


def test_a_first_observation_is_committed_with_its_episode(tokenizer: Any) -> None:
    settings = job(ENVIRONMENTS + "BeginsOne", group_size=2)
    with tq.connect() as queue:
        table = table_of(queue, settings)
        put_two_questions(table, tokenizer)
        with table.lease(names.PLAY, rows=4, timeout_s=10) as batch:
            assert serve(batch, episodes_of(settings, Scripted(tokenizer, {"=": ["4"]}), tokenizer)) is None
        with table.read(range(4), fields=["prompt_ids"]) as read:
            assert [row.tolist() for row in read["prompt_ids"]] == [
                chat_ids(tokenizer, ("user", text)) for text in ("1+1=look", "1+1=look", "2+2=", "2+2=")
            ]


def test_a_row_that_is_played_again_without_a_first_observation_loses_the_old_one(tokenizer: Any) -> None:
    settings = job(ENVIRONMENTS + "Begins", environment={"args": {"said": None}})
    engine = Scripted(tokenizer, {"2+2=": ["4"]})
    with tq.connect() as queue:
        table = table_of(queue, settings)
        begun = np.array(chat_ids(tokenizer, ("user", "2+2=look")), np.int32)
        table.put(
            prompt_ids=[begun], data=[{"prompt": "2+2="}], episode=[None], ordinal=[0], group_id=[0], group_size=1
        )
        with table.lease(names.PLAY, rows=1, timeout_s=10) as batch:
            (part,) = episodes_of(settings, engine, tokenizer)(batch)
            batch.release()
    bare = chat_ids(tokenizer, ("user", "2+2="))
    assert part.columns["prompt_ids"][0].tolist() == bare
    assert [request[0] for request in engine.requests] == [tokenizer.decode(bare)]


def test_an_episode_whose_last_turn_was_cut_was_cut_though_the_environment_ended_it(tokenizer: Any) -> None:
    settings = job(ENVIRONMENTS + "SaysItsSeed")
    for end, reason in ((True, "stop"), (False, "length")):
        engine = Scripted(tokenizer, {"game": ["0"]}, end=end)
        part = played(episodes_of(settings, engine, tokenizer), settings, tokenizer, ["game"])[0]
        assert part.columns["finish_reason"] == [reason]


def agent_job(name: str = "Agent", **args: Any) -> Job:
    given = {
        "agent": ENVIRONMENTS + name,
        "args": args,
        "on_error": "drop",
        "timeout_s": 1.0 if "hangs" in args else 60.0,
    }
    return job("", environment=given)


@pytest.mark.parametrize("stream", [False, True])
def test_the_requests_of_an_agent_are_the_turns_of_an_episode(stream: bool, tokenizer: Any) -> None:
    settings = agent_job(stream=stream)
    engine = Scripted(tokenizer, {"12+34=": ["<12+34>", "46"], "1+2=": ["nothing"]})
    parts = played(episodes_of(settings, engine, tokenizer), settings, tokenizer, ["12+34=", "1+2="])
    response, mask = parts[0].columns["response_ids"][0], parts[0].columns["loss_mask"][0]
    assert tokenizer.decode(response.tolist()) == (
        "<12+34><|im_end|>\n<|im_start|>tool\n46<|im_end|>\n<|im_start|>user\nso?<|im_end|>\n<|im_start|>assistant\n"
        "46<|im_end|>"
    )
    assert tokenizer.decode(response[mask].tolist()) == "<12+34><|im_end|>46<|im_end|>"
    assert parts[0].columns["turn_rewards"][0].tolist() == [0.0, 1.0]
    assert parts[1].columns["rewards"].tolist() == [0.5]  # times the weight
    assert [parts[row].columns["finish_reason"] for row in range(2)] == [["stop"]] * 2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (agent_job(forgets=True), "message 0 of the agent's request does not continue the conversation of the row"),
        (agent_job(twice=True), "the agent has another request that waits for its answer; a row is one conversation"),
        (agent_job(hangs=True), r"did not return within environment.0.timeout_s=1 s; .*; it is in run, line \d+ of"),
        (agent_job("silent"), "the agent returned without a request to its model"),
        (agent_job("Answers"), r"has no coroutine function; write async def run\(data, base_url\)"),
    ],
)
def test_an_agent_that_makes_no_row_fails_its_episode(settings: Job, words: str, tokenizer: Any) -> None:
    failed: dict[int, FailedEpisode] = {}
    engine = Scripted(tokenizer, {"+": ["2", "3"]})
    episodes = episodes_of(settings, engine, tokenizer, failed=failed.__setitem__)
    cause = "timeout" if "timeout" in words else "error"
    assert played(episodes, settings, tokenizer, ["2+2="])[0].drop == f"environment_{cause}"
    assert re.search(words, failed[0].text)


def test_the_responses_to_a_prompt_begin_alike_and_draw_differently(tokenizer: Any) -> None:
    settings = job(ENVIRONMENTS + "SaysItsSeed", group_size=2)
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


def test_a_row_leaves_while_another_is_played(tokenizer: Any, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    settings = job(ENVIRONMENTS + "Gated", environment={"args": {"gate": str(gate)}})
    episodes = episodes_of(settings, Scripted(tokenizer, {"1+1=": ["2"], "2+2=": ["4"]}), tokenizer)
    with tq.connect() as queue:
        table = queue.create_table(
            "t", fields=[tq.Field(names.DATA, "value")], tasks=[tq.Task("play", needs=["prompt_ids", names.DATA])]
        )
        ids = [np.array(tokenizer([text])["input_ids"][0], np.int32) for text in ("1+1=", "2+2=")]
        data = [{"prompt": text, "question": text} for text in ("1+1=", "2+2=")]
        table.put(prompt_ids=ids, data=data, ordinal=[0, 1])
        order = []
        with table.lease("play", rows=2, timeout_s=10) as batch:
            for part in episodes(batch):
                order.append(int(part.at[0]))  # type: ignore[index]
                gate.touch()
    assert order == [1, 0]


def test_an_environment_that_raises_names_its_row(tokenizer: Any) -> None:
    settings = job(ENVIRONMENTS + "Broken")
    episodes = episodes_of(settings, Scripted(tokenizer, {"+": ["2"]}), tokenizer)
    with pytest.raises(
        EnvironmentFailed,
        match=(
            r"ordinal 1 failed: step\('2'\) raised RuntimeError: the tool is gone, in fails, line \d+ of \S+ "
            r"\(try 2\); its data is .*1\+1=.* on_error = \"drop\""
        ),
    ) as failed:
        played(episodes, settings, tokenizer, ["2+2=", "1+1="])
    assert isinstance(failed.value, StageFailedInProcess)  # which ends the run, whatever other rows do


@pytest.mark.parametrize("failures", [TRIES_MAX - 1, TRIES_MAX])
def test_an_environment_that_fails_otherwise_each_time_gets_as_many_tries_as_a_row(
    tokenizer: Any, failures: int, tmp_path: Path
) -> None:
    settings = job(
        ENVIRONMENTS + "Shaky", environment={"args": {"failures": failures, "file": str(tmp_path / "failed")}}
    )
    retried: list[str] = []
    episodes = episodes_of(settings, Scripted(tokenizer, {"+": ["2"]}), tokenizer, retried=retried.append)
    if failures < TRIES_MAX:
        assert played(episodes, settings, tokenizer, ["2+2="])[0].columns["rewards"].tolist() == [2.0]
    else:
        with pytest.raises(EnvironmentFailed, match=rf"timeout {failures}, in \S+, line \d+ of \S+ \(try {failures}\)"):
            played(episodes, settings, tokenizer, ["2+2="])
    assert retried == ["environment_error"] * (TRIES_MAX - 1)


def test_a_job_whose_environment_always_fails_ends(tokenizer: Any) -> None:
    settings = job(ENVIRONMENTS + "Broken", environment={"on_error": "drop"})
    settings = msgspec.structs.replace(settings, trainer=msgspec.structs.replace(settings.trainer, prompts_per_step=1))
    episodes = episodes_of(settings, Scripted(tokenizer, {"+": ["2"]}), tokenizer)
    with pytest.raises(StageFailedInProcess, match="20 batches, were all dropped: environment Broken failed"):
        played(episodes, settings, tokenizer, ["1+1="] * 20)


def test_rows_of_an_environment_that_raises_are_dropped_if_the_job_says_so(tokenizer: Any) -> None:
    settings = job(ENVIRONMENTS + "Broken", environment={"on_error": "drop"})
    failed: dict[int, FailedEpisode] = {}
    engine = Scripted(tokenizer, {"+": ["2"]})
    episodes = episodes_of(settings, engine, tokenizer, failed=failed.__setitem__)
    parts = played(episodes, settings, tokenizer, ["2+2=", "1+1="])
    assert (parts[0].drop, parts[1].drop) == ("", "environment_error")
    assert re.search(r"ordinal 1 failed: step\('2'\) raised RuntimeError: the tool is gone, .*1\+1=", failed[1].text)


@pytest.mark.parametrize("failures", [4, 6])
def test_another_response_takes_the_place_of_one_that_failed(tokenizer: Any, failures: int, tmp_path: Path) -> None:
    """Each response has two tries, which draw the same tokens. The next one draws others."""
    settings = job(
        ENVIRONMENTS + "FailsAlike",
        refills=2,
        environment={"on_error": "drop", "args": {"failures": failures, "file": str(tmp_path / "failed")}},
    )
    retried: list[str] = []
    failed: dict[int, FailedEpisode] = {}
    engine = Scripted(tokenizer, {"+": ["2"]})
    episodes = episodes_of(settings, engine, tokenizer, retried=retried.append, failed=failed.__setitem__)
    part = played(episodes, settings, tokenizer, ["2+2="])[0]
    assert part.drop == ("" if failures == 4 else "environment_error")
    assert len(failed) == (failures == 6)
    seeds = [seed for _, seed, _ in engine.requests]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3] != seeds[4]
    assert len(set(seeds)) == 3
    assert retried == ["environment_error"] * (4 if failures == 4 else 5)


def test_responses_that_are_replaced_count_as_failed_ones(tokenizer: Any) -> None:
    settings = job(ENVIRONMENTS + "Broken", refills=8, environment={"on_error": "drop"})
    settings = msgspec.structs.replace(settings, trainer=msgspec.structs.replace(settings.trainer, prompts_per_step=1))
    episodes = episodes_of(settings, Scripted(tokenizer, {"+": ["2"]}), tokenizer, slots=1)
    with pytest.raises(StageFailedInProcess, match="20 batches, were all dropped: environment Broken failed"):
        played(episodes, settings, tokenizer, ["1+1="] * 3)


def test_an_evaluation_goes_on_however_many_responses_were_replaced(tokenizer: Any) -> None:
    settings = job(ENVIRONMENTS + "Broken", refills=1, environment={"on_error": "drop"})
    settings = msgspec.structs.replace(settings, trainer=msgspec.structs.replace(settings.trainer, prompts_per_step=1))
    questions = ["2+2=", *["1+1="] * BATCHES_MAX]
    ids = [tokenizer.apply_chat_template([{"role": "user", "content": text}])["input_ids"] for text in questions]
    prompts = [
        NumberedPrompt(number=at, ids=np.array(prompt, np.int32), data={"prompt": text, "question": text}, text=text)
        for at, (prompt, text) in enumerate(zip(ids, questions, strict=True))
    ]
    sampling = Sampling(tokens_max=settings.sampling.tokens_max, stop_ids=(tokenizer.eos_token_id,))
    with EpisodeReward(settings, Scripted(tokenizer, {"+": ["2"]}), sampling, tokenizer) as measure:
        figures = measure.figures(prompts, samples=1)
    assert (figures["rows"], figures["failed"], figures["reward"]) == (1, BATCHES_MAX, 2.0)


@dataclass
class Failing:
    """Two rows of an environment, of which that of ``1+1=`` fails."""

    drop: str
    text: str
    retried: list[str]


def failing(environment: str, tokenizer: Any, **limits: Any) -> Failing:
    """Play them, where such rows are dropped; the other row must be as if nothing happened."""
    settings = job(ENVIRONMENTS + environment, environment={"on_error": "drop", "timeout_s": 20.0, **limits})
    failed: dict[int, FailedEpisode] = {}
    retried: list[str] = []
    engine = Scripted(tokenizer, {"+": ["2"] * 9})
    episodes = episodes_of(settings, engine, tokenizer, failed=failed.__setitem__, retried=retried.append)
    parts = played(episodes, settings, tokenizer, ["2+2=", "1+1="])
    assert parts[0].columns["rewards"].tolist() == [2.0]
    assert list(failed) == [1], parts
    return Failing(parts[1].drop, failed[1].text, retried)


@pytest.mark.slow
def test_a_step_that_hangs_fails_its_episode_alone(tokenizer: Any) -> None:
    row = failing("Gated", tokenizer, timeout_s=1.0)
    assert row.drop == "environment_timeout"
    # On a loaded machine another call may be late too: its episode is tried once more.
    assert re.search(
        r"ordinal 1 failed: step\('2'\) did not return within environment.0.timeout_s=1 s; .* \(try \d\); "
        r"it is in step, line \d+ of .*episode_environments.py; its data is \{.*1\+1=",
        row.text,
    )


@pytest.mark.slow
def test_a_step_that_keeps_the_interpreter_is_ended_with_its_process(tokenizer: Any) -> None:
    row = failing("KeepsTheInterpreter", tokenizer, timeout_s=1.0)
    assert row.drop == "environment_timeout"
    assert "step('2') kept the interpreter, and did not return within environment.0.timeout_s=1 s" in row.text


@pytest.mark.parametrize(
    ("environment", "cause", "words"),
    [
        ("TooLong", "output", "step('2') gave a text of 1,048,577 characters; give at most 1,048,576"),
        ("BeginsLong", "output", "tokens, of at most 60 for observations and answers: none is left for an answer"),
        ("HalfACharacter", "error", r"step('2') gave a text with half a character, '\ud800' at 1; decode bytes with"),
        ("AnObject", "error", "step('2') gave a message with content, name, role that cannot be sent: TypeError"),
        ("ALongNumber", "error", "step('2') gave a message with content, name, role that cannot be sent: Overflow"),
        ("HalfAName", "error", "step('2') gave a message with content, name, role that cannot be sent: Unicode"),
        ("RaisesHalfACharacter", "error", r"step('2') raised RuntimeError: a\ud800, in fails, line"),
        ("RaisesWithoutText", "error", "step('2') raised ErrorWithoutText: an error whose text raised KeyError"),
        ("NoTuple", "error", "step('2') returned 'done'; give the tuple (observation, reward, terminated"),
        ("NotANumber", "error", "step('2') gave the reward nan; give a finite number"),
        ("Exits", "error", "reset(seed="),
        ("GivesAnObject", "error", "and then state() gave what cannot be sent: Encoding objects of type GivesAnObject"),
        ("GivesATuple", "error", "and then state() gave {'at': (1, 2)}, which restore() would get as {'at': [1, 2]}"),
        ("GivesMuch", "output", "and then state() gave 1,048,581 bytes; give at most 1,048,576"),
    ],
)
def test_what_is_no_answer_fails_its_episode_alone(tokenizer: Any, environment: str, cause: str, words: str) -> None:
    row = failing(environment, tokenizer)
    assert row.drop == f"environment_{cause}"
    assert words in row.text


def test_a_parameter_of_a_step_that_was_there_before_gets_no_key(tokenizer: Any) -> None:
    settings = job(ENVIRONMENTS + "KeyOfItsOwn")
    episodes = episodes_of(settings, Scripted(tokenizer, {"+": ["2"]}), tokenizer)
    assert played(episodes, settings, tokenizer, ["2+2="])[0].columns["rewards"].tolist() == [2.0]


def test_a_server_that_is_gone_gets_all_tries(tokenizer: Any) -> None:
    row = failing("CallsAServer", tokenizer)
    assert row.drop == "environment_unreachable"
    assert row.retried == ["environment_unreachable"] * (TRIES_MAX - 1)
    assert re.search(r"step\('2'\) raised ConnectionRefusedError: .* \(try 5\)", row.text)


@pytest.mark.slow
def test_an_environment_that_ends_its_process_every_time_ends_no_other_for_good(tokenizer: Any) -> None:
    row = failing("Kills", tokenizer)
    assert row.drop == "environment_died"
    assert "step('2') failed: the process of the environments was ended by SIGKILL (try 5)" in row.text


def test_an_episode_whose_process_is_killed_is_played_again(tokenizer: Any, tmp_path: Path) -> None:
    settings = job(ENVIRONMENTS + "Kills", environment={"args": {"once": str(tmp_path / "killed")}})
    retried: list[str] = []
    episodes = episodes_of(settings, Scripted(tokenizer, {"+": ["2"]}), tokenizer, retried=retried.append)
    assert played(episodes, settings, tokenizer, ["1+1="])[0].columns["rewards"].tolist() == [2.0]
    assert retried == ["environment_died"]


def test_an_episode_has_a_time_limit_of_its_own(tokenizer: Any) -> None:
    row = failing("Endless", tokenizer, episode_s=3.0)
    assert row.drop == "environment_timeout"
    assert re.search(r"step\('2'\) (was not made: |did not return within )the environment.0.episode_s=3 s", row.text)


def test_a_share_of_failed_rows_that_is_too_large_ends_the_job(tokenizer: Any) -> None:
    settings = job(ENVIRONMENTS + "Broken", environment={"on_error": "drop", "failed_max": 0.25})
    settings = msgspec.structs.replace(settings, trainer=msgspec.structs.replace(settings.trainer, prompts_per_step=1))
    questions = ["2+2=", "2+2=", "1+1="] * 7
    episodes = episodes_of(settings, Scripted(tokenizer, {"+": ["2"]}), tokenizer, slots=1)
    with pytest.raises(
        StageFailedInProcess,
        match=r"[67] of the last 20 rows, 20 batches, were dropped, more than environment.0.failed_max=0.25: .*; "
        r"the last: "
        r"environment .*Broken: the episode of ordinal 20 failed: step\('2'\) raised RuntimeError",
    ):
        played(episodes, settings, tokenizer, questions)


@pytest.mark.slow
def test_a_process_in_which_many_calls_hang_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_host, "HUNG_MAX", 1)
    with EnvironmentHost(ENVIRONMENTS + "Gated", {}, timeout_s=1.0, episode_s=60.0) as host:
        until = time.monotonic() + 60
        with host.open(until) as works:
            works.reset(options={"question": "2+2="})
            with host.open(until) as hangs:
                hangs.reset(options={"question": "1+1="})
                with pytest.raises(CallFailed, match="did not return"):
                    hangs.step("2")
            with host.open(until) as other:
                other.reset(options={"question": "2+2="})
                assert other._process is not works._process is hangs._process
                assert other.step("2")[1] == works.step("2")[1] == 1.0


def test_a_host_closes_while_a_child_of_an_environment_lives_on() -> None:
    threads = set(threading.enumerate())
    host = EnvironmentHost(ENVIRONMENTS + "LeavesAChild", {}, timeout_s=60.0, episode_s=60.0)
    with host.open(time.monotonic() + 60) as hosted:
        child = int(hosted.reset()[0])
    closing = threading.Thread(target=host.close, daemon=True)
    try:
        closing.start()
        closing.join(60.0)
        os.kill(child, 0)
        assert set(threading.enumerate()) <= threads
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_process_with_many_open_files_has_environments_too() -> None:
    """The pipes keep their numbers in the environments' process; `select` takes none over 1023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 2048)), hard))
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1100):
            stack.callback(os.close, os.dup(0))
        host = stack.enter_context(EnvironmentHost(ENVIRONMENTS + "Answers", {}, timeout_s=60.0, episode_s=60.0))
        with host.open(time.monotonic() + 60) as hosted:
            hosted.reset(options={"question": "2+2="})
            assert hosted.step("4")[1] == 1.0


def test_an_observation_that_is_no_text_is_refused(tokenizer: Any) -> None:
    settings = job(ENVIRONMENTS + "Numbers")
    episodes = episodes_of(settings, Scripted(tokenizer, {"+": ["2"]}), tokenizer)
    with pytest.raises(EnvironmentFailed, match=r"reset\(seed=.*\) gave an observation of int; give a text"):
        played(episodes, settings, tokenizer, ["2+2="])


def test_a_factory_that_is_nowhere_is_named(tokenizer: Any) -> None:
    settings = job("nowhere_at_all:make")
    with pytest.raises(tq.NotFound, match="nowhere_at_all"):
        episodes_of(settings, Scripted(tokenizer, {}), tokenizer)


@pytest.mark.parametrize("kind", ["agent", "function"])
def test_a_file_of_an_agent_or_function_is_imported_before_any_call_has_its_time(kind: str, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("1 / 0")
    settings = job("", environment={kind: f"{tmp_path / 'broken.py'}:f"}).environment[0]
    with pytest.raises(tq.UsageError, match=r"broken\.py:f: its module raised ZeroDivisionError"):
        EnvironmentHost.of(settings, "environment.0")


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
