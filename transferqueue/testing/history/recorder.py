"""A recorder: wraps tables and channels of a real queue, and writes their calls and results to a history file.

    with HistoryRecorder("worker-3.jsonl", process="worker-3") as recorder:
        table = recorder.table(queue.table("rollouts"))     # put, update, lease, reserve, ... as ever
        ...
        recorder.count(table, drained=True)

Each process writes a file of its own; ``transferqueue check-history *.jsonl`` checks them together. The file has
digests of values. A recorder reads all bytes, of puts and of leases: use it in tests and to search for defects.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self

import numpy as np

from transferqueue.client import Batch, Reservation, Table, WeightChannel, Weights
from transferqueue.client.operations.commit import PreparedCommit, outgoing
from transferqueue.client.operations.row_metadata import GivenFacts
from transferqueue.errors import Disconnected
from transferqueue.storage.columns.column import Column
from transferqueue.storage.columns.placement import MappedBlocks, RowPlacement
from transferqueue.storage.inputs.block_writer import BlockWriter
from transferqueue.storage.inputs.prepare import Prepared
from transferqueue.testing.history import history as h
from transferqueue.wire import messages as m

FACTS: Final = GivenFacts.__struct_fields__


class RecordedResult:
    """The result of the operation in a `HistoryRecorder.during` block; None if it failed."""

    def __init__(self) -> None:
        self.result: h.Result | None = None


class HistoryRecorder:
    """Writes the history of one process to `path`, replacing it. Safe from any thread.

    Args:
        path: The file.
        process: A unique name.
        clock: Seconds of a clock that all processes of the run share. Default: the machine's monotonic clock.
        whole: Whether recorders see every put into its tables. If not, a row without a put is no violation.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        process: str = "process",
        whole: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.process: Final = process
        self._whole: Final = whole
        self._clock: Final = clock
        self._guard = threading.Lock()
        self._numbers = itertools.count(1)
        self._file: IO[bytes] = Path(path).open("wb")  # noqa: SIM115  (closed by `close`)

    # ------------------------------------------------------------ wrapping

    def table(self, table: Table) -> RecordedTable:
        """The same table, recorded."""
        limits, pacing = table.limits, table.pacing
        tasks = list(table.tasks.values())
        self._write(h.Declared(table.name, tasks, limits.rows, pacing, limits.bytes_max, self._whole, at=self._clock()))
        return RecordedTable(self, table)

    def channel(self, channel: WeightChannel) -> RecordedChannel:
        """The same channel, recorded."""
        return RecordedChannel(self, channel)

    def count(self, table: RecordedTable, *, drained: bool = False) -> None:
        """Write the server's counts of a table. drained: it is sealed, every task reached its end, and no operation is
        under way."""
        stats = table.table.stats()
        self._write(
            h.Counted(
                table=table.table.name,
                at=self._clock(),
                rows_put=stats.rows_put,
                rows_live=stats.rows_live,
                rows_done=stats.rows_done,
                dropped=stats.dropped,
                rows_resident=stats.rows_resident,
                bytes=stats.bytes,
                drained=drained,
            )
        )

    def close(self) -> None:
        """End the history. A second call does nothing."""
        if not self._file.closed:
            self._write(h.Finished(self._clock()))
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------ writing

    @contextmanager
    def during(self, call: h.Call) -> Iterator[RecordedResult]:
        """Write the begin of an operation and, when the block ends in any way, its outcome."""
        op = next(self._numbers)
        self._write(h.Invoked(op, self.process, self._clock(), call))
        ending = RecordedResult()
        try:
            yield ending
        except BaseException as error:
            outcome: h.Outcome = "fail" if h.certain(error) else "unknown"
            name = "Disconnected" if isinstance(error, Disconnected) else type(error).__name__
            self._write(h.Ended(op, self._clock(), outcome, error=name))
            raise
        self._write(h.Ended(op, self._clock(), "ok", ending.result))

    def _write(self, line: h.Line) -> None:
        with self._guard:
            self._file.write(h.write_line(line))


