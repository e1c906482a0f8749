"""Values that puts intern: one block for all puts of the same bytes, counted, and gone with the last row that needs
it."""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import copy
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tests.ledger.driver import Driver, World, i64
from tests.scale import only_long
from transferqueue.errors import AlreadyExists, DeadlineExceeded, Full, NotFound, RowsChanged, UsageError
from transferqueue.ledger import Blocked, Ledger
from transferqueue.ledger.rows import LIVE, unused
from transferqueue.limits import Limits
from transferqueue.policies import AckedColumns, Manual, Task
from transferqueue.schema import Field
from transferqueue.wire import messages as m
from transferqueue.wire.codec import decode_constant

IMAGE = Field("image", "int64", (None,))
SUM = 77


def i32(values: list[int]) -> bytes:
    return np.asarray(values, "<i4").tobytes()


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def world_of(**terms: Any) -> tuple[World, Driver]:
    world = World()
    client = world.client("author")
    client.create(**({"fields": [IMAGE], "retention": Manual(), "tasks": [Task("x", ["image"])]} | terms))
    return world, client


def value(client: Driver, content: int, rows: int = 1) -> m.WrittenBlock:
    """The bytes of one value for all rows, with its content."""
    return replace(client.block([IMAGE], 1, slots=[0] * rows), content=key(content), checksum=SUM)


def named(block: m.WrittenBlock, **changed: Any) -> m.WrittenBlock:
    """A reference to the value."""
    return replace(block, **({"extent": 0, "offset": 0, "copies": []} | changed))


def put(client: Driver, block: m.WrittenBlock, rows: int = 1, call: int | None = None, wait_s: float = 0.0) -> Any:
    reply = client.apply(m.PutRequest("t", rows, m.Columns([], [block]), wait_s=wait_s), call)
    return reply if isinstance(reply, Blocked) else list(range(reply.first, reply.first + reply.rows))


def blocks_of(client: Driver, rows: list[int]) -> list[int]:
    content = client.read(rows)
    found = [at.block for part in content.parts for at in part.blocks]
    client.unpin(found)
    return found


def bytes_of(world: World) -> int:
    return world.table().usage.bytes


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("changed", "error", "match"),
    [
        (
            {"content": b"x"},
            UsageError,
            "a content of 1 bytes; only blocks of one value of a table have contents, of 16 bytes each",
        ),
        ({"offset": 64}, UsageError, "named by its content, and by a place as well"),
        ({"copies": [m.WrittenCopy(1, 0)]}, UsageError, "named by its content, and by a place as well"),
        ({"content": key(2)}, NotFound, f"no row has a value of content {key(2).hex()} now; write its bytes"),
        ({"checksum": SUM + 1}, NotFound, "no row has a value of content"),
        ({"counts": [2], "nbytes": 128}, NotFound, "no row has a value of content"),
        ({"rows": 2, "nbytes": 128}, UsageError, "with 2 rows has a content of 16 bytes; only blocks of one value"),
        ({"slots": None, "rows": 1, "content": b""}, NotFound, "extent 0 is not granted"),
        ({"fields": ["image", "image"]}, UsageError, "appears twice"),
        ({"fields": ["unknown"]}, NotFound, "unknown"),
    ],
)
def test_a_bad_reference_is_refused_and_changes_nothing(changed: Any, error: type[Exception], match: str) -> None:
    world, client = world_of()
    block = value(client, 1)
    put(client, block)
    before = world.stats(), world.table().usage.contents.copy()
    with pytest.raises(error, match=match):
        put(client, named(block, **changed))
    assert (world.stats(), world.table().usage.contents) == before


def test_contents_are_of_blocks_of_one_value_of_a_table() -> None:
    world, client = world_of(fields=[IMAGE, Field("other", "int64", (None,))])
    block = value(client, 1)
    put(client, block)
    two = replace(named(block), fields=["image", "other"], counts=[1, 1], nbytes=256)
    with pytest.raises(UsageError, match="only blocks of one value of a table have contents"):
        client.apply(m.PutRequest("t", 1, m.Columns([], [two])))
    with pytest.raises(UsageError, match="only blocks of one value of a table have contents"):
        client.apply(m.Publish("policy", 0, [IMAGE], [named(block, slots=None)]))
    assert world.stats().rows_live == 1


