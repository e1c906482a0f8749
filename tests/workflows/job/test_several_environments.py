"""Jobs with several environments: a calculator of an OpenEnv server, a game, and a reward function. Each plays the rows
of its data, with its share of each stretch of prompts, its limits, its figures; one that fails holds up no other."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import transferqueue as tq
from tests.adapters.openenv_server import Calculator, calculator_server
from tests.workflows.job import jobs
from tests.workflows.job.test_episodes import Scripted
from tests.workflows.job.tokens import ByteTokenizer
from transferqueue.adapters.protocols import PartialResult, Sampling
from transferqueue.workflows.job import names
from transferqueue.workflows.job.data.prompt_data import open_held_out, open_prompts
from transferqueue.workflows.job.data.sequence import PromptSequence, held_out_prompts
from transferqueue.workflows.job.data.source import JobPrompts
from transferqueue.workflows.job.graph import create_table
from transferqueue.workflows.job.reward_terms import tries
from transferqueue.workflows.job.run.dry_run import dry_run
from transferqueue.workflows.job.settings.changes import apply
from transferqueue.workflows.job.settings.job import Job
from transferqueue.workflows.job.settings.read import job_from_values
from transferqueue.workflows.job.stages.episodes import FailedEpisode, JobEpisodes
from transferqueue.workflows.job.stages.policy_weights import FixedWeights
from transferqueue.workflows.job.tiny_model.make import make
from transferqueue.workflows.job.tiny_model.tokenizer import build_tokenizer
from transferqueue.workflows.job.training.row_figures import row_figures

pytest.importorskip("transformers")
WEIGHTS = {"sums": 5.0, "guess_number": 3.0, "exact": 2.0}


def exact(completions: list[str], answer: list[str]) -> list[float]:
    """A reward function."""
    return [float(said == right) for said, right in zip(completions, answer, strict=True)]


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, Calculator]]:
    with calculator_server() as served:
        yield served


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tries, "PAUSE_S", 0.0)


def job_in(folder: Path, url: str, *changes: str, **limits: Any) -> Job:
    for name in WEIGHTS:
        rows = [{"prompt": f"{name} {number}+1=", "answer": str(number + 1)} for number in range(40)]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    environments = [
        {"name": "sums", "url": url, "args": {"observation": "result"}, "weight": 2.0, **limits},
        {"factory": "examples/jobs/environments.py:guess_number"},
        {"function": f"{__name__}:exact"},
    ]
    sources = [{"path": str(folder / f"{n}.jsonl"), "environment": n, "weight": w} for n, w in WEIGHTS.items()]
    values = deepcopy(jobs.GRPO) | {
        "reward": [],
        "environment": environments,
        "data": {"sources": sources, "prompt_tokens_max": 64},
    }
    for change in changes:
        apply(values, change)
    return job_from_values(values)


def prompts_of(settings: Job, rows_put: int = 0) -> JobPrompts:
    data = open_prompts(settings, ByteTokenizer())
    return JobPrompts(settings, PromptSequence(data, settings.data, seed=settings.seed), rows_put=rows_put)


@pytest.mark.parametrize("overlong", [0, 30])
def test_each_environment_has_its_share_of_any_stretch_of_prompts(overlong: int, tmp_path: Path) -> None:
    """Within 2 % of the prompts, in any 100 in a row: also after a restart in their midst, and if one's data has many
    prompts that are left out."""
    settings = job_in(
        tmp_path, "http://127.0.0.1:1", "sampling.group_size=2", "trainer.prompts_per_step=10", "steps=60"
    )
    with (tmp_path / "sums.jsonl").open("a") as file:
        file.writelines(f"\n{json.dumps({'prompt': 'x' * 65, 'answer': ''})}" for _ in range(overlong))
    produce, order = prompts_of(settings), []
    while len(order) < 600 and (rows := produce.wants()):
        order += produce(rows)[names.ENVIRONMENT].values
    shares = {name: weight / sum(WEIGHTS.values()) for name, weight in WEIGHTS.items()}
    for first in range(0, 500, 7):
        counts = Counter(order[first : first + 100])
        assert all(abs(counts[name] - 100 * share) < 2.001 for name, share in shares.items())
    again = prompts_of(settings, rows_put=2 * 50)
    assert again(again.wants())[names.ENVIRONMENT].values[0] == order[50]


def test_held_out_prompts_name_their_environment(tmp_path: Path) -> None:
    file = tmp_path / "sums.jsonl"
    settings = job_in(
        tmp_path,
        "http://127.0.0.1:1",
        f'evaluation={{path="{file}", environment="sums", sets=[{{name="g", path="{file}", environment="exact"}}]}}',
    )
    taken = held_out_prompts(open_held_out(settings, ByteTokenizer()), settings)
    assert {name: prompts[0].environment for name, prompts in taken.items()} == {"": "sums", "g": "exact"}


@pytest.mark.slow
def test_a_dry_run_takes_a_turn_in_each_environment(served: tuple[str, Calculator], tmp_path: Path) -> None:
    """Also in those that play none of the two prompts that it shows."""
    make(tmp_path / "model")
    settings = job_in(tmp_path, served[0], f'model.path="{tmp_path / "model"}"')
    found = dry_run(settings, devices=[])
    assert [trial.name for trial in found.rewards] == [*WEIGHTS]
    assert all(trial.scores for trial in found.rewards)
    assert len(found.prompts) == 2


class Played:
    """Rows of a job as its play stage gives them."""

    def __init__(self, settings: Job, says: dict[str, list[str]], questions: list[tuple[str, str]]) -> None:
        self.failed: dict[int, FailedEpisode] = {}
        self.retried: list[str] = []
        self.ended: list[int] = []
        tokenizer = build_tokenizer()
        sampling = Sampling(tokens_max=64, stop_ids=(tokenizer.eos_token_id,))
        ids = [
            tokenizer.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True)
            for q, _ in questions
        ]
        with (
            JobEpisodes(
                Scripted(tokenizer, says),
                FixedWeights(),  # type: ignore[arg-type]
                sampling,
                settings,
                slots=8,
                tokenizer=tokenizer,
                failed=self.failed.__setitem__,
                retried=self.retried.append,
            ) as play,
            tq.connect() as queue,
        ):
            table = create_table(queue, settings)
            table.put(
                prompt_ids=[np.array(each["input_ids"], np.int32) for each in ids],
                data=[{"prompt": q, "answer": "2"} for q, _ in questions],
                environment=[environment for _, environment in questions],
                episode=[None] * len(questions),
                ordinal=np.arange(len(questions)),
            )
            with table.lease(names.PLAY, rows=len(questions), timeout_s=10) as batch:
                self.parts: dict[int, PartialResult] = {}
                for part in play(batch):
                    row = int(part.at[0])  # type: ignore[index]
                    self.ended.append(row)
                    self.parts[row] = part
                    if not part.drop:
                        batch.ack(batch.rows[[row]], **part.facts, **part.columns)
                    else:
                        batch.drop(part.drop, batch.rows[[row]])
            left = list(table.read(fields=[names.REWARD_TERMS, "rewards", "response_ids"]).rows)
            self.rows = len(left)


SAYS = {"sum ": ["1+1", "2"], "game": ["0", "1", "2", "3", "4"], "exact": ["2"], "hang": ["hang"]}


def test_each_row_is_played_by_its_environment_and_scored_at_its_place(
    tmp_path: Path, served: tuple[str, Calculator]
) -> None:
    settings = job_in(tmp_path, served[0])
    played = Played(settings, SAYS, [("sum 1", "sums"), ("game 2", "guess_number"), ("exact 3", "exact")])
    terms = [played.parts[row].columns[names.REWARD_TERMS][0] for row in range(3)]
    assert [np.flatnonzero(~np.isnan(each)).tolist() for each in terms] == [[0], [1], [2]]
    assert (terms[0][0], terms[2][2]) == (1.0, 1.0)
    rewards = [float(played.parts[row].columns["rewards"][0]) for row in range(3)]
    assert (rewards[0], rewards[2]) == (2.0, 1.0)  # times the weight
    assert rewards[1] == terms[1][1]
    assert len(played.parts[2].columns["turn_rewards"][0]) == 1
    assert played.rows == 3


def test_an_environment_that_does_not_answer_fails_its_own_rows_by_name(
    tmp_path: Path, served: tuple[str, Calculator]
) -> None:
    settings = job_in(tmp_path, served[0], on_error="drop", timeout_s=1.0)
    played = Played(settings, SAYS, [("hang 1", "sums"), ("game 2", "guess_number"), ("exact 3", "exact")])
    assert played.parts[0].drop == "environment_timeout/sums"
    assert played.retried == ["environment_timeout/sums"]
    assert (
        f"environment {served[0]}: the episode of ordinal 0 failed: step('hang') did not return"
        in played.failed[0].text
    )
    assert played.rows == 2


def test_an_environment_plays_as_many_episodes_at_a_time_as_it_says(
    tmp_path: Path, served: tuple[str, Calculator], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, most, lock = Counter[str](), Counter[str](), threading.Lock()
    member = JobEpisodes._member

    def counted(self: Any, environment: Any, *rest: Any) -> Any:
        with lock:
            counts[environment.name] += 1
            most[environment.name] = max(most[environment.name], counts[environment.name])
        time.sleep(0)
        try:
            return member(self, environment, *rest)
        finally:
            with lock:
                counts[environment.name] -= 1

    monkeypatch.setattr(JobEpisodes, "_member", counted)
    settings = job_in(tmp_path, served[0], slots=1)
    played = Played(settings, SAYS, [("sum 1", "sums")] * 4 + [("exact 3", "exact")] * 2)
    assert sorted(played.ended) == [0, 1, 2, 3, 4, 5]
    assert most["sums"] == 1


def test_steps_have_the_reward_and_the_share_of_each_environment(tmp_path: Path) -> None:
    nan = np.nan
    with tq.connect() as queue:
        table = queue.create_table("t", tasks=[tq.Task("train", needs=["response_ids", "rewards", "reward_terms"])])
        table.put(
            response_ids=[[1]] * 4,
            rewards=np.array([2.0, 0.0, 0.5, 1.0], np.float32),
            reward_terms=[np.array(each, np.float32) for each in ([1, nan], [0, nan], [nan, 0.5], [0.5, nan])],
        )
        with table.lease("train", rows=4, timeout_s=10) as batch:
            figures = row_figures([batch], ["sums", "game"])
    assert (figures["reward/sums"], figures["reward/game"]) == (0.5, 0.5)
    assert (figures["reward_share/sums"], figures["reward_share/game"]) == (0.75, 0.25)
