"""Extents, blocks and pins: writers and readers of bytes, and when memory may be reused.

An *extent* is a piece of an arena that one session may write into: the session holds a *grant* of it. A *block* is the
columns of one commit inside an extent. Invariants:

- A session commits blocks only inside extents granted to it. Blocks are aligned and never overlap committed bytes.
- A block is *live* while a row of a table (or a kept version of a weight channel) refers to it. Its bytes count for its
  owner exactly that long.
- A reply that names a block *pins* it for the session, once per reply, until the session unpins it.
- An extent is *open* until its session returns the grant, or commits blocks that begin at its start and end in its last
  page (a put that asked for exactly its size: nothing more fits).
- An extent is freed, once, when it is closed and no block in it is live or pinned.
- An extent of a *lost* shard is removed at that point, but not freed: its memory is not reused.
- A block may have *copies*: the same bytes in extents of other shards, committed with it and needed as long as it is
  (`copies`). The rules about its extent hold for each copy.
- A block of one value may have a *content*: the digest of its bytes. Later commits of its owner refer to it by that
  instead of writing the bytes again (`OwnerBytes.contents`). Such a reference counts as those of the rows that came
  with the block, and is found and added in one call: there is no moment between. When the last reference ends, the
  content is forgotten with the block's bytes.
- A row reads a field in the block of the highest number. So rows that exist already refer to a content only if none of
  them has the field in a newer block that the reference does not replace (`may_refer`). Otherwise the bytes are
  written, and the new block has the content from then on.
- Values of a block may continue values of other blocks, to each of which it has one reference, which it gives back
  when its own last one ends (`continued`): at most `ENDS_MAX` of them in one turn.
- A block whose bytes were spilled to a disk has no extent until they are loaded (`cold_blocks`). It still counts, and
  is not pinned.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

import msgspec

from transferqueue.errors import NotFound, ProtocolError, ShardLost, UsageError, listing
from transferqueue.errors.text import counted
from transferqueue.ledger.effects import Blocked, Effects, FreeExtent, WakeKey, Writes
from transferqueue.ledger.rows.continued import Continued
from transferqueue.ledger.rows.missing_copies import MissingCopies, Shards
from transferqueue.limits import ALIGNMENT, ENDS_MAX, PAGE_BYTES
from transferqueue.wire.messages import BlockLocation, CopyLocation, WrittenBlock

_NO_COPIES: Final[list[CopyLocation]] = []
_NO_BLOCK: Final = BlockLocation(0, 0, 0, 0, 0, 0, [], [], 0, b"", _NO_COPIES)
_Bytes = bytes
Written = dict[int, tuple[int, int]]
"""Extent -> where the blocks of one commit begin and end in it."""


class OwnerBytes(msgspec.Struct, eq=False):
    """Bytes of the live blocks of one owner, each of which lies in `replicas` shards. `contents`: the number of the
    newest live block of each field and content (`_content_key`) to which commits may refer. `table`: its name, if the
    owner is one. `continued`: live blocks with values that continue others."""

    replicas: int = 1
    bytes: int = 0
    contents: dict[_Bytes, int] = {}
    table: str = ""
    continued: dict[int, Continued] = {}


class ExtentState(msgspec.Struct, eq=False, array_like=True):
    """A piece of an arena. Only `session` may commit into it (0: none).

    Args:
        blocks: number of blocks in it that are live or pinned.
        spans: committed byte ranges, ascending, those that touch as one; kept while the session may still commit.
    """

    id: int
    shard: int
    offset: int
    nbytes: int
    session: int
    open: bool = True
    lost: bool = False
    blocks: int = 0
    spans: list[tuple[int, int]] = []

    def overlaps(self, start: int, end: int) -> bool:
        """Whether a committed range overlaps [start, end)."""
        at = bisect_left(self.spans, (start, end))
        before = at > 0 and self.spans[at - 1][1] > start
        return before or (at < len(self.spans) and self.spans[at][0] < end)

    def write(self, start: int, end: int) -> None:
        """Record [start, end) as committed, up to where the next block may begin. Mostly it follows the latest one."""
        end = -(-end // ALIGNMENT) * ALIGNMENT
        if self.spans and self.spans[-1][1] == start:
            self.spans[-1] = (self.spans[-1][0], end)
        else:
            self.spans.insert(bisect_left(self.spans, (start, end)), (start, end))


class CommittedBlock:
    """Committed columns.

    Args:
        extents: the places of the bytes, `at` first, then its copies.
        refs: the number of rows (counted once per part) and of blocks that need them.
        pins: the number of views that may exist.
    """

    __slots__ = ("at", "extents", "pins", "refs", "usage")

    def __init__(self, at: BlockLocation, extents: tuple[ExtentState, ...], usage: OwnerBytes) -> None:
        self.at = at
        self.extents = extents
        self.usage = usage
        self.refs = 0
        self.pins = 0

    @property
    def extent(self) -> ExtentState:
        """The extent that is read unless a copy is nearer."""
        return self.extents[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the block and its copies, also of those that it lacks."""
        return self.at.nbytes * self.usage.replicas

    @property
    def lacks_copies(self) -> bool:
        """Whether rows need it and it lies in too few shards."""
        return self.refs > 0 and len(self.extents) < self.usage.replicas

    @property
    def shards(self) -> Shards:
        """The shards that have it, ascending."""
        return tuple(sorted(extent.shard for extent in self.extents))


