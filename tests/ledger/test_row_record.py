"""What a table knows of the rows that no file contains: whatever files are told of, in whatever order they come."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.ledger.driver import World
from transferqueue.errors import Impossible
from transferqueue.ledger.rows import DONE, EndedRows, RowRecord
from transferqueue.policies import Recorded, Task


def ended(*rows: int) -> EndedRows:
    return EndedRows(0.0, DONE, "", np.array(rows), np.array(rows) % 3, {row: f"k{row}" for row in rows if row % 2})


def told(record: RowRecord) -> list[tuple[list[int], list[int], dict[int, str]]]:
    return [(one.rows.tolist(), one.steps.tolist(), one.keys) for one in record.ended]


@pytest.mark.parametrize("seed", range(20))
def test_what_files_contain_leaves_and_the_rest_keeps_its_order(seed: int) -> None:
    draw = random.Random(seed)
    ids = draw.sample(range(40_000), 15_000)
    record, wanted = RowRecord("life"), list[list[int]]()
    while ids:
        rows = [ids.pop() for _ in range(min(len(ids), draw.choice([1, 1, 1, 7, 500])))]
        record.end(ended(*rows))
        wanted.append(rows)
    for number in range(1, 4):
        gone = {row for rows in wanted for row in rows if draw.random() < 0.1 * number}
        record.recorded(number, np.array(sorted(gone), np.int64))
        wanted = [rest for rows in wanted if (rest := [row for row in rows if row not in gone])]
        assert told(record) == told(RowRecord("", ended=[ended(*rows) for rows in wanted]))
        assert record.waiting == sum(map(len, wanted))
    record.recorded(9, np.array([], np.int64))
    assert (record.files, len(record.ended)) == (9, len(wanted))


@pytest.mark.timeout(60)
def test_many_requests_of_one_row_are_recorded_in_little_time() -> None:
    """Less than a second. A search for each request takes minutes."""
    rows = 100_000
    record = RowRecord("life")
    for row in range(rows):
        record.end(EndedRows(0.0, DONE, "", np.array([row]), np.array([-1]), {}))
    for first in range(4):
        record.recorded(first, np.arange(first, rows, 4))
    assert (record.ended, record.waiting) == ([], 0)


def test_a_block_that_the_server_could_not_read_for_a_file_is_refused() -> None:
    """It lies in a shard with more memory than the server has."""
    world = World()
    client = world.client()
    client.create("recorded", tasks=[Task("train")], retention=Recorded("run"))
    client.create("other", tasks=[Task("train")])
    world.ledger.refuse_to_record_beyond(4)
    with pytest.raises(Impossible, match=r'can never be recorded: table "recorded" .* put fewer rows at a time'):
        client.put(4, ["x"], table="recorded")
    assert world.table("recorded").rows_put == 0
    assert client.put(4, ["x"], table="other") == [0, 1, 2, 3]


def test_a_row_keeps_the_step_with_which_a_task_acked_it() -> None:
    """Also one that a checkpoint covers already, one whose last task is another, and one that another task drops."""
    world = World()
    client = world.client()
    client.create(tasks=[Task("train"), Task("score")], retention=Recorded("run"))
    client.put(5)
    client.ack(client.lease("train", 1), step=3)
    client.checkpointed(5, "train")
    client.ack(client.lease("train", 1), step=5)  # covered
    client.ack(client.lease("train", 1))
    client.ack(client.lease("score", 4))
    client.ack(client.lease("train", 2), step=7)
    client.checkpointed(7, "train")
    client.drop([4], "stale_use")
    record = world.table().record
    assert record is not None
    steps = [step for one in record.ended for step in zip(one.rows.tolist(), one.steps.tolist(), strict=True)]
    assert sorted(steps) == [(0, 3), (1, 5), (2, -1), (3, 7), (4, 7)]


def test_a_batch_has_the_events_since_the_first_of_its_rows_was_put() -> None:
    """Those of rows that have their file are read again for no later one."""
    world = World()
    client = world.client()
    client.create("recorded", tasks=[Task("train")], retention=Recorded("run"))
    for _ in range(2):
        world.pass_time(1.0)
        client.drop(client.put(2, table="recorded"), table="recorded")
        world.pass_time(1.0)
    whole = world.ledger.next_ended("recorded", 4, world.now)
    assert whole is not None
    assert [(event.what, event.rows.tolist()) for event in whole.events] == [
        ("put", [0, 1]), ("dropped", [0, 1]), ("put", [2, 3]), ("dropped", [2, 3])
    ]  # fmt: skip
    world.ledger.rows_recorded("recorded", 1, [0, 1], world.now)
    rest = world.ledger.next_ended("recorded", 4, world.now)
    assert rest is not None
    assert [event.rows.tolist() for event in rest.events] == [[2, 3], [2, 3]]
