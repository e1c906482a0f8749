"""The spilling of one coordinator's arena: when it acts, and its queue of load orders. No I/O.

See docs/decisions/spill.md; `spiller` moves the blocks.

1. A request that finds no memory has cold blocks written.
2. Load orders are carried out as `ledger.rows.cold_blocks` says. An order that finds no memory for `LOAD_STUCK_S`,
   while no block is being written or loaded, ends. Its request goes to the end of the queue. An order also ends with
   the session of its request, unless another request waits for it.
3. A turn costs nothing while no work is due or under way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final

from transferqueue.errors import Corruption
from transferqueue.ledger.effects import WakeKey
from transferqueue.ledger.ledger import Ledger
from transferqueue.ledger.rows.cold_arena import LoadOrder
from transferqueue.limits import LOAD_STUCK_S, SPILL_SILENT_S
from transferqueue.server.memory.backlog import Backlog
from transferqueue.server.memory.lending import for_loads
from transferqueue.server.memory.own_memory import OwnShardMemory
from transferqueue.server.parts import Part
from transferqueue.server.spill.spill_jobs import SpilledBlock, SpillSpace
from transferqueue.server.spill.spiller import Spiller
from transferqueue.storage.elements.dtypes import U8
from transferqueue.storage.memory.checksum import verify
from transferqueue.wire import messages as m

_NEED_BYTES: Final = frozenset({m.LeaseRequest, m.ReadRequest})
"""Requests that wait for blocks on a disk."""


class Spilling(Part):
    """The part of a coordinator whose arena spills. Used by the loop's thread; `read` by any.

    Args:
        space: the disk.
        nbytes: the most bytes there.
        wake: makes the requests due that wait on a key.
    """

    def __init__(
        self, ledger: Ledger, memory: OwnShardMemory, space: SpillSpace, nbytes: int, wake: Callable[[WakeKey], None]
    ) -> None:
        cold = ledger.spill(lambda: for_loads(memory))
        backlog = memory.backlog = Backlog(memory.allocator.capacity, nbytes)
        backlog.growth = lambda: cold.arena.growth
        self.spiller: Final = Spiller(ledger, cold, memory, backlog, space, lambda: wake(("memory",)))
        self._is_active = False
        """Whether work is due or under way."""
        self._held: dict[int, SpilledBlock] = {}
        self._holds = 0

    def memory_granted(self) -> None:
        """See `Part`."""
        if self.spiller.is_above:
            self._is_active = True

    def memory_lacking(self, nbytes: int, use: m.GrantPurpose) -> None:
        """See `Part`."""
        self.spiller.need(nbytes, use)
        self._is_active = True

    def tick(self, now: float) -> None:
        """Process the answers of the disk."""
        if self._is_active:
            self.spiller.loads.set_silent(silent=self.spiller.turn(now))

    def go_on(self, now: float) -> bool:
        """See `Part`."""
        spiller = self.spiller
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

    def waits_ended(self, keys: Collection[WakeKey], now: float) -> None:
        """See `Part`."""
        _count_waits(self.spiller, self.spiller.loads.abandon(keys), now)

    def next_deadline(self) -> float | None:
        """See `Part`."""
        if not self._is_active:
            return None
        due, order = self.spiller.next_deadline(), self.spiller.cold.order
        if order is None or order.stuck_since is None:
            return due
        stuck_until = order.stuck_since + LOAD_STUCK_S
        return stuck_until if due is None else min(due, stuck_until)

    def stop(self) -> None:
        """Stop the thread of the disk, and give its space back."""
        self.spiller.stop()

    # ------------------------------------------------------------ for error texts and reports

    def explain(self, request: Any) -> str:
        """Why a request for blocks on the disk, or for memory that spilling frees, waits."""
        if type(request) is m.Grant:
            return self.explain_memory()
        return self.explain_loads() if type(request) in _NEED_BYTES else ""

    def explain_loads(self) -> str:
        """Why a request for blocks on the disk waits; "" if none does."""
        spiller = self.spiller
        if not spiller.loads.orders:
            return ""
        return (
            f"blocks on the disk are being loaded for {len(spiller.loads.orders)} requests, one after the other; the "
            f"first one lacks {_lacking(spiller) or 'nothing but its turn'}"
        )

    def explain_memory(self) -> str:
        """Why no request is granted the memory that spilling frees; "" if that is not so."""
        spiller = self.spiller
        first = ["blocks that come back from the disk have the free memory first"] if spiller.backlog.is_held else []
        paused = [f"nothing is spilled to the disk now: {spiller.paused}"] if spiller.paused else []
        return "; ".join([*first, *paused])

    def statistics(self) -> Mapping[str, Any]:
        """See `Part`."""
        return {"spill": self.spiller.stats()}

    # ------------------------------------------------------------ `ColdStore`, for snapshots and records

    def hold(self) -> None:
        """See `ColdStore`. An earlier place of a block stays as readable as its present one."""
        self._holds += 1
        self._held = {**self._held, **self.spiller.hold()}

    def release(self) -> None:
        """See `ColdStore`."""
        self._holds -= 1
        if not self._holds:
            self._held = {}
        self.spiller.release()

    def read(self, block: int) -> U8:
        """See `ColdStore`."""
        place = self._held[block]
        try:
            content = self.spiller.read(place)
        except OSError as error:
            raise Corruption(f"spilled block {block} cannot be read from the disk: {error}") from error
        verify(content, place.checksum, f"spilled block {block}")
        return content


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
