"""The ranker's process in a job: whole batches become ready at once and ranked, lengths teach it, plans are published,
a later life goes on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import transferqueue as tq
from tests.workflows.job.jobs import job as job_of_kind
from transferqueue.errors import DeadlineExceeded, UsageError
from transferqueue.observe.figure_table import VALUE, decode, figures_channel
from transferqueue.workflows.dispatch.channels import (
    PlanFollower,
    dispatched,
    live_engines,
    newest,
    plan_channel,
    publish,
)
from transferqueue.workflows.dispatch.ranker import LengthRanker
from transferqueue.workflows.flow.events import Event, Figures
from transferqueue.workflows.flow.stage import Context, LeaseChoice
from transferqueue.workflows.job import graph, names
from transferqueue.workflows.job.stages.rank import rank
from transferqueue.workflows.planner.batch_plan import EngineLane, EngineReport, Plan
from transferqueue.workflows.planner.engine_times import DecodeCurve

WAIT_S = 30.0
PROMPTS, SIZE, STEPS = 24, 2, 6


@pytest.fixture
def queue() -> Iterator[tq.Queue]:
    with tq.connect() as opened:
        yield opened


def ranked_job(*changes: str) -> Any:
    return job_of_kind(
        "grpo",
        "dispatch.kind=length",
        f"trainer.prompts_per_step={PROMPTS}",
        f"steps={STEPS}",
        "pacing.mode=sync",
        *changes,
    )


def test_the_graph_has_the_tasks_and_one_process_for_both() -> None:
    job = ranked_job()
    assert [stage.task.name for stage in graph.stages(job)][:3] == [names.RANK, names.ROLLOUT, names.LENGTHS]
    processes = [process.name for process in graph.stage_jobs(job)]
    assert processes.count(names.RANK) == 1
    assert names.LENGTHS not in processes
    assert names.RANK not in [stage.task.name for stage in graph.stages(job_of_kind("grpo"))]


class Place:
    """A job's table with its ranker; the test is everything else. A prompt's one token says how long its responses
    are."""

    def __init__(self, queue: tq.Queue, folder: Path) -> None:
        import msgspec

        self.job, self.events = ranked_job(), list[Event]()
        self._told = threading.Condition()
        self.table = graph.create_table(queue, self.job)
        self.context = Context(
            queue=queue,
            table=self.table,
            emit=self._tell,
            settings=msgspec.to_builtins(self.job),
            directory=folder,
        )
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self) -> None:
        with rank(self.context) as loop:
            loop()

    def put(self, step: int) -> None:
        kinds = np.random.default_rng(step).integers(1, 9, PROMPTS)
        number = np.repeat(step * PROMPTS + np.arange(PROMPTS), SIZE)
        with self.table.reserve(PROMPTS * SIZE, timeout_s=WAIT_S) as reservation:
            self.table.put(
                reservation=reservation,
                prompt_ids=[np.full(4, kind, np.int32) for kind in np.repeat(kinds, SIZE)],
                data=[{"prompt": "?"}] * (PROMPTS * SIZE),
                group_id=number,
                group_size=SIZE,
                ordinal=number * SIZE + np.tile(np.arange(SIZE), PROMPTS),
            )

    def generate(self) -> tuple[list[int], list[int]]:
        """Take a batch as an engine does; return the kinds and expectations in the order of the leases. Then do the
        rest of the job with it."""
        rows = PROMPTS * SIZE
        with self.table.lease(names.ROLLOUT, rows=rows, timeout_s=WAIT_S) as batch:
            kinds = [int(ids[0]) for ids in batch["prompt_ids"]]
            expected = batch[names.EXPECTED_TOKENS].list()
            lengths = [2 * kind for kind in kinds]
            batch.ack(
                response_ids=[np.zeros(length, np.int32) for length in lengths],
                rollout_logprobs=[np.zeros(length, np.float32) for length in lengths],
                token_versions=[np.zeros(length, np.int32) for length in lengths],
                finish_reason=["stop"] * rows,
                tokens=lengths,
                policy_version=0,
            )
        with self.table.lease(names.REWARD, rows=rows, timeout_s=WAIT_S) as batch:
            batch.ack(rewards=np.zeros(rows, np.float32), reward_terms=[np.zeros(1, np.float32)] * rows)
        with self.table.lease(names.ADVANTAGE, groups=PROMPTS, timeout_s=WAIT_S) as batch:
            batch.ack(advantages=np.zeros(rows, np.float32))
        with self.table.lease(names.TRAIN, groups=PROMPTS, timeout_s=WAIT_S) as batch:
            batch.ack()
        return kinds, expected

    def _tell(self, event: Event) -> None:
        with self._told:
            self.events.append(event)
            self._told.notify_all()

    def wait_until_learned(self, rows: int) -> None:
        """Wait until the ranker has learned from so many rows."""

        def learned() -> int:
            refits = [event for event in self.events if isinstance(event, Figures) and event.kind == "ranker"]
            return max((event.values["rows"] for event in refits), default=0)

        with self._told:
            assert self._told.wait_for(lambda: learned() >= rows, WAIT_S), (
                f"the ranker learned {learned()} of {rows} rows"
            )

    def end(self) -> list[Figures]:
        self.table.seal()
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()
        return [event for event in self.events if isinstance(event, Figures)]


def test_it_learns_from_finished_rows_and_puts_the_longest_first(queue: tq.Queue, tmp_path: Path) -> None:
    curve = DecodeCurve((1.0, 16.0), (10.0, 12.0))
    for name in ("0", "1"):
        version = publish(queue, f"{names.TABLE}/decode/{name}", EngineReport(name=name, slots=4, curve=curve))
        queue.weights(f"{names.TABLE}/decode/{name}").applied(version)
    place = Place(queue, tmp_path)
    seen = []
    for step in range(STEPS):
        place.put(step)
        seen.append(place.generate())
        if step < STEPS - 1:
            place.wait_until_learned((step + 1) * PROMPTS * SIZE)
    events = place.end()
    figures = [each.values for each in events if each.kind == "dispatch"]
    refits = [each.values for each in events if each.kind == "ranker"]
    assert refits[0]["judged_rows"] == 0  # nothing was expected before the first fit
    assert sum(refit["judged_rows"] for refit in refits) <= (STEPS - 1) * PROMPTS * SIZE
    assert refits[-1]["recall_20"] > 0.5
    with queue.weights(figures_channel(names.TABLE, "ranker")).pull(timeout_s=0) as pulled:
        shown = decode(bytes(pulled.numpy()[VALUE]))
    assert shown.lines[0][0] == str(refits[-1]["ranker_version"])
    assert [each["order"] for each in figures][:2] == ["given", "given"]
    assert figures[-1]["order"] == "longest", figures
    assert figures[0]["why"] == "given order: 0 of 20 prompts seen"
    assert seen[0][1] == [0] * (PROMPTS * SIZE)  # nothing was expected before the first lesson
    assert seen[-1][1] == sorted(seen[-1][1], reverse=True)
    assert figures[-1]["recall_20"] > 0.5
    assert newest(queue, plan_channel(names.TABLE), Plan)[1].order == "longest"


@pytest.mark.parametrize("saved", [True, False])
def test_a_later_life_goes_on_with_what_was_saved_and_begins_anew_with_what_is_none(
    queue: tq.Queue, tmp_path: Path, saved: bool
) -> None:
    ranker = LengthRanker()
    ranker.observe([[kind] * 4 for kind in range(1, 9)] * 8, np.tile(np.arange(2, 18, 2), 8))
    ranker.refit()
    arrays: dict[str, Any] = ranker.saved() if saved else {"products": np.zeros(3)}
    np.savez(tmp_path / "ranker.npz", **arrays)
    place = Place(queue, tmp_path)
    place.put(0)
    _, expected = place.generate()
    (figures,) = [event for event in place.end() if event.kind == "dispatch"]
    assert (min(expected) > 0, figures.values["ranker_version"]) == (saved, int(saved))


# ---------------------------------------------------------------- channels


def test_an_engine_is_live_while_its_session_is(queue: tq.Queue) -> None:
    class Engine:
        version = 0

    other = tq.connect(queue.address)
    with dispatched(other, "t", Engine(), name="a", slots=3) as (_, follower):
        assert live_engines(queue, "t") == [EngineReport(name="a", slots=3)]
        assert follower.choice() == LeaseChoice(slots=3)
        plan = Plan(order="longest", cut=7, lanes={"a": EngineLane("tail", 2), "b": EngineLane("regular", 9)})
        publish(queue, plan_channel("t"), plan)
        assert follower.wait_for(lambda choice: choice == LeaseChoice((tq.Compare("tokens", ">=", 7),), 2), WAIT_S)
        assert follower.plan == plan
        publish(queue, plan_channel("t"), Plan(lanes={"b": EngineLane("regular", 9)}))
        assert follower.wait_for(lambda choice: choice == LeaseChoice(slots=3), WAIT_S)
    other.close()
    assert live_engines(queue, "t") == []


def test_a_follower_of_the_regular_class_takes_the_others(queue: tq.Queue) -> None:
    follower = PlanFollower(queue, "t", "b", 9)
    publish(queue, plan_channel("t"), Plan(cut=7, lanes={"b": EngineLane("regular", 5)}))
    assert follower.wait_for(lambda choice: choice == LeaseChoice((tq.Compare("tokens", "<", 7),), 5), WAIT_S)
    follower.close()


def test_a_channel_of_another_program_is_named(queue: tq.Queue) -> None:
    queue.weights("x").publish(0, {"value": np.frombuffer(b"[1]", np.uint8)})
    with pytest.raises(UsageError, match='channel "x" has no Plan'):
        newest(queue, "x", Plan)
    with pytest.raises(DeadlineExceeded):
        newest(queue, "y", Plan)
