"""The part that records rows, in time that the test decides: when it writes, what a kill leaves, what a broken disk
means."""

from __future__ import annotations

import errno
import mmap
import os
import random
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import transferqueue as tq
from tests.scale import sizes
from tests.server.lives import Life, again, write
from transferqueue.errors import Corruption, DiskFailed, Full, UsageError
from transferqueue.policies import Recorded, Task
from transferqueue.schema import Field, layout
from transferqueue.server.durability_level import Level
from transferqueue.server.memory.block_spool import BlockSpool
from transferqueue.server.row_record.part import INTERVAL_S, PATIENCE_S, RETRY_S, RowRecords
from transferqueue.server.row_record.writer import Outcome, ThreadWriter, WrittenFile, bytes_of, resume
from transferqueue.server.row_record.writer import write as write_files
from transferqueue.storage.elements.dtypes import U8
from transferqueue.storage.row_files import files
from transferqueue.storage.row_files.reader import RecordedRows, rows_in
from transferqueue.wire import codec
from transferqueue.wire import messages as m

USE = [Task("use", ["x"])]


class HandWriter:
    """Writes real files in `submit`. Its outcome is lost with the process while `holds`; `broken`: the disk fails."""

    def __init__(self, life: Life, broken: str = "") -> None:
        self.life, self.holds, self.broken = life, False, broken
        self.damaged = -1
        """A block that cannot be read; -1: none."""
        self.outcome: Outcome | None = None
        self.batches = 0

    def probe(self, directory: Path) -> None:
        files.probe(directory)

    def resume(self, directory: Path, life: str, first: int) -> list[WrittenFile]:
        if self.broken:
            raise OSError(errno.EIO, self.broken)
        return resume(directory, life, first)

    def expect(self) -> Any:
        raise AssertionError("nothing is fetched")

    def submit(self, batch: Any, directory: Path, *, after_failure: bool, remote: int) -> None:
        assert not remote
        self.batches += 1
        read = bytes_of(self.life.coordinator.memory.mapped(mmap.PROT_READ))

        def memory(at: m.BlockLocation) -> U8:
            if at.block == self.damaged:
                raise Corruption("its bytes have another checksum", block=at.block)
            return read(at)

        if self.broken:
            self.outcome = Outcome(batch.table, error=self.broken)
        else:
            self.outcome = write_files(batch, directory, memory, after_failure=after_failure)

    def take(self, wait_s: float = 0.0) -> Outcome | None:
        outcome, self.outcome = (None, self.outcome) if self.holds else (self.outcome, None)
        return outcome

    def stop(self) -> None:
        return


class Recording:
    """A life with the part, and a client with a table that records."""

    def __init__(
        self, path: Path, shared: Path, client: Any = None, root: Path | None = None, broken: str = "", **terms: Any
    ) -> None:
        self.root = path / "records" if root is None else root
        self.life = Life(path / "state", Level.PROCESS, shared)
        self.life.clients = 100
        self.writer = HandWriter(self.life, broken)
        self.refused: list[tuple[str, Full]] = []
        coordinator = self.life.coordinator
        self.part = RowRecords(
            self.root,
            coordinator.ledger,
            coordinator.lending,
            self.writer,
            short=coordinator.parts.short_tables,
            wake=coordinator.waiting.wake,
            refuse=coordinator.refuse_work,
            commit=coordinator.commit,
        )
        coordinator.attach(self.part)
        self.part.resume(self.life.now)
        if client is None:
            self.client = self.life.client()
            self.client.ask(m.CreateTable("t", tasks=USE, retention=Recorded("run", **terms)))
        else:
            self.client = again(self.life, client)

    def pass_time(self, seconds: float) -> None:
        """In steps: the writer has an outcome at once, and the part takes it at its next tick."""
        until = self.life.now + seconds
        while self.life.now < until:
            self.life.pass_time(min(0.25, until - self.life.now))
            self.client.post(m.Heartbeat())
        self.life.pass_time(0.0)
        self.life.pass_time(0.0)

    @property
    def table(self) -> Any:
        return self.life.coordinator.ledger.state.tables["t"]

    def end(self, rows: int) -> None:
        """Put rows and drop them."""
        first = self.table.rows.pages.next_row
        assert write(self.life, self.client, rows, fill=first).rows == rows
        assert self.client.ask(self.drop(first, rows)).rows == rows

    def drop(self, first: int, rows: int) -> m.Drop:
        return m.Drop("t", b"".join(row.to_bytes(8, "little") for row in range(first, first + rows)), "over")

    def settle(self) -> None:
        """Until no tick commits for the sake of memory."""
        memory = self.life.coordinator.memory
        while memory.due_at is not None and memory.due_at <= self.life.now:
            self.life.coordinator.tick(self.life.now)

    def end_and_be_killed(self, rows: int) -> int:
        """Put rows, drop them, and write their file in one turn, which is killed before it sends. Returns the first."""
        first = self.table.rows.pages.next_row
        assert write(self.life, self.client, rows, fill=first).rows == rows
        self.client.ids += 1
        call = m.CallFrame(self.client.session, self.client.ids, 0, self.drop(first, rows))
        self.settle()
        self.part.memory_lacking(1, "rows")  # due at once
        self.life.coordinator.receive(self.client.peer, codec.encode_call(call), self.life.now)
        self.life.coordinator.tick(self.life.now)
        self.life.crash()
        return first

    def recorded(self) -> list[int]:
        """The rows of all files, in the order of the files."""
        return [row for one in files.files_in(self.root / "run" / "t") for row in rows_in(one)]


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    found = tmp_path / "shm"
    found.mkdir()
    return found