# ---------------------------------------------------------------- how long it lives


def test_a_value_is_stored_once_and_lives_as_long_as_a_row_needs_it() -> None:
    world, client = world_of()
    block = value(client, 1)
    rows = put(client, block) + put(client, named(block)) + put(client, named(block, slots=None))
    assert bytes_of(world) == block.nbytes
    assert len(blocks_of(client, rows)) == 1
    for row in rows:
        assert world.freed == []
        client.delete([row])
    assert world.freed == [block.extent]
    assert (bytes_of(world), world.table().usage.contents) == (0, {})
    with pytest.raises(NotFound, match="no row has a value of content"):  # a deletion came before the reference
        put(client, named(block))


def test_a_value_that_is_only_viewed_is_not_given_to_new_rows() -> None:
    _world, client = world_of()
    block = value(client, 1)
    (row,) = put(client, block)
    view = client.read([row])
    client.delete([row])
    with pytest.raises(NotFound, match="no row has a value of content"):
        put(client, named(block))
    (again,) = put(client, value(client, 1))
    assert blocks_of(client, [again]) != [at.block for part in view.parts for at in part.blocks]


def test_of_two_writers_of_one_value_the_second_keeps_nothing() -> None:
    world, client = world_of()
    other = world.client("other")
    first, second = value(client, 1), value(other, 1)  # both were told that there is none
    rows = put(client, first) + put(other, second)
    assert (bytes_of(world), world.freed) == (first.nbytes, [second.extent])
    assert len(blocks_of(client, rows)) == 1


def test_contents_are_of_one_table_and_of_one_layout() -> None:
    world, client = world_of()
    client.create("u", fields=[IMAGE], retention=Manual())
    block = value(client, 1)
    put(client, block)
    with pytest.raises(NotFound, match="no row has a value of content"):
        client.apply(m.PutRequest("u", 1, m.Columns([], [named(block)])))
    longer = client.block([IMAGE], 1, counts=[9], slots=[0])
    put(client, replace(longer, content=key(1), checksum=SUM))  # the same digest by chance: another value
    assert bytes_of(world) == block.nbytes + longer.nbytes
    put(client, named(replace(longer, content=key(1), checksum=SUM)))  # the newest one is found
    client.delete([0])
    assert world.table().usage.contents.keys() == {key(1) + b"image"}
    client.delete([1, 2])
    assert (world.table().usage.contents, bytes_of(world)) == ({}, 0)


def test_a_column_that_ends_with_its_task_ends_when_the_last_row_needs_it_no_more() -> None:
    world, client = world_of(retention=AckedColumns(), tasks=[Task("x", ["image"]), Task("y", ["late"])])
    block = value(client, 1)
    put(client, block)
    put(client, named(block))
    for left in (1, 0):
        lease = client.lease("x", 1)
        client.unpin(lease.blocks())
        client.ack(lease)
        assert len(world.table().usage.contents) == left
    assert (world.stats().rows_live, world.freed) == (2, [block.extent])


# ---------------------------------------------------------------- rows that exist already

OTHER = Field("other", "int64", (None,))


def update(client: Driver, rows: list[int], *blocks: m.WrittenBlock, overwrite: bool = False, **condition: Any) -> None:
    client.apply(m.Update("t", i64(rows), m.Columns([], list(blocks)), overwrite, **condition))


def contents_of(client: Driver, rows: list[int]) -> list[int]:
    """The content of the block in which each row has its image; 0: none."""
    (part,) = [part for part in client.read(rows, fields=["image"]).parts if "image" in part.fields]
    client.unpin([at.block for at in part.blocks])
    blocks = decode_constant(part.block_of_row, "<i4", len(rows)).tolist()
    return [int.from_bytes(part.blocks[number].content) for number in blocks]


def refused_unchanged(world: World, act: Callable[[], object], match: str) -> None:
    before = world.stats(), world.table().usage.contents.copy(), world.ledger.state.core.blocks.committed
    with pytest.raises(NotFound, match=match):
        act()
    assert (world.stats(), world.table().usage.contents, world.ledger.state.core.blocks.committed) == before


