"""The thread that writes batches of ended rows into files, one after another.

A file is written aside, synchronised, and renamed (`storage.row_files.files`). The thread touches neither ledger nor
allocator: the part holds the memory until the outcome of the batch is taken.
"""

from __future__ import annotations

import json
import logging
import mmap
import queue
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from transferqueue.errors import Corruption, Disconnected, TransferQueueError
from transferqueue.ledger.arrays import IntArray
from transferqueue.ledger.rows.cold_arena import ON_DISK
from transferqueue.ledger.rules.recording import EndedBatch
from transferqueue.limits import FAREWELL_S
from transferqueue.policies import Recorded
from transferqueue.server.memory.block_spool import BlockSpool
from transferqueue.server.memory.own_memory import SHARD, OwnShardMemory
from transferqueue.server.parts import ColdStore
from transferqueue.server.row_record.batch_columns import BatchColumns
from transferqueue.storage.elements.dtypes import U8
from transferqueue.storage.row_files import files
from transferqueue.storage.row_files.reader import rows_in
from transferqueue.wire.messages import BlockLocation
from transferqueue.wire.versions import VERSION

if TYPE_CHECKING:
    from transferqueue.server.shards.block_fetches import ArrivedBlocks

_log: Final = logging.getLogger("transferqueue.server")
_FORM: Final[dict[str, Any]] = {
    "compression": "zstd",
    "compression_level": 1,
    "use_dictionary": False,
    "write_page_checksum": True,
}
"""Of the files. Dictionaries would double the time, and take more bytes where values are tokens and log-probs."""
_IMPORTED: Final = ("pyarrow.compute", "pyarrow.parquet")
"""Imported when the first table is created, since it takes a fifth of a second: no step is late by it."""
AGE_CHECK_S: Final = 60.0
"""Files are compared with the greatest age of their table after each batch, and this long after the last one."""


Arrival = Callable[[], "ArrivedBlocks | TransferQueueError"]
"""Waits for fetched blocks, or the error that ends the batch."""


class WrittenFile(NamedTuple):
    """A file that exists, and the rows in it."""

    number: int
    rows: list[int]


@dataclass(slots=True)
class Outcome:
    """What became of a batch: the files that exist, and what kept the others from it.

    Args:
        error: of the disk of the record; "": none.
        damaged: a block whose bytes cannot be read, and why; None: none was met.
    """

    table: str
    files: list[WrittenFile] = field(default_factory=list)
    error: str = ""
    damaged: tuple[int, str] | None = None


class SpooledBlocks(NamedTuple):
    """Fetched blocks that the thread has read. damaged: numbers of those that do not match their checksum."""

    arrived: ArrivedBlocks
    damaged: list[int]


class Writer(Protocol):
    """Writes one batch at a time, and knows the files that exist. Each method but `submit`, `take` and `stop` is called
    before a table has rows, or before the first frame, and raises `OSError` if the directory cannot be used."""

    def probe(self, directory: Path) -> None:
        """Return if files can be made in this directory."""

    def resume(self, directory: Path, life: str, first: int) -> list[WrittenFile]:
        """Remove what a killed server of this life was writing. Returns its files from number `first` on."""

    def submit(self, batch: EndedBatch, directory: Path, *, after_failure: bool, remote: int) -> None:
        """Begin to write a batch. after_failure: the latest attempt on this table failed. remote: number of its blocks
        that are fetched (`expect`). `RuntimeError` or `MemoryError` if the system gives no thread."""

    def expect(self) -> Callable[[ArrivedBlocks | TransferQueueError], object]:
        """Blocks of the next batch are fetched. Returns what takes them, or the error that ends the batch."""

    def take(self, wait_s: float = 0.0) -> Outcome | SpooledBlocks | None:
        """The outcome of the batch, once, and before it, what it has read of fetched blocks; None: there is nothing
        yet."""

    def stop(self) -> None:
        """End. A batch that is being written may still appear."""


