"""Bytes: who may write them, who still needs them, and when they may be used again.

An *extent* is granted to one session to write into. A *block* is the columns of one commit inside an
extent. The rules:

- A block is accepted only inside an extent granted to the session that commits it, aligned, and not over
  bytes that were committed before.
- A block is *live* while a row of a table (or a kept version of a channel) refers to it. Its bytes count
  for its owner exactly that long.
- A reply that names a block *pins* it for the session, once per reply, until the session unpins it.
- An extent is *open* until its session returns the grant, or commits a block set that begins at its start
  and ends in its last page (a put that asked for exactly its size: nothing more fits).
- An extent is freed, once, when it is not open and no block in it is live or pinned.
- An extent of a *lost* shard is forgotten then, and not freed: its memory is nobody's.
- A block may have *copies*: the same bytes in extents of other shards, committed with it and needed as long as it is. What is said
  above of its extent holds for each of them. Where its shard is lost, a copy takes its place.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from transferqueue.errors import NotFound, ProtocolError, ShardLost, UsageError, listing
from transferqueue.ledger.effects import Effects, FreeExtent
from transferqueue.limits import ALIGNMENT, PAGE_BYTES
from transferqueue.wire.messages import BlockLocation, CopyLocation, WrittenBlock


class OwnerBytes:
    """Bytes of live blocks of one owner."""

    __slots__ = ("bytes",)

    def __init__(self) -> None:
        self.bytes = 0


class ExtentState:
    """A piece of an arena. session: who may commit into it (0: nobody any more)."""

    __slots__ = ("blocks", "id", "lost", "nbytes", "offset", "open", "session", "shard", "spans")

    def __init__(self, number: int, shard: int, offset: int, nbytes: int, session: int) -> None:
        self.id = number
        self.shard = shard
        self.offset = offset
        self.nbytes = nbytes
        self.session = session
        self.open = True
        self.lost = False
        self.blocks = 0
        """Blocks that are live or pinned."""
        self.spans: list[tuple[int, int]] = []
        """Committed byte ranges, ascending; kept while the session may still commit."""

    def overlaps(self, start: int, end: int) -> bool:
        """Whether a committed range meets [start, end)."""
        at = bisect_left(self.spans, (start, end))
        before = at > 0 and self.spans[at - 1][1] > start
        return before or (at < len(self.spans) and self.spans[at][0] < end)

    def write(self, start: int, end: int) -> None:
        """Record [start, end) as committed."""
        self.spans.insert(bisect_left(self.spans, (start, end)), (start, end))


class CommittedBlock:
    """Committed columns. extents: where they are, `at` first, then its copies. refs: rows (per set of fields) that need them.
    pins: views that may exist."""

    __slots__ = ("at", "extents", "pins", "refs", "usage")

    def __init__(self, at: BlockLocation, extents: list[ExtentState], usage: OwnerBytes) -> None:
        self.at = at
        self.extents = extents
        self.usage = usage
        self.refs = 0
        self.pins = 0

    @property
    def extent(self) -> ExtentState:
        """Where it is read, unless a copy is nearer."""
        return self.extents[0]

    @property
    def nbytes(self) -> int:
        """Bytes that it takes, with its copies."""
        return self.at.nbytes * len(self.extents)


class BlockRegistry:
    """All extents, blocks and pins."""

    def __init__(self, effects: Effects) -> None:
        self.extents: dict[int, ExtentState] = {}
        self.blocks: dict[int, CommittedBlock] = {}
        self.pins: dict[int, dict[int, int]] = {}
        """Holder (a session, or minus a lease) -> block -> how many."""
        self.last_shard = 0
        """The highest number of a shard that anything was ever granted in. Replies that are kept may name it for ever."""
        self._effects = effects
        self._next_extent = 1
        self._next_block = 1

    @property
    def committed(self) -> int:
        """Blocks ever committed."""
        return self._next_block - 1

    @property
    def granted(self) -> int:
        """Extents ever granted: the number of the last."""
        return self._next_extent - 1

    # ------------------------------------------------------------ grants

    def grant(self, session: int, shard: int, offset: int, nbytes: int) -> ExtentState:
        """A new open extent of `session`."""
        extent = ExtentState(self._next_extent, shard, offset, nbytes, session)
        self._next_extent += 1
        self.extents[extent.id] = extent
        self.last_shard = max(self.last_shard, shard)
        return extent

    def return_grant(self, session: int, number: int) -> None:
        """Close an extent. One that is already closed or gone is no error: closing is idempotent."""
        extent = self.extents.get(number)
        if extent is None or not extent.session:
            return
        if extent.session != session:
            raise UsageError(f"extent {number} is granted to another session; return only what was granted to you")
        self._disown(extent)

    def return_grants(self, session: int) -> None:
        """Close all extents of `session`."""
        for extent in [extent for extent in self.extents.values() if extent.session == session]:
            self._disown(extent)

    def _disown(self, extent: ExtentState) -> None:
        extent.session = 0
        extent.open = False
        extent.spans.clear()
        self._free_if_unused(extent)

    def _free_if_unused(self, extent: ExtentState) -> None:
        if extent.open or extent.blocks or self.extents.pop(extent.id, None) is None:
            return
        if not extent.lost:
            self._effects.add(FreeExtent(extent.id, extent.shard, extent.offset, extent.nbytes))

    # ------------------------------------------------------------ losses

    def lose_shard(self, shard: int) -> list[int]:
        """The bytes of the shard are gone. Returns blocks that lie nowhere else: the caller's to give up."""
        for extent in self.extents.values():
            extent.lost |= extent.shard == shard
        lost = []
        for number, block in self.blocks.items():
            if all(extent.lost for extent in block.extents):
                lost.append(number)
            elif any(extent.lost for extent in block.extents):
                self._lose_copies(block)
        return lost

    def _lose_copies(self, block: CommittedBlock) -> None:
        """What is left of the block in shards that are not lost is the block."""
        at = block.at
        places = [CopyLocation(at.shard, at.extent, at.offset), *at.copies]
        first, *copies = [place for place, extent in zip(places, block.extents, strict=True) if not extent.lost]
        block.at = replace(at, shard=first.shard, extent=first.extent, offset=first.offset, copies=copies)
        gone = [extent for extent in block.extents if extent.lost]
        block.extents = [extent for extent in block.extents if not extent.lost]
        if block.refs:
            block.usage.bytes -= at.nbytes * len(gone)
        for extent in gone:
            extent.blocks -= 1
            self._free_if_unused(extent)

    # ------------------------------------------------------------ commits

    def check(self, session: int, placed: Sequence[WrittenBlock], replicas: int = 1) -> None:
        """Raise unless `session` may commit all of `placed` together, each in `replicas` shards."""
        taken: dict[int, ExtentState] = {}
        for block in placed:
            shards = [self._check_place(session, taken, block, *place) for place in _places(block)]
            if len(shards) != replicas or len(set(shards)) != replicas:
                raise UsageError(
                    f"block of {', '.join(block.fields)} was written to shards {listing(shards)}; each block goes to "
                    f"{replicas} different ones here"
                )

    def _check_place(
        self, session: int, taken: dict[int, ExtentState], block: WrittenBlock, number: int, start: int
    ) -> int:
        """Raise unless the bytes of the block may be at `start` in this extent. Returns its shard."""
        extent, end = self._granted(session, number), start + block.nbytes
        if start % ALIGNMENT:
            raise UsageError(f"block at offset {start} is not aligned; blocks begin at multiples of {ALIGNMENT} bytes")
        if start < extent.offset or end > extent.offset + extent.nbytes:
            raise UsageError(
                f"block [{start}, {end}) lies outside extent {extent.id}, which is "
                f"[{extent.offset}, {extent.offset + extent.nbytes})"
            )
        new = taken.setdefault(extent.id, ExtentState(0, 0, 0, 0, 0))
        if block.nbytes and (extent.overlaps(start, end) or new.overlaps(start, end)):
            raise UsageError(
                f"block [{start}, {end}) overlaps bytes that were committed before; bytes are written once"
            )
        new.write(start, end)
        return extent.shard

    def _granted(self, session: int, number: int) -> ExtentState:
        extent = self.extents.get(number)
        if extent is None or extent.session != session:
            raise NotFound(f"extent {number} is not granted to this session (or was returned); ask for a grant first")
        if extent.lost:
            raise ShardLost(
                f"extent {number} was in shard {extent.shard}, which is gone with all that was written there; return it "
                "and write the columns again, into a new grant"
            )
        return extent

    def commit(self, placed: Sequence[WrittenBlock], usage: OwnerBytes, refs: Sequence[int]) -> list[int]:
        """Numbers of the new blocks, in order; `refs` rows will refer to each. Checked before."""
        numbers = [self._commit(block, usage, count) for block, count in zip(placed, refs, strict=True)]
        written: dict[int, list[tuple[int, int]]] = {}
        for block in placed:
            for number, start in _places(block):
                written.setdefault(number, []).append((start, start + block.nbytes))
        for number, spans in written.items():
            self._close_if_full(self.extents[number], spans)
        return numbers

    def _commit(self, placed: WrittenBlock, usage: OwnerBytes, refs: int) -> int:
        number = self._next_block
        self._next_block += 1
        extents = [self.extents[extent] for extent, _ in _places(placed)]
        for extent, (_, start) in zip(extents, _places(placed), strict=True):
            extent.write(start, start + placed.nbytes)
        if refs:
            block = self.blocks[number] = CommittedBlock(_block_at(number, placed, extents), extents, usage)
            block.refs = refs
            usage.bytes += block.nbytes
            for extent in extents:
                extent.blocks += 1
        return number

    def _close_if_full(self, extent: ExtentState, spans: Sequence[tuple[int, int]]) -> None:
        end = extent.offset + extent.nbytes
        starts = min(start for start, _ in spans) == extent.offset
        if starts and max(last for _, last in spans) > end - PAGE_BYTES:
            extent.open = False
            self._free_if_unused(extent)

    def refer(self, numbers: Iterable[int]) -> None:
        """One more thing needs each of these live blocks."""
        for number in numbers:
            self.blocks[number].refs += 1

    def retire(self, number: int, refs: int) -> None:
        """`refs` rows need the block no more."""
        block = self.blocks[number]
        block.refs -= refs
        if not block.refs:
            block.usage.bytes -= block.nbytes
            self._forget_if_unused(block)

    def _forget_if_unused(self, block: CommittedBlock) -> None:
        if block.refs or block.pins:
            return
        del self.blocks[block.at.block]
        for extent in block.extents:
            extent.blocks -= 1
            self._free_if_unused(extent)

    # ------------------------------------------------------------ pins

    def pin(self, holder: int, numbers: Iterable[int]) -> None:
        """One more pin of each block for `holder`."""
        held = self.pins.setdefault(holder, {})
        for number in numbers:
            held[number] = held.get(number, 0) + 1
            self.blocks[number].pins += 1

    def unpin(self, holder: int, counts: dict[int, int]) -> None:
        """Return pins; `ProtocolError` (and no change) if `holder` has fewer."""
        held = self.pins.get(holder, {})
        for number, count in counts.items():
            if count < 1 or held.get(number, 0) < count:
                raise ProtocolError(
                    f"block {number} is pinned {held.get(number, 0)} times by this session; {count} were returned"
                )
        for number, count in counts.items():
            self._unpin(held, number, count)
        if not held:
            self.pins.pop(holder, None)

    def unpin_all(self, holder: int) -> None:
        """Return every pin of `holder`."""
        held = self.pins.pop(holder, {})
        for number in list(held):
            self._unpin(held, number, held[number])

    def _unpin(self, held: dict[int, int], number: int, count: int) -> None:
        held[number] -= count
        if not held[number]:
            del held[number]
        block = self.blocks[number]
        block.pins -= count
        self._forget_if_unused(block)


def _places(placed: WrittenBlock) -> list[tuple[int, int]]:
    """Extent and offset of each copy of a block, the first first."""
    return [(placed.extent, placed.offset), *((copy.extent, copy.offset) for copy in placed.copies)]


def _block_at(number: int, placed: WrittenBlock, extents: Sequence[ExtentState]) -> BlockLocation:
    """How replies name a block."""
    copies = [
        CopyLocation(extent.shard, copy.extent, copy.offset)
        for extent, copy in zip(extents[1:], placed.copies, strict=True)
    ]
    return BlockLocation(
        number, extents[0].shard, placed.extent, placed.offset, placed.nbytes, placed.rows, list(placed.fields),
        list(placed.counts), placed.checksum, copies=copies,
    )  # fmt: skip