class StoredBlock(NamedTuple):
    """A block in an image. `owner`: the position of its account in a list; -1: its owner is gone."""

    at: BlockLocation
    refs: int
    pins: int
    owner: int


class StoredBlocks(msgspec.Struct):
    """A registry in an image."""

    extents: list[ExtentState]
    blocks: list[StoredBlock]
    pins: dict[int, dict[int, int]]
    last_shard: int
    missing: MissingCopies
    granted: int
    committed: int
    ending: list[int]
    ended_at: float


class BlockPart:
    """Base of the optional parts of a registry: copies in several shards (`copies`), and bytes that leave memory for a
    disk (`cold_blocks`). A registry calls all its parts, in order, at the same points. Each method does nothing, so a
    part overrides those that concern it."""

    __slots__ = ()

    def owns(self, extent: int) -> bool:
        """Whether no session may commit into this extent, or return it, since the part alone writes there."""
        return False

    def committed(self, block: CommittedBlock) -> None:
        """A block was committed."""

    def retired(self, block: CommittedBlock) -> None:
        """The last row that needs this block has ended."""

    def forgotten(self, block: CommittedBlock) -> None:
        """This block is gone: no row needs it, and no view of it may exist."""

    def closed(self, extent: ExtentState) -> None:
        """Nothing more is written into this extent by its session."""

    def unread(self, extent: ExtentState) -> None:
        """The last reader of a block of this extent is gone."""


class Cold(Protocol):
    """The part that has blocks on a disk, for requests that need their bytes."""

    @property
    def on_disk(self) -> Mapping[int, CommittedBlock]:
        """These blocks."""

    def want(self, numbers: Collection[int], core: Writes) -> Blocked | None:
        """The condition that a request naming these blocks waits for."""

    def is_wanted(self, numbers: Collection[int]) -> bool:
        """Whether a request waits for one of these blocks, which is on a disk."""


