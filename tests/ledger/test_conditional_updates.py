"""An update that is made only if rows have what was read of them: `Update.if_unchanged`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tests.ledger.driver import Driver, World, i64
from transferqueue.errors import NotFound, ProtocolError, RowsChanged, UsageError
from transferqueue.limits import FIELDS_MAX
from transferqueue.policies import Manual, Task
from transferqueue.wire import codec
from transferqueue.wire import messages as m


@pytest.fixture
def world() -> World:
    world = World()
    client = world.client()
    client.create("open", tasks=[Task("train", ["ids"])], retention=Manual())
    for _ in range(2):
        client.put(2, ["ids", "mask"], {"score": [1.0, np.nan]}, table="open", tags=[{"n": 1}, {}])
    return world


ROWS = [0, 1, 2, 3]


def read(
    client: Driver, rows: Sequence[int] = ROWS, fields: Sequence[str] = ("ids", "score"), *, tags: bool = False
) -> m.RowsRead:
    """What a client makes of a reply."""
    content = client.read(rows, table="open", fields=list(fields))
    placed = []
    for part in content.parts:
        numbers = np.array([at.block for at in part.blocks], "<i8")
        index = codec.decode_constant(part.block_of_row, "<i4", len(rows))
        placed.append(m.BlocksRead(part.fields, codec.encode_constant(numbers[index])))
    seen = content.tags if content.tags is not None else [{} for _ in rows]
    return m.RowsRead(content.inline, placed, seen if tags else None)


def update(client: Driver, seen: m.RowsRead, rows: Sequence[int] = ROWS, **facts: Any) -> Any:
    columns = client.columns(len(rows), ["ids"], **facts)
    return client.apply(m.Update("open", i64(rows), columns, True, seen))


def state(client: Driver) -> Any:
    content = client.read(ROWS, table="open", fields=["ids", "mask", "score"])
    client.unpin([at.block for part in content.parts for at in part.blocks])
    return content.inline, content.parts, content.tags, client.observe("audit")


BAD: list[tuple[str, Callable[[m.RowsRead], m.RowsRead], type[Exception], str]] = [
    ("nothing", lambda seen: m.RowsRead(), UsageError, "neither fields nor tags"),
    (
        "an unknown field",
        lambda seen: m.RowsRead([m.Inline("y", bytes(32))]),
        NotFound,
        'field "y" is not in table "open"',
    ),
    (
        "few values",
        lambda seen: m.RowsRead([m.Inline("score", bytes(24))]),
        UsageError,
        'field "score" has 24 bytes; 4 rows',
    ),
    (
        "values of blocks",
        lambda seen: m.RowsRead([m.Inline("ids", bytes(32))]),
        UsageError,
        'field "ids", which lies in blocks',
    ),
    ("blocks of values", lambda seen: m.RowsRead([], [m.BlocksRead(["score"], bytes(8))]), UsageError, "travel inline"),
    ("few blocks", lambda seen: m.RowsRead([], [m.BlocksRead(["ids"], bytes(16))]), ProtocolError, "16 bytes"),
    ("a field twice", lambda seen: m.RowsRead(seen.inline * 2), UsageError, 'names field "score" twice'),
    (
        "many fields",
        lambda seen: m.RowsRead([], [m.BlocksRead(["ids"] * (FIELDS_MAX + 1), bytes(8))]),
        UsageError,
        f"names {FIELDS_MAX + 1} fields",
    ),
    ("no field", lambda seen: m.RowsRead(seen.inline, [m.BlocksRead([], bytes(8))]), UsageError, "blocks of no fields"),
    ("few tags", lambda seen: m.RowsRead([], [], [{}]), UsageError, "tags of 1 row; the update names 4 rows"),
    (
        "another block",
        lambda seen: m.RowsRead([], [m.BlocksRead(["ids"], i64([99]))]),
        RowsChanged,
        "of rows 0, 1, 2, 3",
    ),
    ("a negative block", lambda seen: m.RowsRead([], [m.BlocksRead(["ids"], i64([-1]))]), RowsChanged, 'field "ids"'),
]


@pytest.mark.parametrize(("made", "error", "text"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_what_does_not_hold_is_refused_and_changes_nothing(
    world: World, made: Callable[[m.RowsRead], m.RowsRead], error: type[Exception], text: str
) -> None:
    client = world.client()
    seen, before = read(client), state(client)
    with pytest.raises(error, match=text):
        update(client, made(seen), inline={"score": 5.0}, tags=[{"n": 2}] * 4)
    assert state(client) == before


def test_rows_that_did_not_change_are_updated(world: World) -> None:
    client = world.client()
    assert update(client, read(client), inline={"score": 5.0}) == m.DoneReply(4)
    assert np.frombuffer(read(client).inline[0].data).tolist() == [5.0] * 4


def test_only_the_first_of_two_that_read_the_same_updates(world: World) -> None:
    first, second = world.client(), world.client()
    both = read(first), read(second)
    update(first, both[0], inline={"score": 2.0})
    before = state(first)
    with pytest.raises(
        RowsChanged, match=r"rows 0, 1, 2, 3 in table \"open\" changed after the read.*read the rows again"
    ):
        update(second, both[1], inline={"score": 3.0})
    assert state(first) == before
    update(second, read(second), inline={"score": 3.0})


WRITES: list[tuple[str, Callable[[Driver], Any], bool]] = [
    ("the same field in a block of its own", lambda one: one.update([2], ["ids"], table="open", overwrite=True), True),
    ("both fields of the block", lambda one: one.update([2], ["mask", "ids"], table="open", overwrite=True), True),
    ("the inline field", lambda one: one.update([2], inline={"score": 7.0}, table="open", overwrite=True), True),
    ("the same inline value", lambda one: one.update([2], inline={"score": 1.0}, table="open", overwrite=True), False),
    ("another field of the block", lambda one: one.update([2], ["mask"], table="open", overwrite=True), False),
    ("another row", lambda one: one.update([3], ["ids"], table="open", overwrite=True), False),
    ("tags", lambda one: one.update([2], table="open", tags=[{"n": 9}]), False),
]


@pytest.mark.parametrize(("write", "changes"), [case[1:] for case in WRITES], ids=[case[0] for case in WRITES])
def test_a_write_in_between_is_noticed_where_it_matters(
    world: World, write: Callable[[Driver], Any], changes: bool
) -> None:
    client, other = world.client(), world.client()
    seen = read(client, [2])
    write(other)
    if changes:
        with pytest.raises(RowsChanged, match="row 2"):
            update(client, seen, [2])
    else:
        update(client, seen, [2])


def test_tags_are_compared_if_they_were_read(world: World) -> None:
    client, other = world.client(), world.client()
    seen = read(client, fields=(), tags=True)
    other.update([2], table="open", tags=[{"n": True}])  # equal to 1 for Python, not for a reader
    with pytest.raises(RowsChanged, match="the tags of row 2 "):
        update(client, seen, tags=[{"n": 2}] * 4)
    update(client, read(client, fields=(), tags=True), tags=[{"n": 2}] * 4)
    assert read(client, fields=(), tags=True).tags == [{"n": 2}] * 4


def test_a_row_that_is_gone_is_not_found(world: World) -> None:
    client, other = world.client(), world.client()
    seen = read(client)
    other.delete([2], table="open")
    with pytest.raises(NotFound, match="row 2"):
        update(client, seen)


def test_counters_by_many_clients_lose_no_addition(world: World) -> None:
    """Each client adds 1 by compare and retry, in a random order of reads and updates."""
    clients = [world.client() for _ in range(5)]
    clients[0].update([0], inline={"score": 0.0}, table="open", overwrite=True)
    chance, seen, done = np.random.default_rng(7), dict[int, m.RowsRead](), [0] * len(clients)
    while min(done) < 20:
        number = int(chance.integers(len(clients)))
        if number not in seen:
            seen[number] = read(clients[number], [0], ["score"])
            continue
        value = float(np.frombuffer(seen[number].inline[0].data)[0])
        try:
            columns = clients[number].columns(1, inline={"score": value + 1})
            clients[number].apply(m.Update("open", i64([0]), columns, True, seen.pop(number)))
            done[number] += 1
        except RowsChanged:
            pass
    assert np.frombuffer(read(clients[0], [0], ["score"]).inline[0].data)[0] == sum(done)


def test_the_answer_of_a_retry_is_that_of_the_first_try(world: World) -> None:
    """A client that lost the answer sends the call again: it must not conflict with itself."""
    client = world.client()
    request = m.Update("open", i64([0]), client.columns(1, ["ids"]), True, read(client, [0]))
    client.call += 1
    assert client.apply(request, client.call) == client.apply(request, client.call) == m.DoneReply(1)