def test_updates_acks_and_releases_refer_to_values_of_the_table() -> None:
    world, client = world_of(fields=[OTHER, IMAGE], tasks=[Task("x", ["other"], gives=["image"])])
    rows = client.put(4, [OTHER])
    block = value(client, 1, 1)
    update(client, rows[:1], block)
    before = bytes_of(world)
    update(client, rows[1:2], named(block))
    lease = client.lease("x", 2)
    client.release(lease, rows[:1], columns=m.Columns([], [named(block)]))  # it has the value already, by its block
    client.ack(lease, [1])
    lease = client.lease("x", 3)
    assert lease.rows == [0, 2, 3]
    client.ack(lease, [2, 3], columns=m.Columns([], [named(block, slots=i32([0, 0]))]))
    assert (bytes_of(world), contents_of(client, rows)) == (before, [1] * 4)
    client.ack(lease, [0])
    world.ledger = Ledger.from_image(world.ledger.image())
    for row in rows:
        assert world.table().usage.contents
        client.delete([row])
    assert (bytes_of(world), world.table().usage.contents) == (0, {})


def test_a_row_never_refers_to_a_block_that_it_would_not_read() -> None:
    world, client = world_of(fields=[OTHER, IMAGE])
    block = value(client, 1)
    put(client, block)
    (row,) = client.put(
        1, [OTHER, IMAGE]
    )  # in a newer block than that of content 1, which an update of the image does not replace
    why = "older than a block in which these rows have the field beside others"
    refused_unchanged(world, lambda: update(client, [row], named(block), overwrite=True), why)
    refused_unchanged(world, lambda: update(client, [0, row], named(block, slots=i32([0, 0])), overwrite=True), why)
    update(client, [row], value(client, 1), overwrite=True)  # written: other rows may refer to it from now on
    assert (contents_of(client, [0, row]), len(blocks_of(client, [0, row]))) == ([1, 1], 2)
    update(client, [0], named(block), overwrite=True)
    assert (contents_of(client, [0, row]), len(blocks_of(client, [0, row]))) == ([1, 1], 1)


def test_a_row_takes_an_older_value_again() -> None:
    """A block of the field alone is replaced, whatever its number."""
    world, client = world_of()
    first, second = value(client, 1), value(client, 2)
    rows = put(client, first) + put(client, second) + put(client, second := named(second))
    read = client.read(rows[1:2])
    update(client, rows[1:2], named(first), overwrite=True)
    assert contents_of(client, rows) == [1, 1, 2]
    condition = m.RowsRead(
        blocks=[m.BlocksRead(["image"], i64([at.block for part in read.parts for at in part.blocks]))]
    )
    with pytest.raises(RowsChanged):
        update(client, rows[1:2], named(first), overwrite=True, if_unchanged=condition)
    update(client, rows[1:2], second, overwrite=True)
    update(client, rows[1:2], named(first), overwrite=True, if_unchanged=condition)  # the same value again
    assert contents_of(client, rows) == [1, 1, 2]
    assert bytes_of(world) == 2 * first.nbytes


def test_a_freed_column_still_lies_in_the_block_of_columns_that_are_read() -> None:
    """Its number counts: rows read the field there again once it is set."""
    world, client = world_of(fields=[OTHER, IMAGE], tasks=[])
    block = value(client, 1)
    put(client, block)
    (row,) = client.put(1, [OTHER, IMAGE])
    client.apply(m.FreeColumns("t", i64([row]), ["image"], again=True))
    refused_unchanged(world, lambda: update(client, [row], named(block)), "older")
    update(client, [row], value(client, 1))
    assert contents_of(client, [row]) == [1]


def test_a_block_of_several_values_has_no_content() -> None:
    """An update that depends on what was read compares numbers of blocks: it would not see a row that moved to another
    value of its block."""
    world, client = world_of(fields=[IMAGE, OTHER])
    two = replace(client.block([IMAGE], 2, slots=[0, 1]), content=key(5), checksum=SUM)
    with pytest.raises(UsageError, match="only blocks of one value of a table have contents"):
        put(client, two, rows=2)
    assert world.stats().rows_live == 0


def members_of(block: m.WrittenBlock, rows: list[int]) -> m.WrittenBlock:
    """The block for these rows of the request alone."""
    return replace(block, slots=None, members=i32(rows))