class BlockRegistry:
    """All extents, blocks and pins. No image contains its parts.

    `cold` has the blocks that are on a disk; None: all are in memory.
    """

    parts: tuple[BlockPart, ...] = ()
    cold: Cold | None = None

    def __init__(self, effects: Effects) -> None:
        self.extents: dict[int, ExtentState] = {}
        self.blocks: dict[int, CommittedBlock] = {}
        self.ending: list[int] = []
        """References that ended blocks had to others, one by one, which are still to be given back."""
        self.ended_at = 0.0
        """When a turn began with some of these."""
        self.pins: dict[int, dict[int, int]] = {}
        """Holder (a session, or minus a lease) -> block -> number of pins."""
        self.last_shard = 0
        """The highest shard number in which an extent was ever granted. Cached replies may name that shard for ever."""
        self.missing = MissingCopies()
        self._effects = effects
        self._next_extent = 1
        self._next_block = 1
        self._latest = _NO_BLOCK

    @property
    def committed(self) -> int:
        """Number of blocks ever committed."""
        return self._next_block - 1

    @property
    def granted(self) -> int:
        """Number of extents ever granted, which is the id of the last one."""
        return self._next_extent - 1

    def stored(self, owners: Sequence[OwnerBytes]) -> StoredBlocks:
        """The registry as an image has it. `owners`: the accounts that exist."""
        number = {id(usage): at for at, usage in enumerate(owners)}
        blocks = [
            StoredBlock(one.at, one.refs, one.pins, number.get(id(one.usage), -1)) for one in self.blocks.values()
        ]
        return StoredBlocks(
            [*self.extents.values()],
            blocks,
            self.pins,
            self.last_shard,
            self.missing,
            self.granted,
            self.committed,
            self.ending,
            self.ended_at,
        )

    def restore(self, stored: StoredBlocks, owners: Sequence[OwnerBytes]) -> None:
        """Continue as the registry of an image. `owners`: as for `stored`."""
        self.extents = {extent.id: extent for extent in stored.extents}
        for at, refs, pins, owner in stored.blocks:
            extents = tuple([self.extents[number] for number in (at.extent, *(copy.extent for copy in at.copies))])
            usage = owners[owner] if owner >= 0 else OwnerBytes()
            block = self.blocks[at.block] = CommittedBlock(at, extents, usage)
            block.refs, block.pins = refs, pins
        self.pins, self.last_shard, self.missing = stored.pins, stored.last_shard, stored.missing
        self._next_extent, self._next_block = stored.granted + 1, stored.committed + 1
        self.ending, self.ended_at = stored.ending, stored.ended_at

    def attach(self, part: BlockPart) -> None:
        """Have this part follow the registry, instead of an earlier one of its class."""
        self.parts = (*(one for one in self.parts if type(one) is not type(part)), part)

    def _is_of_part(self, extent: int) -> bool:
        for part in self.parts:  # noqa: SIM110  (each put passes here)
            if part.owns(extent):
                return True
        return False

    # ------------------------------------------------------------ grants

    def grant(self, session: int, shard: int, offset: int, nbytes: int) -> ExtentState:
        """Open a new extent for `session`."""
        extent = ExtentState(self._next_extent, shard, offset, nbytes, session)
        self._next_extent += 1
        self.extents[extent.id] = extent
        self.last_shard = max(self.last_shard, shard)
        return extent

    def may_return(self, session: int, number: int) -> bool:
        """Whether an extent is there to be closed: one that is closed or freed is not, which is no error. `UsageError`
        if `session` may not."""
        extent = self.extents.get(number)
        if extent is None or not extent.session:
            return False
        if extent.session != session:
            raise UsageError(f"extent {number} is granted to another session; return only your own grants")
        if self._is_of_part(number):
            raise _ordered(number)
        return True

    def return_grant(self, number: int) -> None:
        """Close an extent that `may_return` accepted."""
        self._disown(self.extents[number])

    def return_grants(self, session: int) -> None:
        """Close all extents of `session`."""
        for extent in [extent for extent in self.extents.values() if extent.session == session]:
            self._disown(extent)

    def _disown(self, extent: ExtentState) -> None:
        extent.session = 0
        extent.open = False
        extent.spans.clear()
        for part in self.parts:
            part.closed(extent)
        self.free_if_unused(extent)

    def free_if_unused(self, extent: ExtentState) -> None:
        """Free an extent that is closed and in which no block is left."""
        if extent.open or extent.blocks or self.extents.pop(extent.id, None) is None:
            return
        if not extent.lost:
            self._effects.add(FreeExtent(extent.id, extent.shard, extent.offset, extent.nbytes))

    # ------------------------------------------------------------ commits

    def check(self, session: int, placed: Sequence[WrittenBlock], usage: OwnerBytes | None = None) -> None:
        """Raise unless `session` may commit all of `placed` together. `usage` is of the owner; None: it has neither
        copies nor contents."""
        copies = 1 if usage is None else usage.replicas
        written: dict[int, ExtentState] | None = {} if len(placed) > 1 else None
        for block in placed:
            if block.content and self._is_reference(block, usage):
                continue
            shards = [self._check_place(session, written, block, block.extent, block.offset)]
            if block.copies:
                shards += [self._check_place(session, written, block, at.extent, at.offset) for at in block.copies]
            if len(shards) != copies or (copies > 1 and len(set(shards)) != copies):
                raise UsageError(
                    f"block of {', '.join(block.fields)} was written to shards {listing(shards)}; each block goes to "
                    f"{copies} different ones here"
                )

    def _check_place(
        self, session: int, written: dict[int, ExtentState] | None, block: WrittenBlock, number: int, start: int
    ) -> int:
        """Raise unless the bytes of the block may be at `start` in this extent. Returns its shard. `written`: bytes of
        the blocks before it; None: it is the only one (its copies lie in other shards).
        """
        extent, end = self.extents.get(number), start + block.nbytes
        if extent is None or extent.session != session or extent.lost or self._is_of_part(number):
            raise _not_granted(number, extent, session)
        if start % ALIGNMENT:
            raise UsageError(f"block at offset {start} is not aligned; blocks begin at multiples of {ALIGNMENT} bytes")
        if start < extent.offset or end > extent.offset + extent.nbytes:
            raise UsageError(
                f"block [{start}, {end}) lies outside extent {extent.id}, which is "
                f"[{extent.offset}, {extent.offset + extent.nbytes})"
            )
        new = written.setdefault(extent.id, ExtentState(0, 0, 0, 0, 0)) if written is not None else None
        spans = extent.spans
        follows = not spans or start >= spans[-1][1]  # mostly: after all that was committed there
        if block.nbytes and (
            (not follows and extent.overlaps(start, end)) or (new is not None and new.overlaps(start, end))
        ):
            raise UsageError(
                f"block [{start}, {end}) overlaps bytes that were committed before; bytes are written once"
            )
        if new is not None:
            new.write(start, end)
        return extent.shard

    def commit(
        self,
        placed: Sequence[WrittenBlock],
        usage: OwnerBytes,
        refs: Sequence[int],
        anew: Collection[int] = (),
        continued: Mapping[int, Continued] = MappingProxyType({}),
    ) -> list[int]:
        """Add the blocks that `check` accepted. Returns their numbers, in order.

        Args:
            placed: the blocks.
            usage: of their owner.
            refs: references of rows to each.
            anew: those of `placed` that are needed even if another block has the same content.
            continued: by place in `placed`, what the values of a block without a content continue: live blocks.
        """
        written: Written = {}
        numbers: list[int] = []
        for block, count in zip(placed, refs, strict=True):
            known = self._same_content(block, usage) if block.content and len(numbers) not in anew else None
            numbers.append(self._commit(block, usage, count, written, known))
        for place, values in continued.items():
            usage.continued[numbers[place]] = values
            self.refer(values.above)
        for number, (start, end) in written.items():
            extent = self.extents[number]
            if start == extent.offset and end > extent.offset + extent.nbytes - PAGE_BYTES:  # it is full
                extent.open = False
                self.free_if_unused(extent)
        return numbers

    def _commit(
        self,
        placed: WrittenBlock,
        usage: OwnerBytes,
        refs: int,
        written: Written,
        known: CommittedBlock | None,
    ) -> int:
        """Add one block. `known` is the block of the same content to which the commit refers instead."""
        if known is not None and not placed.extent:
            known.refs += refs
            return known.at.block
        number = self._next_block
        self._next_block += 1
        extents: tuple[ExtentState, ...] = (self._write(placed.extent, placed.offset, placed.nbytes, written),)
        if placed.copies:
            extents += tuple([self._write(at.extent, at.offset, placed.nbytes, written) for at in placed.copies])
        if (
            known is not None
        ):  # two commits wrote the same content at the same time: the second one's bytes are not needed
            known.refs += refs
            return known.at.block
        if refs:
            at = self._latest = _block_at(number, placed, extents, self._latest)
            block = self.blocks[number] = CommittedBlock(at, extents, usage)
            block.refs = refs
            usage.bytes += block.nbytes
            if placed.content:
                usage.contents[_content_key(placed)] = number
            for extent in extents:
                extent.blocks += 1
            for part in self.parts:
                part.committed(block)
        return number

    def _write(self, number: int, start: int, nbytes: int, written: Written) -> ExtentState:
        extent, end = self.extents[number], start + nbytes
        extent.write(start, end)
        before = written.get(number)
        written[number] = (start, end) if before is None else (min(before[0], start), max(before[1], end))
        return extent

    def sever(self, usage: OwnerBytes, lost: Collection[int]) -> None:
        """These blocks are lost, and no row reads a value that continues one of theirs: nothing keeps them for that."""
        for number, continued in [*usage.continued.items()]:
            severed = [above for above in continued.above if above in lost]
            if severed and number in usage.continued:
                usage.continued[number] = continued.without(severed)
                for above in severed:
                    self.retire(above, 1)

    def refer(self, numbers: Iterable[int], times: int = 1) -> None:
        """Add so many references to each of these live blocks."""
        for number in numbers:
            self.blocks[number].refs += times

    def retire(self, number: int, refs: int) -> None:
        """Remove `refs` references to a block."""
        block = self.blocks[number]
        block.refs -= refs
        if not block.refs:
            if block.usage.continued and (continued := block.usage.continued.pop(number, None)) is not None:
                self.ending += continued.above
            block.usage.bytes -= block.nbytes
            if block.at.content and block.usage.contents.get(key := _content_key(block.at)) == number:
                del block.usage.contents[key]
            for part in self.parts:
                part.retired(block)
            self._forget_if_unused(block)

    def end_some(self) -> None:
        """Give back references of `ending`, as many as one turn may. Wakes those who wait for the room."""
        tables: set[str] = set()
        for _ in range(ENDS_MAX):
            if not self.ending:
                break
            number = self.ending.pop()
            tables.add(self.blocks[number].usage.table)
            self.retire(number, 1)
        for name in sorted(tables):
            self._effects.wake("room", name)
            self._effects.wake("clock", name)

    def _forget_if_unused(self, block: CommittedBlock) -> None:
        if block.refs or block.pins:
            return
        del self.blocks[block.at.block]
        for part in self.parts:
            part.forgotten(block)
        for extent in block.extents:
            extent.blocks -= 1
            self.free_if_unused(extent)

    # ------------------------------------------------------------ blocks that are named by their content

    def _is_reference(self, placed: WrittenBlock, usage: OwnerBytes | None) -> bool:
        """Whether the block is named by its content alone. Raises if it may have none, or if no such block is live."""
        names = ", ".join(placed.fields)
        if usage is None or len(placed.fields) != 1 or placed.rows != 1 or len(placed.content) != CONTENT_BYTES:
            raise UsageError(
                f"block of {names} with {counted(placed.rows, 'row')} has a content of {len(placed.content)} bytes; "
                f"only blocks of one value of a table have contents, of {CONTENT_BYTES} bytes each"
            )
        if placed.extent:
            return False
        if placed.offset or placed.copies:
            raise UsageError(f"block of {names} is named by its content, and by a place as well; give one of them")
        if self._same_content(placed, usage) is None:
            raise NotFound(
                f'field "{names}": no row has a value of content {placed.content.hex()} now; write its bytes into a '
                "grant, and commit them"
            )
        return True

    def may_refer(self, placed: WrittenBlock, usage: OwnerBytes, newest: int) -> bool:
        """Whether existing rows may refer to the live block of this content. `newest`: of the blocks that keep the
        field of such a row."""
        block = self._same_content(placed, usage)
        return block is not None and block.at.block > newest

    def _same_content(self, placed: WrittenBlock, usage: OwnerBytes) -> CommittedBlock | None:
        """The live block of the same bytes and layout."""
        block = self.blocks.get(usage.contents.get(_content_key(placed), 0))
        if block is None or (block.extents and block.extent.lost):
            return None
        at = block.at
        same = (at.nbytes, at.rows, at.fields, at.counts) == (placed.nbytes, placed.rows, placed.fields, placed.counts)
        return block if same and at.checksum == placed.checksum else None

    # ------------------------------------------------------------ bytes that leave memory, and come back

    def leave(self, block: CommittedBlock) -> None:
        """The bytes of an unpinned block are from now on only on a disk."""
        extents, block.extents = block.extents, ()
        for extent in extents:
            extent.blocks -= 1
            self.free_if_unused(extent)

    def arrive(self, block: CommittedBlock, number: int) -> None:
        """The bytes of a block that had none in memory are in this extent, which is open."""
        extent = self.extents[number]
        block.extents = (extent,)
        extent.blocks += 1

    def close(self, number: int) -> None:
        """Nothing more is written into this extent."""
        self._disown(self.extents[number])

    def wake(self, key: WakeKey) -> None:
        """Requests that wait for this are due."""
        self._effects.wake(*key)

    # ------------------------------------------------------------ pins

    def pin(self, holder: int, numbers: Iterable[int]) -> None:
        """Add one pin of each block for `holder`."""
        held = self.pins.setdefault(holder, {})
        for number in numbers:
            held[number] = held.get(number, 0) + 1
            self.blocks[number].pins += 1

    def check_unpin(self, holder: int, counts: dict[int, int]) -> None:
        """`ProtocolError` if `holder` has fewer pins."""
        held = self.pins.get(holder, {})
        for number, count in counts.items():
            if count < 1 or held.get(number, 0) < count:
                raise ProtocolError(
                    f"block {number} is pinned {held.get(number, 0)} times by this session; {count} were returned"
                )

    def unpin(self, holder: int, counts: dict[int, int]) -> None:
        """Return pins, which `check_unpin` accepted."""
        held = self.pins.get(holder, {})
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
        if not block.pins and block.extents:
            for part in self.parts:
                part.unread(block.extent)


