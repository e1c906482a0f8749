"""An ack must bring the fields that its task gives; tasks learn when no task will give a field any more."""

from __future__ import annotations

import pytest

from tests.ledger.driver import Driver, World
from transferqueue.errors import AlreadyExists, DeadlineExceeded, EndOfTable, Impossible, UsageError
from transferqueue.ledger import Blocked
from transferqueue.policies import Complete, DeliverPartial, Task

REWARD = Task("reward", ["x"], ["rewards", "trace"], lease_s=10.0)
TRAIN = Task("train", ["x", "rewards"], lease_s=10.0)


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def client(world: World) -> Driver:
    driver = world.client("worker")
    driver.create(tasks=[REWARD, TRAIN])
    return driver


def scores(client: Driver, rows: int, name: str = "rewards") -> dict[str, object]:
    return {"columns": client.columns(rows, inline={name: 1.0})}


# ---------------------------------------------------------------- an ack without what it owes


def test_an_ack_without_what_another_task_needs_is_refused_and_the_lease_stays(client: Driver) -> None:
    client.put(2, ["x"])
    lease = client.lease("reward", 2)
    text = (
        'the ack of rows 0, 1 by task "reward" of table "t" has no "rewards", which task "reward" gives and task '
        '"train" '
        r"needs\. Nothing was changed.*ack them with rewards=\.\.\., or end rows that have no result by batch\.drop"
    )
    before = client.observe("stats").tables["t"].tasks["reward"]
    with pytest.raises(UsageError, match=text):
        client.ack(lease)
    after = client.observe("stats").tables["t"].tasks["reward"]
    assert (before.leased, before.done) == (after.leased, after.done) == (2, 0)
    assert client.ack(lease, **scores(client, 2)).rows == 2
    assert client.lease("train", 2).rows == [0, 1]


def test_a_column_by_nearly_that_name_is_named_in_the_refusal_and_not_added(world: World, client: Driver) -> None:
    client.put(1, ["x"])
    lease = client.lease("reward", 1)
    with pytest.raises(UsageError, match='it has "reward", and "rewards" is meant'):
        client.ack(lease, **scores(client, 1, "reward"))
    assert "reward" not in world.table().rows.fields
    with pytest.raises(UsageError, match="needs; it has zeal"):
        client.ack(lease, **scores(client, 1, "zeal"))


def test_what_no_other_task_needs_may_stay_away(client: Driver) -> None:
    client.put(1, ["x"])
    assert client.ack(client.lease("reward", 1), **scores(client, 1)).rows == 1, "nobody needs trace"


def test_a_task_may_replace_what_it_has_read_and_nothing_else(client: Driver) -> None:
    client.put(2, ["x"])
    lease = client.lease("reward", 2)
    client.update([0, 1], inline={"rewards": 2.0})
    with pytest.raises(AlreadyExists, match='field "rewards"'):
        client.ack(lease, **scores(client, 2))
    assert client.ack(lease, columns=client.columns(2, ["x"])).rows == 2


def test_what_the_rows_have_already_need_not_come_again(client: Driver) -> None:
    client.put(3, ["x"])
    lease = client.lease("reward", 3)
    client.update([0, 1], inline={"rewards": 2.0})
    assert client.ack(lease, [0]).rows == 1
    with pytest.raises(UsageError, match=r'the ack of row 2 by task "reward"'):
        client.ack(lease, [1, 2])
    with pytest.raises(AlreadyExists):
        client.ack(lease, [1, 2], **scores(client, 2))
    client.release(lease, [2], **scores(client, 1))
    assert client.ack(lease).rows == 1
    assert client.ack(client.lease("reward", 1)).rows == 1, "its progress has the field"


def test_rows_without_a_result_are_ended_by_a_drop_and_those_dropped_meanwhile_owe_nothing(
    world: World, client: Driver
) -> None:
    client.put(3, ["x"])
    lease = client.lease("reward", 3)
    client.ack(lease, [0], drop="no_result")
    client.drop([1], "spoilt")
    assert client.ack(lease, [1, 2], **scores(client, 2)).rows == 1
    assert world.table().rows_dropped == {"no_result": 1, "spoilt": 1}


def test_of_several_tasks_that_give_a_field_the_last_one_owes_it(client: Driver) -> None:
    client.create("two", tasks=[REWARD, Task("judge", ["x"], ["rewards"]), TRAIN])
    client.put(1, ["x"], table="two")
    first = client.lease("reward", 1, table="two")
    assert client.ack(first, table="two").rows == 1, "judge still has the row"
    last = client.lease("judge", 1, table="two")
    with pytest.raises(UsageError, match='by task "judge" of table "two" has no "rewards"'):
        client.ack(last, table="two")


def test_the_last_of_several_replicas_cannot_end_rows_without_a_result(client: Driver) -> None:
    client.put(1, ["x"])
    for replica in (0, 1):
        lease = client.lease("reward", 1, replica=replica, replicas=2)
    client.ack(lease)
    with pytest.raises(UsageError, match='has no "rewards"'):
        client.ack(lease)
    assert client.ack(lease, **scores(client, 1)).rows == 1


def test_an_ack_with_a_step_owes_the_same(client: Driver) -> None:
    client.put(1, ["x"])
    lease = client.lease("reward", 1)
    with pytest.raises(UsageError, match='has no "rewards"'):
        client.ack(lease, step=3)
    client.ack(lease, step=3, **scores(client, 1))
    assert client.rollback(1, "reward").rows == 1
    assert client.ack(client.lease("reward", 1), step=2).rows == 1, "a rollback clears no column"