@pytest.mark.parametrize(
    ("members", "match"),
    [
        (
            [[0, 1], [1, 2]],
            'field "image" lies in 2 blocks with 4 members for 3 rows; 2 to 64 blocks share out the rows',
        ),
        ([[0], [1]], "with 2 members for 3 rows"),
        ([[0, 1], [3]], "each row is in one of them"),
        ([[0, -1], [1, 2]], "each row is in one of them"),
        ([[0, 1, 2], []], "each block has one"),
        ([[0, 1, 2]], "lies in 1 block with 3 members"),
        ([[0, 0, 1, 2]], "lies in 1 block with 4 members"),
        ([[0], None], "appears twice"),
        ([None, None], "appears twice"),
        ([[number] for number in range(65)], "lies in 65 blocks"),
    ],
)
def test_blocks_that_do_not_share_out_the_rows_are_refused(members: list[list[int] | None], match: str) -> None:
    world, client = world_of()
    rows = 65 if len(members) == 65 else 3
    put(client, value(client, 0))
    blocks = [
        value(client, 1 + number, rows) if of is None else members_of(value(client, 1 + number), of)
        for number, of in enumerate(members)
    ]
    before = world.stats(), world.table().usage.contents.copy()
    with pytest.raises(UsageError, match=match):
        client.apply(m.PutRequest("t", rows, m.Columns([], blocks)))
    assert (world.stats(), world.table().usage.contents) == before


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"content": b""}, "has members; such a block has one field, a content and no slots"),
        ({"slots": i32([0])}, "no slots"),
        ({"rows": 2, "nbytes": 128}, "block of image has 2 rows; the request has 1"),
        ({"fields": ["image", "other"], "counts": [1, 1], "nbytes": 256}, "appears twice|one field"),
        ({"members": b"123"}, "members"),
    ],
)
def test_a_block_of_some_rows_is_of_one_value(changed: Any, match: str) -> None:
    world, client = world_of(fields=[IMAGE, OTHER])
    blocks = [members_of(value(client, 1), [0]), replace(members_of(value(client, 2), [1]), **changed)]
    with pytest.raises(UsageError, match=match):
        client.apply(m.PutRequest("t", 2, m.Columns([], blocks)))
    assert world.stats().rows_live == 0


def test_a_block_without_fields_has_no_members() -> None:
    _world, client = world_of()
    for blocks in ([0], [0, 1]):
        placed = [replace(members_of(value(client, 1), [number]), fields=[], counts=[]) for number in blocks]
        with pytest.raises(UsageError, match=r"block|field"):
            client.apply(m.PutRequest("t", len(blocks), m.Columns([], placed)))


def test_a_column_lies_in_a_block_for_each_value() -> None:
    world, client = world_of(fields=[IMAGE, OTHER], tasks=[Task("x", ["other"], gives=["image"])])
    one, two = value(client, 1), value(client, 2)
    blocks = [members_of(one, [0, 3]), members_of(two, [1, 2])]
    client.apply(m.PutRequest("t", 4, m.Columns([], blocks)))
    rows = [0, 1, 2, 3]
    assert contents_of(client, rows) == [1, 2, 2, 1]
    more = client.put(3, [OTHER])
    update(client, more[:2], members_of(named(two), [0]), members_of(named(one), [1]))
    assert contents_of(client, more[:2]) == [2, 1]
    stored = bytes_of(world)
    lease = client.lease("x", 3)
    client.apply(m.Drop("t", i64(more[1:2]), "for_a_test"))
    mixed = m.Columns([], [members_of(named(two), [0, 1]), members_of(named(one), [2])])
    client.release(lease, more, columns=mixed)  # one of its rows was dropped meanwhile
    assert contents_of(client, [*rows, more[0], more[2]]) == [1, 2, 2, 1, 2, 1]
    client.delete([rows[0], rows[3], *more[1:]])
    assert world.table().usage.contents.keys() == {key(2) + b"image"}
    client.delete([rows[1], rows[2], more[0]])
    assert (world.table().usage.contents, stored > bytes_of(world)) == ({}, True)


