"""Columns that end with their last task, and columns that a caller frees: values, bytes, errors, restarts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.ledger.driver import Driver, World, ids
from transferqueue.errors import AlreadyExists, ColumnFreed, Impossible, LeaseExpired, NotFound, UsageError
from transferqueue.ledger import Blocked, Ledger
from transferqueue.policies import Acked, AckedColumns, Complete, Manual, ManualColumns, Pacing, Requeue, Task
from transferqueue.schema import Field
from transferqueue.wire import messages as m
from transferqueue.wire.answers.row import RowField

TASKS = (Task("look", ["image"]), Task("score", ["image", "text"], ["score"]), Task("train", ["text", "score"]))


def world_of(tasks: Any = TASKS, retention: Any = None, **terms: Any) -> tuple[World, Driver]:
    world = World()
    client = world.client("author")
    client.create(tasks=tasks, retention=retention or AckedColumns(), **terms)
    return world, client


def put_apart(client: Driver, rows: int, *names: str, **facts: Any) -> list[int]:
    """Rows with each column in a block and an extent of its own, as clients write them."""
    fields = [Field(name, "int64", (None,)) for name in names]
    blocks = [client.block([field], rows) for field in fields]
    reply = client.apply(m.PutRequest("t", rows, m.Columns(fields, blocks, [], client.columns(rows, **facts).facts)))
    return list(range(reply.first, reply.first + reply.rows))


def do(client: Driver, task: str, rows: int, **terms: Any) -> None:
    lease = client.lease(task, rows)
    columns = client.columns(rows, (), {"score": 1.0}) if task == "score" else None
    client.unpin(lease.blocks())
    client.ack(lease, columns=columns, **terms)


def bytes_of(world: World) -> int:
    return world.table().usage.bytes


# ---------------------------------------------------------------- by rule


def test_a_column_ends_with_the_last_task_that_needs_it() -> None:
    world, client = world_of()
    put_apart(client, 4, "image", "text")
    image = world.ledger.state.core.blocks.blocks[1].nbytes
    do(client, "look", 4)
    assert world.stats().columns_freed == 0  # score needs the image, too
    do(client, "score", 3)
    assert (world.stats().columns_freed, world.stats().column_bytes_freed) == (3, 0)  # a row still has the block
    before = bytes_of(world)
    do(client, "score", 1)
    assert (world.stats().columns_freed, world.stats().column_bytes_freed) == (4, image)
    assert (bytes_of(world), world.freed) == (before - image, [1])
    assert world.stats().rows_live == 4
    do(client, "train", 4)
    assert (world.freed, bytes_of(world), world.stats().columns_freed) == ([1, 2], 0, 4)
    assert world.audit().tables["t"].rows_done == 4


def test_columns_stay_with_their_rows_unless_the_table_says_otherwise() -> None:
    for retention in (Acked(), Manual(), ManualColumns()):
        world, client = world_of(retention=retention)
        put_apart(client, 1, "image", "text")
        do(client, "look", 1)
        do(client, "score", 1)
        assert (world.stats().columns_freed, world.freed) == (0, [])
        assert client.read([0], fields=["image"]).rows


def test_a_column_that_no_task_needs_stays_with_its_row_and_inline_values_stay() -> None:
    world, client = world_of()
    put_apart(client, 1, "image", "text", "notes")
    do(client, "look", 1)
    do(client, "score", 1)
    read = client.read([0], fields=["text", "notes", "score"])
    assert read.rows
    assert [one.field for one in read.inline] == ["score"]
    assert world.freed == [1]


def test_columns_of_one_block_end_one_by_one_and_its_bytes_with_the_last() -> None:
    world, client = world_of()
    client.put(2, ["image", "text"])
    do(client, "look", 2)
    do(client, "score", 2)
    assert (world.stats().columns_freed, world.stats().column_bytes_freed, world.freed) == (2, 0, [])
    do(client, "train", 2)
    assert world.freed == [1]


def test_a_view_keeps_the_bytes_of_a_column_that_ended() -> None:
    world, client = world_of()
    put_apart(client, 1, "image", "text")
    reader = world.client()
    seen = reader.read([0], fields=["image"])
    do(client, "look", 1)
    do(client, "score", 1)
    assert (world.freed, world.stats().column_bytes_freed > 0) == ([], True)
    reader.unpin([at.block for part in seen.parts for at in part.blocks])
    assert world.freed == [1]


def test_a_row_acked_with_a_step_keeps_its_columns_until_a_checkpoint_covers_it() -> None:
    world, client = world_of()
    put_apart(client, 1, "image", "text")
    do(client, "look", 1, step=3)
    do(client, "score", 1)
    assert world.stats().columns_freed == 0
    assert client.rollback(2, "look").rows == 1
    do(client, "look", 1, step=3)
    client.checkpointed(3, "look")
    assert (world.stats().columns_freed, world.freed) == (1, [1])


def test_a_column_stays_while_a_stale_row_may_be_requeued_to_a_task_that_needs_it() -> None:
    tasks = [Task("answer", ["image"], ["text"]), Task("train", ["text"])]
    pacing = Pacing("train", 1, 3, 0, Requeue("answer"))
    world, client = world_of(tasks, pacing=pacing)
    put_apart(client, 2, "image", policy_version=0)
    given = client.lease("answer", 2)
    client.ack(given, columns=client.columns(2, ["text"]))
    assert world.stats().columns_freed == 0
    client.advance(1)  # both rows are stale, and go back to "answer", which still has the image
    given = client.lease("answer", 2)
    assert given.rows == [0, 1]
    client.ack(given, columns=client.columns(2, ["text"], policy_version=1))
    do(client, "train", 1)
    assert world.stats().rows_done == 1


def test_members_that_come_too_late_for_a_group_do_not_keep_their_columns() -> None:
    tasks = [Task("train", ["image"], groups=Complete(min_size=1, deadline_s=5)), Task("log", ["text"])]
    world, client = world_of(tasks)
    put_apart(client, 2, "image", "text", group_id=1, group_size=2)
    given = client.lease("train", groups=1)
    client.unpin(given.blocks())
    client.ack(given)
    assert world.stats().columns_freed == 2
    assert world.stats().tasks["log"].ready == 2


def test_a_result_that_was_used_and_freed_is_not_asked_for_again() -> None:
    tasks = [Task("a", ["x"], ["y"]), Task("b", ["x"], ["y"]), Task("c", ["y"]), Task("d", ["x"])]
    world, client = world_of(tasks)
    put_apart(client, 1, "x")
    client.ack(client.lease("a", 1), columns=client.columns(1, ["y"]))
    client.ack(client.lease("c", 1))
    assert world.stats().columns_freed == 1
    client.ack(client.lease("b", 1))
    assert world.stats().tasks["b"].done == 1


# ---------------------------------------------------------------- readers


def test_reading_a_column_that_ended_says_when_and_why() -> None:
    world, client = world_of()
    put_apart(client, 2, "image", "text")
    do(client, "look", 2)
    do(client, "score", 1)
    world.pass_time(12.0)
    with pytest.raises(
        ColumnFreed,
        match=r'column "image" of row 0 in table "t" was freed 12.0 s ago: task "score" was the last that needs it',
    ):
        client.read([0, 1], fields=["image"])
    assert client.read([1], fields=["image"]).rows
    content = client.read([0, 1])
    assert [part.fields for part in content.parts] == [["text"]]
    life = client.observe("row", "t", 0)
    assert life.fields["image"] == RowField(set=False, freed=True)
    assert [event.detail for event in life.events if event.what == "columns freed"] == ["image"]


def test_a_task_may_not_lease_a_column_that_ends_without_it() -> None:
    world, client = world_of()
    put_apart(client, 1, "image", "text", "notes")
    do(client, "score", 1)
    before = world.stats()
    with pytest.raises(
        UsageError,
        match=r'task "train" does not need field "image", which table "t" frees as soon as look, score are done',
    ):
        client.lease("train", 1, fields=["text", "image"])
    assert world.stats() == before
    assert client.lease("train", 1, fields=["text", "notes"]).rows == [0]  # nobody needs notes: they stay


def test_a_new_task_may_not_wait_for_columns_that_ended() -> None:
    _world, client = world_of()
    put_apart(client, 1, "image", "text")
    do(client, "look", 1)
    do(client, "score", 1)
    with pytest.raises(Impossible, match=r'task "more" would wait for ever: column "image" of row 0 .* from_="now"'):
        client.add_task(Task("more", ["image"]))
    client.add_task(Task("more", ["image"], from_="now"))
    client.add_task(Task("other", ["text"]))
    assert put_apart(client, 1, "image", "text") == [1]
    assert client.lease("more", 1).rows == [1]
    assert client.lease("other", 2).rows == [0, 1]


def test_a_column_that_was_freed_may_be_written_again() -> None:
    _world, client = world_of()
    put_apart(client, 1, "image", "text")
    do(client, "look", 1)
    do(client, "score", 1)
    client.update([0], ["image"])
    assert client.read([0], fields=["image"]).rows
    with pytest.raises(AlreadyExists):
        client.update([0], ["image"])
    assert client.observe("row", "t", 0).fields["image"].freed is False


# ---------------------------------------------------------------- by hand


def test_a_caller_frees_columns_of_rows_that_live_on() -> None:
    world, client = world_of([Task("use", ["text"])], Manual())
    put_apart(client, 3, "image", "text")
    assert client.free([0, 2], ["image"]).rows == 2
    assert client.free([0, 1, 2], ["image"]).rows == 1  # what is gone does not count
    assert (world.freed, world.stats().columns_freed) == ([1], 3)
    world.pass_time(3.0)
    with pytest.raises(ColumnFreed, match=r"freed 3.0 s ago by free_columns, which author called"):
        client.read([1], fields=["image"])
    assert client.lease("use", 3).rows == [0, 1, 2]


def test_inline_columns_and_columns_of_ended_rows_are_freed_too() -> None:
    _world, client = world_of([Task("use", ["text"])], Manual())
    client.put(1, ["text"], {"score": 3.0})
    client.ack(client.lease("use", 1))
    assert client.free([0], ["score", "text"]).rows == 2
    with pytest.raises(ColumnFreed):
        client.read([0], fields=["score"])
    client.delete([0])


def test_a_column_that_a_task_needs_is_not_freed_under_it() -> None:
    world, client = world_of([Task("use", ["image"]), Task("log", ["text"])], Manual())
    put_apart(client, 3, "image", "text")
    given = client.lease("use", 1)
    client.ack(client.lease("use", 1), step=4)
    before = world.stats()
    for row, state in ((0, "leased"), (1, "stepped"), (2, "ready")):
        with pytest.raises(
            UsageError,
            match=rf'column "image" of row {row} .* task "use" may still need it \(the row is {state} there\)',
        ):
            client.free([row], ["text" if row > 2 else "image"])
    assert world.stats() == before
    client.ack(given)
    assert client.free([0], ["image"]).rows == 1


def test_a_column_freed_again_is_waited_for_by_tasks_that_had_it() -> None:
    world, client = world_of([Task("use", ["image"]), Task("log", ["text"])], Manual())
    put_apart(client, 3, "image", "text")
    client.ack(client.lease("use", 1))
    held = client.lease("use", 1)
    assert client.free([0, 1, 2], ["image"], again=True).rows == 3
    with pytest.raises(LeaseExpired):
        client.ack(held)
    assert (world.stats().tasks["use"].pending, world.stats().tasks["log"].ready) == (3, 3)
    with pytest.raises(NotFound, match='does not have "image" yet') as unread:
        client.read([0], fields=["image"])
    assert not isinstance(unread.value, ColumnFreed)
    client.add_task(Task("late", ["image"]))  # as one for a column that is not written yet
    client.update([0, 1, 2], ["image"])
    assert client.lease("use", 3).rows == client.lease("late", 3).rows == [0, 1, 2]
    assert world.audit().balanced


def test_free_columns_refuses_what_it_cannot_do_and_changes_nothing() -> None:
    world, client = world_of([Task("train", ["image"], groups=Complete())], Manual())
    put_apart(client, 2, "image", group_id=1, group_size=2)
    before = world.stats()
    with pytest.raises(NotFound, match='field "picture" is not in table "t"; it has image'):
        client.free([0], ["picture"])
    with pytest.raises(NotFound, match="row 7 was never put"):
        client.free([7], ["image"])
    with pytest.raises(UsageError, match="without fields frees nothing"):
        client.free([0], [])
    with pytest.raises(UsageError, match='task "train" of table "t" takes whole groups and needs "image"'):
        client.free([0], ["image"], again=True)
    assert world.stats() == before


# ---------------------------------------------------------------- what outlives a server


def test_an_image_and_a_snapshot_remember_what_was_freed() -> None:
    world, client = world_of()
    put_apart(client, 2, "image", "text")
    do(client, "look", 2)
    do(client, "score", 1)
    stats = world.stats()
    world.ledger = Ledger.from_image(world.ledger.image())
    with pytest.raises(ColumnFreed, match='task "score" was the last'):
        client.read([0], fields=["image"])
    other = World()
    other.ledger.restore_snapshot(world.ledger.take_snapshot(world.now), other.now)
    reader = other.client()
    with pytest.raises(ColumnFreed, match=r"was freed \(the time was evicted from the log\)"):
        reader.read([0], fields=["image"])
    assert ids(reader.read([1], fields=["image"]).rows) == [1]
    assert other.stats().columns_freed == stats.columns_freed == 1


def test_a_lost_value_whose_giver_lacks_its_freed_input_ends_its_row() -> None:
    tasks = [Task("answer", ["image"], ["text"]), Task("train", ["text"]), Task("log", ["text"])]
    world, client = world_of(tasks)
    put_apart(client, 1, "image")
    client.ack(client.lease("answer", 1), columns=client.columns(1, ["text"]))
    blocks = np.array(list(world.ledger.state.core.blocks.blocks), np.int64)
    assert world.ledger.blocks_lost(blocks.tolist(), world.now) == {"t": [0]}
    assert world.audit().balanced
    assert isinstance(client.lease("answer", 1, wait_s=1.0), Blocked)
