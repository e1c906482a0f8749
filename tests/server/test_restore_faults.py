"""A restore that fails at any step changes nothing: no table, no row, no byte lent; and one after it is as good as the
first."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Self

import numpy as np
import pytest

import transferqueue as tq
from tests.damage.restoring import NOW, Restorer
from transferqueue.errors import Corruption, InternalError, UsageError
from transferqueue.ledger.persistence import restore as planting
from transferqueue.policies import Complete, Task
from transferqueue.server.durability import snapshot_directory, snapshots
from transferqueue.server.durability import snapshot_files as cutfiles
from transferqueue.server.durability.journal import SqliteJournal
from transferqueue.server.durability.recorded_ledger import RecordedLedger, replay_journal
from transferqueue.server.durability_level import Level
from transferqueue.storage.inputs import from_snapshot
from transferqueue.wire import messages as m

ROOMS = (
    str(Path(planting.__file__).parent),
    *(str(module.__file__) for module in (cutfiles, snapshots, from_snapshot, snapshot_directory)),
)
WORK = frozenset({"_read", "_write_block", "_restore_tables"})
"""Of the functions that begin, follow and clean up a work, those that do it."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("root")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(snapshots.SNAPSHOTS_VARIABLE, str(root))
        with tq.connect() as queue:
            table = queue.create_table(
                "t", tasks=[Task("score", gives=["score"]), Task("train", ["score"], groups=Complete())]
            )
            table.put(
                text=["a", "b", "c"], x=[np.arange(n) for n in range(3)], group_id=1, group_size=3, key=["k", "l", "m"]
            )
            with table.lease("score", rows=2) as batch:
                batch.ack(score=[1.0, 2.0], step=3)
            queue.weights("w").publish(1, {"a": np.ones(3)})
            queue.snapshot("s")
    return root


@pytest.fixture
def restorer(made: Path) -> Restorer:
    return Restorer(made)


class Fault(Exception):
    """What a step raises here."""


class Faults:
    """Raises at a chosen line of a restore. Lines are chosen by place: the first time that each is reached."""

    def __init__(self, at: int = -1) -> None:
        self.at = at
        self.lines: list[tuple[CodeType, int]] = []
        self._seen: set[tuple[CodeType, int]] = set()

    def __enter__(self) -> Self:
        threading.settrace(self._enter)
        self._before = sys.gettrace()
        sys.settrace(self._enter)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)
        threading.settrace(None)  # type: ignore[arg-type]

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(ROOMS):
            return None
        if code.co_filename == snapshots.__file__ and code.co_name not in WORK:
            return None
        if code.co_name in ("tick", "check_empty"):
            return None  # the loop's, before the work begins
        return self._line

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        where = frame.f_code, frame.f_lineno
        if event == "line" and where not in self._seen:
            self._seen.add(where)
            self.lines.append(where)
            if len(self.lines) - 1 == self.at:
                raise Fault(f"{frame.f_code.co_name}:{frame.f_lineno}")
        return self._line


def test_a_restore_reaches_many_lines(restorer: Restorer) -> None:
    with Faults() as faults:
        assert restorer.restore("s") is None
    assert len(faults.lines) > 300


def fail_at(restorer: Restorer, at: int, digest: str) -> bool:
    """Whether the restore failed; `state` is as before then, and a second try is good."""
    restorer.begin()
    before = restorer.state()
    with Faults(at) as faults:
        error = restorer.restore("s")
    if error is None:
        return False
    assert isinstance(error, InternalError | Corruption), faults.lines[-1]
    assert restorer.state() == before, faults.lines[-1]
    assert restorer.restore("s") is None, faults.lines[-1]
    assert restorer.digest() == digest, faults.lines[-1]
    return True


def steps(restorer: Restorer) -> tuple[int, str]:
    with Faults() as faults:
        assert restorer.restore("s") is None
    return len(faults.lines), restorer.digest()


def test_a_fault_at_any_of_some_steps_changes_nothing(restorer: Restorer, caplog: pytest.LogCaptureFixture) -> None:
    count, digest = steps(restorer)
    assert sum(fail_at(restorer, at, digest) for at in range(3, count, count // 12)) > 8


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_fault_at_every_sixth_step_changes_nothing(restorer: Restorer, caplog: pytest.LogCaptureFixture) -> None:
    count, digest = steps(restorer)
    assert sum(fail_at(restorer, at, digest) for at in range(0, count, 6)) > 0.7 * count / 6


def test_memory_of_a_planted_table_is_not_given_back(restorer: Restorer) -> None:
    """Also where the thread that reads the files has stopped waiting for the turn that plants."""
    assert restorer.restore("s") is None
    used = restorer.memory.used
    restorer.snapshots._give_back([], NOW)
    assert restorer.memory.used == used
    other = restorer.memory.take(1 << 16)
    assert other is not None
    wanted = restorer.digest()
    fd = os.open(restorer.arena.path, os.O_RDWR)
    os.pwrite(fd, b"\xff" * other[1], other[0])
    os.close(fd)
    assert restorer.digest() == wanted


def test_what_nobody_waits_for_any_more_is_not_done(restorer: Restorer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "LOOP_ANSWER_S", 0.0)
    before = restorer.state()
    error = restorer.restore("s")
    assert error is None or restorer.state() == before


def test_a_table_that_came_meanwhile_stays_and_the_memory_returns(restorer: Restorer) -> None:
    """A table is created between the reading of the files and the planting."""
    plain = restorer.snapshots._restore_tables

    def late(*given: Any) -> None:
        restorer.ledger.apply(m.CreateTable("mine"), session=1, call=50, now=NOW)
        return plain(*given)

    restorer.snapshots._restore_tables = late  # type: ignore[method-assign]
    used = restorer.memory.used
    error = restorer.restore("s")
    assert isinstance(error, UsageError)
    assert "this one has mine" in str(error)
    assert (list(restorer.ledger.state.tables), restorer.memory.used) == (["mine"], used)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[SqliteJournal]:
    made = SqliteJournal(tmp_path / "journal.sqlite", Level.PROCESS)
    yield made
    made.close()


def test_the_next_life_knows_nothing_of_a_restore_that_failed(
    restorer: Restorer, journal: SqliteJournal, made: Path, tmp_path: Path
) -> None:
    ledger = RecordedLedger(restorer.ledger, journal, epoch=1)
    ledger.checkpoint()
    restorer.ledger = restorer.snapshots._ledger = ledger
    shutil.copytree(made / "s", tmp_path / "damaged")
    (tmp_path / "damaged/000001/tables/0/rows.arrow").unlink()
    restorer.snapshots.root = tmp_path  # type: ignore[misc]
    assert isinstance(restorer.restore("damaged"), Corruption)
    assert next_life(ledger, journal) == []
    restorer.snapshots.root = made  # type: ignore[misc]
    assert restorer.restore("s") is None
    assert next_life(ledger, journal) == ["t"]


def next_life(ledger: RecordedLedger, journal: SqliteJournal) -> list[str]:
    """The tables of a server that is started now, whose extents are those of this one."""
    ledger.commit()
    again, _ = replay_journal(journal)
    mine, theirs = ledger.state.core.blocks, again.state.core.blocks
    assert [(one.id, one.offset) for one in mine.extents.values()] == [
        (one.id, one.offset) for one in theirs.extents.values()
    ]
    assert again.observe(m.Observe("audit"), NOW) == ledger.observe(m.Observe("audit"), NOW)
    return list(again.state.tables)
