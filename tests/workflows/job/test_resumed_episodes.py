"""What a row keeps of its episode, who may write it, and what goes on from it."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import transferqueue as tq
from tests.workflows.job.policies import job_of, table_of
from tests.workflows.job.test_episodes import ENVIRONMENTS, Scripted, chat_ids
from transferqueue.adapters.protocols import Completion, Prompt, Sampling
from transferqueue.workflows.job import names
from transferqueue.workflows.job.reward_terms import environment_process, tries
from transferqueue.workflows.job.settings.job import Job
from transferqueue.workflows.job.settings.sizes import play_bytes, row_bytes, rows_ahead, rows_kept, tokens_of_row
from transferqueue.workflows.job.stages.episodes import BegunEpisode, JobEpisodes, _keep
from transferqueue.workflows.job.stages.policy_weights import FixedWeights
from transferqueue.workflows.job.tiny_model.tokenizer import build_tokenizer

pytest.importorskip("transformers")
SAYS = {"2+2=": ["a", "b", "c"]}
Turns = Mapping[str, Any]


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tries, "PAUSE_S", 0.0)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer()


class OfVersion(Scripted):
    """Draws with the newest weights, as an engine does."""

    drawn_by = 0

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, *, timeout_s: float) -> Iterator[Completion]:
        for drawn in super().generate(prompts, sampling, timeout_s=timeout_s):
            yield dataclasses.replace(drawn, spans=((self.drawn_by, len(drawn.ids)),))


def job(folder: Path, factory: str = "Resumes", refills: int = 0, **args: Any) -> Job:
    environment = {"factory": ENVIRONMENTS + factory, "args": {"folder": str(folder), **args}, "on_error": "drop"}
    sampling = {"group_size": 2, "tokens_max": 90, "refills": refills}
    return job_of(Path("nowhere"), reward=[], environment=[environment], sampling=sampling)


def episodes(settings: Job, engine: Scripted, tokenizer: Any, **more: Any) -> JobEpisodes:
    sampling = Sampling(tokens_max=90, stop_ids=(tokenizer.eos_token_id,))
    return JobEpisodes(engine, FixedWeights(), sampling, settings, slots=4, tokenizer=tokenizer, **more)


def put(table: tq.Table, tokenizer: Any, begun: Turns | None = None) -> None:
    ids = np.array(chat_ids(tokenizer, ("user", "2+2=")), np.int32)
    table.put(
        prompt_ids=[ids, ids],
        data=[{"prompt": "2+2=", "question": "2+2="}] * 2,
        episode=[begun, None],
        ordinal=np.arange(2),
        group_id=[0, 0],
        group_size=2,
    )


def calls(folder: Path) -> list[dict[str, Any]]:
    path = folder / "calls.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()]
    path.unlink()
    return found


def shape(made: list[dict[str, Any]]) -> list[str]:
    return [f"{call['call']} {call['turn']}" if "turn" in call else call["call"] for call in made]


def play_one(
    settings: Job, engine: Scripted, tokenizer: Any, begun: Turns | None = None, **more: Any
) -> tuple[Any, list[Turns]]:
    """Play one row, and return its result and what it kept meanwhile."""
    kept: list[Turns] = []
    more = {"keep": lambda batch, row, turns: kept.append(msgspec.msgpack.decode(msgspec.msgpack.encode(turns)))} | more
    with tq.connect("embedded") as queue:
        table = table_of(queue, settings)
        put(table, tokenizer, begun)
        with episodes(settings, engine, tokenizer, **more) as play, table.lease(names.PLAY, rows=1) as batch:
            (part,) = play(batch)
            batch.release()
    return part, kept


def test_a_row_that_comes_back_starts_its_episode_again(tokenizer: Any, tmp_path: Path) -> None:
    """One member of a group is too old: it is played again from its start, with the newest weights alone."""
    settings, engine = job(tmp_path), OfVersion(tokenizer, SAYS)
    with tq.connect("embedded") as queue:
        table = table_of(queue, settings)
        put(table, tokenizer)
        policy = queue.weights(names.POLICY, keep=8)
        with episodes(settings, engine, tokenizer, keep=partial(_keep, table)) as play:
            for version in (0, 1):
                engine.drawn_by = version
                policy.publish(version, {"w": np.zeros(2, np.float32)})
                with table.lease(names.PLAY, rows=1, timeout_s=10) as batch:
                    (part,) = play(batch)
                    batch.ack(batch.rows, **part.facts, **part.columns)
            assert shape(calls(tmp_path)) == ["reset", "step 1", "step 2", "step 3"] * 2
            engine.drawn_by = 2
            policy.publish(2, {"w": np.zeros(2, np.float32)})
            with table.lease(names.PLAY, rows=1, timeout_s=10) as batch:
                assert batch[names.EPISODE].list() == [None]
                (part,) = play(batch)
                assert part.facts["policy_version"] == part.facts["policy_version_max"] == 2
                batch.ack(batch.rows, **part.facts, **part.columns)
    assert shape(calls(tmp_path)) == ["reset", "step 1", "step 2", "step 3"]


def test_a_turn_that_failed_is_made_again_with_its_key_and_its_tokens(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "fail-2").touch()
    engine = Scripted(tokenizer, SAYS)
    part, _ = play_one(job(tmp_path), engine, tokenizer)
    made = calls(tmp_path)
    assert shape(made) == ["reset", "step 1", "step 2", "restore 1", "step 2", "step 3"]
    keys = [call["key"] for call in made if call["call"] == "step"]
    assert keys[1] == keys[2]
    assert (len({*keys}), {len(key) for key in keys}) == (3, {32})
    assert len(engine.requests) == 3
    assert part.columns["turn_rewards"][0].tolist() == [1.0] * 3


def test_an_episode_that_cannot_be_restored_starts_again(tokenizer: Any, tmp_path: Path) -> None:
    """Its sandbox went with the environment that failed."""
    (tmp_path / "fail-2").touch()
    retried: list[str] = []
    part, _ = play_one(job(tmp_path, gone=True), Scripted(tokenizer, SAYS), tokenizer, retried=retried.append)
    assert part.drop == ""
    made = calls(tmp_path)
    assert shape(made) == ["reset", "step 1", "step 2", "restore 1", "reset", "step 1", "step 2", "step 3"]
    assert retried == ["environment_unreachable", "environment_error"]
    assert len({call["key"] for call in made if call["call"] == "step"}) == 5


def test_an_episode_that_starts_again_has_other_keys(tokenizer: Any, tmp_path: Path) -> None:
    """With the same actions too: what its tool did belongs to an episode that is gone. So has each other run."""
    (tmp_path / "fail-2").touch()
    play_one(job(tmp_path, "Logs"), Scripted(tokenizer, SAYS), tokenizer)
    play_one(job(tmp_path, "Logs"), Scripted(tokenizer, SAYS), tokenizer)
    made = calls(tmp_path)
    assert shape(made)[:6] == ["reset", "step 1", "step 2", "reset", "step 1", "step 2"]
    assert len({call["key"] for call in made if call["call"] == "step"}) == 2 + 3 + 3


def test_another_process_goes_on_with_the_tokens_that_were_drawn(tokenizer: Any, tmp_path: Path) -> None:
    """From each moment that was kept: the same tokens and keys, and none is drawn again."""
    settings = job(tmp_path)
    part, kept = play_one(settings, Scripted(tokenizer, SAYS), tokenizer)
    whole = [call for call in calls(tmp_path) if call["call"] == "step"]
    assert [(len(turns["rewards"]), turns["drawn_tokens"]) for turns in kept] == [
        (0, 2), (1, None), (1, 2), (2, None), (2, 2)
    ]  # fmt: skip
    for turns in kept:
        engine = Scripted(tokenizer, {"2+2=": ["x"] * len(turns["rewards"]) + ["b", "c"][len(turns["rewards"]) - 1 :]})
        engine.says = SAYS
        again, _ = play_one(settings, engine, tokenizer, turns)
        done, drawn = len(turns["rewards"]), turns["drawn_tokens"] is not None
        made = calls(tmp_path)
        assert shape(made) == [f"restore {done}", *(f"step {turn}" for turn in range(done + 1, 4))]
        assert made[1:] == whole[done:]
        assert len(engine.requests) == 3 - done - drawn
        for name in ("response_ids", "rollout_logprobs", "token_versions", "turn_rewards", "loss_mask"):
            assert again.columns[name][0].tolist() == part.columns[name][0].tolist()
        assert again.facts == part.facts


def test_another_response_that_was_begun_goes_on_as_that_one(tokenizer: Any, tmp_path: Path) -> None:
    settings = job(tmp_path, refills=1)
    _, kept = play_one(settings, Scripted(tokenizer, SAYS), tokenizer)
    calls(tmp_path)
    with tq.connect("embedded") as queue:
        table = table_of(queue, settings)
        put(table, tokenizer)
        with episodes(settings, Scripted(tokenizer, SAYS), tokenizer) as play, table.lease(names.PLAY, rows=1) as batch:
            (wanted,) = play._episodes(batch)
            second = play._fresh(play.environment(""), wanted, 1)
            batch.release()
    begun = {**kept[3], "refill": 1, "draws": second.draws}
    engine = Scripted(tokenizer, SAYS)
    part, _ = play_one(settings, engine, tokenizer, begun)
    assert shape(calls(tmp_path)) == ["restore 2", "step 3"]
    assert len(engine.requests) == 1
    assert part.drop == ""


@pytest.mark.parametrize("other", [{"environment": "games=m:other"}, {"draws": 7}, {"refill": 4}])
def test_turns_of_another_environment_or_response_are_discarded(
    tokenizer: Any, tmp_path: Path, other: dict[str, Any]
) -> None:
    settings = job(tmp_path)
    _, kept = play_one(settings, Scripted(tokenizer, SAYS), tokenizer)
    calls(tmp_path)
    play_one(settings, Scripted(tokenizer, SAYS), tokenizer, {**kept[3], **other})
    assert shape(calls(tmp_path)) == ["reset", "step 1", "step 2", "step 3"]


def turns_of(state: bytes = b"x") -> Turns:
    begun = BegunEpisode("e", 0, 1, state=state)
    return begun.kept()


def test_a_process_that_lost_its_lease_overwrites_nothing() -> None:
    with tq.connect("embedded") as queue:
        task = tq.Task(names.PLAY, needs=[names.EPISODE], lease_s=0.3, time_limit_s=0.3)
        table = queue.create_table("t", fields=[tq.Field(names.EPISODE, "value")], tasks=[task])
        table.put(episode=[None])
        late = table.lease(names.PLAY, rows=1)
        _keep(table, late, 0, turns_of(b"old"))
        now = table.lease(names.PLAY, rows=1, timeout_s=20, lease_s=60)
        _keep(table, now, 0, turns_of(b"new"))
        with pytest.raises(tq.LeaseExpired):
            _keep(table, late, 0, turns_of(b"late"))
        assert table.read([0])[names.EPISODE].list()[0]["state"] == b"new"


def test_a_write_between_the_read_and_the_update_stays(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It froze after it had read and renewed: whoever holds the row since has written."""
    with tq.connect("embedded") as queue:
        table = table_of(queue, job(tmp_path))
        put(table, tokenizer)
        batch = table.lease(names.PLAY, rows=1)
        renew = batch.renew

        def frozen() -> float:
            table.update([0], overwrite=True, episode=[turns_of(b"new")])
            return renew()

        monkeypatch.setattr(batch, "renew", frozen)
        _keep(table, batch, 0, turns_of(b"late"))
        assert table.read([0])[names.EPISODE].list()[0]["state"] == b"new"
        batch.release()