def test_a_task_that_takes_groups_is_told_how_to_end_single_rows(client: Driver) -> None:
    client.create("g", tasks=[Task("rank", ["x"], ["rank"], groups=Complete()), Task("use", ["rank"])])
    client.put(2, ["x"], table="g", group_id=1, group_size=2)
    lease = client.lease("rank", groups=1, table="g")
    with pytest.raises(UsageError, match=r"end rows that have no result by table\.drop"):
        client.ack(lease, table="g")
    client.drop([0], "no_result", table="g")
    assert client.ack(lease, [0, 1], table="g", columns=client.columns(2, inline={"rank": 1.0})).rows == 1


# ---------------------------------------------------------------- what nobody gives any more, after the seal


def test_who_waits_in_a_sealed_table_for_what_nobody_gives_any_more_learns_it_at_once(client: Driver) -> None:
    client.create("late", tasks=[REWARD, Task("log", ["x"])])
    rows = client.put(3, ["x"], table="late")
    client.ack(client.lease("reward", 3, table="late"), table="late")
    client.update(rows[:1], inline={"rewards": 1.0}, table="late")
    client.add_task(TRAIN, table="late")
    with pytest.raises(DeadlineExceeded, match='no task will give "rewards" of 2 rows'):
        client.lease("train", 2, table="late")
    assert isinstance(client.lease("train", 2, table="late", wait_s=5.0), Blocked), "rows may still be put"
    client.seal("late")
    last = client.lease("train", 3, table="late", wait_s=5.0)
    assert last.rows == rows[:1], "what is left"
    assert isinstance(client.lease("train", 3, table="late", wait_s=5.0), Blocked), "the row may come back"
    client.ack(last, table="late")
    text = (
        r'task "train" of table "late" can never progress: the table is sealed, and 2 rows lack "rewards" '
        r'\(given by "reward": no task will give "rewards" of 2 rows\)\. Give rewards with update\(\), or end'
    )
    with pytest.raises(Impossible, match=text):
        client.lease("train", 3, table="late", wait_s=5.0)
    client.update(rows[1:], inline={"rewards": 1.0}, table="late")
    client.ack(client.lease("train", 2, table="late"), table="late")
    with pytest.raises(EndOfTable):
        client.lease("train", 2, table="late")


def test_a_wait_goes_on_while_a_task_before_it_moves_and_is_woken_by_its_end(world: World, client: Driver) -> None:
    pad = Task("pad", ["rewards"], ["padded"])
    client.create("chain", tasks=[REWARD, Task("log", ["x"])])
    client.put(2, ["x"], table="chain")
    client.ack(client.lease("reward", 1, table="chain"), table="chain")
    client.add_task(pad, table="chain")
    client.add_task(Task("use", ["padded"]), table="chain")
    client.seal("chain")
    assert isinstance(client.lease("use", 1, table="chain", wait_s=5.0), Blocked)
    world.woken.clear()
    reward = client.lease("reward", 1, table="chain")
    client.ack(reward, table="chain", **scores(client, 1))
    padding = client.lease("pad", 1, table="chain")
    assert isinstance(client.lease("use", 2, table="chain", wait_s=5.0), Blocked)
    client.ack(padding, table="chain", **scores(client, 1, "padded"))
    assert ("task", "chain", "use") in world.woken
    client.ack(client.lease("use", 2, table="chain"), table="chain")
    with pytest.raises(
        Impossible, match=r'task "use".* 1 row lacks "padded" \(given by "pad": 1 without what "pad" needs'
    ):
        client.lease("use", 1, table="chain", wait_s=5.0)
    with pytest.raises(Impossible, match='task "pad"'):
        client.lease("pad", 1, table="chain", wait_s=5.0)


def test_a_field_that_no_task_gives_may_come_by_an_update_after_the_seal(client: Driver) -> None:
    client.create("open", tasks=[Task("train", ["x", "rewards"])])
    rows = client.put(1, ["x"], table="open")
    client.seal("open")
    assert isinstance(client.lease("train", 1, table="open", wait_s=5.0), Blocked)
    with pytest.raises(DeadlineExceeded, match='1 row lacks "rewards"'):
        client.lease("train", 1, table="open")
    client.update(rows, inline={"rewards": 1.0}, table="open")
    assert client.lease("train", 1, table="open").rows == rows


def test_members_that_came_too_late_for_the_task_that_gives_are_told_to_who_waits_for_them(world: World) -> None:
    client = world.client()
    rule = Complete(min_size=1, deadline_s=5, incomplete=DeliverPartial())
    client.create(tasks=[Task("reward", ["x"], ["rewards"], groups=rule), TRAIN])
    client.put(1, ["x"], group_id=1, group_size=2)
    world.pass_time(6)
    batch = client.lease("reward", groups=1)
    client.put(1, ["x"], group_id=1, group_size=2)
    client.seal()
    assert isinstance(client.lease("train", 2, wait_s=5.0), Blocked)
    world.woken.clear()
    client.ack(batch, **scores(client, 1))
    assert ("task", "t", "train") in world.woken
    client.ack(client.lease("train", 2))
    with pytest.raises(Impossible, match=r'task "train".* can never progress.*1 row lacks'):
        client.lease("train", 1, wait_s=5.0)