class ThreadWriter:
    """A `Writer` with a thread. `stir` has the loop call `tick` soon. cold: has the blocks on the disk."""

    def __init__(self, memory: OwnShardMemory, stir: Callable[[], None], cold: ColdStore | None = None) -> None:
        self._memory, self._stir, self._cold = memory, stir, cold
        self._batches: queue.SimpleQueue[Callable[[], Outcome] | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[Outcome | SpooledBlocks] = queue.SimpleQueue()
        self._arrivals: queue.SimpleQueue[ArrivedBlocks | TransferQueueError] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._aging: dict[Path, Recorded] = {}
        """Directories whose files have a greatest age. Used by the thread."""

    def probe(self, directory: Path) -> None:
        """See `Writer`."""
        files.probe(directory)
        with suppress(RuntimeError, MemoryError):  # the first batch is told
            self._start()

    def resume(self, directory: Path, life: str, first: int) -> list[WrittenFile]:
        """See `Writer`."""
        return resume(directory, life, first)

    def submit(self, batch: EndedBatch, directory: Path, *, after_failure: bool, remote: int) -> None:
        """See `Writer`."""
        self._start()
        fetched = (remote, self._arrivals.get) if remote else None
        self._batches.put(lambda: self._write(batch, directory, fetched, after_failure=after_failure))

    def expect(self) -> Callable[[ArrivedBlocks | TransferQueueError], object]:
        """See `Writer`. A queue of its own for each batch: what an earlier one left is not taken for its blocks."""
        self._arrivals = queue.SimpleQueue()
        return self._arrivals.put

    def take(self, wait_s: float = 0.0) -> Outcome | SpooledBlocks | None:
        """See `Writer`."""
        with suppress(queue.Empty):
            return self._outcomes.get(timeout=wait_s) if wait_s else self._outcomes.get_nowait()
        return None

    def stop(self) -> None:
        """See `Writer`."""
        self._arrivals.put(Disconnected("the server stops"))
        self._batches.put(None)
        if self._thread is not None:
            self._thread.join(FAREWELL_S)

    def _start(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="transferqueue row record", daemon=True)
            thread.start()
            self._thread = thread

    def _run(self) -> None:
        for module in _IMPORTED:
            with suppress(Exception):  # the first batch is told
                import_module(module)
        while True:
            try:
                batch = self._batches.get(timeout=AGE_CHECK_S if self._aging else None)
            except queue.Empty:
                for directory, terms in self._aging.items():
                    _keep_bounds(directory, terms)
                continue
            if batch is None:
                return
            self._outcomes.put(batch())
            del batch  # its columns are large
            self._stir()

    def _write(
        self, batch: EndedBatch, directory: Path, fetched: tuple[int, Arrival] | None, *, after_failure: bool
    ) -> Outcome:
        if batch.terms.age_s is not None:
            self._aging[directory] = batch.terms
        try:
            arena = self._memory.mapped(mmap.PROT_READ)
            if fetched is None:
                return write(batch, directory, bytes_of(arena, self._cold), after_failure=after_failure)
            with closing(BlockSpool(files.aside(directory, batch.life, 0).parent)) as spool:
                spool_remote(spool, *fetched, arena, self._tell)
                memory = bytes_of(arena, self._cold, spool)
                return write(batch, directory, memory, after_failure=after_failure)
        except Exception as error:  # noqa: BLE001  (named in the outcome)
            return _failed(Outcome(batch.table), error)

    def _tell(self, spooled: SpooledBlocks) -> None:
        self._outcomes.put(spooled)
        self._stir()


def spool_remote(
    spool: BlockSpool,
    count: int,
    arrival: Arrival,
    arena: U8,
    tell: Callable[[SpooledBlocks], None],
) -> None:
    """Keep `count` fetched blocks as they arrive. arrival: blocks for the next ones. tell: gets those that were read.
    Raises the error that arrives instead."""
    while len(spool) < count:
        arrived = arrival()
        if isinstance(arrived, TransferQueueError):
            raise arrived
        tell(SpooledBlocks(arrived, spool.add_checked(arena, arrived.blocks)))


def bytes_of(
    arena: U8, cold: ColdStore | None = None, spool: BlockSpool | None = None
) -> Callable[[BlockLocation], U8]:
    """Return what reads a block that is held: from the arena, from the disk of cold blocks, or one that was fetched. It
    raises `Corruption` with the number of the block."""

    def read(at: BlockLocation) -> U8:
        if spool is not None and at.shard not in (SHARD, ON_DISK):
            return spool.read(at.block)
        if cold is None or at.shard != ON_DISK:
            return arena[at.offset : at.offset + at.nbytes]
        try:
            return cold.read(at.block)
        except Corruption as error:
            raise Corruption(str(error), block=at.block) from error

    return read


def write(
    batch: EndedBatch, directory: Path, memory: Callable[[BlockLocation], U8], *, after_failure: bool = False
) -> Outcome:
    """Write a batch, mostly into one file. Never raises: an error is in the outcome, and the files before it stay."""
    outcome = Outcome(batch.table)
    try:
        if after_failure and (found := published(directory, batch.life, batch.number)):
            outcome.files = found  # by a failed attempt, all the same
            return outcome
        columns = BatchColumns(batch, memory, time.time())
        for number, chosen in enumerate(columns.files(), batch.number):
            _write_file(columns, batch, directory, number, chosen)
            outcome.files.append(WrittenFile(number, batch.rows[chosen].tolist()))
        _keep_bounds(directory, batch.terms)
    except Exception as error:  # noqa: BLE001  (named in the outcome)
        return _failed(outcome, error)
    return outcome


def _failed(outcome: Outcome, error: Exception) -> Outcome:
    """The outcome of a batch that an error ended. A defect is logged with its trace."""
    if isinstance(error, Corruption) and error.block:
        outcome.damaged = error.block, str(error)
    elif isinstance(error, OSError | TransferQueueError):
        outcome.error = f"{type(error).__name__}: {error}"
    else:
        _log.error("rows of table %s could not be written", outcome.table, exc_info=error)
        outcome.error = f"{error!r}; please report it"
    return outcome


def _keep_bounds(directory: Path, terms: Recorded) -> None:
    """Remove the files that the terms do not keep. The rows are recorded all the same if that fails."""
    try:
        files.remove_old(directory, terms.bytes_max, terms.age_s)
    except OSError as error:
        _log.warning("old files of %s stay: %s", directory, error)


def resume(directory: Path, life: str, first: int) -> list[WrittenFile]:
    """See `Writer.resume`."""
    files.remove_unfinished(directory, life)
    return published(directory, life, first)


def published(directory: Path, life: str, first: int) -> list[WrittenFile]:
    """The files of a life from number `first` on. One that is damaged counts as a file without rows: the rows go into
    another one."""
    found = []
    for one in files.files_in(directory):
        if one.life == life and one.number >= first:
            try:
                found.append(WrittenFile(one.number, rows_in(one)))
            except Corruption as error:
                _log.error("%s", error)
                found.append(WrittenFile(one.number, []))
    return found


def _write_file(columns: BatchColumns, batch: EndedBatch, directory: Path, number: int, chosen: IntArray) -> None:
    import pyarrow.parquet as pq

    aside = files.aside(directory, batch.life, number)
    try:
        with aside.open("wb") as file:
            schema = columns.schema().with_metadata(_about(batch, number))
            with pq.ParquetWriter(file, schema, **_FORM) as writer:
                for table in columns.chunks(chosen):
                    writer.write_table(table.cast(schema), row_group_size=max(1, table.num_rows))
            file.flush()
            files.synchronise(file.fileno())
        files.publish(aside, directory)
    finally:
        aside.unlink(missing_ok=True)


def _about(batch: EndedBatch, number: int) -> dict[bytes, Any]:
    about = {"table": batch.table, "life": batch.life, "number": number, "package": VERSION, "format": 1}
    return {b"transferqueue": json.dumps(about).encode()}