def test_turns_are_not_kept_while_there_is_no_memory(tokenizer: Any, tmp_path: Path) -> None:
    with tq.connect("embedded", arena_bytes="8MiB") as queue:
        table = table_of(queue, job(tmp_path))
        put(table, tokenizer)
        filled = queue.create_table("filled", tasks=[tq.Task("read", needs=["x"])])
        with suppress(tq.Full):
            while True:
                filled.put(x=np.zeros((1, 1 << 20), np.uint8), timeout_s=0)
        batch, began = table.lease(names.PLAY, rows=1), time.monotonic()
        for _ in range(3):
            _keep(table, batch, 0, turns_of(bytes(1 << 19)))
        assert 0.5 < time.monotonic() - began < 30
        assert table.read([0])[names.EPISODE].list() == [None]
        batch.release()


def test_a_row_that_is_gone_keeps_nothing(tokenizer: Any, tmp_path: Path) -> None:
    with tq.connect("embedded") as queue:
        table = table_of(queue, job(tmp_path))
        put(table, tokenizer)
        batch = table.lease(names.PLAY, rows=2)
        table.drop([0], "over")
        _keep(table, batch, 0, turns_of())


def test_memory_of_turns_is_counted_for_rows_in_play_alone(tmp_path: Path) -> None:
    settings = job(tmp_path)
    (environment,) = settings.environment
    function = msgspec.structs.replace(environment, factory="", function="m:f", args={})
    without = msgspec.structs.replace(settings, environment=(function,))
    assert row_bytes(settings) == row_bytes(without)
    assert play_bytes(without) == 0
    assert play_bytes(settings) == min(8, rows_ahead(settings)) * tokens_of_row(settings) * 13
    assert rows_kept(settings) > 8


def positional(action: str, key: str) -> None: ...
def keyword(action: str, *, key: str) -> None: ...
def own(action: str, key: str = "a") -> None: ...
def other(action: str, **key: str) -> None: ...


@pytest.mark.parametrize(
    ("step", "takes"), [(positional, True), (keyword, True), (own, False), (other, False), (dict, False), (None, False)]
)
def test_a_step_gets_a_key_if_it_needs_one(step: Callable[..., Any] | None, takes: bool) -> None:
    assert environment_process._takes_key(step) is takes