@pytest.fixture
def recording(tmp_path: Path, shared: Path) -> Any:
    made = Recording(tmp_path, shared)
    yield made
    made.life.crash()


def test_rows_are_written_a_moment_after_they_end_and_freed_after_that(recording: Recording) -> None:
    recording.end(3)
    recording.pass_time(INTERVAL_S / 2)
    assert recording.recorded() == []
    assert recording.table.rows_resident == 3
    recording.pass_time(INTERVAL_S)
    assert recording.recorded() == [0, 1, 2]
    assert (recording.table.rows_resident, recording.table.rows_recorded, recording.table.usage.bytes) == (0, 3, 0)


def test_one_file_for_the_rows_of_many_requests(recording: Recording) -> None:
    for _ in range(5):
        recording.end(2)
    recording.pass_time(2 * INTERVAL_S)
    assert recording.writer.batches == 1
    assert recording.recorded() == list(range(10))


def test_steps_that_end_together_share_a_file(recording: Recording) -> None:
    """Sorted by step, so that a reader skips what has other steps."""
    for step in (2, 1):
        write(recording.life, recording.client, 2, fill=step)
        leased = recording.client.ask(m.LeaseRequest("t", "use", rows=2))
        recording.client.ask(m.Ack("t", leased.lease, leased.token, step=step))
    recording.client.ask(m.CommitCheckpoint("t", 2))
    recording.pass_time(2 * INTERVAL_S)
    assert (recording.writer.batches, recording.recorded()) == (1, [2, 3, 0, 1])


def test_the_last_rows_of_a_sealed_table_wait_for_no_others(recording: Recording) -> None:
    recording.end(1)
    recording.client.ask(m.Seal("t"))
    recording.pass_time(0.0)
    assert recording.recorded() == [0]


def test_memory_is_not_granted_again_before_the_file_exists(recording: Recording) -> None:
    recording.writer.holds = True
    recording.end(1)
    before = recording.life.coordinator.memory.used
    recording.pass_time(2 * INTERVAL_S)
    assert recording.life.coordinator.memory.used == before
    recording.writer.holds = False
    recording.pass_time(INTERVAL_S)
    assert recording.life.coordinator.memory.used < before


def test_who_lacks_memory_waits_for_no_interval(recording: Recording) -> None:
    recording.end(1)
    recording.part.memory_lacking(1, "rows")
    recording.pass_time(0.0)
    assert recording.recorded() == [0]


def test_a_file_that_the_ledger_was_not_told_of_is_not_written_again(tmp_path: Path, shared: Path) -> None:
    """The server is killed after the rename, and before the ledger has the news."""
    first = Recording(tmp_path, shared)
    first.writer.holds = True
    first.end(2)
    first.pass_time(2 * INTERVAL_S)
    assert first.recorded() == [0, 1]
    assert first.table.rows_resident == 2
    first.life.crash()
    second = Recording(tmp_path, shared, first.client)
    assert (second.table.rows_resident, second.table.rows_recorded) == (0, 2)
    second.end(1)
    second.pass_time(2 * INTERVAL_S)
    assert second.recorded() == [0, 1, 2]
    second.life.crash()


