"""The part of a server that has ended rows written into files: when, in which order, and what a broken disk means.

It does no I/O: a `Writer` writes, and the ledger is told of its files.

1. One batch is written at a time. Its extents and its blocks on the disk are held meanwhile, as for a snapshot. Blocks
   that lie in remote shards alone are fetched first, into a file without a name (`shards.block_fetches`).
2. A batch is due `INTERVAL_S` after the first of its rows ended, or at once if a request lacks memory, the table is
   crowded, or no more rows will end (`Ledger.records_at_once`).
3. The end of a row is durable before a file has the row, and the ledger is told of a file after it exists under its
   name. Its memory is free after that, and not before.
4. After a start, each file of a life that the ledger was not told of is told first (`resume`): none is written twice.
5. After a failure the batch stays, and is tried again every `RETRY_S`. When failures have lasted `PATIENCE_S`, the
   terms decide (`Recorded.required`): requests that add work to the table are refused until a batch succeeds, or each
   batch that fails is freed without a file, logged and counted.
6. A block that the disk does not give, or gives changed, is lost, as after a failed load (`ledger.data_loss`). Its rows
   are recorded without its values, and their events say why. One that no shard can copy now is
   not lost: that is a failed attempt.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from os.path import normpath
from pathlib import Path
from typing import TYPE_CHECKING, Final

from transferqueue.errors import Disconnected, DiskFailed, Full, Impossible, UsageError
from transferqueue.ledger.ledger import Ledger
from transferqueue.ledger.rules.recording import EndedBatch
from transferqueue.limits import SNAPSHOT_FETCH_S
from transferqueue.policies import Recorded
from transferqueue.server.memory.lending import Lending
from transferqueue.server.memory.own_copies import refer_to_own_copies
from transferqueue.server.parts import ColdStore, Part
from transferqueue.server.row_record.writer import Outcome, SpooledBlocks, Writer, WrittenFile
from transferqueue.storage.row_files.files import directory_of
from transferqueue.wire import messages as m

if TYPE_CHECKING:
    from transferqueue.server.shards.block_fetches import BlockFetches

_log: Final = logging.getLogger("transferqueue.server")
INTERVAL_S: Final = 1.0
RETRY_S: Final = 2.0
PATIENCE_S: Final = 30.0
ROWS_AT_ONCE: Final = 1 << 16
"""About the most rows of a batch."""
FINISH_S: Final = 60.0
"""The longest that the end of a server waits for its last files."""


@dataclass(slots=True)
class FailedAttempts:
    """Attempts on a table that fail since `since`."""

    since: float
    retry_at: float
    error: str


class RowRecords(Part):
    """Used by the loop's thread.

    Args:
        root: the directory of all records, under which tables name theirs; None: they may name any directory.
        writer: writes the files.
        short: tables to which no work may be added, and why.
        wake: makes the requests due that wait on a key.
        refuse: refuses the waiting requests that add work to a table.
        commit: returns when all changes so far are durable.
        cold: has the blocks that are on a disk; None: none is.
        fetches: brings the blocks of remote shards; None: there are none.
    """

    def __init__(
        self,
        root: Path | None,
        ledger: Ledger,
        lending: Lending,
        writer: Writer,
        *,
        short: dict[str, str],
        wake: Callable[[tuple[str, ...]], None],
        refuse: Callable[[str, Full], None],
        commit: Callable[[], None],
        cold: ColdStore | None = None,
        fetches: BlockFetches | None = None,
    ) -> None:
        self.root: Final = root
        self._root: Final = (root or Path.cwd()).resolve()
        """So that files stay together when the process changes its directory."""
        self._ledger, self._lending, self._writer = ledger, lending, writer
        self._short, self._wake, self._refuse, self._commit = short, wake, refuse, commit
        self._cold, self._fetches = cold, fetches
        if fetches is not None:
            ledger.refuse_to_record_beyond(lending.own.allocator.capacity)
        self._look_at: float | None = None
        """When to look whether blocks that are fetched came; None: none is."""
        self._ends = False
        """Whether the server serves no more requests, so that no shard copies."""
        self._batch: EndedBatch | None = None
        """The batch that is being written."""
        self._held: list[int] = []
        """Its extents."""
        self._failures: dict[str, FailedAttempts] = {}
        """By life of the table."""
        self._urgent = False
        """Whether a request lacks memory."""

    # ------------------------------------------------------------ tables

    def check_table(self, terms: m.CreateTable | m.TableTerms) -> None:
        """See `Part`."""
        if not isinstance(terms.retention, Recorded):
            return
        directory = self._directory(terms.name, terms.retention)
        self._check_inside(directory, terms.retention)
        try:
            self._writer.probe(directory)
        except OSError as error:
            raise UsageError(
                f'table "{terms.name}" cannot record its rows: {directory} cannot be written to ({error.strerror}); '
                "name another directory, or start the server with another --records"
            ) from error

    def _check_inside(self, directory: Path, terms: Recorded) -> None:
        if self.root is not None and not directory.resolve().is_relative_to(self._root):
            raise UsageError(
                f"record directory {terms.directory!r} is outside {self.root}, where this server keeps records; name "
                "one under it, or start the server with another --records"
            )

    def _directory(self, table: str, terms: Recorded) -> Path:
        """Of the table's files. Asks no disk."""
        return directory_of(Path(normpath(self._root / terms.directory)), table)

    def resume(self, now: float) -> None:
        """Tell the ledger of files that an earlier run had written, and not told. Call it before the first frame.
        `DiskFailed` if a directory cannot be read."""
        for name, record in self._ledger.rows_to_record().items():
            terms = self._ledger.recorded_terms(name)
            directory = self._directory(name, terms)
            self._check_inside(directory, terms)
            try:
                found = self._writer.resume(directory, record.life, record.files + 1)
            except OSError as error:
                raise DiskFailed(
                    f'the record of table "{name}" cannot be read: {error}; start the server when {directory} is there',
                    is_full=False,
                ) from error
            if found and (unended := self._told(name, found, now)):
                _log.error(
                    'files %d to %d of table "%s" have %d rows that have not ended here, or have twice: they may come '
                    "into further files",
                    *(found[0].number, found[-1].number, name, unended),
                )

    def _told(self, table: str, found: list[WrittenFile], now: float) -> int:
        """Tell the ledger of files. Returns how many rows of them it did not free."""
        rows = [row for one in found for row in one.rows]
        return len(rows) - self._ledger.rows_recorded(table, found[-1].number, rows, now)

    # ------------------------------------------------------------ time

    def tick(self, now: float) -> None:
        """Take the outcome of the batch, and begin the next one that is due."""
        while self._batch is not None and (outcome := self._writer.take()) is not None:
            self._hear(self._batch, outcome, now)
        if self._batch is None:
            self._begin(now)
        elif self._fetches is not None and self._look_at is not None and now >= self._look_at:
            self._fetches.expire(now)
            self._look_at = now + SNAPSHOT_FETCH_S

    def next_deadline(self) -> float | None:
        """See `Part`."""
        if self._batch is not None:
            return self._look_at
        due = min(self._due().values(), default=math.inf)
        return None if due == math.inf else due

    def memory_lacking(self, nbytes: int, use: m.GrantPurpose) -> None:
        """See `Part`."""
        self._urgent = True

    def _due(self) -> dict[str, float]:
        """When each table with rows that wait is due."""
        due: dict[str, float] = {}
        for name, record in self._ledger.rows_to_record().items():
            if record.ended:
                at_once = self._urgent or self._ledger.records_at_once(name)
                due[name] = record.ended[0].at + (0.0 if at_once else INTERVAL_S)
                if (failure := self._failures.get(record.life)) is not None:
                    due[name] = failure.retry_at
        return due

    def _begin(self, now: float) -> None:
        due = {name: at for name, at in self._due().items() if at <= now}
        if not due:
            self._urgent = False
            return
        name = min(due, key=due.__getitem__)
        self._commit()
        batch = self._ledger.next_ended(name, ROWS_AT_ONCE, now)
        if batch is None:
            return
        remote = refer_to_own_copies(batch.blocks)
        if remote and (why := self._fetch(remote, now)):
            self._failed(batch, why, now)
            return
        self._batch = batch
        self._held = [
            place
            for at in batch.blocks.values()
            for place in (at.extent, *(copy.extent for copy in at.copies))
            if place
        ]
        self._lending.hold(self._held)
        if self._cold is not None:
            self._cold.hold()
        directory, after_failure = self._directory(name, batch.terms), batch.life in self._failures
        try:
            self._writer.submit(batch, directory, after_failure=after_failure, remote=len(remote))
        except (OSError, RuntimeError, MemoryError) as error:
            self._end(batch, Outcome(name, error=str(error)), now)

    def _fetch(self, remote: list[m.BlockLocation], now: float) -> str:
        """Have shards bring these blocks. Returns why they cannot; "": they do."""
        if self._fetches is None or self._ends:
            return f"block {remote[0].block} lies in shard {remote[0].shard}, and the server stops"
        try:
            self._fetches.begin(remote, self._writer.expect(), now)
        except Impossible as error:
            return str(error)
        self._look_at = now + SNAPSHOT_FETCH_S
        return ""

    def _hear(self, batch: EndedBatch, outcome: Outcome | SpooledBlocks, now: float) -> None:
        if isinstance(outcome, Outcome):
            self._end(batch, outcome, now)
        elif self._fetches is not None:
            self._fetches.read(outcome.arrived, outcome.damaged, now)

    def _end(self, batch: EndedBatch, outcome: Outcome, now: float) -> None:
        self._batch = None
        if self._fetches is not None and self._look_at is not None:
            self._fetches.end(now)
            self._look_at = None
        if self._ledger.has_table(batch.table):
            if outcome.files:
                self._told(batch.table, outcome.files, now)
            if outcome.error:
                self._failed(batch, outcome.error, now)
            else:
                self._works(batch)
        if outcome.damaged:
            _log.error("block %d is lost: %s; rows are recorded without its values", *outcome.damaged)
            self._ledger.blocks_lost(outcome.damaged[:1], now)
        if self._cold is not None:
            self._cold.release()
        self._lending.release(self._held, now)
        self._held = []
        self._wake(("memory",))

    # ------------------------------------------------------------ failures

    def _works(self, batch: EndedBatch) -> None:
        if self._failures.pop(batch.life, None) is not None:
            _log.warning('the record of table "%s" is written again', batch.table)
            self._short.pop(batch.table, None)

    def _failed(self, batch: EndedBatch, error: str, now: float) -> None:
        name, lives = batch.table, {record.life for record in self._ledger.rows_to_record().values()}
        self._failures = {life: failure for life, failure in self._failures.items() if life in lives}
        failure = self._failures.setdefault(batch.life, FailedAttempts(now, now, error))
        if failure.since == now:
            _log.warning('rows of table "%s" wait, since they cannot be recorded: %s', name, error)
        failure.retry_at, failure.error = now + RETRY_S, error
        if now - failure.since >= PATIENCE_S:
            self._give_in(batch, error, now)

    def _give_in(self, batch: EndedBatch, error: str, now: float) -> None:
        """The disk has failed for long: do as the terms say."""
        name = batch.table
        if not batch.terms.required:
            freed = self._ledger.rows_recorded(name, 0, batch.rows.tolist(), now)
            _log.error('%d rows of table "%s" were freed without a file: %s', freed, name, error)
        elif name not in self._short:
            waiting = self._ledger.rows_to_record()[name].waiting
            self._short[name] = (
                f'table "{name}" takes no rows: {waiting:,} that have ended wait for their file, and it cannot be '
                f"written ({error}). Make room in {batch.terms.directory}, and it goes on by itself; a table with "
                "Recorded(required=False) would free them without a file"
            )
            _log.error("%s", self._short[name])
            self._refuse(name, Full(self._short[name]))

    # ------------------------------------------------------------ the end

    def finish(self, now: float, clock: Callable[[], float]) -> None:
        """Write what is left, and end. Call it after the last frame. Rows that cannot be written wait for the next
        server, if the state outlives this one.

        Args:
            now: of the loop's last turn. The ledger's time stands still: no client can renew its lease any more.
            clock: seconds, for the deadline.
        """
        until = clock() + FINISH_S
        self._ends = True
        if self._fetches is not None:
            self._fetches.fail(Disconnected("the server stops"))
        while (left := until - clock()) > 0:
            self._urgent = True
            self.tick(now)
            if self._batch is None:
                break
            if (outcome := self._writer.take(left)) is not None:
                self._hear(self._batch, outcome, now)
        self._writer.stop()
        waiting = sum(record.waiting for record in self._ledger.rows_to_record().values())
        if waiting:
            _log.error("%d rows that have ended are in no file: %s", waiting, self._reasons())

    def _reasons(self) -> str:
        return "; ".join(sorted({failure.error for failure in self._failures.values()})) or "the disk is too slow"
