"""The spilling of all arenas of one coordinator: its own, and those of remote shards that have a disk. No I/O.

The rules (docs/decisions/0056, 0059; what one arena does: `spiller`):

1. Whoever finds no memory has cold blocks written in every arena that could give it some.
2. Load orders are carried out as `ledger.rows.cold_blocks` says. One that finds no memory in an arena for `LOAD_STUCK_S`, while nothing is being
   written or loaded there, ends. Its request goes to the end of the line. An order also ends
   with the session whose request made it, unless another request waits for it.
3. A turn looks only at arenas where something is to be done or under way. So it costs nothing while none is, however many spill.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Final

from transferqueue.ledger.effects import WakeKey
from transferqueue.ledger.ledger import Ledger
from transferqueue.ledger.rows.cold_arena import LoadOrder
from transferqueue.ledger.rows.cold_blocks import ColdBlocks
from transferqueue.limits import LOAD_STUCK_S, SPILL_JOB_BLOCKS, SPILL_SILENT_S
from transferqueue.server.shards.backlog import Backlog
from transferqueue.server.shards.own_memory import SHARD, OwnShardMemory
from transferqueue.server.shards.remote_shard import RemoteShard
from transferqueue.server.shards.shards import for_loads
from transferqueue.server.spill.shard_disk import ShardDisk
from transferqueue.server.spill.spill_file import SpillSpace
from transferqueue.server.spill.spiller import Spiller
from transferqueue.storage.elements.dtypes import U8
from transferqueue.wire import messages as m


class Spillers:
    """The spillers of one coordinator, by shard. wake: makes the requests due that wait on a key. Used by the loop's thread; `read` by any."""

    def __init__(self, ledger: Ledger, wake: Callable[[WakeKey], None] = lambda _: None) -> None:
        self._ledger: Final = ledger
        self._wake: Final = wake
        self._cold: ColdBlocks | None = None
        """None: no arena spills yet."""
        self._spillers: Final[dict[int, Spiller]] = {}
        self._disks: Final[dict[int, ShardDisk]] = {}
        self._active: Final[set[int]] = set()
        """Where something is to be done, or under way."""

    @property
    def is_any(self) -> bool:
        """Whether any arena spills."""
        return bool(self._spillers)

    def get(self, shard: int) -> Spiller | None:
        """The spiller of this shard; None if it does not spill."""
        return self._spillers.get(shard)

    # ------------------------------------------------------------ which arenas spill

    def add_own(self, memory: OwnShardMemory, space: SpillSpace, nbytes: int) -> Spiller:
        """Have the coordinator's own arena spill to `space`, at most `nbytes`."""
        self._cold = self._ledger.spill()
        memory.backlog = Backlog(memory.allocator.capacity, nbytes)
        cold = self._cold.add_arena(SHARD, lambda: for_loads(memory))
        memory.backlog.growth = lambda: cold.growth
        spiller = self._spillers[SHARD] = Spiller(self._ledger, cold, memory, memory.backlog, space, self._wake_memory)
        return spiller

    def shard_joined(self, shard: RemoteShard) -> None:
        """A shard joined. If it has a disk, its arena spills."""
        if shard.backlog is None:
            return
        self._cold = self._ledger.spill()
        cold = self._cold.add_arena(shard.number, lambda: for_loads(shard), SPILL_JOB_BLOCKS)
        shard.backlog.growth = lambda: cold.growth
        disk = self._disks[shard.number] = ShardDisk(shard.command)
        spiller = self._spillers[shard.number] = Spiller(
            self._ledger, cold, shard, shard.backlog, disk, self._wake_memory, shard.leave_if_empty
        )
        shard.holds_spilled = lambda: spiller.holds_blocks

    def shard_gone(self, shard: int) -> None:
        """A shard is gone, and its disk with it. The caller tells the ledger."""
        if self._spillers.pop(shard, None) is not None:
            del self._disks[shard]
            self._active.discard(shard)
            self._active.update(self._spillers)  # some orders may end

    def _wake_memory(self) -> None:
        self._wake(("memory",))

    def report(self, shard: int, report: m.ReportSpill, now: float) -> None:
        """A shard reports what its disk has done. `ProtocolError` if the reports do not fit its jobs; then nothing changes."""
        if (disk := self._disks.get(shard)) is not None:
            disk.report(report)
            self._turn(shard, now)

    # ------------------------------------------------------------ what the coordinator calls

    def taken(self, shard: int) -> None:
        """Memory of a shard was granted."""
        if (spiller := self._spillers.get(shard)) is not None and spiller.is_above:
            self._active.add(shard)

    def need(self, nbytes: int, shards: Collection[int], use: m.GrantPurpose) -> None:
        """Somebody waits for memory in one of these shards, and found none."""
        for number in self._spillers.keys() & shards:
            self._spillers[number].need(nbytes, use)
            self._active.add(number)

    def turn(self, now: float) -> None:
        """Take in what the disks have done."""
        for number in list(self._active):
            self._turn(number, now)

    def _turn(self, number: int, now: float) -> None:
        spiller = self._spillers[number]
        is_silent = spiller.turn(now)
        self._active.add(number)
        if self._cold is not None and is_silent is not spiller.cold.is_silent:
            self._cold.set_silent(spiller.cold, silent=is_silent)

    def go_on(self, now: float) -> bool:
        """Begin what is due now. Call it when no request is due. Returns whether requests may be due since."""
        if (cold := self._cold) is None:
            return False
        if cold.stirred:
            self._active.update(cold.stirred)
            cold.stirred.clear()
        if not self._active:
            return False
        for number in self._active:
            self._spillers[number].free_forgotten()
        if ended := cold.end_orders():
            for order in ended:
                self._order_ended(order, now)
            return True
        self._active.difference_update([number for number in self._active if not self._spillers[number].go_on(now)])
        return self._give_up_stuck_orders(cold, now)

    def abandon(self, keys: Collection[WakeKey], now: float) -> None:
        """The session has ended whose requests waited on these keys, and no other waits on them."""
        if self._cold is not None:
            for order in self._cold.abandon(keys):
                self._order_ended(order, now)

    def next_deadline(self) -> float | None:
        """When `turn` or `go_on` has something to do next, though nothing happens; None: nothing is due."""
        if not self._active:
            return None
        due = [self._spillers[number].next_deadline() for number in self._active]
        orders = self._cold.carried_out() if self._cold is not None else []
        due += [order.stuck_since + LOAD_STUCK_S for order in orders if order.stuck_since is not None]
        return min((at for at in due if at is not None), default=None)

    def stop(self) -> None:
        """Stop the thread of the own arena, and give its space back."""
        for spiller in self._spillers.values():
            spiller.stop()

    # ------------------------------------------------------------ load orders

    def _give_up_stuck_orders(self, cold: ColdBlocks, now: float) -> bool:
        """Returns whether an order ended, or finds no memory since now: then blocks that are spared for it may leave."""
        stuck: list[LoadOrder] = []
        is_new = False
        for order in cold.carried_out():
            if order.since is None:
                order.since = now
            if not self._is_stuck(order):
                order.stuck_since = None
            elif order.stuck_since is None:
                order.stuck_since, is_new = now, True
            elif now >= order.stuck_since + LOAD_STUCK_S:
                stuck.append(order)
        if stuck:
            cold.give_up(stuck)
        for order in stuck:
            self._order_ended(order, now)
        return bool(stuck) or is_new

    def _is_stuck(self, order: LoadOrder) -> bool:
        """Whether the order finds no memory in an arena, and nothing is under way there."""
        spillers = [self._spillers[number] for number in order.arenas]
        return any(each.cold.order is order and each.load_wants and not each.is_busy for each in spillers)

    def _order_ended(self, order: LoadOrder, now: float) -> None:
        for number in order.arenas:
            self._spillers[number].counters.load_waits_s += now - (now if order.since is None else order.since)

    # ------------------------------------------------------------ for people

    def explain_loads(self) -> str:
        """What a request waits for whose blocks are on a disk, or "" if none does."""
        if self._cold is None or not self._cold.orders:
            return ""
        order = next(iter(self._cold.orders.values()))
        lacking = "; ".join(filter(None, (self._explain_load(order, number) for number in sorted(order.arenas))))
        return (
            f"blocks on the disk are being loaded for {len(self._cold.orders)} requests, one after the other; the first one lacks "
            f"{lacking or 'nothing but its turn'}"
        )

    def _explain_load(self, order: LoadOrder, number: int) -> str:
        """What the order lacks in this arena."""
        spiller = self._spillers[number]
        if spiller.cold.is_silent:
            return f"an answer of the disk{_of(number)}, which has been silent for more than {SPILL_SILENT_S:g} s"
        lacking = sum(nbytes for _, nbytes in spiller.cold.missing()) if spiller.cold.order is order else 0
        if not lacking and not spiller.has_work:
            return ""
        memory = "" if spiller.has_work else f", and memory for them ({spiller.explain_memory()})"
        return f"{lacking:,} bytes of them{_of(number)}{memory}"

    def explain_memory(self) -> str:
        """Why memory that blocks could leave, or have left, is granted to nobody, or ""."""
        held = [_of(number) for number, spiller in self._spillers.items() if spiller.backlog.is_held]
        paused = "; ".join(
            f"{spiller.paused}{_of(number)}" for number, spiller in self._spillers.items() if spiller.paused
        )
        first = "".join(f". Blocks that come back from the disk{where} have the free memory first" for where in held)
        return f"{first}. Nothing is spilled to the disk now: {paused}" if paused else first

    def plain(self, shard: int) -> dict[str, Any] | None:
        """What reports show of one shard; None if it does not spill."""
        spiller = self._spillers.get(shard)
        return None if spiller is None else spiller.plain()

    # ------------------------------------------------------------ for snapshots

    def hold(self) -> dict[int, m.SpilledBlock]:
        """Where all blocks on disks lie. They keep their space until `release`."""
        places: dict[int, m.SpilledBlock] = {}
        for spiller in self._spillers.values():
            places |= spiller.hold()
        return places

    def release(self) -> None:
        """End `hold`."""
        for spiller in self._spillers.values():
            spiller.release()

    def read(self, place: m.SpilledBlock) -> U8:
        """The bytes of a block on the disk of the own arena. OSError if the disk does not give them."""
        return self._spillers[SHARD].read(place)


def _of(number: int) -> str:
    return "" if number == SHARD else f" in shard {number}"