def test_results_of_replicas_refer_to_a_value_until_the_last_ack() -> None:
    world, client = world_of(fields=[OTHER, IMAGE], tasks=[Task("x", ["other"], gives=["image"])])
    block = value(client, 1)
    (first,) = put(client, block)
    (row,) = client.put(1, [OTHER])
    lease, other = [client.lease("x", 1, replica=number, replicas=2) for number in range(2)]
    assert lease.rows == other.rows == [row]
    client.ack(lease, columns=m.Columns([], [named(block)]))
    client.delete([first])
    assert len(world.table().usage.contents) == 1  # the results need it
    world.ledger = Ledger.from_image(world.ledger.image())
    client.ack(other, columns=m.Columns([], [named(block)]))
    assert contents_of(client, [row]) == [1]
    client.delete([row])
    assert world.table().usage.contents == {}


# ---------------------------------------------------------------- retries, deaths, waits


def test_a_retry_adds_no_second_reference_even_after_the_value_is_gone() -> None:
    world, client = world_of()
    block = value(client, 1)
    put(client, block)
    rows = put(client, named(block), call=500)
    assert put(client, named(block), call=500) == rows
    client.delete([0])
    assert put(client, named(block), call=500) == rows
    client.delete(rows)
    assert (world.freed, bytes_of(world)) == ([block.extent], 0)


def test_a_writer_that_dies_between_grant_and_commit_leaves_nothing() -> None:
    world, client = world_of()
    writer = world.client("writer")
    block = value(writer, 1)
    writer.close()
    assert (world.freed, world.table().usage.contents) == ([block.extent], {})
    with pytest.raises(NotFound, match="no row has a value of content"):
        put(client, named(block))
    with pytest.raises(NotFound, match="is not granted to this session"):  # nor does a revoked grant name a content
        put(client, block)
    assert world.table().usage.contents == {}


def test_a_writer_that_dies_after_its_commit_leaves_the_value_to_others() -> None:
    world, client = world_of()
    writer = world.client("writer")
    block = value(writer, 1)
    put(writer, block)
    writer.close()
    put(client, named(block))
    client.delete([0])
    assert bytes_of(world) == block.nbytes


def test_a_put_that_waits_for_room_looks_for_its_value_again() -> None:
    _world, client = world_of(limits=Limits(rows=1))
    block = value(client, 1)
    put(client, block)
    with pytest.raises(Full):
        put(client, named(block))
    assert isinstance(put(client, named(block), call=800, wait_s=9), Blocked)
    client.delete([0])  # makes room, and takes the value
    with pytest.raises(NotFound, match="no row has a value of content"):
        put(client, named(block), call=800, wait_s=9)


def test_a_reference_takes_no_bytes_of_the_table() -> None:
    world, client = world_of(limits=Limits(bytes=200))
    block = value(client, 1)
    put(client, block)
    for _ in range(9):
        put(client, named(block))
    assert bytes_of(world) == block.nbytes <= 200
    with pytest.raises(Full):
        put(client, value(client, 2))


# ---------------------------------------------------------------- copies, lost shards, restarts


def test_a_value_with_copies_keeps_them_for_all_its_rows() -> None:
    world, client = world_of(replicas=2)
    client.copies = [1]
    block = value(client, 1)
    put(client, block)
    put(client, named(block))
    assert bytes_of(world) == 2 * block.nbytes
    assert world.lose_shard(0).get("t", []) == []
    put(client, named(block))  # the copy has it
    assert blocks_of(client, [0, 1, 2]) == [1]
    world.lose_shard(1)
    with pytest.raises(NotFound, match="no row has a value of content"):
        put(client, named(block))
    assert (world.table().usage.contents, bytes_of(world)) == ({}, 0)


def test_the_image_of_a_ledger_has_the_contents() -> None:
    world, client = world_of()
    block = value(client, 1)
    put(client, block)
    world.ledger = Ledger.from_image(world.ledger.image())
    put(client, named(block))
    client.delete([0])
    assert bytes_of(world) == block.nbytes
    client.delete([1])
    assert (bytes_of(world), world.table().usage.contents) == (0, {})