class RecordedTable:
    """A table whose operations are recorded; arguments and errors as of `Table`. `table` is the table itself."""

    def __init__(self, recorder: HistoryRecorder, table: Table) -> None:
        self.table: Final = table
        self._recorder = recorder

    def put(self, *, reservation: RecordedReservation | None = None, timeout_s: float = 60.0, **values: Any) -> Any:
        """`Table.put`."""
        facts, columns = split(values)
        out = outgoing(columns, GivenFacts(**facts), self.table.fields, None)
        call = h.PutCall(
            table=self.table.name,
            rows=out.rows,
            digests=digests_of(out),
            group_id=_ints(out.facts.group_id),
            group_size=_ints(out.facts.group_size, "<i4"),
            versions=_ints(out.facts.policy_version),
            reservation=0 if reservation is None else reservation.reservation.id,
        )
        under = None if reservation is None else reservation.reservation
        with self._recorder.during(call) as ending:
            rows = self.table.put(reservation=under, timeout_s=timeout_s, **values)
            ending.result = h.RowsResult(rows.tolist())
        return rows

    def update(self, rows: Any, *, overwrite: bool = False, **values: Any) -> None:
        """`Table.update`."""
        facts, columns = split(values)
        ids = np.atleast_1d(np.asarray(rows))
        out = outgoing(columns, GivenFacts(**facts), self.table.fields, len(ids))
        with self._recorder.during(h.UpdateCall(self.table.name, ids.tolist(), digests_of(out))):
            self.table.update(rows, overwrite=overwrite, **values)

    def lease(self, task: str, **terms: Any) -> RecordedBatch:
        """`Table.lease`. Reads all its columns."""
        replicas = terms["replica"][1] if terms.get("replica") else 1
        call = h.LeaseCall(self.table.name, task, terms.get("timeout_s", 60.0), terms.get("world", 1), replicas)
        with self._recorder.during(call) as ending:
            batch = self.table.lease(task, **terms)
            ending.result = first = _leased(batch)
        return RecordedBatch(self._recorder, self, batch, first.digests)

    def ack(self, batches: Iterable[RecordedBatch], *, step: int = -1) -> int:
        """`Table.ack`: written as one ack of each batch, all with the same begin and outcome."""
        taken = list(batches)
        with ExitStack() as calls:
            for batch in taken:
                calls.enter_context(self._recorder.during(h.AckCall(*batch._whose, batch._ids(None), step=step)))
            rows = self.table.ack([batch.batch for batch in taken], step=step)
        for batch in taken:
            batch._take(batch._ids(None))
        return rows

    def reserve(self, rows: int, **terms: Any) -> RecordedReservation:
        """`Table.reserve`."""
        with self._recorder.during(h.ReserveCall(self.table.name, rows)) as ending:
            found = self.table.reserve(rows, **terms)
            ending.result = h.ReservedResult(found.id, found.rows)
        return RecordedReservation(self._recorder, self.table.name, found)

    def drop(self, rows: Any, reason: str) -> int:
        """`Table.drop`."""
        with self._recorder.during(h.DropCall(self.table.name, np.atleast_1d(np.asarray(rows)).tolist(), reason)):
            return self.table.drop(rows, reason)

    def advance(self, version: int, **terms: Any) -> None:
        """`Table.advance`."""
        with self._recorder.during(h.AdvanceCall(self.table.name, version)):
            self.table.advance(version, **terms)

    def rollback(self, step: int, **terms: Any) -> int:
        """`Table.rollback`."""
        with self._recorder.during(h.RollbackCall(self.table.name)):
            return self.table.rollback(step, **terms)

    def seal(self) -> None:
        """`Table.seal`."""
        with self._recorder.during(h.SealCall(self.table.name)):
            self.table.seal()


class RecordedBatch:
    """A batch whose end is recorded. `batch` is the batch itself; it has the columns and facts."""

    def __init__(self, recorder: HistoryRecorder, table: RecordedTable, batch: Batch, first: h.Digests) -> None:
        self.batch: Final = batch
        self._first = first
        self._recorder, self._table = recorder, table
        self._left: list[int] = batch.rows.tolist()

    def __getitem__(self, field: str) -> Column:
        return self.batch[field]

    def __len__(self) -> int:
        return len(self.batch)

    def ack(self, rows: Any = None, *, step: int = -1, **values: Any) -> int:
        """`Batch.ack`."""
        facts, columns = split(values)
        ids = self._ids(rows)
        known = self._table.table.fields
        digests = digests_of(outgoing(columns, GivenFacts(**facts), known, len(ids))) if columns else {}
        with self._recorder.during(h.AckCall(*self._whose, ids, digests, step=step)):
            ended = self.batch.ack(rows, step=step, **values)
        self._take(ids)
        return ended

    def drop(self, reason: str, rows: Any = None) -> int:
        """`Batch.drop`."""
        ids = self._ids(rows)
        with self._recorder.during(h.AckCall(*self._whose, ids, drop=reason)):
            ended = self.batch.drop(reason, rows)
        self._take(ids)
        return ended

    def release(self, rows: Any = None, *, failed: bool = False, reason: str = "") -> int:
        """`Batch.release`."""
        ids = self._ids(rows)
        with self._recorder.during(h.ReleaseCall(*self._whose, ids, failed)):
            released = self.batch.release(rows, failed=failed, reason=reason)
        self._take(ids)
        return released

    def look(self) -> None:
        """Read all columns again, and write whether they are unchanged."""
        with self._recorder.during(h.LookCall(self._table.table.name, self.batch.lease)) as ending:
            ending.result = h.LookedResult(_leased(self.batch).digests == self._first)

    @property
    def _whose(self) -> tuple[str, str, int]:
        return self.batch.table, self.batch.task, self.batch.lease

    def _ids(self, rows: Any) -> list[int]:
        return list(self._left) if rows is None else np.atleast_1d(np.asarray(rows)).tolist()

    def _take(self, ids: list[int]) -> None:
        self._left = [row for row in self._left if row not in set(ids)]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """As `Batch`: a clean exit acks the remaining rows, an exception releases them as failed."""
        if self.batch.ended:
            return
        call: h.Call = h.AckCall(*self._whose, self._ids(None))
        if error is not None:
            call = h.ReleaseCall(*self._whose, self._ids(None), isinstance(error, Exception))
        with self._recorder.during(call):
            self.batch.__exit__(kind, error, trace)


