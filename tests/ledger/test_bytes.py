"""Extents, blocks and pins; column groups and slots; weight channels: how long bytes live, and where a field is
read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.ledger.driver import Driver, Given, World, i64
from transferqueue.errors import AlreadyExists, DeadlineExceeded, InternalError, NotFound, SchemaError, UsageError
from transferqueue.ledger import Blocked
from transferqueue.limits import PAGE_ROWS, PARTS_MAX, Limits
from transferqueue.policies import HoldClock, Manual, Pacing, Task
from transferqueue.schema import Field, layout
from transferqueue.wire import codec
from transferqueue.wire import messages as m
from transferqueue.wire.codec import decode_fields


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def client(world: World) -> Driver:
    client = world.client()
    client.create(tasks=[Task("x", ["a"]), Task("y", ["b"])], retention=Manual())
    return client


def places(content: m.ReplyRows) -> dict[str, list[tuple[int, int]]]:
    """field -> (extent, slot) of each row."""
    found = {}
    for part in content.parts:
        rows = len(content.rows) // 8
        at, slots = (
            codec.decode_constant(part.block_of_row, "<i4", rows),
            codec.decode_ascending(part.slot_of_row, "<i4", rows),
        )
        for name in part.fields:
            found[name] = [(part.blocks[one].extent, int(slot)) for one, slot in zip(at, slots, strict=True)]
    return found


# ---------------------------------------------------------------- extents


def test_an_exact_grant_closes_with_its_put_and_frees_with_its_last_row(world: World, client: Driver) -> None:
    client.put(2, ["a", "b"])
    assert not world.ledger.state.core.blocks.extents[1].open
    client.drop([0])
    client.delete([0])
    assert world.freed == []
    client.delete([1])
    assert world.freed == [1]
    assert not world.ledger.state.core.blocks.blocks


def test_a_shared_grant_stays_open_until_it_is_returned(world: World, client: Driver) -> None:
    given = client.grant(1 << 18)
    field = Field("a", "int64", (None,))
    for number in range(3):
        block = m.WrittenBlock(given.extent, given.offset + 128 * number, 128, 1, ["a"], [1])
        client.apply(m.PutRequest("t", 1, m.Columns(fields=[field], blocks=[block])))
    client.delete([0, 1, 2])
    assert world.freed == []
    client.apply(m.ReturnGrant(given.extent))
    assert world.freed == [given.extent]


def test_a_grant_that_was_never_used_comes_back(world: World, client: Driver) -> None:
    given = client.grant(5000)
    client.apply(m.ReturnGrant(given.extent))
    other = client.grant(5000)
    client.close()
    assert world.freed == [given.extent, other.extent]


def test_a_view_keeps_an_extent_past_its_rows(world: World, client: Driver) -> None:
    client.put(2, ["a"])
    one, two = client.read([0]), client.read([0, 1])
    client.delete([0, 1])
    blocks = [at.block for content in (one, two) for part in content.parts for at in part.blocks]
    assert len(blocks) == 2
    client.unpin(blocks[:1])
    assert world.freed == []
    client.unpin(blocks[1:])
    assert world.freed == [1]


def test_pins_of_a_dead_session_return_at_once_or_when_its_lock_is_free(world: World, client: Driver) -> None:
    client.put(2, ["a"])
    for lingers in (False, True):
        reader = world.client()
        reader.read([0])
        grant = reader.grant(100).extent
        reader.close(pins=not lingers)
        assert (grant in world.taken) == lingers
        assert bool(world.ledger.state.core.blocks.pins) == lingers
    with pytest.raises(InternalError, match="is open; close it before its pins end"):
        world.ledger.end_pins(client.session)
    world.ledger.end_pins(reader.session)
    world.collect()
    assert not world.ledger.state.core.blocks.pins
    assert grant not in world.taken


def test_replies_pin_once_each_and_a_retry_does_not_pin_again(world: World, client: Driver) -> None:
    client.put(1, ["a"])
    request = m.LeaseRequest("t", "x", rows=1)
    client.apply(request)
    client.apply(request, call=client.call)
    (counts,) = world.ledger.state.core.blocks.pins.values()
    assert list(counts.values()) == [1]


# ---------------------------------------------------------------- parts: where a field is read


def test_a_field_is_read_where_it_was_written_last(world: World, client: Driver) -> None:
    client.put(3, ["a", "b"])  # extent 1
    client.update([1], ["a"], overwrite=True)  # 2
    client.update([1, 2], ["a", "b"], overwrite=True)  # 3
    client.update([2], ["b"], overwrite=True)  # 4
    found = places(client.read([2, 1, 0], fields=["a", "b"]))
    assert found == {"a": [(3, 1), (3, 0), (1, 0)], "b": [(4, 0), (3, 0), (1, 0)]}
    assert world.freed == [2]  # shadowed by 3
    client.unpin(list(world.ledger.state.core.blocks.pins[1]))
    client.update([2], ["a"], overwrite=True)  # 5
    client.update([0], ["a", "b"], overwrite=True)  # 6: the last row that read extent 1
    assert world.freed == [2, 1]
    client.delete([1, 2])
    assert sorted(world.freed) == [1, 2, 3, 4, 5]


def test_overwriting_field_by_field_gives_the_old_block_back(world: World, client: Driver) -> None:
    client.put(1, ["a", "b", "c"])
    for name in ("a", "b"):
        client.update([0], [name], overwrite=True)
    assert world.freed == []
    client.update([0], ["c"], overwrite=True)
    assert world.freed == [1]


def test_shared_rows_are_stored_once(world: World, client: Driver) -> None:
    field = Field("a", "int64", (None,))
    block = client.block([field], 2, slots=[0, 0, 0, 1, 1, 1])
    client.apply(m.PutRequest("t", 6, m.Columns(fields=[field], blocks=[block])))
    given = client.lease("x", 6)
    assert places(given.reply.content)["a"] == [(1, 0)] * 3 + [(1, 1)] * 3
    client.release(given)
    client.delete([0, 1, 2, 3, 4])
    assert world.stats().bytes == block.nbytes
    client.delete([5])
    assert world.stats().bytes == 0


def test_more_sets_of_fields_than_parts_are_stored_field_by_field(world: World, client: Driver) -> None:
    names = [f"f{number}" for number in range(24)]
    pairs = [(one, two) for at, one in enumerate(names) for two in names[at + 1 :]][: PARTS_MAX + 10]
    for row, pair in enumerate(pairs):
        assert client.put(1, list(pair)) == [row]
    last = len(pairs) - 1
    assert places(client.read([last], fields=list(pairs[last]))) == {name: [(last + 1, 0)] for name in pairs[last]}
    client.update([last], [pairs[last][0]], overwrite=True)
    assert world.freed == []
    client.update([last], list(pairs[last]), overwrite=True)
    assert len(world.freed) == 1
    client.delete(list(range(len(pairs))))
    client.unpin(list(world.ledger.state.core.blocks.pins[1]))
    assert not world.taken


def test_rows_of_many_puts_in_one_reply(world: World, client: Driver) -> None:
    for _ in range(4):
        client.put(2, ["a"], {"n": 1.0})
    given: Given = client.lease("x", 8, fields=["a", "n"])
    assert places(given.reply.content)["a"] == [(1 + row // 2, row % 2) for row in range(8)]
    assert given.column("n") == [1.0] * 8


def test_a_lease_names_only_fields_that_all_its_rows_have(client: Driver) -> None:
    client.put(2, ["a"])
    client.update([0], ["c"])
    client.update([0, 1], inline={"n": 2.0})
    given = client.lease("x", 2, fields=["a", "c", "n", "n"])
    assert [field.name for field in decode_fields(given.reply.content.definitions)] == ["a", "n"]


def test_facts_keys_and_tags_travel_with_the_rows(client: Driver) -> None:
    facts: dict[str, Any] = {
        "group_id": 7, "group_size": 2, "ordinal": [0, 1], "policy_version": 3, "policy_version_max": 5,
        "tokens": [10, 20], "priority": 0.5, "keys": ["k", ""], "tags": [{}, {"t": "x"}],
    }  # fmt: skip
    client.put(2, ["a"], **facts)
    content = client.lease("x", 2).reply.content
    numbers = {
        name: codec.decode_constant(getattr(content, name), dtype, 2).tolist()
        for name, dtype in {
            "group_id": "<i8", "group_size": "<i4", "ordinal": "<i8", "policy_version": "<i8",
            "policy_version_max": "<i8", "tokens": "<i8", "priority": "<f8",
        }.items()
    }  # fmt: skip
    assert numbers == {
        "group_id": [7, 7], "group_size": [2, 2], "ordinal": [0, 1], "policy_version": [3, 3],
        "policy_version_max": [5, 5], "tokens": [10, 20], "priority": [0.5, 0.5],
    }  # fmt: skip
    assert (content.keys, content.tags) == (["k", ""], [{}, {"t": "x"}])
    client.update([1], keys=["n"], tags=[{}])
    content = client.read([0, 1])
    assert (content.keys, content.tags) == (["k", "n"], None)
    assert np.frombuffer(client.apply(m.Find("t", ["n", "k", "gone", ""])).rows, "<i8").tolist() == [1, 0, -1, -1]


def test_inline_dtypes_come_back_as_they_went_in(client: Driver) -> None:
    values = {
        "bool": [True, False], "int8": [-1, 2], "uint64": [2**64 - 1, 0], "float16": [0.5, -0.0],
        "float32": [0.1, np.inf], "complex64": [1 + 2j, 0],
    }  # fmt: skip
    arrays = {name: np.array(one, name) for name, one in values.items()}
    columns = m.Columns(
        fields=[Field(f"f_{name}", name) for name in values],
        inline=[m.Inline(f"f_{name}", one.tobytes()) for name, one in arrays.items()],
    )
    client.apply(m.PutRequest("t", 2, columns))
    for one in client.read([0, 1]).inline:
        assert one.data == arrays[one.field[2:]].tobytes()


# ---------------------------------------------------------------- pages


def test_pages_of_finished_rows_are_used_again(world: World) -> None:
    client = world.client()
    client.create(tasks=[Task("x", ["n"])])
    pages = world.table().rows.pages
    first = client.put(5000, inline={"n": 1.0})
    (straggler,) = client.put(1)
    waiting = first
    for _ in range(40):
        rows = client.put(5000, inline={"n": 2.0})
        given = client.lease("x", 5000)
        client.ack(given)
        assert given.rows == waiting
        waiting = rows
    assert pages.resident == 5001
    assert len(pages.pages()) <= 5
    assert pages._capacity == 8 * PAGE_ROWS
    client.update([straggler], inline={"n": 3.0})
    assert client.read([straggler], fields=["n"]).inline[0].data == np.array([3.0]).tobytes()
    with pytest.raises(NotFound, match="finished and was freed"):
        client.read([first[0]])
    assert client.lease("x", 5001).column("n") == [2.0] * 5000 + [3.0]


def test_columns_grow_past_their_first_size(world: World) -> None:
    client = world.client()
    client.create(tasks=[Task("x", ["n"])], limits=Limits(rows=1 << 20))
    for number in range(40):
        client.put(5000, inline={"n": float(number)}, tokens=number)
    for first in range(0, 40, 2):
        given = client.lease("x", 10_000)
        assert given.column("n") == [float(number) for number in (first, first + 1) for _ in range(5000)]
        client.ack(given)
    assert world.table().rows.pages.resident == 0


# ---------------------------------------------------------------- weights


def publish(client: Driver, version: int, *, keep: int = 2, channel: str = "policy", **terms: Any) -> Any:
    fields = [Field("w", "bfloat16", (4, 4)), Field("scale", "float32")]
    nbytes = layout(fields, 1, [0, 0])[1]
    given = client.grant(nbytes)
    block = m.WrittenBlock(given.extent, given.offset, nbytes, 1, ["w", "scale"], [0, 0])
    return client.apply(m.Publish(channel, version, fields, [block], keep, **terms))


def pull(client: Driver, **terms: Any) -> Any:
    return client.apply(m.Pull("policy", **terms))


def test_any_kept_version_can_be_pulled_at_any_time(world: World, client: Driver) -> None:
    other = world.client()
    assert isinstance(pull(other, wait_s=9), Blocked)
    publish(client, 1)
    assert ("channel", "policy") in world.woken
    first = pull(other)
    assert (first.version, first.blocks[0].extent) == (1, 1)
    publish(client, 2)
    publish(client, 5)
    assert pull(other, version=2).version == 2
    assert pull(other, above=2).version == 5
    with pytest.raises(NotFound, match='version 1 of channel "policy" is not kept; it has 2, 5'):
        pull(other, version=1)
    with pytest.raises(DeadlineExceeded, match="does not have a version above 5: its latest is 5"):
        pull(other, above=5)
    assert isinstance(pull(other, version=6, wait_s=9), Blocked)
    assert world.freed == []  # version 1 is kept no more, and pinned
    other.unpin([first.blocks[0].block])
    assert world.freed == [1]


def test_versions_are_published_once_and_in_order(world: World, client: Driver) -> None:
    publish(client, 3)
    with pytest.raises(AlreadyExists, match="version 3 of channel"):
        publish(client, 3)
    with pytest.raises(UsageError, match="never goes back to 2"):
        publish(client, 2)
    fields = [Field("w", "float32", (4,))]
    block = client.block(fields, 1)
    with pytest.raises(SchemaError, match="declares v, but its blocks hold w"):
        client.apply(m.Publish("policy", 4, [Field("v", "float32", (4,))], [block]))
    with pytest.raises(SchemaError, match="one row and no slots"):
        client.apply(m.Publish("policy", 4, fields, [client.block(fields, 2)]))
    with pytest.raises(SchemaError, match="each named once"):
        client.apply(m.Publish("policy", 4, [], []))


def test_publication_moves_the_clock_and_application_is_another_fact(world: World, client: Driver) -> None:
    client.create("r", tasks=[Task("train")], pacing=Pacing("train", 4, 1, 1, channel="policy"))
    client.put(1, table="r", policy_version=0)
    publish(client, 1)
    assert world.stats("r").version == 1
    publish(client, 2)
    assert world.table("r").rows_dropped == {"stale": 1}
    client.apply(m.ReportApplied("policy", 1))
    with pytest.raises(NotFound, match=r"version 3 of channel .* was never published; its latest is 2"):
        client.apply(m.ReportApplied("policy", 3))
    channel = world.ledger.state.channels["policy"]
    assert {session: one.version for session, one in channel.applied.items()} == {client.session: 1}
    late = client.create("later", tasks=[Task("train")], pacing=Pacing("train", 4, channel="policy"))
    assert late.version == 2
    client.close()
    assert channel.applied == {}


def test_a_held_clock_holds_the_publication(world: World, client: Driver) -> None:
    client.create("r", tasks=[Task("train")], pacing=Pacing("train", 4, 1, 0, HoldClock(), "policy"))
    client.put(1, table="r", policy_version=0)
    waits = publish(client, 1, wait_s=9)
    assert waits == Blocked((("clock", "r"),))
    with pytest.raises(DeadlineExceeded, match="held at 0: 1 row"):
        publish(client, 1)
    given = client.lease("train", 1, table="r")
    client.ack(given, table="r")
    assert isinstance(publish(client, 1), m.DoneReply)


def test_extents_of_two_sessions_do_not_mix(world: World, client: Driver) -> None:
    mine = client.grant(4096)
    other = world.client().grant(4096)
    assert mine.offset != other.offset
    rows = client.put(1)
    block = m.WrittenBlock(other.extent, other.offset, 128, 1, ["a"], [1])
    with pytest.raises(NotFound, match="not granted to this session"):
        client.apply(m.Update("t", i64(rows), m.Columns(fields=[Field("a", "int64", (None,))], blocks=[block])))
