"""One verdict for any answer, and the right one for each state of a queue."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.observe.answers import ROWS, TABLE, answer, chain, one_table, session, wait
from tests.observe.snapshots import server, stats, table, task
from transferqueue.observe.stages import all_stages, in_order
from transferqueue.observe.verdict import TROUBLES, QueueVerdict, ended, report
from transferqueue.wire.answers.doctor import Departed, DoctorAnswer, PipelineStage, TaskDiagnosis
from transferqueue.wire.answers.stats import Stats, TaskError

KEY_ERROR = TaskError(type="KeyError", text="'answer'", worker="reward-0", count=28, first_s=20.0, last_s=0.5)


def verdict(known: Stats, said: DoctorAnswer, patience_s: float = 10.0) -> QueueVerdict:
    return report(known, said, patience_s=patience_s).verdict


# ---------------------------------------------------------------- each state


@given(st.integers(1, 6).flatmap(lambda length: st.tuples(st.just(length), st.integers(0, length - 1))))
def test_each_wait_is_followed_to_the_task_that_waits_for_no_other(lengths: tuple[int, int]) -> None:
    length, broken = lengths
    found = verdict(*chain(length, broken))
    name = chr(ord("a") + broken)
    assert (found.state, found.task, found.trouble) == ("missing", name, True)
    assert found.text == f"{TABLE}/{name}: {ROWS} rows ready, no worker connected; start one"
    assert found.short == f"{name}: no worker"


def failing(length: int, broken: int, **changed: object) -> tuple[Stats, DoctorAnswer]:
    known, said = chain(length, broken, errors=[KEY_ERROR], failed=28, **changed)
    name = chr(ord("a") + broken)
    tasks = [msgspec.structs.replace(one, failing=one.task == name) for one in said.tables[TABLE]]
    return known, msgspec.structs.replace(said, tables={TABLE: tasks})


def test_a_task_that_only_fails_is_told_at_once_with_its_error() -> None:
    found = verdict(*failing(3, 1), patience_s=3600.0)
    assert (found.state, found.task, found.mark) == ("failing", "b", "✗")
    assert found.text == "b fails: KeyError 'answer', 28 times"
    assert found.remedy.startswith("reward-0 reported it 500 ms ago.")
    assert verdict(*failing(3, 1, paused_s=12.0)).text.endswith("28 times; paused, tried again in 12 s")


def test_silent_workers_are_told_together_with_their_rows() -> None:
    stages = [
        PipelineStage(task=""),
        PipelineStage(task="rollout", gives=["y"], workers=[1, 2]),
        PipelineStage(task="train", needs=["y"], lacks={"y": 4}),
    ]
    held = [session(number, f"rollout-{number}", 11.0 + number, rows=2, of="rollout") for number in (1, 2)]
    known = stats(tables=one_table({"rollout": task(leased=4), "train": task(pending=4)}))
    said = answer(stages, sessions={str(one.session): one for one in held}, waiting=[wait(3, "trainer", "train")])
    found = verdict(known, said)
    assert (found.state, found.text) == ("silent", "rollout-1 and rollout-2 silent for 12 s with 4 rows")
    assert found.chain == ["rollout-1 is process 4001", "rollout-2 is process 4002"]
    assert found.also == []
    assert verdict(known, said, patience_s=60.0).state != "silent"
    heard = {str(one.session): msgspec.structs.replace(one, silent_s=2.0) for one in held}
    assert verdict(known, msgspec.structs.replace(said, sessions=heard), patience_s=0.0).state != "silent"


def test_a_silent_producer_that_has_reserved_rows_is_told() -> None:
    stages = [PipelineStage(task="", workers=[1]), PipelineStage(task="train")]
    producer = session(1, "rollout-0", 30.0, reserved=8)
    said = answer(stages, sessions={"1": producer}, waiting=[wait(3, "trainer", "train")])
    found = verdict(stats(tables=one_table({"train": task()}, rows_live=0)), said)
    assert found.text == "rollout-0 silent for 30 s with 8 rows"


def test_a_column_that_no_task_gives_is_named() -> None:
    stages = [PipelineStage(task=""), PipelineStage(task="train", needs=["score"], lacks={"score": 8}, workers=[3])]
    said = answer(stages, sessions={"3": session(3, "trainer")}, waiting=[wait(3, "trainer", "train")])
    found = verdict(stats(tables=one_table({"train": task(pending=8)})), said)
    assert (found.state, found.text) == ("stuck", f'{TABLE}: train lacks "score" of 8 rows, and no task gives it')


def test_a_full_table_whose_rows_are_kept_is_told_as_full() -> None:
    stages = [PipelineStage(task="", workers=[1]), PipelineStage(task="train", workers=[3])]
    waits = [wait(1, "maker", request="Put"), wait(3, "trainer", "train")]
    said = answer(stages, sessions={"1": session(1, "maker"), "3": session(3, "trainer")}, waiting=waits)
    full = one_table({"train": task(done=16)}, rows_live=0, rows_done=16, rows_resident=16, rows_limit=16)
    found = verdict(stats(tables=full), said)
    assert (found.state, found.text) == ("full", f"{TABLE} is full: 16 of 16 rows; 16 rows have ended and are kept")
    waiting = msgspec.structs.replace(said, waiting=[wait(1, "maker", request="Grant", table="")])
    known = stats(tables=one_table({}), server=server(used_bytes=1 << 30, capacity_bytes=1 << 30))
    assert verdict(known, waiting).text == "the arena is full: 1 GiB of 1 GiB, and no task can go on to free some"


def test_rows_that_are_all_stale_are_told() -> None:
    stages = [PipelineStage(task="", workers=[1]), PipelineStage(task="train", workers=[3])]
    said = answer(
        stages,
        {"stale": 64},
        sessions={"1": session(1, "maker"), "3": session(3, "trainer")},
        waiting=[wait(3, "trainer", "train")],
    )
    known = stats(tables=one_table({"train": task()}, rows_live=0, pacing_task="train", max_staleness=2))
    found = verdict(known, said)
    assert found.state == "stale"
    assert found.text == f"{TABLE}: all rows come too late for train: the last 64 were over 2 versions behind"
    trained = msgspec.structs.replace(said.pipelines[TABLE], ends={"stale": 64, "acked": 1})
    assert verdict(known, msgspec.structs.replace(said, pipelines={TABLE: trained})).state != "stale"


@pytest.mark.parametrize(
    ("left", "rows_put", "state"),
    [
        (None, 0, "starved"),
        (Departed(label="maker", ago_s=30.0, how="killed by SIGKILL", died=True), 8, "starved"),
        (Departed(label="maker", ago_s=30.0, how="said goodbye"), 8, "waiting"),
    ],
)
def test_a_table_without_producers(left: Departed | None, rows_put: int, state: str) -> None:
    stages = [PipelineStage(task="", left=left), PipelineStage(task="train", workers=[3])]
    said = answer(stages, sessions={"3": session(3, "trainer")}, waiting=[wait(3, "trainer", "train")])
    known = stats(tables=one_table({"train": task()}, rows_live=0, rows_put=rows_put, rows_done=rows_put))
    found = verdict(known, said)
    assert (found.state, "no producer connected" in found.text) == (state, True)


def test_workers_that_go_on_are_no_trouble_however_long_they_take() -> None:
    stages = [
        PipelineStage(task=""),
        PipelineStage(task="rollout", gives=["y"], workers=[1]),
        PipelineStage(task="train", needs=["y"], lacks={"y": 4}, workers=[3]),
    ]
    sessions = {"1": session(1, "rollout-0", rows=4, of="rollout"), "3": session(3, "trainer")}
    tasks = {"rollout": task(leased=4, oldest_lease_s=75.0), "train": task(pending=4)}
    said = answer(stages, sessions=sessions, waiting=[wait(3, "trainer", "train", 74.0)])
    found = verdict(stats(tables=one_table(tasks)), said)
    assert (found.state, found.trouble, found.mark) == ("waiting", False, "…")
    assert found.text == "trainer has waited 74 s for train: rollout-0 works on 4 rows for 75 s"
    soon = msgspec.structs.replace(said, waiting=[wait(3, "trainer", "train", 2.0)])
    healthy = verdict(stats(tables=one_table(tasks)), soon)
    assert (healthy.state, healthy.text) == ("healthy", f"{TABLE}: all stages move")


def test_producers_that_wait_for_the_reservations_of_others_are_no_trouble() -> None:
    stages = [PipelineStage(task="", workers=[1, 2]), PipelineStage(task="train", workers=[3])]
    sessions = {"1": session(1, "maker-1", reserved=8), "2": session(2, "maker-2"), "3": session(3, "trainer")}
    waits = [wait(2, "maker-2", request="Reserve"), wait(3, "trainer", "train")]
    known = stats(tables=one_table({"train": task()}, rows_live=0, outstanding=8, outstanding_limit=8))
    found = verdict(known, answer(stages, sessions=sessions, waiting=waits))
    assert found.state == "waiting"
    assert "maker-1 works on 8 rows" in found.text


def test_a_finished_job_says_so_and_keeps_its_summary_once_the_server_is_gone() -> None:
    over = one_table({"train": task(done=48)}, rows_put=50, rows_live=0, rows_done=48, rows_dropped=2, sealed=True)
    over[TABLE] = msgspec.structs.replace(over[TABLE], dropped={"stale": 2})
    found = verdict(stats(tables=over), answer([PipelineStage(task="train")]))
    assert (found.state, found.mark) == ("finished", "✓")
    assert found.text == "finished: 48 done, 2 dropped (stale 2)"
    assert ended(found, "gone").text == found.text
    cut_off = ended(verdict(*chain(2, 0)), "no server runs at x")
    assert (cut_off.state, cut_off.trouble) == ("gone", True)
    assert cut_off.also == [f"before that: {TABLE}/a: {ROWS} rows ready, no worker connected; start one"]
    assert ended(None, "gone").also == []


def test_a_queue_without_work() -> None:
    assert verdict(stats(), DoctorAnswer(now_s=1.0, tables={}, waiting=[], sessions={})).text == "no tables yet"
    idle = verdict(stats(tables=one_table({"train": task()}, rows_live=0, rows_put=0)), answer([]))
    assert (idle.state, idle.trouble) == ("idle", False)
    assert idle.text == f"nothing to do: no unfinished rows (0 done, 0 dropped); {TABLE} is still open"
    left = verdict(stats(tables=one_table({"train": task()}, rows_live=3)), answer([]))
    assert (left.state, left.text) == ("idle", "idle: 3 rows unfinished, no stage works on them")


def test_defects_and_losses_come_first_and_do_not_hide_what_else_is_wrong() -> None:
    known, said = chain(2, 0)
    hurt = msgspec.structs.replace(known, server=server(internal_errors=2))
    found = verdict(hurt, said)
    assert (found.state, found.text) == ("defect", "the server met 2 defects of its own")
    assert found.also == [f"{TABLE}/a: {ROWS} rows ready, no worker connected; start one"]
    lost = msgspec.structs.replace(known.tables[TABLE], dropped={"lost": 3})
    assert verdict(msgspec.structs.replace(known, tables={TABLE: lost}), said).state == "lost"


def test_tasks_without_a_worker_are_told_together() -> None:
    stages = [PipelineStage(task=""), PipelineStage(task="judge"), PipelineStage(task="train")]
    lonely = task(ready=ROWS, unattended_s=40.0, age_s=30.0)
    found = verdict(stats(tables=one_table({"judge": lonely, "train": lonely})), answer(stages))
    assert found.text == f"{TABLE}: no worker connected for judge and train; start them"
    young = msgspec.structs.replace(lonely, age_s=1.0)
    found = verdict(stats(tables=one_table({"judge": young, "train": young})), answer(stages))
    assert (found.state, found.trouble) == ("waiting", False), "the rows came a second ago"


def test_a_trainer_between_two_leases_is_not_missing() -> None:
    stages = [PipelineStage(task="", workers=[1]), PipelineStage(task="train", workers=[3])]
    sessions = {"1": session(1, "maker"), "3": session(3, "trainer")}
    tasks = {"train": task(ready=8, unattended_s=75.0, age_s=80.0)}
    waits = [wait(1, "maker", request="Reserve", waited_s=60.0)]
    found = verdict(stats(tables=one_table(tasks)), answer(stages, sessions=sessions, waiting=waits))
    assert (found.state, found.trouble) == ("waiting", False)
    assert "trainer is connected, and last asked for rows 75 s ago" in found.text


def test_a_wait_leads_into_another_table() -> None:
    """Producers of one table wait for rows of another, whose task has no worker."""
    judge = PipelineStage(task="judge", needs=["x"], gives=["y"])
    make = PipelineStage(task="make", needs=["y"], lacks={"y": 4}, workers=[1])
    said = answer([PipelineStage(task="", workers=[1]), PipelineStage(task="train", workers=[3])])
    pipelines = said.pipelines | {"prompts": type(said.pipelines[TABLE])(stages=[PipelineStage(task=""), judge, make])}
    said = msgspec.structs.replace(
        said,
        pipelines=pipelines,
        tables=said.tables | {"prompts": [TaskDiagnosis(task="judge", text=""), TaskDiagnosis(task="make", text="")]},
        sessions={"1": session(1, "maker"), "3": session(3, "trainer")},
        waiting=[wait(3, "trainer", "train"), wait(1, "maker", "make", table="prompts")],
    )
    prompts = table(
        rows_live=4,
        tasks={"judge": task(ready=4, unattended_s=50.0, age_s=50.0), "make": task(pending=4)},
    )
    found = verdict(stats(tables=one_table({"train": task()}, rows_live=0) | {"prompts": prompts}), said)
    assert (found.state, found.table, found.task) == ("missing", "prompts", "judge")


# ---------------------------------------------------------------- the order of stages


def test_stages_come_after_those_that_give_what_they_need() -> None:
    train = PipelineStage(task="train", needs=["y", "z"])
    reward = PipelineStage(task="reward", needs=["y"], gives=["z"])
    rollout = PipelineStage(task="rollout", needs=["x"], gives=["y"])
    assert [stage.task for stage in in_order([train, reward, rollout])] == ["rollout", "reward", "train"]
    ring = [PipelineStage(task="a", needs=["y"], gives=["x"]), PipelineStage(task="b", needs=["x"], gives=["y"])]
    assert [stage.task for stage in in_order(ring)] == ["a", "b"], "as declared, where they need each other"


# ---------------------------------------------------------------- any answer

NAMES = st.sampled_from(["a", "b", "c", "d"])
COLUMNS = st.lists(st.sampled_from(["x", "y", "z"]), max_size=3, unique=True)
SECONDS = st.one_of(st.none(), st.floats(0, 1000))
SOME = st.integers(0, 9)


@st.composite
def made_up(draw: st.DrawFn) -> tuple[Stats, DoctorAnswer]:
    """An answer whose parts need not agree with each other."""
    names = draw(st.lists(NAMES, unique=True, max_size=4))
    numbers = draw(st.lists(st.integers(1, 5), unique=True, max_size=5))
    stages = [
        PipelineStage(
            task=name, needs=draw(COLUMNS), gives=draw(COLUMNS), lacks=dict.fromkeys(draw(COLUMNS), 2),
            workers=draw(st.lists(st.integers(1, 6), unique=True, max_size=3)),
            left=draw(st.one_of(st.none(), st.just(Departed(label="w", ago_s=1.0, how="died", died=True)))),
        )
        for name in ["", *names]
    ]  # fmt: skip
    tasks = {
        name: task(
            pending=draw(SOME), ready=draw(SOME), held=draw(SOME), leased=draw(SOME), unattended_s=draw(SECONDS),
            age_s=draw(SECONDS), paused_s=draw(SECONDS), retrying=draw(SOME), retry_s=draw(SECONDS),
            stranded=draw(st.booleans()), errors=draw(st.sampled_from([[], [KEY_ERROR]])),
        )
        for name in names
    }  # fmt: skip
    sessions = [
        session(number, f"w-{number}", draw(st.floats(0, 100)), draw(SOME), draw(NAMES), reserved=draw(SOME))
        for number in numbers
    ]
    requests = st.sampled_from(["Lease", "Put", "Reserve", "Grant", "Pull", "Publish", "AdvanceClock"])
    waits = [
        wait(
            draw(st.integers(1, 6)), draw(st.sampled_from(["", "w"])), draw(NAMES), draw(st.floats(0, 1000)),
            request=draw(requests), table=draw(st.sampled_from([TABLE, "", "none"])), why=draw(st.text(max_size=20)),
        )
        for _ in range(draw(st.integers(0, 5)))
    ]  # fmt: skip
    said = answer(
        stages,
        draw(st.dictionaries(st.sampled_from(["acked", "stale", "kept though stale"]), SOME)),
        sessions={str(one.session): one for one in sessions},
        waiting=waits,
    )
    counts = {
        "rows_live": draw(SOME), "rows_done": draw(SOME), "rows_put": draw(SOME), "rows_resident": draw(SOME),
        "sealed": draw(st.booleans()), "pacing_task": draw(st.one_of(st.none(), NAMES)),
        "dropped": draw(st.dictionaries(st.sampled_from(["lost", "stale", "\x1b"]), SOME)),
        "outstanding_limit": draw(st.one_of(st.none(), SOME)), "bytes_limit": draw(st.one_of(st.none(), SOME)),
    }  # fmt: skip
    return stats(tables={TABLE: table(tasks=tasks, **counts), "unknown": table()}), said


@pytest.mark.slow
@given(made_up(), st.sampled_from([0.0, 10.0, 3600.0]))
def test_any_answer_has_one_verdict_of_one_line(made: tuple[Stats, DoctorAnswer], patience_s: float) -> None:
    known, said = made
    found = verdict(known, said, patience_s)
    assert found.text.strip()
    assert found.short.strip()
    assert "\n" not in found.text + found.short + found.remedy
    assert found.trouble == (found.state in TROUBLES)
    assert found.text not in found.also
    assert found.mark in "✗…✓"
    assert len(found.text) < 500
    stages = all_stages(known, said)
    assert list(stages) == [TABLE]
    assert found == verdict(known, said, patience_s), "it depends on nothing else"
    failing = [stage for stage in stages[TABLE] if stage.failing and stage.task]
    if failing:
        assert found.state in ("defect", "lost", "failing")
