"""Who waits for what: each wait in the server's words, then silent sessions, then the tasks without a wait."""

from typing import Any

from transferqueue.observe.diagnosis import diagnose
from transferqueue.wire.answers.doctor import DoctorAnswer, TaskDiagnosis
from transferqueue.wire.answers.sessions import HeldLease, SessionStats
from transferqueue.wire.answers.stats import Waiting

WHY = 'task "train" waits for 3 complete groups'


def wait(label: str, waited_s: float, **changed: Any) -> Waiting:
    about = {"session": 7, "label": label, "request": "Lease", "table": "t", "task": "train"}
    return Waiting(**about | {"waited_s": waited_s, "left_s": 5.0, "why": WHY} | changed)


def session(label: str, silent_s: float, *leases: tuple[str, str, int]) -> SessionStats:
    held = [HeldLease(lease=n, table=table, task=task, rows=rows) for n, (table, task, rows) in enumerate(leases)]
    return SessionStats(session=7, label=label, silent_s=silent_s, leases=held)


def answer(**changed: Any) -> DoctorAnswer:
    told = [
        TaskDiagnosis(task="reward", text="reward has nothing to do"),
        TaskDiagnosis(task="train", text="train waits for 1 group"),
    ]
    return DoctorAnswer(now_s=1.0, tables={"t": told}, **changed)


def test_a_table_in_which_nobody_waits_is_told_as_it_stands() -> None:
    texts = [finding.text for finding in diagnose(answer()).tables["t"]]
    assert texts == ["reward has nothing to do", "train waits for 1 group"]


def test_a_wait_is_told_in_place_of_the_ledgers_line_and_first() -> None:
    found = diagnose(answer(waiting=[wait("trainer", 12.0)]))
    assert [(finding.task, finding.text) for finding in found.tables["t"]] == [
        ("train", f"{WHY} (trainer has waited 12 s)"),
        ("reward", "reward has nothing to do"),
    ]


def test_those_who_wait_alike_are_told_together() -> None:
    waits = [wait(f"trainer-{n}", float(n)) for n in range(6)]
    (finding,) = [one for one in diagnose(answer(waiting=waits)).tables["t"] if one.task == "train"]
    assert finding.text.endswith("(trainer-5, trainer-4, trainer-3, trainer-2 and 2 more have waited 5.0 s)")


def test_a_silent_holder_is_told_in_the_tables_whose_rows_it_holds() -> None:
    sessions = {"7": session("rollout-5", 74.0, ("t", "train", 8), ("u", "x", 1))}
    found = diagnose(answer(sessions=sessions))
    assert found.tables["t"][0].text == "rollout-5 holds 8 rows for train in 1 lease and has been silent for 74 s"
    assert len(diagnose(answer(sessions={"7": session("idle", 74.0)})).tables["t"]) == 2


def test_a_wait_for_memory_is_told_elsewhere() -> None:
    found = diagnose(answer(waiting=[wait("maker", 30.0, request="Grant", table="", task="", why="the arena is full")]))
    assert found.elsewhere[0].text == "the arena is full (maker has waited 30 s)"