class RecordedReservation:
    """A reservation whose return is recorded. `reservation` is the reservation itself."""

    def __init__(self, recorder: HistoryRecorder, table: str, reservation: Reservation) -> None:
        self.reservation: Final = reservation
        self._recorder, self._table = recorder, table

    def release(self, rows: int | None = None) -> None:
        """`Reservation.release`."""
        with self._recorder.during(h.UnreserveCall(self._table, self.reservation.id, rows or 0)):
            self.reservation.release(rows)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.reservation.left:
            with self._recorder.during(h.UnreserveCall(self._table, self.reservation.id)):
                self.reservation.__exit__(kind, error, trace)


class RecordedChannel:
    """A weight channel whose operations are recorded. `channel` is the channel itself."""

    def __init__(self, recorder: HistoryRecorder, channel: WeightChannel) -> None:
        self.channel: Final = channel
        self._recorder = recorder

    def publish(self, version: int, tensors: Mapping[str, Any], **terms: Any) -> None:
        """`WeightChannel.publish`."""
        with self._recorder.during(h.PublishCall(self.channel.name, version, h.digest_of_mapping(tensors))):
            self.channel.publish(version, tensors, **terms)

    def pull(self, above: int = -1, *, version: int | None = None, **terms: Any) -> Weights:
        """`WeightChannel.pull`. All tensors are read."""
        wanted = -1 if version is None else version
        with self._recorder.during(h.PullCall(self.channel.name, above, wanted)) as ending:
            weights = self.channel.pull(above, version=version, **terms)
            ending.result = h.PulledResult(weights.version, h.digest_of_mapping(weights))
        return weights


# ---------------------------------------------------------------- digests


def split(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of a put, update or ack, as facts and columns."""
    facts = {name: value for name, value in values.items() if name in FACTS}
    return facts, {name: value for name, value in values.items() if name not in FACTS}


def digests_of(out: PreparedCommit) -> h.Digests:
    """Digests of columns as a reader gets them, with the types of their fields."""
    return {column.field.name: h.digests(_read_back(column)) for column in out.columns}


def _read_back(column: Prepared) -> Column:
    field = column.field
    if field.inline:
        return Column.of_inline(field, column.inline())
    draft = BlockWriter([column])
    memory = np.empty(draft.nbytes, np.uint8)
    draft.write(memory)
    at = m.BlockLocation(1, 0, 0, 0, draft.nbytes, draft.stored_rows, [field.name], draft.counts)
    slots = np.arange(draft.rows, dtype=np.int32) if draft.slots is None else draft.slots
    return Column(field, RowPlacement(MappedBlocks([at], [memory], {field.name: field}), np.zeros_like(slots), slots))


def _leased(batch: Batch) -> h.LeasedResult:
    return h.LeasedResult(
        lease=batch.lease,
        rows=batch.rows.tolist(),
        digests={name: h.digests(batch[name]) for name in batch.fields},
        group_id=batch.group_id.tolist(),
        group_size=batch.group_size.tolist(),
        versions=batch.policy_version.tolist(),
        clock=batch.version,
    )


def _ints(data: bytes | None, dtype: str = "<i8") -> list[int]:
    return [] if data is None else np.frombuffer(data, dtype).tolist()