CONTENT_BYTES: Final = 16


def _content_key(block: WrittenBlock | BlockLocation) -> bytes:
    return block.content + block.fields[0].encode()


def _not_granted(number: int, extent: ExtentState | None, session: int) -> NotFound | UsageError | ShardLost:
    """The error of a commit into an extent that the session may not write into, that belongs to a copy order, or that
    is lost."""
    if extent is None or extent.session != session:
        return NotFound(f"extent {number} is not granted to this session (or was returned); ask for a grant first")
    if not extent.lost:
        return _ordered(number)
    return ShardLost(
        f"extent {number} was in shard {extent.shard}, which is gone with all that was written there; return it "
        "and write the columns again, into a new grant"
    )


def _ordered(number: int) -> UsageError:
    return UsageError(
        f"extent {number} belongs to a copy order, which ends with its report (TakeCopies) alone; ask for a grant to "
        "write rows"
    )


def _block_at(
    number: int, placed: WrittenBlock, extents: Sequence[ExtentState], before: BlockLocation
) -> BlockLocation:
    """The location of a block, as replies state it. Its lists are never changed, so it shares those that are equal in
    the previous block."""
    fields, counts, copies = before.fields, before.counts, _NO_COPIES
    if placed.fields != fields:
        fields = placed.fields
    if placed.counts != counts:
        counts = placed.counts
    if placed.copies:
        copies = [
            CopyLocation(extent.shard, copy.extent, copy.offset)
            for extent, copy in zip(extents[1:], placed.copies, strict=True)
        ]
    return BlockLocation(
        number, extents[0].shard, extents[0].id, placed.offset, placed.nbytes, placed.rows, fields, counts,
        placed.checksum,
        b"", copies, placed.content,
    )  # fmt: skip