@pytest.mark.parametrize("seed", [0, 1, *only_long(*range(2, 40))])
def test_references_agree_with_a_model(seed: int) -> None:
    """Puts by bytes or by reference, deletions, views, deaths, images: bytes and contents are always those of the live
    rows."""
    draw = random.Random(seed)
    world, client = world_of()
    writers = [world.client(f"writer {number}") for number in range(3)]
    content_of: dict[int, int] = {}
    bytes_by_content = {number: 80 + 64 * number for number in range(4)}
    views: list[int] = []
    for _ in range(300):
        content, writer = draw.randrange(4), draw.choice(writers)
        match draw.choice(["refer", "refer", "write", "delete", "view", "return", "image"]):
            case "refer" | "write" as how:
                rows = draw.randint(1, 3)
                layout = {"counts": [1 + 8 * content], "slots": [0] * rows}
                block = replace(writer.block([IMAGE], 1, **layout), content=key(content), checksum=SUM)
                bytes_by_content[content] = block.nbytes
                if how == "refer":
                    writer.apply(m.ReturnGrant(block.extent))
                    if content not in content_of.values():
                        with pytest.raises(NotFound):
                            put(writer, named(block), rows)
                        continue
                    block = named(block)
                content_of |= dict.fromkeys(put(writer, block, rows), content)
            case "delete" if content_of:
                gone = draw.sample(sorted(content_of), min(len(content_of), draw.randint(1, 4)))
                client.delete(gone)
                for row in gone:
                    del content_of[row]
            case "view" if content_of:
                seen = client.read([draw.choice(sorted(content_of))])
                views += [at.block for part in seen.parts for at in part.blocks]
            case "return" if views:
                client.unpin([views.pop()])
            case "image":
                world.ledger = Ledger.from_image(world.ledger.image())
        live = set(content_of.values())
        assert {int.from_bytes(one[:16], "big") for one in world.table().usage.contents} == live
        assert bytes_of(world) == sum(bytes_by_content[one] for one in live)
        references = sum(block.refs for block in world.ledger.state.core.blocks.blocks.values())
        assert references == len(content_of)
    client.unpin(views, None) if views else None
    client.delete(sorted(content_of))
    assert (bytes_of(world), world.table().usage.contents, world.taken) == (0, {}, {})


