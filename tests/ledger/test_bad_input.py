"""Bad input gets a clear typed error, and nothing changes: every case that the ledger sees."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from tests.ledger.driver import Driver, World, i64
from transferqueue.errors import (
    AlreadyExists,
    DeadlineExceeded,
    Disconnected,
    Full,
    Impossible,
    LeaseExpired,
    NotFound,
    ProtocolError,
    SchemaError,
    Sealed,
    UsageError,
)
from transferqueue.limits import Limits
from transferqueue.policies import (
    Compare,
    Complete,
    KeepStale,
    Manual,
    Pacing,
    Plugin,
    Requeue,
    TagIs,
    Task,
    TokenBalanced,
    VersionBetween,
)
from transferqueue.schema import Field
from transferqueue.wire import messages as m

DENSE = Field("pixels", "float32", (4,))
RAGGED = Field("ids", "int64", (None,))
TASKS = [
    Task("grade", ["ids"], ["score"]),
    Task("train", ["ids", "score"], groups=Complete()),
    Task("shard", ["ids"], selector=TokenBalanced()),
]


@pytest.fixture
def world() -> World:
    world = World()
    client = world.client()
    client.create(tasks=TASKS, fields=[DENSE, RAGGED], limits=Limits(rows=32, bytes=4096), extra_fields=True)
    client.put(4, ["ids"], group_id=1, group_size=4, keys=["a", "b", "c", "d"])
    client.put(1, ["ids"])
    return world


@pytest.fixture
def client(world: World) -> Driver:
    return world.client("worker")


def snapshot(world: World) -> Any:
    state = world.ledger.state
    table = state.tables["t"]
    rows = table.rows
    return (
        world.stats(),
        [column.a.tobytes() for column in rows.pages._columns],
        dict(rows.keys),
        dict(rows.tags),
        list(rows.fields),
        sorted(state.core.blocks.blocks),
        sorted(state.tables),
        sorted(state.channels),
        {number: (one.held.tolist(), one.deadline) for number, one in state.core.leases.by_id.items()},
    )


def refused(world: World, kind: type[Exception], text: str, act: Callable[[], Any]) -> None:
    """`act` raises `kind` with `text` in its message, and the ledger is as before."""
    before = snapshot(world)
    with pytest.raises(kind, match=re.escape(text)):
        act()
    assert snapshot(world) == before


def columns(**changes: Any) -> m.Columns:
    return m.Columns(**changes)


def facts(**changes: Any) -> m.Columns:
    return m.Columns(facts=m.RowFacts(**changes))


# ---------------------------------------------------------------- names that do not exist


def test_unknown_table_lists_those_that_exist(world: World, client: Driver) -> None:
    refused(world, NotFound, 'table "u" does not exist; there are t', lambda: client.put(1, table="u"))


def test_unknown_task_lists_those_of_the_table(world: World, client: Driver) -> None:
    refused(world, NotFound, 'task "x" is not in table "t"; it has grade, shard, train', lambda: client.lease("x", 1))


def test_unknown_field_lists_those_of_the_table(world: World, client: Driver) -> None:
    act = lambda: client.lease("grade", 1, fields=["x"])  # noqa: E731
    refused(world, NotFound, 'field "x" is not in table "t"; it has ids, pixels', act)
    undeclared = columns(inline=[m.Inline("x", bytes(8))])
    refused(world, NotFound, 'field "x" is not in table', lambda: client.apply(m.PutRequest("t", 1, undeclared)))
    refused(world, NotFound, 'field "x"', lambda: client.read([0], fields=["x"]))


def test_unknown_channel(world: World, client: Driver) -> None:
    refused(world, NotFound, 'channel "policy" does not exist', lambda: client.apply(m.ReportApplied("policy", 0)))


def test_a_table_that_declares_its_fields_takes_no_others(world: World, client: Driver) -> None:
    client.create("closed", fields=[Field("x", "int64")], tasks=[Task("grade", ["x"], gives=["y"])])
    other = columns(fields=[Field("z", "int64")], inline=[m.Inline("z", bytes(8))])
    message = (
        'field "z" is not in table "closed", which takes only the fields that it was made with or that a task names: '
        "x, y;"
    )
    refused(world, SchemaError, message, lambda: client.apply(m.PutRequest("closed", 1, other)))
    one = columns(fields=[Field("x", "int64")], inline=[m.Inline("x", bytes(8))])
    row = client.apply(m.PutRequest("closed", 1, one)).first
    refused(world, SchemaError, message, lambda: client.apply(m.Update("closed", i64([row]), other)))
    lease = client.lease("grade", 1, table="closed")
    refused(world, SchemaError, message, lambda: client.apply(m.Ack("closed", lease.lease, lease.token, columns=other)))
    client.apply(m.AddTask("closed", Task("late", ["z"])))
    client.apply(m.Ack("closed", lease.lease, lease.token, columns=other))


# ---------------------------------------------------------------- schema


@pytest.mark.parametrize("field", [Field("ids", "int32", (None,)), Field("ids", "int64", (4,)), Field("ids", "int64")])
def test_dtype_shape_or_raggedness_against_the_schema(world: World, client: Driver, field: Field) -> None:
    message = f'field "ids" of table "t" is int64[None], not {field.describe()}; give values of the declared dtype'
    inline = m.Columns(fields=[field])
    refused(world, SchemaError, message, lambda: client.apply(m.PutRequest("t", 1, inline)))


def test_columns_of_different_row_counts(world: World, client: Driver) -> None:
    placed = client.block([RAGGED], 3)
    refused(
        world,
        SchemaError,
        "has 3 rows; the request has 2",
        lambda: client.apply(m.PutRequest("t", 2, columns(blocks=[placed]))),
    )
    inline = m.Columns(fields=[Field("score", "float64")], inline=[m.Inline("score", bytes(24))])
    refused(
        world, UsageError, "has 24 bytes; 2 rows of <f8 take 16", lambda: client.apply(m.PutRequest("t", 2, inline))
    )
    refused(
        world,
        UsageError,
        "tokens has 8 bytes; 2 rows",
        lambda: client.apply(m.PutRequest("t", 2, facts(tokens=i64([1])))),
    )
    refused(
        world, UsageError, "keys has 1 value for 2 rows", lambda: client.apply(m.PutRequest("t", 2, facts(keys=["k"])))
    )


def test_an_inline_field_in_a_block_and_the_reverse(world: World, client: Driver) -> None:
    score = Field("score", "float64")
    placed = client.block([score], 1)
    wrong = columns(fields=[score], blocks=[placed])
    refused(
        world,
        SchemaError,
        'field "score" is float64, which travels inline',
        lambda: client.apply(m.PutRequest("t", 1, wrong)),
    )
    wrong = columns(inline=[m.Inline("ids", bytes(8))])
    refused(world, SchemaError, "does not travel inline", lambda: client.apply(m.PutRequest("t", 1, wrong)))


def test_columns_that_look_like_committed_ones_are_checked_all_the_same(world: World, client: Driver) -> None:
    """The ledger remembers which names and definitions it has checked. What it remembers must fit in every part."""
    score = Field("score", "float64")
    for _ in range(2):  # the second is remembered
        placed, other = client.block([RAGGED], 1), client.block([DENSE], 1)
        good = columns(fields=[RAGGED, score], blocks=[placed], inline=[m.Inline("score", bytes(8))])
        client.apply(m.PutRequest("t", 1, good))
        client.apply(m.PutRequest("t", 1, columns(fields=[RAGGED, DENSE], blocks=[client.block([RAGGED], 1), other])))

    def changed(text: str, error: type[Exception] = UsageError, **parts: Any) -> None:
        block = client.block([RAGGED], 1)
        wrong = structs.replace(good, **({"blocks": [block]} | parts))
        refused(world, error, text, lambda: client.apply(m.PutRequest("t", 1, wrong)))

    fresh = client.block([RAGGED], 1)
    changed("has 127 bytes; 1 rows with counts [1] take 128", blocks=[structs.replace(fresh, nbytes=fresh.nbytes - 1)])
    changed('field "ids": count -1 is not one', blocks=[structs.replace(fresh, counts=[-1])])
    changed("a block has 0 rows", blocks=[structs.replace(fresh, rows=0)])
    changed("has 2 rows; the request has 1", SchemaError, blocks=[client.block([RAGGED], 2)])
    changed("slots reach from 1 to 1", blocks=[structs.replace(fresh, slots=np.array([1], "<i4").tobytes())])
    changed("has 4 bytes; 1 rows of <f8", inline=[m.Inline("score", bytes(4))])
    changed('field "score" of table "t" is float64, not int64', SchemaError, fields=[RAGGED, Field("score", "int64")])
    changed('field "ids" appears twice', blocks=[fresh, client.block([RAGGED], 1)])
    changed('field "pixels" is float32[4], which does not travel inline', SchemaError, inline=[m.Inline("pixels", b"")])
    changed("a block without fields", blocks=[structs.replace(fresh, fields=[], counts=[])])
    merged = client.block([RAGGED, DENSE], 1)
    client.apply(m.PutRequest("t", 1, columns(fields=[RAGGED, DENSE], blocks=[merged])))
    divided = [structs.replace(merged, fields=["ids"]), structs.replace(merged, fields=["pixels"])]
    empty = columns(fields=[], blocks=[], inline=[])
    client.apply(m.PutRequest("t", 1, empty))  # rows without columns look as a block without fields does
    nothing = structs.replace(fresh, fields=[], counts=[])
    changed("a block without fields", fields=[], blocks=[nothing], inline=[])
    changed("counts for 1 fields is not a block", fields=[RAGGED, DENSE], blocks=divided, inline=[])


def test_a_bool_that_is_none(world: World, client: Driver) -> None:
    wrong = columns(fields=[Field("ok", "bool")], inline=[m.Inline("ok", b"\x02")])
    refused(world, SchemaError, "neither 0 nor 1", lambda: client.apply(m.PutRequest("t", 1, wrong)))


def test_a_field_given_twice(world: World, client: Driver) -> None:
    wrong = columns(fields=[Field("s", "int8")], inline=[m.Inline("s", b"1"), m.Inline("s", b"2")])
    refused(world, UsageError, 'field "s" appears twice', lambda: client.apply(m.PutRequest("t", 1, wrong)))
    twice = columns(fields=[Field("s", "int8"), Field("s", "int16")])
    refused(
        world,
        SchemaError,
        'field "s" of table "t" is int8, not int16',
        lambda: client.apply(m.PutRequest("t", 1, twice)),
    )


# ---------------------------------------------------------------- blocks and extents


def change(placed: m.WrittenBlock, **changes: Any) -> m.Columns:
    values = {name: getattr(placed, name) for name in placed.__struct_fields__} | changes
    return m.Columns(blocks=[m.WrittenBlock(**values)])


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"extent": 999}, NotFound, "extent 999 is not granted to this session"),
        ({"offset": 1 << 30}, UsageError, "lies outside extent"),
        ({"offset": 8}, UsageError, "is not aligned"),
        ({"nbytes": 64}, UsageError, "has 64 bytes; 2 rows with counts [2] take 128"),
        ({"counts": [1 << 60]}, UsageError, "rows with counts"),
        ({"counts": [-1]}, UsageError, "count -1"),
        ({"counts": []}, UsageError, "is not a block"),
        ({"fields": []}, UsageError, "without fields"),
        ({"fields": ["ids", "ids"], "counts": [2, 2]}, UsageError, "appears twice"),
        ({"rows": 0}, UsageError, "a block has 0 rows"),
        ({"rows": 1 << 61}, UsageError, "a block has"),
        ({"slots": np.array([0, 2], "<i4").tobytes()}, UsageError, "slots reach from 0 to 2"),
        ({"slots": np.array([-1, 0], "<i4").tobytes()}, UsageError, "slots reach from -1"),
        ({"slots": b"123"}, UsageError, "slots has 3 bytes"),
    ],
)
def test_a_block_that_is_not_one(
    world: World, client: Driver, changes: dict[str, Any], kind: type[Exception], text: str
) -> None:
    placed = client.block([RAGGED], 2)
    if "offset" in changes:
        changes = {"offset": placed.offset + changes["offset"]}
    refused(world, kind, text, lambda: client.apply(m.PutRequest("t", 2, change(placed, **changes))))


def test_an_extent_of_another_session(world: World, client: Driver) -> None:
    placed = world.client().block([RAGGED], 2)
    refused(
        world, NotFound, "is not granted to this session", lambda: client.apply(m.PutRequest("t", 2, change(placed)))
    )
    act = lambda: client.apply(m.ReturnGrant(placed.extent))  # noqa: E731
    refused(world, UsageError, "is granted to another session", act)


def test_bytes_are_written_once(world: World, client: Driver) -> None:
    given = client.grant(1 << 20)
    one = m.WrittenBlock(given.extent, given.offset + 64, 128, 2, ["ids"], [2])
    client.apply(m.PutRequest("t", 2, columns(blocks=[one])))
    for offset in (0, 64, 128):
        again = change(one, offset=given.offset + offset)
        refused(
            world,
            UsageError,
            "overlaps bytes that were committed",
            lambda again=again: client.apply(m.PutRequest("t", 2, again)),
        )
    fresh = m.WrittenBlock(given.extent, given.offset + 1024, 128, 2, ["ids"], [2])
    other = m.WrittenBlock(given.extent, given.offset + 1024, 64, 2, ["pixels"], [0])
    both = columns(blocks=[fresh, other])
    refused(world, UsageError, "overlaps", lambda: client.apply(m.PutRequest("t", 2, both)))
    client.apply(
        m.PutRequest("t", 2, columns(blocks=[m.WrittenBlock(given.extent, given.offset + 192, 128, 2, ["ids"], [2])]))
    )


def test_a_returned_grant_takes_no_commit(world: World, client: Driver) -> None:
    placed = client.block([RAGGED], 2)
    client.apply(m.ReturnGrant(placed.extent))
    refused(world, NotFound, "not granted to this session", lambda: client.apply(m.PutRequest("t", 2, change(placed))))
    client.apply(m.ReturnGrant(placed.extent))  # closing is idempotent


def test_pins_that_the_session_does_not_have(world: World, client: Driver) -> None:
    given = client.lease("grade", 1)
    (block,) = given.blocks()
    refused(world, ProtocolError, "is pinned 1 times by this session; 2 were", lambda: client.unpin([block], [2]))
    refused(world, ProtocolError, "is pinned 1 times by this session; 2 were", lambda: client.unpin([block, block]))
    refused(world, ProtocolError, "is pinned 0 times", lambda: client.unpin([block + 7]))
    refused(world, ProtocolError, "counts are positive", lambda: client.unpin([block], [-1]))
    refused(world, ProtocolError, "2 blocks are unpinned with 1 counts", lambda: client.unpin([block, block], [1]))
    refused(world, ProtocolError, "not a whole number", lambda: client.apply(m.Unpin(b"123", b"")))


# ---------------------------------------------------------------- groups


def test_a_group_larger_than_its_size(world: World, client: Driver) -> None:
    text = 'group 1 of table "t" would have 4 + 1 = 5 rows; its group_size is 4'
    refused(world, UsageError, text, lambda: client.put(1, group_id=1, group_size=4))
    refused(world, UsageError, "would have 0 + 3 = 3 rows", lambda: client.put(3, group_id=2, group_size=2))


def test_members_that_disagree_on_the_size(world: World, client: Driver) -> None:
    refused(world, UsageError, "has group_size 4, but this put says 5", lambda: client.put(1, group_id=1, group_size=5))
    refused(
        world, UsageError, "has group_size 2, but this put says 3", lambda: client.put(2, group_id=9, group_size=[2, 3])
    )


def test_half_of_what_makes_a_group(world: World, client: Driver) -> None:
    refused(world, UsageError, "group_id without group_size; pass both", lambda: client.put(1, group_id=3))
    refused(world, UsageError, "group_size without group_id; pass both", lambda: client.put(1, group_size=3))
    refused(world, UsageError, "without a group_id", lambda: client.put(1, group_id=-1, group_size=3))


def test_a_group_that_never_fits(world: World, client: Driver) -> None:
    text = 'group 9 of 33 rows can never be complete in table "t", which holds at most 32 rows'
    refused(world, Impossible, text, lambda: client.put(1, group_id=9, group_size=33))
    text = "a group of 4 rows; a lease of complete groups with rows=3 can never hold one: 4 > 3; ask for rows >= 4"
    refused(world, Impossible, text, lambda: client.lease("train", 3, wait_s=9))
    refused(world, Impossible, "for each of 2 ranks: 8 > 4", lambda: client.lease("train", 4, world=2, wait_s=9))


def test_groups_of_a_task_that_takes_rows(world: World, client: Driver) -> None:
    refused(world, UsageError, 'task "grade" does not take groups', lambda: client.lease("grade", groups=1))


def test_part_of_a_group_cannot_be_acked(world: World, client: Driver) -> None:
    client.update([0, 1, 2, 3], inline={"score": 1.0})
    given = client.lease("train", groups=1)
    text = 'task "train" takes whole groups: ack all rows of group 1 together'
    refused(world, UsageError, text, lambda: client.ack(given, [0, 1]))
    refused(world, UsageError, "release all rows of group 1 together", lambda: client.release(given, [3]))


def test_group_facts_do_not_change(world: World, client: Driver) -> None:
    act = lambda: client.update([4], group_id=7, group_size=2)  # noqa: E731
    refused(world, UsageError, "set by put and cannot be updated", act)


# ---------------------------------------------------------------- rows


def test_rows_that_are_not_there(world: World, client: Driver) -> None:
    update = lambda rows: client.update(rows, inline={"score": 1.0})  # noqa: E731
    refused(world, NotFound, "row 99 was never put", lambda: update([0, 99]))
    refused(world, NotFound, "row -1 was never put", lambda: update([-1]))
    refused(world, NotFound, "ids so far end at 4", lambda: client.drop([5]))
    refused(world, UsageError, "row 2 is named 2 times", lambda: client.drop([2, 1, 2]))
    refused(world, UsageError, "the list of rows is empty", lambda: client.drop([]))
    refused(world, ProtocolError, "not a whole number of int64", lambda: client.apply(m.Drop("t", b"abc", "x")))
    refused(
        world, UsageError, "has 3 bytes; 1 rows", lambda: client.apply(m.Update("t", i64([0]), facts(tokens=b"abc")))
    )


def test_update_of_a_deleted_row(world: World, client: Driver) -> None:
    client.drop([4])
    act = lambda: client.update([1, 4], inline={"score": 1.0})  # noqa: E731
    refused(world, NotFound, 'row 4 of table "t" is finished and was freed, or was deleted', act)


def test_update_of_a_row_that_was_dropped_and_stays_readable(client: Driver, world: World) -> None:
    client.create("kept", tasks=[Task("x", ["y"])], retention=Manual())
    client.put(2, inline={"y": 1.0}, table="kept")
    client.drop([0], table="kept")
    act = lambda: client.update([0], inline={"z": 1.0}, table="kept")  # noqa: E731
    refused(world, NotFound, 'row 0 of table "kept" has ended: it was dropped, and cannot be changed', act)


def test_update_of_a_field_already_set(world: World, client: Driver) -> None:
    client.update([0], inline={"score": 1.0})
    text = 'field "score" of row 0 in table "t" is already set; table.update(rows, overwrite=True, ...) replaces it'
    refused(world, AlreadyExists, text, lambda: client.update([0, 1], inline={"score": 2.0}))
    client.update([0], inline={"score": 2.0}, overwrite=True)
    assert np.frombuffer(client.read([0], fields=["score"]).inline[0].data, "<f8").tolist() == [2.0]


def test_a_key_names_one_row(world: World, client: Driver) -> None:
    refused(world, AlreadyExists, "key 'b' of table \"t\" names row 1", lambda: client.put(2, keys=["new", "b"]))
    refused(world, UsageError, "key 'n' appears twice", lambda: client.put(2, keys=["n", "n"]))
    refused(world, AlreadyExists, "key 'a'", lambda: client.update([3], keys=["a"]))


def test_facts_out_of_range(world: World, client: Driver) -> None:
    refused(world, UsageError, "tokens -1 is out of range", lambda: client.put(1, tokens=-1))
    refused(world, UsageError, "policy_version -2 is out of range", lambda: client.put(1, policy_version=-2))
    refused(world, UsageError, "ordinal -9223372036854775808 is out", lambda: client.put(1, ordinal=-(1 << 63)))
    refused(world, UsageError, "tokens 1099511627777 is out of range", lambda: client.put(1, tokens=(1 << 40) + 1))
    refused(world, UsageError, "priority has a NaN", lambda: client.put(1, priority=float("nan")))
    many = [{f"t{number}": 1 for number in range(65)}]
    refused(world, UsageError, "a row has 65 tags; at most 64", lambda: client.put(1, tags=many))


def test_a_field_read_before_it_is_there(world: World, client: Driver) -> None:
    client.update([0], inline={"score": 1.0})
    refused(
        world, NotFound, 'row 1 of table "t" does not have "score" yet', lambda: client.read([0, 1], fields=["score"])
    )


# ---------------------------------------------------------------- leases


def test_a_lease_of_nothing_or_of_two_things(world: World, client: Driver) -> None:
    text = "a lease names exactly one of rows, tokens and groups, above 0; this names none"
    refused(world, UsageError, text, lambda: client.lease("grade", rows=0))
    refused(world, UsageError, "this names rows and tokens", lambda: client.lease("grade", rows=1, tokens=5))
    refused(world, UsageError, "at_least=3 is above rows=2", lambda: client.lease("grade", rows=2, at_least=3))


def test_rank_and_replica_outside_their_range(world: World, client: Driver) -> None:
    refused(world, UsageError, "rank=2 is not below world=2", lambda: client.lease("grade", 2, rank=2, world=2))
    refused(world, UsageError, "replica=1 is not below replicas=1", lambda: client.lease("grade", 2, replica=1))
    refused(
        world,
        Impossible,
        "rows=3 cannot be split in equal counts over world=2",
        lambda: client.lease("shard", 3, world=2),
    )
    refused(world, Impossible, "world=5000 is above 4096", lambda: client.lease("shard", 5000, world=5000))
    refused(world, Impossible, "rows=2 cannot", lambda: client.lease("grade", 2, world=4))
    refused(world, Impossible, "groups=3 cannot be split", lambda: client.lease("train", groups=3, world=2))


def test_a_lease_that_never_fills(world: World, client: Driver) -> None:
    text = 'a lease of 33 rows can never be filled: table "t" holds at most 32 rows'
    refused(world, Impossible, text, lambda: client.lease("grade", 33, wait_s=60))
    refused(world, Impossible, "the most that one lease may have", lambda: client.lease("grade", 1 << 40, at_least=1))
    _only_groups(client)
    refused(world, Impossible, "9 complete groups of table", lambda: client.lease("g", groups=9, table="gs"))


def _only_groups(client: Driver) -> None:
    client.create("gs", tasks=[Task("g", groups=Complete())], limits=Limits(rows=16))
    client.put(2, table="gs", group_id=0, group_size=4)


def test_where_that_cannot_be_evaluated(world: World, client: Driver) -> None:
    lease = lambda *where: client.lease("grade", 1, where=where)  # noqa: E731
    refused(world, NotFound, 'field "x" is not in table', lambda: lease(Compare("x", "<", 1)))
    refused(
        world, UsageError, 'where compares field "ids", which is int64[None]', lambda: lease(Compare("ids", "<", 1))
    )
    refused(world, UsageError, "where has 17 predicates; at most 16", lambda: lease(*[VersionBetween()] * 17))
    refused(world, UsageError, "tag name", lambda: lease(TagIs("no spaces", 1)))


def test_a_lease_that_does_not_wait_says_what_is_missing(world: World, client: Driver) -> None:
    text = 'task "train" of table "t" waits for 1 complete group: 0 groups are ready'
    refused(world, DeadlineExceeded, text, lambda: client.lease("train", groups=1))


def test_ack_of_an_expired_lease(world: World, client: Driver) -> None:
    given = client.lease("grade", 2, lease_s=5)
    world.pass_time(5)
    refused(world, LeaseExpired, "it expired after 5 s without renewal", lambda: client.ack(given))
    refused(world, LeaseExpired, "its rows may be with another worker", lambda: client.renew(given))
    refused(world, LeaseExpired, "it expired", lambda: client.release(given))


def test_a_late_ack_is_refused_before_any_tick(world: World, client: Driver) -> None:
    given = client.lease("grade", 2, lease_s=5)
    world.now += 6
    with pytest.raises(LeaseExpired, match="it expired"):
        client.ack(given)


def test_ack_of_a_foreign_lease(world: World, client: Driver) -> None:
    given = world.client().lease("grade", 2)
    refused(world, LeaseExpired, "belongs to another session", lambda: client.ack(given))
    mine = client.lease("grade", 1)
    forged = m.Ack("t", mine.lease, mine.token + 1)
    refused(world, LeaseExpired, "belongs to another session", lambda: client.apply(forged))
    refused(world, LeaseExpired, "it is unknown", lambda: client.apply(m.Ack("t", 77, 77)))


def test_rows_that_are_not_of_the_lease(world: World, client: Driver) -> None:
    given = client.lease("grade", 2)
    refused(world, UsageError, "row 4 is not in lease 1", lambda: client.ack(given, [0, 4]))
    client.ack(given, [0], columns=client.columns(1, inline={"score": 1.0}))
    refused(world, LeaseExpired, "row 0 of lease 1 was acked or released before", lambda: client.ack(given, [0, 1]))


def test_results_of_an_ack_are_checked(world: World, client: Driver) -> None:
    given = client.lease("grade", 2)
    client.update([1], inline={"score": 5.0})
    results = client.columns(2, inline={"score": 1.0})
    refused(world, AlreadyExists, 'field "score" of row 1', lambda: client.ack(given, columns=results))
    short = client.columns(1, inline={"score": 1.0})
    refused(world, UsageError, "has 8 bytes; 2 rows", lambda: client.ack(given, columns=short))
    refused(world, UsageError, "carries no columns", lambda: client.ack(given, columns=results, drop="bad"))
    refused(world, UsageError, "reason name", lambda: client.ack(given, drop="no good"))
    client.ack(given, [0], columns=short)


# ---------------------------------------------------------------- capacity and flow


def test_a_put_or_row_larger_than_the_table(world: World, client: Driver) -> None:
    text = 'a put of 33 rows can never enter table "t", which holds at most 32: 33 > 32'
    refused(world, Impossible, text, lambda: client.put(33, wait_s=60))
    placed = client.block([RAGGED], 1, counts=[600])
    big = columns(blocks=[placed])
    text = 'do not fit table "t", which holds at most 4096 bytes: 4864 > 4096'
    refused(world, Impossible, text, lambda: client.apply(m.PutRequest("t", 1, big, wait_s=60)))
    client.drop([4])
    refused(world, NotFound, "row 4", lambda: client.apply(m.Update("t", i64([4]), big)))
    pixels = client.block([DENSE], 1)
    fields = [Field("more", "int64", (None,))]
    more = columns(fields=fields, blocks=[client.block(fields, 1, counts=[600])])
    refused(world, Impossible, "bytes", lambda: client.apply(m.Update("t", i64([1]), more)))
    client.apply(m.Update("t", i64([1]), columns(blocks=[pixels])))


def test_no_room_and_no_wish_to_wait(world: World, client: Driver) -> None:
    text = 'table "t" has no room: 28 rows do not fit: 5 are resident and 0 reserved, of at most 32; task "grade" has'
    refused(world, Full, text, lambda: client.put(28))
    refused(world, Full, "28 rows cannot be reserved", lambda: client.reserve(28))
    refused(world, Impossible, "33 rows can never be reserved", lambda: client.reserve(33, wait_s=60))


def test_no_room_because_ended_rows_are_kept(world: World, client: Driver) -> None:
    client.create("kept", tasks=[Task("x", ["y"])], retention=Manual(), limits=Limits(rows=3))
    client.put(2, inline={"y": 1.0}, table="kept")
    client.drop([1], table="kept")
    client.ack(client.lease("x", 1, table="kept"), table="kept")
    text = (
        'table "kept" has no room: 2 rows do not fit: 2 are resident and 0 reserved, of at most 3; '
        "2 rows have ended, and will be kept until table.delete(rows), since the table's retention is Manual"
    )
    refused(world, Full, text, lambda: client.put(2, inline={"y": 1.0}, table="kept"))
    client.put(1, inline={"y": 1.0}, table="kept")
    refused(
        world,
        Full,
        'task "x" has 1 ready, 0 leased, 0 not complete; 2 rows have ended',
        lambda: client.put(1, inline={"y": 1.0}, table="kept"),
    )


def test_reservations_of_others_or_too_small(world: World, client: Driver) -> None:
    mine, other = client.reserve(2).reservation, world.client().reserve(3).reservation
    refused(world, UsageError, "has 2 rows left; the put has 3", lambda: client.put(3, reservation=mine))
    refused(world, NotFound, "is not of this session", lambda: client.put(1, reservation=other))
    refused(world, NotFound, "is not of this session", lambda: client.apply(m.Unreserve("t", other)))
    refused(world, UsageError, "3 cannot be returned", lambda: client.apply(m.Unreserve("t", mine, 3)))
    client.put(2, reservation=mine)
    refused(world, NotFound, "is used up", lambda: client.put(1, reservation=mine))


def test_weights_too_old_ever_to_be_trained(world: World, client: Driver) -> None:
    client.create("p", tasks=[Task("x")], limits=Limits(rows=64), pacing=Pacing("x", 4, 3, 1))
    client.advance(3, table="p")
    text = "the last of them would be 4 versions behind, above max_staleness 1"
    refused(world, Impossible, text, lambda: client.reserve(8, 0, table="p", wait_s=60))
    refused(
        world, UsageError, 'the clock of table "p" is 3; it never goes back to 2', lambda: client.advance(2, table="p")
    )
    refused(world, UsageError, "is above", lambda: client.advance(1 << 60, table="p"))


def test_seal_twice_and_put_after_seal(world: World, client: Driver) -> None:
    client.seal()
    refused(world, Sealed, 'table "t" is sealed already', client.seal)
    refused(world, Sealed, 'table "t" is sealed; it takes no further rows', lambda: client.put(1))
    refused(world, Sealed, "none can be reserved", lambda: client.reserve(1))


def test_delete_of_a_leased_row(world: World, client: Driver) -> None:
    client.lease("grade", 1)
    refused(world, UsageError, 'row 0 of table "t" is leased by task "grade"', lambda: client.delete([0, 1]))


def test_too_many_reasons(world: World, client: Driver) -> None:
    client.create("many", limits=Limits(rows=1024))
    client.put(300, table="many")
    for number in range(256):
        client.drop([number], f"r{number}", table="many")
    text = 'reason "one-more" would be number 257'
    refused(world, UsageError, text, lambda: client.drop([299], "one-more", table="many"))
    client.drop([299], "r7", table="many")


# ---------------------------------------------------------------- configurations that can never work


def test_tables_that_can_never_work(world: World, client: Driver) -> None:
    def create(text: str, **terms: Any) -> None:
        refused(world, Impossible, text, lambda: client.create("new", **terms))

    train, rollout = Task("train", ["r"]), Task("rollout", ["p"], ["r"])
    small = Limits(rows=8)
    create('names task "x", which is not declared; it has train', tasks=[train], pacing=Pacing("x", 1))
    create("batch_rows=9 never fits", tasks=[train], pacing=Pacing("train", 9, 0), limits=small)
    create("(1 + 1) * 5 = 10 rows be ahead", tasks=[train], pacing=Pacing("train", 5), limits=small)
    stale = Pacing("train", 1, on_stale=Requeue("gone"))
    create('Requeue names task "gone"', tasks=[train], pacing=stale)
    stale = Pacing("train", 1, on_stale=Requeue("train"))
    create("declares no gives", tasks=[train], pacing=stale)
    other = Task("other", ["q"], ["z"])
    stale = Pacing("train", 1, on_stale=Requeue("other"))
    create("needs no column of it", tasks=[train, rollout, other], pacing=stale)
    create("needs 1025 and gives 0 fields", tasks=[Task("w", [f"f{number}" for number in range(1025)])])


def test_a_rule_for_stale_rows_needs_a_bound(world: World, client: Driver) -> None:
    tasks = [Task("train", ["r"]), Task("rollout", ["p"], ["r"])]
    unbounded = Pacing("train", 1, on_stale=Requeue("rollout"))
    text = 'pacing of table "new" has on_stale=Requeue("rollout") and no max_staleness, so no row is ever stale; set'
    refused(world, UsageError, text, lambda: client.create("new", tasks=tasks, pacing=unbounded))


def test_tables_that_are_declared_wrongly(world: World, client: Driver) -> None:
    twice = [Task("a"), Task("a")]
    refused(world, AlreadyExists, 'task "a" is declared twice', lambda: client.create("new", tasks=twice))
    fields = [Field("f", "int8"), Field("f", "int8")]
    refused(world, AlreadyExists, 'field "f" is declared twice', lambda: client.create("new", fields=fields))
    refused(
        world, UsageError, "65 tasks are declared", lambda: client.create("n", tasks=[Task(f"t{x}") for x in range(65)])
    )
    refused(world, UsageError, "129 characters", lambda: client.create("n" * 129))
    refused(world, UsageError, "characters that names may not have", lambda: client.create("a b"))
    refused(world, AlreadyExists, 'table "t" exists already', lambda: client.create())
    other = [Task("grade", ["nothing"])]
    text = 'table "t" exists with other terms: limits, task "grade"; give the terms that it was made with'
    refused(
        world,
        AlreadyExists,
        text,
        lambda: client.create(exist_ok=True, tasks=other, limits=Limits(rows=3), extra_fields=True),
    )
    plugin = [Task("x", selector=Plugin("mine"))]
    refused(world, NotFound, 'selector plugin "mine" is not installed', lambda: client.create("new", tasks=plugin))
    forever = [Task("x", lease_s=float("inf"))]
    refused(world, UsageError, "lease_s is inf", lambda: client.create("new", tasks=forever))


def test_a_task_declared_again_with_other_terms(world: World, client: Driver) -> None:
    client.apply(m.AddTask("t", TASKS[0]))
    other = m.AddTask("t", Task("grade", ["pixels"]))
    refused(world, AlreadyExists, 'task "grade" of table "t" exists with other terms', lambda: client.apply(other))


def test_fields_against_the_schema(world: World, client: Driver) -> None:
    other = m.AddFields("t", [Field("new", "int8"), Field("ids", "str")])
    refused(world, SchemaError, 'field "ids" of table "t" is int64[None], not str', lambda: client.apply(other))
    many = m.AddFields("t", [Field(f"f{number}", "int8") for number in range(1024)])
    refused(world, UsageError, "would have 1026 fields; at most 1024", lambda: client.apply(many))


def test_a_clock_that_is_a_weight_channel(world: World, client: Driver) -> None:
    client.create("w", tasks=[Task("x")], pacing=Pacing("x", 1, channel="policy", on_stale=KeepStale()))
    text = 'the clock of table "w" is weight channel "policy"; publish a version there'
    refused(world, UsageError, text, lambda: client.advance(1, table="w"))


# ---------------------------------------------------------------- sessions and messages


def test_a_session_that_is_not_open(world: World, client: Driver) -> None:
    client.close()
    refused(world, Disconnected, f"session {client.session} is not open", lambda: client.put(1))


def test_messages_that_are_not_for_the_ledger(world: World, client: Driver) -> None:
    refused(world, ProtocolError, "Hello is not a request for the ledger", lambda: client.apply(m.Hello(b"")))
    refused(world, UsageError, "'x' cannot be observed", lambda: client.observe("x"))
    refused(world, NotFound, "row 99 was never put", lambda: client.observe("row", "t", 99))
