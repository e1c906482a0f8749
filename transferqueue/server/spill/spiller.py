"""Has cold blocks written when memory is short, and loaded when a request needs them. No I/O: a `SpillFile` does that.

The rules (docs/decisions/0056; which blocks are cold, and who waits for them: `ledger.rows.cold_blocks`):

1. Extents are spilled when more than `SPILL_ABOVE` of the arena is in use, down to `SPILL_TO`, and when a request for memory, or a load, finds
   no room.
2. One part in `LOADS_SHARE` of the arena and of the disk is for loads, not for new rows: these cannot fill both, so that nothing comes back. A
   load does not take the share for results: a worker whose rows were loaded can write its results.
3. If a block cannot be written (a full disk, a full file, an error of the disk), it stays in memory, and spilling pauses: until a spilled
   block returns its space, or `SPILL_PAUSE_S` has passed. `paused` says why. Whoever waits for memory waits on, as without spilling.
4. A block that the disk does not give is read `LOAD_TRIES` times. Then it is lost, as one whose checksum differs is at once: its rows are made
   again or end as lost (`ledger.data_loss`). Its bytes are never given to anybody.
5. A load order that finds no memory for `LOAD_STUCK_S`, while nothing is being written or loaded, ends. Its request goes to the end of the
   line if it still waits.
6. While a snapshot reads blocks on the disk, they keep their space.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any, Final, Protocol

from transferqueue.errors import OutOfMemory
from transferqueue.ledger.ledger import Ledger
from transferqueue.limits import (
    LOAD_STUCK_S,
    LOAD_TRIES,
    LOADS_SHARE,
    PAGE_BYTES,
    SPILL_ABOVE,
    SPILL_BATCH_BYTES,
    SPILL_PAUSE_S,
    SPILL_TO,
)
from transferqueue.schema import align
from transferqueue.server.shards.own_memory import OwnShardMemory
from transferqueue.server.shards.shards import for_rows
from transferqueue.server.spill.spill_file import (
    BlocksLoaded,
    BlocksWritten,
    BlockToLoad,
    BlockToWrite,
    SpillAnswer,
    SpilledBlock,
)
from transferqueue.storage.elements.dtypes import U8

_log: Final = logging.getLogger("transferqueue.server")
_TURNS_SKIPPED: Final = 64
"""Where nothing was cold and nobody waits, so many turns pass before the next look."""


class SpillSpace(Protocol):
    """What a spiller asks of a `SpillFile`."""

    def write(self, extent: int, blocks: Sequence[BlockToWrite], /) -> None:
        """See `SpillFile.write`."""

    def load(self, offset: int, blocks: Sequence[BlockToLoad], /) -> None:
        """See `SpillFile.load`."""

    def free(self, places: Iterable[SpilledBlock], /) -> None:
        """See `SpillFile.free`."""

    def answers(self) -> list[SpillAnswer]:
        """See `SpillFile.answers`."""

    def read(self, place: SpilledBlock, /) -> U8:
        """See `SpillFile.read`."""

    def stop(self) -> None:
        """See `SpillFile.stop`."""


class SpillCounters:
    """What was spilled and loaded since the server started. Each counter only grows."""

    def __init__(self) -> None:
        self.spilled_blocks = 0
        self.spilled_bytes = 0
        self.loaded_blocks = 0
        self.loaded_bytes = 0
        self.lost_blocks = 0
        self.load_waits_s = 0.0
        """Time between the moment that a load order was the first one and its end, of all orders."""


class Spiller:
    """The spilling of one coordinator. Used by the loop's thread; `read` by any."""

    def __init__(self, ledger: Ledger, memory: OwnShardMemory, space: SpillSpace, nbytes: int) -> None:
        self.nbytes: Final = nbytes
        """The most bytes on the disk."""
        self.counters: Final = SpillCounters()
        self.paused = ""
        """Why nothing is spilled now; "": nothing hinders it."""
        self._ledger, self._memory, self._space = ledger, memory, space
        capacity = memory.allocator.capacity
        self._above, self._to = int(SPILL_ABOVE * capacity), int(SPILL_TO * capacity)
        self._cold: Final = ledger.spill_cold_blocks(for_rows(memory))
        memory.kept_for_loads = capacity // LOADS_SHARE
        self._places: dict[int, SpilledBlock] = {}
        self._writing: dict[int, int] = {}
        """Extents that are being written, and their bytes."""
        self._loads = 0
        self._tries: dict[int, int] = {}
        self._load_wants = 0
        """Bytes that the first load order finds no memory for."""
        self._disk_used = 0
        """Bytes of the disk, in whole pages."""
        self._wanted = 0
        """Bytes that somebody waits for; 0: nobody."""
        self._order_since: float | None = None
        """Since when the first order is the first one."""
        self._stuck_since: float | None = None
        """Since when it finds no memory, and nothing is under way that may give it some."""
        self._paused_until = 0.0
        self._fruitless = 0
        """For how many turns not to look again for cold blocks that nobody waits for."""
        self._held = False
        self._freed_while_held: list[SpilledBlock] = []

    # ------------------------------------------------------------ what the coordinator calls

    def need(self, nbytes: int) -> None:
        """Somebody waits for memory, and found none."""
        self._wanted = max(self._wanted, nbytes)

    def turn(self, now: float) -> None:
        """Take in what the disk has done."""
        for answer in self._space.answers():
            if isinstance(answer, BlocksWritten):
                self._written(answer, now)
            else:
                self._loaded(answer, now)

    def go_on(self, now: float) -> bool:
        """Begin what is due now. Call it when no request is due. Returns whether requests may be due since."""
        if not self._wanted and self._cold.is_idle and self._memory.used <= self._above:
            return False
        self._free_forgotten()
        if self._end_order(now):
            return True
        self._begin_loads(now)
        self._begin_writes(now)
        return self._give_up_stuck_order(now)

    def next_deadline(self) -> float | None:
        """When `go_on` has something to do next, though nothing happens; None: nothing is due."""
        if self._writing:
            return None
        due = [self._stuck_since + LOAD_STUCK_S] if self._stuck_since is not None else []
        due += [self._paused_until] if self.paused and self._wanted else []
        return min(due, default=None)

    def explain(self) -> str:
        """What a request waits for whose blocks are on the disk, or "" if none does."""
        if not self._cold.orders:
            return ""
        count = len(self._cold.orders)
        lacking = sum(nbytes for _, nbytes in self._cold.missing())
        return (
            f"blocks on the disk are being loaded for {count} requests, one after the other; the first one lacks {lacking:,} bytes of them"
            + (
                f", and memory for them ({self._memory.used:,} of {self._memory.allocator.capacity:,} bytes are in use)"
                if not self._loads
                else ""
            )
        )

    def plain(self) -> dict[str, Any]:
        """What reports show."""
        counters = self.counters
        return {
            "bytes_max": self.nbytes,
            "blocks": len(self._cold.on_disk),
            "bytes": self._cold.bytes_on_disk,
            "spilled_blocks": counters.spilled_blocks,
            "spilled_bytes": counters.spilled_bytes,
            "loaded_blocks": counters.loaded_blocks,
            "loaded_bytes": counters.loaded_bytes,
            "lost_blocks": counters.lost_blocks,
            "load_waits_s": counters.load_waits_s,
            "paused": self.paused,
        }

    def stop(self) -> None:
        """Stop the thread and give the space back."""
        self._space.stop()

    # ------------------------------------------------------------ for snapshots

    def hold(self) -> dict[int, SpilledBlock]:
        """Where all blocks on the disk lie. They keep their space until `release`."""
        self._held = True
        return dict(self._places)

    def release(self) -> None:
        """End `hold`."""
        self._held = False
        freed, self._freed_while_held = self._freed_while_held, []
        self._free(freed)

    def read(self, place: SpilledBlock) -> U8:
        """See `SpillFile.read`."""
        return self._space.read(place)

    # ------------------------------------------------------------ to the disk

    def _begin_writes(self, now: float) -> None:
        if self._writing or (self.paused and now < self._paused_until):
            return
        used = self._memory.used
        nbytes = max(self._wanted, used - self._to if used > self._above else 0)
        nbytes = max(self._load_wants, min(nbytes, self._room_on_disk(nbytes)))
        if not nbytes:
            self._fruitless = 0
            return
        if not (self._wanted or self._load_wants) and self._fruitless:
            self._fruitless -= 1
            return
        chosen = self._cold.choose(min(nbytes, max(SPILL_BATCH_BYTES, self._wanted, self._load_wants)))
        if not chosen and self._load_wants:
            chosen = self._cold.choose_scattered(self._memory.used)
        self._wanted = 0 if chosen else self._wanted
        self._fruitless = 0 if chosen else _TURNS_SKIPPED
        if self.paused and not chosen:
            self._paused_until = now + SPILL_PAUSE_S
        for extent in chosen:
            self._writing[extent.number] = extent.nbytes
            self._space.write(
                extent.number, [BlockToWrite(at.block, at.offset, at.nbytes, at.checksum) for at in extent.blocks]
            )

    def _room_on_disk(self, wanted: int) -> int:
        """The bytes that may go to the disk for the sake of new rows. If these are too few, `paused` says so."""
        room = max(self.nbytes - self.nbytes // LOADS_SHARE - self._disk_used, 0)
        if wanted and not room and not self.paused:
            self.paused = (
                f"the spilled blocks take {self._disk_used:,} of {self.nbytes:,} bytes (--spill-bytes), and the rest is for blocks that make room for "
                "those that come back"
            )
        return room

    def _written(self, answer: BlocksWritten, now: float) -> None:
        del self._writing[answer.extent]
        if answer.error:
            self._pause(answer.error, now)
        else:
            self.paused = ""
        spilled = set(self._cold.finish_writing(answer.extent, written=not answer.error))
        kept = [place for place in answer.places if place.block in spilled]
        self._places.update((place.block, place) for place in kept)
        self._disk_used += _disk_bytes(kept)
        self.counters.spilled_blocks += len(kept)
        self.counters.spilled_bytes += sum(place.nbytes for place in kept)
        self._space.free(place for place in answer.places if place.block not in spilled)

    def _pause(self, why: str, now: float) -> None:
        if not self.paused:
            _log.warning("spilling pauses, and producers wait for memory: %s", why)
        self.paused, self._paused_until = why, now + SPILL_PAUSE_S

    # ------------------------------------------------------------ back into memory

    def _end_order(self, now: float) -> bool:
        if not self._cold.end_order():
            return False
        self._order_ended(now)
        return True

    def _order_ended(self, now: float) -> None:
        self.counters.load_waits_s += now - (now if self._order_since is None else self._order_since)
        self._order_since = self._stuck_since = None

    def _give_up_stuck_order(self, now: float) -> bool:
        if not self._cold.orders or self._loads or self._writing:
            self._stuck_since = None
        elif self._stuck_since is None:
            self._stuck_since = now
        elif now >= self._stuck_since + LOAD_STUCK_S:
            self._cold.give_up_order()
            self._order_ended(now)
            return True
        return False

    def _begin_loads(self, now: float) -> None:
        self._load_wants = 0
        if not self._cold.orders:
            return
        if self._order_since is None:
            self._order_since = now
        for numbers, nbytes in self._cold.missing():
            if (offset := self._take(nbytes)) is None:
                self._load_wants = nbytes
                return
            offsets = self._cold.begin_loading(offset, align(nbytes, PAGE_BYTES), numbers)
            self._loads += 1
            self._space.load(offset, [BlockToLoad(self._places[number], at) for number, at in offsets.items()])

    def _take(self, nbytes: int) -> int | None:
        """Memory for a load; None if there is none now."""
        if self._memory.used + align(nbytes, PAGE_BYTES) > self._cold.room:
            return None
        try:
            extent = self._memory.take(nbytes)
        except OutOfMemory:
            return None
        return None if extent is None else extent[0]

    def _loaded(self, answer: BlocksLoaded, now: float) -> None:
        self._loads -= 1
        self._cold.finish_loading(answer.offset, answer.loaded)
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
        known = {number: why for number, why in lost.items() if number in self._cold.on_disk}
        for number, why in known.items():
            _log.error("spilled block %d is lost: %s; its rows are made again, or end as lost", number, why)
        self.counters.lost_blocks += len(known)
        self._ledger.blocks_lost(list(known), now)

    # ------------------------------------------------------------ space on the disk

    def _free_forgotten(self) -> None:
        self._free([self._places.pop(number) for number in self._cold.take_forgotten() if number in self._places])

    def _free(self, places: list[SpilledBlock]) -> None:
        if not places:
            return
        if self._held:
            self._freed_while_held += places
            return
        self._space.free(places)
        self._disk_used -= _disk_bytes(places)
        self._paused_until = 0.0


def _disk_bytes(places: Iterable[SpilledBlock]) -> int:
    return sum(align(max(place.nbytes, 1), PAGE_BYTES) for place in places)
