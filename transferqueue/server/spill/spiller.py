"""Has cold blocks written when memory is short, and loaded when a request needs them. No I/O: a `SpillSpace` does that.

See docs/decisions/spill.md. `ledger.rows.cold_blocks` says which blocks are cold, and which requests wait for them.

1. Extents are spilled when more than `SPILL_ABOVE` of the arena is in use, down to `SPILL_TO`, and when a request for
   memory, or a load, finds no room.
2. Parts of the arena and of the disk are for loads (`memory.backlog`). If new rows could fill both, no block could come
   back. A load does not take the share for results: a worker whose rows were loaded can write its results. While a load
   finds no memory, and a job under way may free some, no request is granted it.
3. If a block cannot be written (a full disk, a full file, an error of the disk), it stays in memory, and spilling
   pauses: until a spilled block returns its space, or `SPILL_PAUSE_S` has passed. `paused` says why. Requests that wait
   for memory keep waiting, as without spilling.
4. A block that the disk does not give is read `LOAD_TRIES` times. Then it is lost. A block whose checksum differs is
   lost at once. The rows of a lost block are made again or end as lost (`ledger.data_loss`), and no client gets its
   bytes.
5. While a snapshot or a record reads blocks on the disk, they keep their space.
6. A disk is silent when it has work and has not answered for `SPILL_SILENT_S`, until it answers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Final

from transferqueue.errors import OutOfMemory
from transferqueue.ledger.ledger import Ledger
from transferqueue.ledger.rows.cold_blocks import ColdBlocks
from transferqueue.limits import (
    LOAD_TRIES,
    PAGE_BYTES,
    SPILL_ABOVE,
    SPILL_BATCH_BYTES,
    SPILL_PAUSE_S,
    SPILL_SILENT_S,
    SPILL_TO,
)
from transferqueue.schema import align
from transferqueue.server.memory.backlog import Backlog
from transferqueue.server.memory.own_memory import OwnShardMemory
from transferqueue.server.spill.spill_jobs import (
    BlocksLoaded,
    BlocksWritten,
    BlockToLoad,
    BlockToWrite,
    SpilledBlock,
    SpillSpace,
)
from transferqueue.storage.elements.dtypes import U8
from transferqueue.wire import messages as m
from transferqueue.wire.answers.stats import SpillStats

_log: Final = logging.getLogger("transferqueue.server")


class SpillCounters:
    """Blocks spilled and loaded since the arena spills. Each counter only grows."""

    def __init__(self) -> None:
        self.spilled_blocks = 0
        self.spilled_bytes = 0
        self.loaded_blocks = 0
        self.loaded_bytes = 0
        self.lost_blocks = 0
        self.load_waits_s = 0.0
        """Time between the first try of a load order and its end, summed over all orders."""


class Spiller:
    """Moves blocks between the arena and its disk. Used by the loop's thread; `read` by any.

    Args:
        cold: the cold blocks.
        space: the disk. `backlog` keeps its books.
        wake_memory: makes the requests due that wait for memory.
    """

    def __init__(
        self,
        ledger: Ledger,
        cold: ColdBlocks,
        memory: OwnShardMemory,
        backlog: Backlog,
        space: SpillSpace,
        wake_memory: Callable[[], object],
    ) -> None:
        self.backlog: Final = backlog
        self.loads: Final = cold
        self.cold: Final = cold.arena
        self.counters: Final = SpillCounters()
        self.paused = ""
        """Why spilling pauses now; "": it does not."""
        self.load_wants = 0
        """Bytes for which the load order finds no memory."""
        self._ledger, self._memory, self._space = ledger, memory, space
        self._wake_memory: Final = wake_memory
        self._last_job = 0
        self._places: dict[int, SpilledBlock] = {}
        self._writing: dict[int, int] = {}
        """The extent that is being written, by job."""
        self._loads: dict[int, int] = {}
        """The extent that blocks are loaded into, by job."""
        self._progress_at = 0.0
        """When the disk last answered, or got work while idle."""
        self._tries: dict[int, int] = {}
        self._wanted = 0
        """Bytes for which a request waits and that it may have; 0: no request waits."""
        self._paused_until = self._tried_at = 0.0
        """When writes may be tried again after a failure, and when extents to write were last looked for."""
        self._is_full = False
        """Whether `paused` says that no more blocks can change places."""
        self._holds = 0
        self._freed_while_held: list[SpilledBlock] = []

    # ------------------------------------------------------------ what `Spilling` calls

    def need(self, nbytes: int, use: m.GrantPurpose) -> None:
        """A request waits for memory. Spill blocks for it, if all of them can come back."""
        backlog, used = self.backlog, self._memory.used
        if use == "weights" or backlog.may_have(nbytes, used, rows=use == "rows"):
            self._wanted = max(self._wanted, nbytes)
        elif not self.paused:
            self._is_full = True
            self.paused = (
                f"memory ({used:,} bytes) and disk ({backlog.on_disk:,} of {backlog.disk_bytes:,} bytes, "
                f"--spill-bytes) hold the most that can change places, with blocks of up to {backlog.largest:,} bytes"
            )

    def turn(self, now: float) -> bool:
        """Process the answers of the disk. Returns whether it is silent."""
        answers = self._space.answers()
        if answers.written or answers.loaded:
            self._progress_at = now
        for written in answers.written:
            self._written(written, now)
        for loaded in answers.loaded:
            self._loaded(loaded, now)
        return self.has_work and now >= self._progress_at + SPILL_SILENT_S

    def go_on(self, now: float) -> bool:
        """Begin the work that is due. Returns whether any is left or under way."""
        self._begin_loads(now)
        self._begin_writes(now)
        self._share_memory()
        return bool(self.has_work or self._wanted or self.load_wants or self.is_above)

    def _share_memory(self) -> None:
        """Have other requests wait for memory, or not (rules 3 and 4 of `memory.backlog`)."""
        backlog, was_held, was_stuck = self.backlog, self.backlog.is_held, self.backlog.is_stuck
        backlog.is_held = self.load_wants > 0 and self.has_work and not self.cold.is_silent
        backlog.is_stuck = self.load_wants > 0 and not backlog.is_held
        if (was_held and not backlog.is_held) or (backlog.is_stuck and not was_stuck):
            self._wake_memory()

    @property
    def has_work(self) -> bool:
        """Whether the disk has work."""
        return bool(self._writing or self._loads)

    @property
    def is_above(self) -> bool:
        """Whether so much memory is in use that cold blocks are spilled ahead of need."""
        return self._memory.used > SPILL_ABOVE * self._memory.grantable

    def next_deadline(self) -> float | None:
        """When to call `turn` or `go_on` next even without an event; None: nothing is due."""
        if self.has_work:
            return None if self.cold.is_silent else self._progress_at + SPILL_SILENT_S
        tries_again = self.paused and self._wanted and self._tried_at < self._paused_until
        return self._paused_until if tries_again else None

    def explain_memory(self) -> str:
        """The memory in use, for texts about a load order that finds none."""
        return f"{self._memory.used:,} of {self._memory.grantable:,} bytes are in use"

    def stats(self) -> SpillStats:
        """The figures for reports."""
        counters = self.counters
        return SpillStats(
            bytes_max=self.backlog.disk_bytes,
            blocks=len(self.cold.on_disk),
            bytes=self.cold.bytes_on_disk,
            spilled_blocks=counters.spilled_blocks,
            spilled_bytes=counters.spilled_bytes,
            loaded_blocks=counters.loaded_blocks,
            loaded_bytes=counters.loaded_bytes,
            lost_blocks=counters.lost_blocks,
            load_waits_s=counters.load_waits_s,
            paused=self.paused,
        )

    def stop(self) -> None:
        """Stop the thread and give the space back."""
        self._space.stop()

    # ------------------------------------------------------------ for snapshots and records

    def hold(self) -> dict[int, SpilledBlock]:
        """The places of all blocks on the disk. They keep their space until as many calls of `release`."""
        self._holds += 1
        return dict(self._places)

    def release(self) -> None:
        """End one `hold`."""
        self._holds -= 1
        if self._holds:
            return
        freed, self._freed_while_held = self._freed_while_held, []
        self._free(freed)

    def read(self, place: SpilledBlock) -> U8:
        """See `SpillFile.read`."""
        return self._space.read(place)

    # ------------------------------------------------------------ to the disk

    def _begin_writes(self, now: float) -> None:
        if self._writing or (self.paused and now < self._paused_until):
            return
        self._tried_at = now
        used = self._memory.used
        ahead = used - int(SPILL_TO * self._memory.grantable) if self.is_above else 0
        wanted = max(self._wanted, self.load_wants)
        nbytes = max(wanted, min(ahead, self.backlog.room_for_rows(used)))
        if not nbytes:
            return
        nbytes = min(nbytes, max(SPILL_BATCH_BYTES, wanted))
        chosen = self.cold.choose(nbytes)
        if not chosen and self.load_wants:
            chosen = self.cold.choose_scattered(used)
        if not chosen and self._wanted:
            chosen = self.cold.choose_spared(self._wanted)
        self._wanted = 0 if chosen else self._wanted
        for extent in chosen:
            job = self._new_job(now)
            self._writing[job] = extent.number
            self.backlog.largest = max(self.backlog.largest, extent.nbytes)
            self._space.write(job, [BlockToWrite(at.block, at.offset, at.nbytes, at.checksum) for at in extent.blocks])

    def _new_job(self, now: float) -> int:
        if not self.has_work:
            self._progress_at = now
        self._last_job += 1
        return self._last_job

    def _written(self, answer: BlocksWritten, now: float) -> None:
        extent = self._writing.pop(answer.job)
        if answer.error:
            self._pause(answer.error, now)
        else:
            self.paused = ""
        spilled = set(self.cold.finish_writing(extent, written=not answer.error))
        kept = [place for place in answer.places if place.block in spilled]
        self._places.update((place.block, place) for place in kept)
        self.backlog.on_disk += _disk_bytes(kept)
        self.counters.spilled_blocks += len(kept)
        self.counters.spilled_bytes += sum(place.nbytes for place in kept)
        if others := [place for place in answer.places if place.block not in spilled]:
            self._space.free(others)
        if not kept:  # no memory was freed; other extents may be written for the waiting requests
            self._wake_memory()

    def _pause(self, why: str, now: float) -> None:
        if not self.paused or self._is_full:
            _log.warning("the server stops spilling for now, and producers wait for memory: %s", why)
        self.paused, self._is_full, self._paused_until = why, False, now + SPILL_PAUSE_S

    # ------------------------------------------------------------ back into memory

    def _begin_loads(self, now: float) -> None:
        self.load_wants = 0
        for numbers, nbytes in self.cold.missing():
            if not self._begins_load(numbers, nbytes, now):
                self.load_wants = nbytes
                return

    def _begins_load(self, numbers: list[int], nbytes: int, now: float) -> bool:
        """Load a group of blocks, together if possible. In parts, if the free memory lies in pieces, or no block can
        leave until the disk has free space. Returns whether there was memory for all."""
        if (offset := self._take(nbytes)) is None:
            in_parts = len(numbers) > 1 and (self.paused or self._fits(nbytes))
            return bool(in_parts) and all(self._begins_load(*half, now) for half in self.cold.halves(numbers))
        extent, offsets = self.cold.begin_loading(offset, align(nbytes, PAGE_BYTES), numbers)
        job = self._new_job(now)
        self._loads[job] = extent
        self._space.load(job, [BlockToLoad(self._places[number], at) for number, at in offsets.items()])
        return True

    def _take(self, nbytes: int) -> int | None:
        """Memory for a load; None if there is none now."""
        if not self._fits(nbytes):
            return None
        try:
            extent = self._memory.take(nbytes)
        except OutOfMemory:
            return None
        return None if extent is None else extent[0]

    def _fits(self, nbytes: int) -> bool:
        return self._memory.used + align(nbytes, PAGE_BYTES) <= self.cold.room()

    def _loaded(self, answer: BlocksLoaded, now: float) -> None:
        self.cold.finish_loading(self._loads.pop(answer.job), answer.loaded)
        places = [self._places.pop(number) for number in answer.loaded if number in self._places]
        self.counters.loaded_blocks += len(places)
        self.counters.loaded_bytes += sum(place.nbytes for place in places)
        self._free(places)
        lost = dict.fromkeys(answer.damaged, "its bytes on the disk have another checksum")
        for number, why in answer.failed.items():
            self._tries[number] = self._tries.get(number, 0) + 1
            if self._tries[number] >= LOAD_TRIES:
                lost[number] = f"its bytes cannot be read from the disk ({why})"
        for number in (*answer.loaded, *lost):
            self._tries.pop(number, None)
        if lost:
            self._lose(lost, now)

    def _lose(self, lost: dict[int, str], now: float) -> None:
        known = {number: why for number, why in lost.items() if number in self.cold.on_disk}
        for number, why in known.items():
            _log.error("spilled block %d is lost: %s; its rows are made again, or end as lost", number, why)
        self.counters.lost_blocks += len(known)
        self._ledger.blocks_lost(list(known), now)

    # ------------------------------------------------------------ space on the disk

    def free_forgotten(self) -> None:
        """Return the space of blocks that are no longer needed."""
        forgotten = self.cold.take_forgotten()
        for number in forgotten:
            self._tries.pop(number, None)
        self._free([self._places.pop(number) for number in forgotten if number in self._places])

    def _free(self, places: list[SpilledBlock]) -> None:
        if not places:
            return
        if self._holds:
            self._freed_while_held += places
            return
        self._space.free(places)
        self.backlog.on_disk -= _disk_bytes(places)
        self._paused_until = 0.0
        if self._is_full:
            self.paused, self._is_full = "", False
        if self.backlog.has_refused:
            self.backlog.has_refused = False
            self._wake_memory()


def _disk_bytes(places: Iterable[SpilledBlock]) -> int:
    return sum(align(max(place.nbytes, 1), PAGE_BYTES) for place in places)