class Course:
    """Rows that are put, updated and acked, their columns by content or not, under losses of shards, deaths and
    restarts from images.

    number: the content of each row's image, as it was written last; 0: none. The block that a row reads names its
    number by where it lies.
    """

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        tasks = [Task("x", ["other"], lease_s=1e6), Task("never", ["late"])]  # so that rows live on
        self.world, self.client = world_of(fields=[OTHER, IMAGE], tasks=tasks)
        self.number: dict[int, int] = {}
        self.places: dict[tuple[int, int], list[int]] = {}
        """Extent and offset of each block with images -> the content of each of its rows."""
        self.leases: list[Any] = []
        self.shared: list[tuple[Any, list[int]]] = []
        """Leases of two replicas, of which one acked with these images."""
        self.outranked = 0
        self.referred = self.refused = 0

    def pick(self) -> list[int]:
        awaited = sorted({row for lease, _ in self.shared for row in lease.rows if row in self.number})
        rows = awaited if awaited and self.draw.random() < 0.5 else sorted(self.number)
        return sorted(self.draw.sample(rows, min(len(rows), self.draw.randint(1, 3))))

    def images(self, rows: int) -> tuple[list[m.WrittenBlock], list[int]]:
        """The blocks of a commit that gives these rows images: referred to, written with a content, of several values,
        alone, or beside another column."""
        self.client.shard, content = self.draw.choice([0, 0, 1]), self.draw.randint(1, 3)
        hows = ["refer", "refer", "refer", "write", "several", "plain", "together", "apart", "apart"]
        match self.draw.choice(hows if rows > 1 else hows[:-2]):
            case "apart":
                return self._apart(rows)
            case "refer":
                return [named(self._value(content, rows, grant=False))], [content] * rows
            case "write":
                return [self._kept(self._value(content, rows), [content])], [content] * rows
            case "several":
                of = [self.draw.randint(0, 1) for _ in range(rows)]
                return [self._kept(self.client.block([IMAGE], 2, slots=of), [1, 2])], [1 + slot for slot in of]
            case how:
                numbers = [self.draw.randint(1, 3) for _ in range(rows)]
                block = self.client.block([IMAGE] if how == "plain" else [IMAGE, OTHER], rows)
                return [self._kept(block, numbers)], numbers

    def _apart(self, rows: int) -> tuple[list[m.WrittenBlock], list[int]]:
        """Two values that share out the rows, each referred to or written."""
        cut, contents = self.draw.randint(1, rows - 1), self.draw.sample([1, 2, 3], 2)
        order = self.draw.sample(range(rows), rows)
        blocks, numbers, refers = [], [0] * rows, self.draw.random() < 0.7
        for content, mine in zip(contents, (order[:cut], order[cut:]), strict=True):
            block = self._value(content, 1, grant=not refers)
            blocks.append(members_of(named(block) if refers else self._kept(block, [content]), mine))
            for row in mine:
                numbers[row] = content
        return blocks, numbers

    def _value(self, content: int, rows: int, *, grant: bool = True) -> m.WrittenBlock:
        block = replace(self.client.block([IMAGE], 1, slots=[0] * rows), content=key(content), checksum=SUM)
        if not grant:
            self.client.apply(m.ReturnGrant(block.extent))
        return block

    def _kept(self, block: m.WrittenBlock, numbers: list[int]) -> m.WrittenBlock:
        self.places[block.extent, block.offset] = numbers
        return block

    def commit(self, rows: int, send: Callable[[m.Columns], Any]) -> tuple[Any, list[int]] | None:
        """Give `rows` rows images. If there is no value to refer to, nothing changes: None."""
        blocks, numbers = self.images(rows)
        refers = not blocks[0].extent
        before = self.world.stats(), self.world.table().usage.contents.copy()
        try:
            reply = send(m.Columns([], blocks))
        except AlreadyExists:  # an ack that brings the other column too
            return None
        except NotFound:
            assert refers
            assert (self.world.stats(), self.world.table().usage.contents) == before
            self.refused += 1
            return None
        self.referred += refers
        return reply, numbers

    # ------------------------------------------------------------ steps

    def put(self) -> None:
        rows = self.draw.randint(1, 3)
        if done := self.commit(rows, lambda columns: self.client.apply(m.PutRequest("t", rows, columns))):
            self.number |= zip(range(done[0].first, done[0].first + rows), done[1], strict=True)

    def put_without(self) -> None:
        self.number |= dict.fromkeys(self.client.put(self.draw.randint(1, 3), [OTHER]), 0)

    def update(self) -> None:
        rows = self.pick()
        if done := self.commit(len(rows), lambda columns: self.client.apply(m.Update("t", i64(rows), columns, True))):
            self.number |= zip(rows, done[1], strict=True)

    def lease(self) -> None:
        try:
            self.leases.append(self.client.lease("x", 3, at_least=1))
        except DeadlineExceeded:
            return
        self.client.unpin(self.leases[-1].blocks())

    def end(self, send: Any) -> None:
        """End a lease with images: an ack, which only rows without one may get, or a release."""
        if not self.leases:
            return
        lease = self.leases.pop()
        rows = [row for row in lease.rows if row in self.number]
        if not rows:
            return
        may = send == self.client.release or not any(self.number[row] for row in rows)
        done = self.commit(len(rows), lambda columns: send(lease, rows, columns=columns)) if may else None
        if done is None:
            send(lease, rows)
        else:
            self.number |= zip(rows, done[1], strict=True)

    def share(self) -> None:
        """One of two replicas acks with images, for rows that lose what they had."""
        try:
            lease, _ = [self.client.lease("x", 3, at_least=1, replica=number, replicas=2) for number in range(2)]
        except DeadlineExceeded:
            return
        self.client.unpin(lease.blocks(), [2] * len(lease.blocks()))
        self.client.free(lease.rows, ["image"], again=True)
        self.number |= dict.fromkeys(lease.rows, 0)
        done = self.commit(len(lease.rows), lambda columns: self.client.ack(lease, columns=columns))
        if done is None:
            self.client.release(lease)
        else:
            self.shared.append((lease, done[1]))

    def end_shared(self) -> None:
        """The other replica acks: the rows that are still there have these images, whatever they were given
        meanwhile."""
        if not self.shared:
            return
        lease, numbers = self.shared.pop(self.draw.randrange(len(self.shared)))
        if (
            held := self.world.ledger.state.core.leases.by_id.get(lease.lease)
        ) is None:  # its results were lost, or all of its rows
            return
        given = {row: number for row, number, has in zip(lease.rows, numbers, held.held.tolist(), strict=True) if has}
        self.outranked += any(self.number[row] for row in given)
        self.client.ack(lease)
        self.number |= given

    def free(self) -> None:
        rows = self.pick()
        self.client.apply(m.FreeColumns("t", i64(rows), ["image"], again=True))
        self.number |= dict.fromkeys(rows, 0)

    def delete(self) -> None:
        leased = {row for lease in [*self.leases, *(lease for lease, _ in self.shared)] for row in lease.rows}
        if rows := [row for row in self.pick() if row not in leased]:
            self.client.delete(rows)
            for row in rows:
                del self.number[row]

    def lose(self) -> None:
        """What lay in shard 1 is gone."""
        self.world.lose_shard(1)
        rows, has = self._with_image()
        self.number |= dict.fromkeys(rows[~has].tolist(), 0)

    def _with_image(self) -> tuple[Any, Any]:
        table = self.world.table()
        rows = np.array(sorted(self.number), np.int64)
        return rows, table.rows.has_all(table.rows.pages.index(rows), table.rows.mask(("image",)))

    def bury(self) -> None:
        """Delete rows that were dropped, since a column that a task needs was lost."""
        pages = self.world.table().rows.pages
        if ended := [row for row in self.number if pages.fate.a[pages.index(np.array([row]))][0] != LIVE]:
            self.client.delete(ended)
            for row in ended:
                del self.number[row]

    def die(self) -> None:
        self.client.close()
        self.client, self.leases, self.shared = self.world.client("another"), [], []

    def restart(self) -> None:
        self.world.ledger = Ledger.from_image(self.world.ledger.image())

    def run(self, steps: int) -> None:
        weighted = [self.put] * 4 + [self.put_without] * 2 + [self.update] * 8 + [self.lease] * 3
        weighted += [lambda: self.end(self.client.ack), lambda: self.end(self.client.release)] * 2
        weighted += [self.free, self.delete, self.restart] + [self.share] * 4 + [self.end_shared] * 2
        for _ in range(steps):
            rare = self.draw.random()
            step = self.lose if rare < 0.02 else self.die if rare < 0.04 else self.draw.choice(weighted)
            if self.number or step == self.put:
                step()
            self.bury()
            self.check()

    def check(self) -> None:
        """Each row reads what it was given last, from a block that needs exactly the rows that have it."""
        table, blocks = self.world.table(), self.world.ledger.state.core.blocks.blocks
        rows, has = self._with_image()
        (places,) = table.column_groups.locate(["image"], table.rows.pages.index(rows))
        for row, had, block, slot in zip(
            rows.tolist(), has, places.blocks.tolist(), places.slots.tolist(), strict=True
        ):
            read = self.places[blocks[block].at.extent, blocks[block].at.offset][slot] if had else 0
            assert read == self.number[row], f"row {row} reads {read}, and was given {self.number[row]}"
        entries: dict[int, int] = {}
        for part in table.column_groups._by_fields.values():
            for number in part.block.a[table.rows.pages.index(table.rows.pages.resident_rows())].tolist():
                entries[number] = entries.get(number, 0) + bool(number)
        for lease in self.world.ledger.state.core.leases.by_id.values():
            for number, count in unused(copy(lease.staged)) if lease.staged else ():
                entries[number] = entries.get(number, 0) + count
        assert {number: block.refs for number, block in blocks.items() if block.refs} == {
            number: count for number, count in entries.items() if number
        }
        assert table.usage.bytes == sum(block.at.nbytes for block in blocks.values() if block.refs)
        assert all(blocks[number].refs for number in table.usage.contents.values())


@pytest.mark.parametrize("seed", [0, 1, 2, *only_long(*range(3, 60))])
def test_rows_read_what_they_were_given_last(seed: int) -> None:
    course = Course(seed)
    course.run(400)
    assert course.referred > 20
    assert course.refused
    assert course.outranked
