"""Acks with a step, checkpoints and rollbacks; the prompt cursor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.ledger.driver import Driver, World
from transferqueue.errors import DeadlineExceeded, EndOfTable, Full, LeaseExpired, NotFound, ProtocolError, UsageError
from transferqueue.ledger import Ledger
from transferqueue.ledger.rows import FinishedOrdinals, indexes
from transferqueue.limits import Limits
from transferqueue.policies import Complete, Pacing, Retry, Task
from transferqueue.wire import messages as m


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def client(world: World) -> Driver:
    return world.client("trainer")


def train(client: Driver, rows: int, step: int) -> list[int]:
    lease = client.lease("train", rows)
    client.ack(lease, step=step)
    return lease.rows


def table(client: Driver, **terms: Any) -> None:
    client.create(tasks=[Task("train")], **terms)


# ---------------------------------------------------------------- bad input


def test_a_rollback_before_the_last_checkpoint_is_refused(world: World, client: Driver) -> None:
    table(client)
    client.put(2)
    train(client, 1, step=4)
    client.checkpointed(4)
    held = client.lease("train", 1)
    with pytest.raises(
        UsageError, match=r"cannot go back to step 3: rows up to step 4 are final since checkpointed.*restore that"
    ):
        client.rollback(3)
    assert client.ack(held).rows == 1  # nothing was changed


def test_a_rollback_does_not_move_the_clock_forward(world: World, client: Driver) -> None:
    table(client)
    client.advance(2)
    with pytest.raises(
        UsageError, match=r"clock of table \"t\" is 2; a rollback does not move it forward to 3: use advance"
    ):
        client.rollback(0, version=3)
    assert world.stats().version == 2


@pytest.mark.parametrize("verb", ["checkpointed", "rollback"])
def test_the_task_must_be_known(client: Driver, verb: str) -> None:
    client.create(tasks=[Task("grade"), Task("train")])
    with pytest.raises(UsageError, match=r'table "t" has no pacing.*name one of grade, train'):
        getattr(client, verb)(1)
    with pytest.raises(NotFound, match=r'task "tain" is not in table "t"; it has grade, train'):
        getattr(client, verb)(1, "tain")


def test_without_a_name_the_pacing_task_is_meant(world: World, client: Driver) -> None:
    client.create(tasks=[Task("grade"), Task("train")], pacing=Pacing("train", 4))
    client.put(1)
    train(client, 1, step=0)
    assert client.checkpointed(0).rows == 1
    assert world.stats().tasks["train"].done == 1


# ---------------------------------------------------------------- steps


def test_rows_are_kept_until_a_checkpoint_covers_their_step(world: World, client: Driver) -> None:
    table(client)
    client.put(3, ["a"])
    first, second = train(client, 1, step=1), train(client, 2, step=2)
    assert (world.stats().rows_live, world.stats().tasks["train"].stepped) == (3, 3)
    assert client.checkpointed(1).rows == 1
    assert world.table().rows.pages.resident_rows().tolist() == second
    assert first == [0]
    assert client.checkpointed(5).rows == 2
    assert client.checkpointed(3).rows == 0  # covered before
    assert world.audit().balanced
    assert world.stats().rows_done == 3
    assert world.stats().tasks["train"].checkpoint == 5
    assert len(world.freed) == 1


def test_an_ack_that_a_checkpoint_covers_or_without_step_is_final(world: World, client: Driver) -> None:
    table(client)
    client.put(2)
    client.checkpointed(7)
    train(client, 1, step=7)
    train(client, 1, step=-1)
    assert world.stats().rows_done == 2


def test_rows_rolled_back_come_again_at_their_old_place_and_count_once(world: World, client: Driver) -> None:
    table(client)
    client.put(6)
    for step in range(3):
        train(client, 1, step)
    client.checkpointed(0)
    assert client.rollback(0).rows == 2
    lease = client.lease("train", 5)
    assert lease.rows == [1, 2, 3, 4, 5]
    client.ack(lease, step=1)
    client.checkpointed(1)
    stats = world.stats()
    assert (stats.rows_put, stats.rows_done, stats.rows_live, stats.balanced) == (6, 6, 0, True)
    assert stats.tasks["train"].done == 6


def test_a_rollback_ends_the_leases_of_the_task_and_no_others(world: World, client: Driver) -> None:
    client.create(tasks=[Task("grade"), Task("train", retry=Retry(attempts=1))], pacing=Pacing("train", 4))
    client.put(2)
    held, other = client.lease("train", 1), client.lease("grade", 1)
    client.rollback(-1)
    with pytest.raises(LeaseExpired, match="its task was rolled back to step -1"):
        client.ack(held, step=9)
    assert [one.lease for one in world.ended] == [held.lease]
    client.ack(other)
    assert client.lease("train", 2).rows == [0, 1]  # no attempt was counted
    assert world.stats().tasks["train"].failed == 0


def test_groups_come_back_whole(client: Driver, world: World) -> None:
    client.create(tasks=[Task("train", groups=Complete())])
    client.put(4, group_id=[0, 0, 1, 1], group_size=2)
    client.ack(client.lease("train", groups=1), step=0)
    client.ack(client.lease("train", groups=1), step=1)
    assert client.rollback(0).rows == 2
    assert client.lease("train", groups=1).rows == [2, 3]
    client.checkpointed(0)
    assert world.stats().rows_done == 2


def test_several_tasks_each_for_itself(world: World, client: Driver) -> None:
    client.create(tasks=[Task("critic"), Task("train")])
    client.put(1)
    for task in ("critic", "train"):
        client.ack(client.lease(task, 1), step=3)
    client.checkpointed(3, "critic")
    assert world.stats().rows_done == 0
    client.rollback(2, "train")
    client.ack(client.lease("train", 1), step=3)
    client.checkpointed(3, "train")
    assert world.stats().rows_done == 1


def test_replicas_step_together(world: World, client: Driver) -> None:
    table(client)
    client.put(2)
    peers = [client.lease("train", 2, replica=peer, replicas=2) for peer in range(2)]
    for lease in peers:
        client.ack(lease, step=1)
    assert world.stats().tasks["train"].stepped == 2
    assert client.rollback(0).rows == 2


def test_a_dropped_row_stays_dropped(world: World, client: Driver) -> None:
    table(client)
    client.put(2)
    train(client, 2, step=1)
    client.drop([0])
    assert client.rollback(0).rows == 1
    assert world.audit().tables["t"].dropped == {"test": 1}
    assert world.audit().balanced


def test_stepped_rows_are_not_outstanding_but_take_room(client: Driver, world: World) -> None:
    table(client, limits=Limits(rows=4), pacing=Pacing("train", 2, depth=0))
    for step in range(2):
        client.put(2)
        train(client, 2, step)
    assert world.stats().outstanding == 0
    with pytest.raises(
        Full, match=r'4 rows are kept until a checkpoint covers step 1: call checkpointed\(1, task="train"\)'
    ):
        client.put(1)
    with pytest.raises(DeadlineExceeded, match=r'checkpointed\(1, task="train"\) once the model is saved'):
        client.lease("train", 1)
    waiting = client.put(1, wait_s=5.0)
    client.checkpointed(0)
    assert waiting.keys == (("room", "t"), ("table", "t"))
    assert ("room", "t") in world.woken
    assert client.put(1) == [4]


def test_the_end_of_a_table_does_not_wait_for_a_checkpoint(client: Driver) -> None:
    table(client)
    client.put(1)
    client.seal()
    train(client, 1, step=0)
    with pytest.raises(EndOfTable):
        client.lease("train", 1)
    client.rollback(-1)
    assert client.lease("train", 1).rows == [0]


def test_with_the_version_the_clock_goes_back_and_rows_stay_in_bound(client: Driver, world: World) -> None:
    table(client, pacing=Pacing("train", 1, max_staleness=1))
    client.put(2, policy_version=0)
    train(client, 1, step=0)
    client.advance(1)
    train(client, 1, step=1)
    client.advance(3)
    assert client.rollback(-1, version=0).rows == 2
    assert world.stats().version == 0
    assert client.lease("train", 2).rows == [0, 1]


def test_rows_rolled_back_are_judged_again_as_the_clock_comes_back(client: Driver, world: World) -> None:
    table(client, pacing=Pacing("train", 1, max_staleness=1))
    client.put(1, policy_version=0)
    train(client, 1, step=0)
    client.advance(5)
    client.rollback(-1, version=0)
    client.advance(5)
    assert world.stats().dropped == {"stale": 1}


def test_without_the_version_rows_over_the_bound_are_stale(client: Driver, world: World) -> None:
    table(client, pacing=Pacing("train", 1, max_staleness=1))
    client.put(1, policy_version=0)
    train(client, 1, step=0)
    client.advance(5)
    assert client.rollback(-1).rows == 1
    assert world.stats().dropped == {"stale": 1}


def test_what_is_filed_stays_in_proportion_to_the_rows(client: Driver, world: World) -> None:
    table(client)
    for _ in range(30):
        rows = client.put(1000)
        train(client, 1000, step=1)
        client.drop(rows)
    assert world.table().tasks["train"].stepped._size <= 8192 + 2 * 1000


def test_steps_survive_an_image(client: Driver, world: World) -> None:
    table(client)
    client.put(2, ordinal=[0, 1])
    train(client, 1, step=4)
    world.ledger = Ledger.from_image(world.ledger.image())
    assert client.rollback(3).rows == 1
    assert client.cursor() == 0


# ---------------------------------------------------------------- the cursor


def test_the_cursor_is_the_lowest_ordinal_that_is_not_final(client: Driver, world: World) -> None:
    table(client)
    assert client.cursor() == 0
    client.put(3, ordinal=[0, 1, 3])
    assert client.cursor() == 0
    train(client, 2, step=-1)
    assert client.cursor() == 2  # never put
    train(client, 1, step=5)
    client.put(1, ordinal=2)
    client.drop([3])
    assert client.cursor() == 3  # stepped: not final
    client.checkpointed(5)
    assert (client.cursor(), client.cursor(9)) == (4, 9)
    assert world.stats().cursor == 4


def test_members_of_one_prompt_share_its_ordinal(client: Driver) -> None:
    table(client)
    client.put(4, ordinal=[0, 0, 1, 1])
    client.ack(client.lease("train", 3))
    assert client.cursor() == 1
    client.put(1, ordinal=0)
    assert client.cursor() == 0


def test_rows_without_an_ordinal_do_not_count(client: Driver) -> None:
    table(client)
    client.put(2)
    client.ack(client.lease("train", 2))
    assert client.cursor() == 0


def test_spans_are_those_of_a_plain_set(client: Driver, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexes, "PENDING_MAX", 40)
    table(client)
    dice = np.random.default_rng(5)
    ended: set[int] = set()
    for _ in range(60):
        numbers = dice.integers(0, 300, 7)
        client.put(7, ordinal=numbers)
        client.ack(client.lease("train", 7))
        ended |= set(numbers.tolist())
        start = int(dice.integers(0, 300))
        assert client.cursor(start) == next(n for n in range(start, 400) if n not in ended)
    spans = world.table().ordinals.spans
    assert {n for first, last in spans.tolist() for n in range(first, last + 1)} == ended
    assert (spans[1:, 0] > spans[:-1, 1] + 1).all()


def test_sparse_ordinals_are_bounded(client: Driver, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexes, "SPANS_MAX", 4)
    table(client)
    client.put(9, ordinal=range(0, 18, 2))
    client.ack(client.lease("train", 9))
    assert client.cursor() == 1
    assert isinstance(world.table().ordinals, FinishedOrdinals)
    assert len(world.table().ordinals.spans) == 4


def test_a_step_out_of_range_is_no_message() -> None:
    from transferqueue.wire import codec

    frame = codec.encode_call(m.CallFrame(1, 1, 0, m.Ack("t", 1, 1, step=-2)))
    with pytest.raises(ProtocolError, match=r"-1"):
        codec.decode_call(frame)


# ---------------------------------------------------------------- several leases in one commit


def test_an_ack_of_several_leases_names_those_that_are_over_and_changes_nothing(world: World, client: Driver) -> None:
    table(client)
    client.put(6)
    leases = [client.lease("train", 2) for _ in range(3)]
    client.release(leases[0])
    client.ack(leases[2])
    before = world.stats()
    with pytest.raises(LeaseExpired, match=r"2 of 3 leases have ended, so none was acked.*lease 1 .*; lease 3 .*acked"):
        client.ack_leases(leases, step=1)
    assert world.stats() == before
    assert client.ack_leases(leases[1:2], step=1).rows == 2


def test_an_ack_of_several_leases_passes_over_those_whose_rows_were_dropped(world: World, client: Driver) -> None:
    table(client)
    client.put(4)
    leases = [client.lease("train", 2) for _ in range(2)]
    client.drop(leases[0].rows)
    assert client.ack_leases(leases, step=1).rows == 2
    assert not world.ended
    assert world.audit().balanced


def test_leases_and_tokens_of_an_ack_come_in_pairs(client: Driver) -> None:
    table(client)
    client.put(1)
    lease = client.lease("train", 1)
    one = lease.lease.to_bytes(8, "little")
    for leases, tokens in ((b"", b""), (one, b""), (one * 2, one * 2)):
        with pytest.raises(UsageError, match="name at least one lease, each once with its token"):
            client.apply(m.AckLeases("t", leases, tokens))
    with pytest.raises(UsageError, match=r"257 leases are acked at once; at most 256"):
        client.apply(m.AckLeases("t", bytes(8 * 257), one))
    assert client.ack_leases([lease]).rows == 1


def test_leases_of_another_session_or_token_are_refused(world: World, client: Driver) -> None:
    table(client)
    client.put(2)
    leases = [client.lease("train", 1) for _ in range(2)]
    with pytest.raises(LeaseExpired, match=r"2 of 2 leases have ended.*belongs to another session"):
        world.client("thief").ack_leases(leases)
    with pytest.raises(LeaseExpired, match="1 of 2 leases have ended"):
        client.apply(m.AckLeases("t", np.array([1, 2], "<i8").tobytes(), np.array([1, 7], "<i8").tobytes()))
    assert client.ack_leases(leases).rows == 2


def test_a_missing_result_refuses_all_leases(world: World, client: Driver) -> None:
    client.create(tasks=[Task("grade", gives=["score"]), Task("train", ["score"])])
    client.put(2)
    leases = [client.lease("grade", 1) for _ in range(2)]
    client.update(leases[0].rows, inline={"score": [1.0]})
    with pytest.raises(UsageError, match=r'ack of row 1 by task "grade".*has no "score"'):
        client.ack_leases(leases)
    assert world.stats().tasks["grade"].leased == 2


def test_replicas_ack_their_shares_of_several_leases(world: World, client: Driver) -> None:
    table(client)
    client.put(4)
    other = world.client("peer")
    mine = [client.lease("train", 2, replica=0, replicas=2) for _ in range(2)]
    theirs = [other.lease("train", 2, replica=1, replicas=2) for _ in range(2)]
    assert client.ack_leases(mine, step=0).rows == 4
    assert world.stats().tasks["train"].leased == 4
    with pytest.raises(LeaseExpired, match="was acked by this replica before"):
        client.ack_leases(mine, step=0)
    assert other.ack_leases(theirs, step=0).rows == 4
    assert client.checkpointed(0, "train").rows == 4


def test_a_row_that_the_ack_of_one_lease_drops_is_done_with_the_other(world: World, client: Driver) -> None:
    """Rules about groups and staleness run after all leases ended, never between two."""
    client.create(tasks=[Task("train")], pacing=Pacing("train", 4, max_staleness=1))
    client.put(4, policy_version=0)
    leases = [client.lease("train", 2) for _ in range(2)]
    client.advance(5)
    assert client.ack_leases(leases).rows == 4
    assert (world.stats().rows_done, world.stats().rows_live) == (4, 0)
