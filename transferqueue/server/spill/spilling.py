"""The spilling of one coordinator's arena: when it acts, and its queue of load orders. No I/O.

See docs/decisions/spill.md; `spiller` moves the blocks.

1. A request that finds no memory has cold blocks written.
2. Load orders are carried out as `ledger.rows.cold_blocks` says. An order that finds no memory for `LOAD_STUCK_S`,
   while no block is being written or loaded, ends. Its request goes to the end of the queue. An order also ends with
   the session of its request, unless another request waits for it.
3. A turn costs nothing while no work is due or under way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Final

from transferqueue.errors import InternalError
from transferqueue.ledger.effects import WakeKey
from transferqueue.ledger.ledger import Ledger
from transferqueue.ledger.rows.cold_arena import LoadOrder
from transferqueue.limits import LOAD_STUCK_S, SPILL_SILENT_S
from transferqueue.server.shards.backlog import Backlog
from transferqueue.server.shards.own_memory import OwnShardMemory
from transferqueue.server.shards.registry import for_loads
from transferqueue.server.spill.spill_jobs import SpilledBlock, SpillSpace
from transferqueue.server.spill.spiller import Spiller
from transferqueue.storage.elements.dtypes import U8
from transferqueue.wire import messages as m
from transferqueue.wire.answers.stats import SpillStats


class Spilling:
    """Spills nothing until `begin`. `wake` makes the requests due that wait on a key. Used by the loop's thread; `read`
    by any."""

    def __init__(self, ledger: Ledger, wake: Callable[[WakeKey], None] = lambda _: None) -> None:
        self._ledger: Final = ledger
        self._wake: Final = wake
        self._spiller: Spiller | None = None
        self._is_active = False
        """Whether work is due or under way."""

    def begin(self, memory: OwnShardMemory, space: SpillSpace, nbytes: int) -> Spiller:
        """Have the arena spill at most `nbytes` to `space` from now on."""
        cold = self._ledger.spill(lambda: for_loads(memory))
        backlog = memory.backlog = Backlog(memory.allocator.capacity, nbytes)
        backlog.growth = lambda: cold.arena.growth
        self._spiller = Spiller(self._ledger, cold, memory, backlog, space, lambda: self._wake(("memory",)))
        return self._spiller

    @property
    def is_on(self) -> bool:
        """Whether the arena spills."""
        return self._spiller is not None

    # ------------------------------------------------------------ what the coordinator calls

    def taken(self) -> None:
        """Memory of the arena was granted."""
        if (spiller := self._spiller) is not None and spiller.is_above:
            self._is_active = True

    def need(self, nbytes: int, use: m.GrantPurpose) -> None:
        """A request found no memory in the arena, and waits."""
        if (spiller := self._spiller) is not None:
            spiller.need(nbytes, use)
            self._is_active = True

    def turn(self, now: float) -> None:
        """Process the answers of the disk."""
        if (spiller := self._spiller) is not None and self._is_active:
            spiller.loads.set_silent(silent=spiller.turn(now))

    def go_on(self, now: float) -> bool:
        """Begin the work that is due. Call it when no request is due. Returns whether requests may be due
        afterwards."""
        if (spiller := self._spiller) is None:
            return False
        if spiller.loads.stirred:
            self._is_active, spiller.loads.stirred = True, False
        if not self._is_active:
            return False
        spiller.free_forgotten()
        if ended := spiller.loads.end_orders():
            _count_waits(spiller, ended, now)
            return True
        self._is_active = spiller.go_on(now)
        return _give_up_stuck_order(spiller, now)

    def abandon(self, keys: Collection[WakeKey], now: float) -> None:
        """No request waits on these keys any more: the session of those that did has ended."""
        if (spiller := self._spiller) is not None:
            _count_waits(spiller, spiller.loads.abandon(keys), now)

    def next_deadline(self) -> float | None:
        """When to call `turn` or `go_on` next even without an event; None: nothing is due."""
        if (spiller := self._spiller) is None or not self._is_active:
            return None
        due, order = spiller.next_deadline(), spiller.cold.order
        if order is None or order.stuck_since is None:
            return due
        stuck_until = order.stuck_since + LOAD_STUCK_S
        return stuck_until if due is None else min(due, stuck_until)

    def stop(self) -> None:
        """Stop the thread of the disk, and give its space back."""
        if (spiller := self._spiller) is not None:
            spiller.stop()

    # ------------------------------------------------------------ for error texts and reports

    def explain_loads(self) -> str:
        """Why a request for blocks on the disk waits; "" if none does."""
        if (spiller := self._spiller) is None or not spiller.loads.orders:
            return ""
        return (
            f"blocks on the disk are being loaded for {len(spiller.loads.orders)} requests, one after the other; the "
            f"first one lacks {_lacking(spiller) or 'nothing but its turn'}"
        )

    def explain_memory(self) -> str:
        """Why no request is granted the memory that spilling frees; "" if that is not so."""
        if (spiller := self._spiller) is None:
            return ""
        first = ". Blocks that come back from the disk have the free memory first" if spiller.backlog.is_held else ""
        return f"{first}. Nothing is spilled to the disk now: {spiller.paused}" if spiller.paused else first

    def stats(self) -> SpillStats | None:
        """The figures for reports; None if nothing is spilled."""
        return None if self._spiller is None else self._spiller.stats()

    # ------------------------------------------------------------ for snapshots

    def hold(self) -> dict[int, SpilledBlock]:
        """The places of all blocks on the disk. They keep their space until `release`."""
        return {} if self._spiller is None else self._spiller.hold()

    def release(self) -> None:
        """End `hold`."""
        if self._spiller is not None:
            self._spiller.release()

    def read(self, place: SpilledBlock) -> U8:
        """The bytes of a block on the disk. OSError if the disk does not give them."""
        if self._spiller is None:
            raise InternalError(f"block {place.block} should be on a disk, but this server does not spill")
        return self._spiller.read(place)


def _give_up_stuck_order(spiller: Spiller, now: float) -> bool:
    """Returns whether an order ended, or has just run out of memory: then blocks that are spared for it may leave."""
    if (order := spiller.cold.order) is None:
        return False
    if order.since is None:
        order.since = now
    if not spiller.load_wants or spiller.has_work:
        order.stuck_since = None
        return False
    if order.stuck_since is None:
        order.stuck_since = now
        return True
    if now < order.stuck_since + LOAD_STUCK_S:
        return False
    spiller.loads.give_up([order])
    _count_waits(spiller, [order], now)
    return True


def _count_waits(spiller: Spiller, ended: Iterable[LoadOrder], now: float) -> None:
    for order in ended:
        spiller.counters.load_waits_s += now - (now if order.since is None else order.since)


def _lacking(spiller: Spiller) -> str:
    """The thing that the first load order lacks; "": nothing."""
    if spiller.cold.is_silent:
        return f"an answer of the disk, which has been silent for more than {SPILL_SILENT_S:g} s"
    lacking = sum(nbytes for _, nbytes in spiller.cold.missing())
    if not lacking and not spiller.has_work:
        return ""
    memory = "" if spiller.has_work else f", and memory for them ({spiller.explain_memory()})"
    return f"{lacking:,} bytes of them{memory}"
