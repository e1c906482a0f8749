"""Values that puts intern: one block for all puts of the same bytes, counted, and gone with the last row that needs it."""

from __future__ import annotations

import random
from typing import Any

import pytest
from msgspec.structs import replace

from tests.ledger.driver import Driver, World, i64
from tests.scale import only_long
from transferqueue.errors import Full, NotFound, UsageError
from transferqueue.ledger import Ledger, MustWait
from transferqueue.limits import Limits
from transferqueue.policies import AckedColumns, Manual, Task
from transferqueue.schema import Field
from transferqueue.wire import messages as m

IMAGE = Field("image", "int64", (None,))
SUM = 77


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
    return reply if isinstance(reply, MustWait) else list(range(reply.first, reply.first + reply.rows))


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
        ({"content": b"x"}, UsageError, "a content of 1 bytes; only a put gives contents, of 16 bytes each"),
        ({"offset": 64}, UsageError, "named by its content, and by a place as well"),
        ({"copies": [m.WrittenCopy(1, 0)]}, UsageError, "named by its content, and by a place as well"),
        ({"content": key(2)}, NotFound, f"no row has a value of content {key(2).hex()} now; write its bytes"),
        ({"checksum": SUM + 1}, NotFound, "no row has a value of content"),
        ({"counts": [2], "nbytes": 128}, NotFound, "no row has a value of content"),
        ({"rows": 2, "nbytes": 128}, NotFound, "no row has a value"),
        ({"slots": None, "rows": 1, "content": b""}, NotFound, "extent 0 is not granted"),
        ({"fields": ["image", "image"]}, UsageError, "given twice"),
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


def test_only_puts_give_contents() -> None:
    world, client = world_of(fields=[IMAGE, Field("other", "int64", (None,))])
    block = value(client, 1)
    (row,) = put(client, block)
    for content in (block, named(block)):
        with pytest.raises(UsageError, match="only a put gives contents"):
            client.apply(m.Update("t", i64([row]), m.Columns([], [replace(content, fields=["other"])])))
    lease = client.lease("x", 1)
    with pytest.raises(UsageError, match="only a put gives contents"):
        client.ack(lease, columns=m.Columns([], [replace(named(block), fields=["other"])]))
    two = replace(named(block), fields=["image", "other"], counts=[1, 1], nbytes=256)
    with pytest.raises(UsageError, match="only a put gives contents"):  # a reference names one column
        client.apply(m.PutRequest("t", 1, m.Columns([], [two])))
    assert world.stats()["rows_live"] == 1


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
    assert (world.stats()["rows_live"], world.freed) == (2, [block.extent])


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
    assert isinstance(put(client, named(block), call=800, wait_s=9), MustWait)
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
    """Puts by bytes or by reference, deletions, views, deaths, images: bytes and contents are always those of the live rows."""
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