def test_a_row_whose_end_was_lost_with_a_kill_is_in_no_file(tmp_path: Path, shared: Path) -> None:
    """The server is killed in the turn in which the rows ended and their file was written."""
    first = Recording(tmp_path, shared)
    first.end(1)
    assert first.end_and_be_killed(2) == 1
    second = Recording(tmp_path, shared, first.client)
    second.client.ask(second.drop(1, 2))  # from a client that got no answer; refused if they are gone
    second.pass_time(2 * INTERVAL_S)
    assert second.recorded() == [0, 1, 2]
    assert second.table.rows_recorded == 3
    second.life.crash()


def test_rows_that_a_tick_ended_are_in_no_file_before_that_is_durable(tmp_path: Path, shared: Path) -> None:
    """No answer follows such an end, and so no commit."""
    first = Recording(tmp_path, shared)
    assert write(first.life, first.client, 1, fill=0).rows == 1
    first.settle()
    first.part.memory_lacking(1, "rows")
    (block,) = first.life.coordinator.ledger.state.core.blocks.blocks
    first.life.coordinator.ledger.blocks_lost([block], first.life.now)
    assert first.table.rows_dropped
    first.life.coordinator.tick(first.life.now)
    first.life.crash()
    second = Recording(tmp_path, shared, first.client)
    assert (second.recorded(), second.table.rows_live, second.table.rows_recorded) == ([0], 0, 1)
    second.life.crash()


def test_a_file_with_rows_that_have_not_ended_is_named_at_the_start(
    tmp_path: Path, shared: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = Recording(tmp_path, shared)
    first.writer.holds = True
    first.end(1)
    first.pass_time(2 * INTERVAL_S)
    assert write(first.life, first.client, 1, fill=1).rows == 1
    (one,) = files.files_in(first.root / "run" / "t")
    copy = files.aside(first.root / "run" / "t", one.life, 2)
    table = pq.read_table(one.path)
    pq.write_table(table.set_column(table.schema.names.index("_row"), "_row", [[1]]), copy)
    files.publish(copy, first.root / "run" / "t")
    first.life.crash()
    second = Recording(tmp_path, shared, first.client)
    assert second.table.rows_recorded == 1
    assert 'files 1 to 2 of table "t" have 1 rows that have not ended here' in caplog.text
    second.life.crash()


def test_rows_without_a_file_survive_a_kill(tmp_path: Path, shared: Path) -> None:
    first = Recording(tmp_path, shared)
    first.end(2)
    aside = files.aside(first.root / "run" / "t", first.table.record.life, 1)
    aside.write_bytes(b"PAR1 half a file")
    first.life.crash()
    second = Recording(tmp_path, shared, first.client)
    assert not aside.exists()
    second.pass_time(2 * INTERVAL_S)
    assert second.recorded() == [0, 1]
    row = RecordedRows("t", second.root / "run" / "t").arrow(["_reason", "x"]).to_pylist()[0]
    assert row == {"_reason": "over", "x": [0]}
    second.life.crash()


def test_a_damaged_file_that_was_not_told_is_written_again(tmp_path: Path, shared: Path) -> None:
    first = Recording(tmp_path, shared)
    first.writer.holds = True
    first.end(2)
    first.pass_time(2 * INTERVAL_S)
    (one,) = files.files_in(first.root / "run" / "t")
    os.truncate(one.path, 40)
    first.life.crash()
    second = Recording(tmp_path, shared, first.client)
    second.pass_time(2 * INTERVAL_S)
    recorded = RecordedRows("t", second.root / "run" / "t")
    assert recorded.arrow(["_row"])["_row"].to_pylist() == [0, 1]
    assert [damage.file for damage in recorded.damaged] == [one.path]
    second.life.crash()


def test_a_life_goes_on_with_a_restart_and_a_new_table_begins_another(tmp_path: Path, shared: Path) -> None:
    first = Recording(tmp_path, shared)
    life = first.table.record.life
    first.life.crash()
    second = Recording(tmp_path, shared, first.client)
    assert second.table.record.life == life
    second.client.ask(m.DropTable("t"))
    second.client.ask(m.CreateTable("t", tasks=USE, retention=Recorded("run")))
    assert second.table.record.life != life
    second.life.crash()


def test_memory_that_a_snapshot_holds_too_stays_until_both_have_ended(recording: Recording) -> None:
    lending = recording.life.coordinator.lending
    recording.end(1)
    (at,) = (block.at for block in recording.life.coordinator.ledger.state.core.blocks.blocks.values())
    lending.hold([at.extent])
    recording.pass_time(2 * INTERVAL_S)
    assert recording.recorded() == [0]
    assert lending.freed_while_held(at.shard) == [at.extent]
    lending.release([at.extent], recording.life.now)
    assert lending.freed_while_held(at.shard) == []
    recording.end(1)  # the memory is granted again
    recording.pass_time(2 * INTERVAL_S)
    assert recording.recorded() == [0, 1]


def test_a_block_that_cannot_be_read_is_lost_and_its_rows_are_recorded_without_it(recording: Recording) -> None:
    recording.end(2)
    (number,) = recording.life.coordinator.ledger.state.core.blocks.blocks
    recording.writer.damaged = number
    recording.pass_time(2 * INTERVAL_S)
    rows = RecordedRows("t", recording.root / "run" / "t").arrow(["_row", "x", "_events"]).to_pylist()
    assert [(row["_row"], row["x"]) for row in rows] == [(0, None), (1, None)]
    assert {"what": "damaged bytes", "detail": "x"}.items() <= rows[0]["_events"][-1].items()


def test_a_clean_end_ends_no_lease(recording: Recording) -> None:
    """No client can renew while the last files are written, and the loop's time lags behind the system's."""
    assert write(recording.life, recording.client, 1, fill=0).rows == 1
    assert isinstance(recording.client.ask(m.LeaseRequest("t", "use", rows=1)), m.Leased)
    recording.client.ask(m.CreateTable("u", tasks=USE, retention=Recorded("run")))
    assert write(recording.life, recording.client, 1, fill=0, table="u").rows == 1
    assert recording.client.ask(m.Drop("u", bytes(8), "over")).rows == 1
    far = recording.life.now + 100_000.0
    recording.part.finish(recording.life.now, lambda: far)
    assert recording.life.coordinator.ledger.state.tables["u"].rows_recorded == 1
    assert len(recording.life.coordinator.ledger.state.core.leases.by_id) == 1


@pytest.mark.parametrize("blocks", [1, 3])
def test_a_value_that_cannot_be_read_is_lost_alone(recording: Recording, blocks: int) -> None:
    """Its client wrote offsets that point outside the block; the others stay."""
    for _ in range(blocks):
        recording.end(2)
    known = recording.life.coordinator.ledger.state.core.blocks.blocks
    at = known[max(known)].at
    with recording.life.file.open("r+b") as file:
        file.seek(at.offset)
        file.write((1 << 40).to_bytes(8, "little") * 3)
    recording.pass_time(3 * INTERVAL_S)
    rows = RecordedRows("t", recording.root / "run" / "t").arrow(["_row", "x"]).to_pylist()
    whole = 2 * blocks - 2
    assert [(row["_row"], row["x"] is None) for row in rows] == [(row, row >= whole) for row in range(2 * blocks)]
    assert (recording.table.rows_resident, recording.table.usage.bytes) == (0, 0)


def test_text_that_no_reader_could_decode_is_lost(recording: Recording) -> None:
    field = Field("x", "str")
    nbytes = layout([field], 1, [2])[1]
    granted = recording.client.ask(m.Grant(4096))
    with recording.life.file.open("r+b") as file:
        file.seek(granted.offset)
        file.write(((0).to_bytes(8, "little") + (2).to_bytes(8, "little")).ljust(64, b"\0") + b"\xff\xfe")
    placed = m.WrittenBlock(granted.extent, granted.offset, nbytes, 1, ["x"], [2])
    assert recording.client.ask(m.PutRequest("t", 1, m.Columns(fields=[field], blocks=[placed]))).rows == 1
    assert recording.client.ask(recording.drop(0, 1)).rows == 1
    recording.pass_time(3 * INTERVAL_S)
    rows = RecordedRows("t", recording.root / "run" / "t").arrow(["x", "_events"]).to_pylist()
    assert [(row["x"], row["_events"][-1]["what"]) for row in rows] == [(None, "damaged bytes")]


# ---------------------------------------------------------------- a disk that fails

FULL = os.strerror(errno.ENOSPC)


def test_rows_wait_for_a_disk_and_then_new_ones_are_refused(recording: Recording) -> None:
    recording.writer.broken = FULL
    recording.end(2)
    recording.pass_time(PATIENCE_S - RETRY_S)
    assert recording.table.rows_resident == 2
    recording.end(1)  # not refused yet
    recording.pass_time(3 * RETRY_S)
    granted = recording.client.ask(m.Grant(4096))
    refused = recording.client.ask(m.Reserve("t", 1))
    assert (refused.error, granted.nbytes) == ("Full", 4096)
    assert 'table "t" takes no rows: 3 that have ended wait for their file' in refused.text
    assert FULL in refused.text
    recording.writer.broken = ""
    recording.pass_time(2 * RETRY_S)
    assert recording.recorded() == [0, 1, 2]
    recording.end(1)
    assert recording.table.rows_recorded == 3


def test_rows_go_on_unrecorded_where_that_is_declared(tmp_path: Path, shared: Path) -> None:
    recording = Recording(tmp_path, shared, required=False)
    recording.writer.broken = FULL
    recording.end(2)
    recording.pass_time(PATIENCE_S - RETRY_S)
    assert recording.table.rows_unrecorded == 0
    recording.pass_time(3 * RETRY_S)
    assert (recording.table.rows_unrecorded, recording.table.rows_resident) == (2, 0)
    recording.writer.broken = ""
    recording.end(1)
    recording.pass_time(2 * RETRY_S)
    assert recording.recorded() == [2]
    audit = recording.life.coordinator.ledger.state.tables["t"]
    assert audit.rows_dropped == {"over": 3}
    recording.life.crash()


def test_a_file_of_a_failed_attempt_that_exists_is_told(recording: Recording) -> None:
    """As if the disk had renamed the file, and failed to say so."""
    recording.writer.holds = True
    recording.end(1)
    recording.pass_time(2 * INTERVAL_S)
    recording.writer.holds, recording.writer.outcome = False, Outcome("t", error="Input/output error")
    recording.end(1)
    recording.pass_time(3 * RETRY_S)
    assert recording.recorded() == [0, 1]
    assert recording.table.rows_recorded == 2


def test_a_record_that_cannot_be_read_stops_the_start(tmp_path: Path, shared: Path) -> None:
    first = Recording(tmp_path, shared)
    first.life.crash()
    with pytest.raises(DiskFailed, match=r'the record of table "t" cannot be read: .*; start the server when'):
        Recording(tmp_path, shared, first.client, broken=os.strerror(errno.EIO))


def test_a_value_that_no_shard_can_copy_now_is_not_lost(recording: Recording, caplog: pytest.LogCaptureFixture) -> None:
    """Its shard may copy it later, and live rows may lie in the same block."""
    recording.end(2)
    recording.writer.broken = "no shard could copy it"
    recording.pass_time(PATIENCE_S + 3 * RETRY_S)
    assert "it cannot be written (no shard could copy it)" in caplog.text
    recording.writer.broken = ""
    recording.pass_time(3 * RETRY_S)
    assert recording.recorded() == [0, 1]


class Killed:
    """A course of one seed: rows end, time passes, the disk fails now and then, and the server is killed at any point:
    before a batch, while a file is written, after it exists and before the ledger knows, before the ledger's commit."""

    def __init__(self, seed: int, path: Path, shared: Path) -> None:
        self.random, self.path, self.shared = random.Random(seed), path, shared
        self.now = Recording(path, shared)
        self.rows = 0

    def run(self, steps: int) -> Recording:
        acts = [self._end, self._end, self._pass, self._pass, self._hold, self._break, self._kill, self._half_written]
        acts.append(self._kill_in_a_turn)
        for _ in range(steps):
            self.random.choice(acts)()
        self._kill()
        self.now.pass_time(4 * RETRY_S)
        return self.now

    def _end(self) -> None:
        rows = self.random.randrange(1, 5)
        self.now.end(rows)
        self.rows += rows

    def _pass(self) -> None:
        self.now.pass_time(self.random.choice([0.3, INTERVAL_S, 3 * RETRY_S]))

    def _hold(self) -> None:
        self.now.writer.holds = not self.now.writer.holds

    def _break(self) -> None:
        self.now.writer.broken = "" if self.now.writer.broken else os.strerror(errno.ENOSPC)

    def _half_written(self) -> None:
        record = self.now.table.record
        files.aside(self.now.root / "run" / "t", record.life, record.files + 1).write_bytes(b"PAR1")

    def _kill(self) -> None:
        """Half of the time the last ticks were not committed."""
        if self.random.random() < 0.5:
            self.now.life.coordinator.tick(self.now.life.now + INTERVAL_S)
        self.now.life.crash()
        self.now = Recording(self.path, self.shared, self.now.client)

    def _kill_in_a_turn(self) -> None:
        rows = self.random.randrange(1, 5)
        first = self.now.end_and_be_killed(rows)
        self.now = Recording(self.path, self.shared, self.now.client)
        self.now.client.ask(self.now.drop(first, rows))
        self.rows += rows


@pytest.mark.slow
@pytest.mark.parametrize("seeds", sizes(12, 300))
def test_each_row_is_in_one_file_on_every_course(seeds: int, tmp_path: Path) -> None:
    for seed in range(seeds):
        (tmp_path / f"{seed}" / "shm").mkdir(parents=True)
        course = Killed(seed, tmp_path / f"{seed}", tmp_path / f"{seed}" / "shm")
        ended = course.run(30)
        assert sorted(ended.recorded()) == list(range(course.rows)), seed
        assert (ended.table.rows_recorded, ended.table.record.waiting) == (course.rows, 0), seed
        assert ended.table.rows_dropped == ({"over": course.rows} if course.rows else {}), seed
        assert ended.table.usage.bytes == 0, seed
        assert not list((ended.root / "run" / "t" / files.ASIDE).iterdir()), seed
        ended.life.crash()


def test_a_writer_that_the_system_gives_no_thread_is_tried_again(
    recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(*_: Any, **__: Any) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(recording.writer, "submit", no_thread)
        recording.end(1)
        recording.pass_time(2 * INTERVAL_S)
    recording.pass_time(2 * RETRY_S)
    assert recording.recorded() == [0]


def test_a_defect_of_the_thread_keeps_no_other_table_from_its_files(recording: Recording, tmp_path: Path) -> None:
    """The real thread, whose arena cannot be opened for a while."""
    stirred = threading.Event()
    memory = recording.life.coordinator.memory
    writer = ThreadWriter(memory, stirred.set)
    recording.end(1)
    batch = recording.life.coordinator.ledger.next_ended("t", 10, recording.life.now)
    assert batch is not None
    outcomes = []
    for path in (str(tmp_path / "none"), memory.arena.path):
        memory.arena.path = path
        writer.submit(batch, tmp_path / "files" / "t", after_failure=False, remote=0)
        outcomes.append(writer.take(60.0))
    writer.stop()
    assert isinstance(outcomes[0], Outcome)
    assert isinstance(outcomes[1], Outcome)
    assert "FileNotFoundError" in outcomes[0].error
    assert [one.rows for one in outcomes[1].files] == [[0]]


def test_files_of_a_table_without_new_rows_are_removed_by_their_age(
    recording: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transferqueue.server.row_record.writer.AGE_CHECK_S", 0.02)
    recording.client.ask(m.CreateTable("u", tasks=USE, retention=Recorded("run", age_s=60.0)))
    assert write(recording.life, recording.client, 1, fill=0, table="u").rows == 1
    assert recording.client.ask(m.Drop("u", bytes(8), "over")).rows == 1
    batch = recording.life.coordinator.ledger.next_ended("u", 10, recording.life.now)
    assert batch is not None
    writer = ThreadWriter(recording.life.coordinator.memory, lambda: None)
    writer.submit(batch, tmp_path / "files", after_failure=False, remote=0)
    assert writer.take(60.0) is not None
    (one,) = files.files_in(tmp_path / "files")
    os.utime(one.path, (0, 0))
    tick = threading.Event()
    while one.path.exists():
        tick.wait(0.02)
    writer.stop()


def test_a_new_table_has_no_failures_of_an_earlier_one(tmp_path: Path, shared: Path) -> None:
    recording = Recording(tmp_path, shared, required=False)
    recording.writer.broken = FULL
    recording.end(1)
    recording.pass_time(PATIENCE_S + 2 * RETRY_S)
    assert recording.table.rows_unrecorded == 1
    recording.client.ask(m.DropTable("t"))
    recording.client.ask(m.CreateTable("t", tasks=USE, retention=Recorded("run", required=False)))
    recording.end(1)
    recording.pass_time(2 * RETRY_S)
    assert recording.table.rows_unrecorded == 0
    recording.writer.broken = ""
    recording.pass_time(2 * RETRY_S)
    assert recording.recorded() == [0]
    recording.life.crash()


def test_a_file_that_a_user_removes_is_no_failure_of_the_disk(
    recording: Recording, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor is an old one that cannot be removed."""
    whole = files.files_in

    def listed(directory: Path) -> list[files.RecordedFile]:
        return [one._replace(path=directory / "gone") for one in whole(directory)]

    recording.client.ask(m.CreateTable("u", tasks=USE, retention=Recorded("run", bytes=1)))
    monkeypatch.setattr(files, "files_in", listed)
    assert write(recording.life, recording.client, 1, fill=0, table="u").rows == 1
    assert recording.client.ask(m.Drop("u", bytes(8), "over")).rows == 1
    recording.pass_time(2 * INTERVAL_S)
    assert recording.life.coordinator.ledger.state.tables["u"].rows_recorded == 1
    assert "cannot be recorded" not in caplog.text


def test_what_a_killed_server_spooled_is_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / "spool").write_bytes(b"half")
    with closing(BlockSpool(tmp_path)) as spool:
        spool.add(1, np.frombuffer(b"abc", np.uint8))
        assert spool.read(1).tobytes() == b"abc"
    assert not list(tmp_path.iterdir())


def test_files_stay_together_when_the_process_changes_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An embedded server, and a directory that is not absolute."""
    monkeypatch.chdir(tmp_path)
    with tq.connect("embedded") as queue:
        table = queue.create_table("t", tasks=USE, retention=tq.Recorded("run"))
        table.put(x=[1])
        table.drop([0], reason="over")
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        table.put(x=[2])
        table.drop([1], reason="over")
    assert tq.open_run(tmp_path / "run").table("t").arrow(["_row"]).num_rows == 2
    assert not list((tmp_path / "elsewhere").iterdir())


# ---------------------------------------------------------------- terms that are refused


@pytest.mark.parametrize("directory", ["..", "../elsewhere", "/etc"])
def test_a_record_stays_under_the_directory_of_the_server(recording: Recording, directory: str) -> None:
    refused = recording.client.ask(m.CreateTable("u", tasks=USE, retention=Recorded(directory)))
    assert refused.error == "UsageError"
    assert f"record directory {directory!r} is outside" in refused.text


def test_a_link_does_not_lead_out_of_the_directory_of_the_server(recording: Recording, tmp_path: Path) -> None:
    (tmp_path / "records" / "link").symlink_to(tmp_path)
    refused = recording.client.ask(m.CreateTable("u", tasks=USE, retention=Recorded("link")))
    assert "record directory 'link' is outside" in refused.text


def test_a_table_whose_directory_is_outside_stops_the_start(tmp_path: Path, shared: Path) -> None:
    first = Recording(tmp_path, shared)
    first.client.ask(m.CreateTable("u", tasks=USE, retention=Recorded(str(tmp_path / "records" / "u"))))
    first.life.crash()
    with pytest.raises(UsageError, match=r"is outside .*, where this server keeps records"):
        Recording(tmp_path, shared, first.client, root=tmp_path / "other")


def test_a_directory_that_cannot_be_written_is_refused_at_once(tmp_path: Path, recording: Recording) -> None:
    (tmp_path / "records" / "file").write_bytes(b"")
    refused = recording.client.ask(m.CreateTable("u", tasks=USE, retention=Recorded("file")))
    assert "cannot be written to (File exists); name another directory" in refused.text


def test_terms_say_what_is_wrong() -> None:
    for wrong in ({"directory": ""}, {"directory": "a\0"}, {"directory": "a", "age_s": 0.0}):
        with pytest.raises(UsageError, match="recorded: "):
            Recorded(**wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        Recorded("a", bytes="many")
