"""Shared batches: how ranks and replicas divide them, and stay in step."""

from __future__ import annotations

import itertools
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from tests.ledger.driver import Driver, World, i64
from tests.scale import examples
from transferqueue.errors import AlreadyExists, DeadlineExceeded, EndOfTable, Impossible, LeaseExpired, UsageError
from transferqueue.ledger import Blocked
from transferqueue.ledger.tasks.shared_batches import shares
from transferqueue.limits import PARTS_MAX, Limits
from transferqueue.policies import Complete, DropStale, HoldClock, Pacing, Selector, Task, TokenBalanced
from transferqueue.wire import codec
from transferqueue.wire import messages as m

weights = st.lists(st.integers(0, 60), min_size=1, max_size=60)

# ---------------------------------------------------------------- the split


def best(items: list[int], world: int) -> int:
    """The least possible load of the heaviest rank, by trying everything."""
    return min(
        max(sum(item for item, rank in zip(items, chosen, strict=True) if rank == one) for one in range(world))
        for chosen in itertools.product(range(world), repeat=len(items))
    )


@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(1, 3))
@settings(max_examples=examples(60))
def test_free_counts_are_within_grahams_bound_of_the_best(items: list[int], world: int) -> None:
    parts = shares(np.array(items), world, equal_counts=False)
    heaviest = max(sum(items[at] for at in part) for part in parts)
    assert heaviest <= (4 / 3 - 1 / (3 * world)) * best(items, world) + 1e-9


@given(weights, st.integers(1, 9))
def test_free_counts_against_the_lower_bound(items: list[int], world: int) -> None:
    """With many units the best is not computable; the mean and the heaviest unit bound it from below."""
    parts = shares(np.array(items), world, equal_counts=False)
    assert sorted(at for part in parts for at in part) == list(range(len(items)))
    ranked = sorted(items, reverse=True)
    pair = ranked[world - 1] + ranked[world] if len(items) > world else 0
    least = max(sum(items) / world, ranked[0], pair)
    assert (
        max(sum(items[at] for at in part) for part in parts) <= (4 / 3 - 1 / (3 * world)) * least + ranked[0] / 3 + 1e-9
    )


@given(weights, st.integers(1, 9))
def test_equal_counts_are_equal_and_balanced(items: list[int], world: int) -> None:
    parts = shares(np.array(items), world, equal_counts=True)
    assert sorted(at for part in parts for at in part) == list(range(len(items)))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert all(part.tolist() == sorted(part.tolist()) for part in parts)
    loads = [sum(items[at] for at in part) for part in parts]
    if len(items) % world == 0:
        assert max(loads) - min(loads) <= max(items) * (len(items) // world)


def test_equal_counts_balance_a_long_tail() -> None:
    """Log-normal lengths, as rollouts have them: the heaviest rank is within 2 % of the mean."""
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(6.5, 0.8, 512).astype(np.int64)
    loads = [int(lengths[part].sum()) for part in shares(lengths, 8, equal_counts=True)]
    assert max(loads) <= 1.02 * lengths.sum() / 8


# ---------------------------------------------------------------- ranks


def ranks(world: int, selector: Selector | None = None, **terms: Any) -> tuple[World, list[Driver]]:
    place = World()
    clients = [place.client(f"rank-{number}") for number in range(world)]
    task = Task("x", selector=selector or TokenBalanced(), lease_s=10, **terms)
    clients[0].create(tasks=[task], limits=Limits(rows=1 << 12))
    return place, clients


def ask(clients: list[Driver], rank: int, rows: int, **terms: Any) -> Any:
    return clients[rank].lease("x", rows, rank=rank, world=len(clients), **terms)


@pytest.mark.parametrize("equal", [True, False])
@given(lengths=st.lists(st.integers(1, 50), min_size=24, max_size=40), order=st.permutations([0, 1, 2]))
@settings(max_examples=examples(20))
def test_ranks_get_disjoint_balanced_shares_of_the_same_batch(
    equal: bool, lengths: list[int], order: list[int]
) -> None:
    _, clients = ranks(3, TokenBalanced(equal_counts=equal))
    clients[0].put(len(lengths), tokens=lengths)
    taken: list[list[int]] = []
    for step in range(2):
        given = {rank: ask(clients, rank, 12).rows for rank in order}
        assert sorted(row for rows in given.values() for row in rows) == list(range(12 * step, 12 * step + 12))
        if equal:
            assert [len(given[rank]) for rank in range(3)] == [4, 4, 4]
        taken.append([sum(lengths[row] for row in given[rank]) for rank in range(3)])
    assert all(max(loads) <= (4 / 3 - 1 / 9) * sum(loads) / 3 + max(lengths) for loads in taken)


def test_a_fast_rank_runs_ahead_and_the_slow_one_gets_its_old_shares_in_order() -> None:
    place, clients = ranks(2)
    clients[0].put(12)
    fast = [ask(clients, 0, 4).rows for _ in range(3)]
    assert {key for key in place.woken if key[0] == "task"} == {("task", "t", "x")}
    with pytest.raises(DeadlineExceeded):
        ask(clients, 0, 4)
    slow = [ask(clients, 1, 4).rows for _ in range(3)]
    assert [sorted(left + right) for left, right in zip(fast, slow, strict=True)] == [
        [0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11],
    ]  # fmt: skip


def test_ranks_ask_alike() -> None:
    _, clients = ranks(2)
    clients[0].put(12)
    ask(clients, 0, 4)
    with pytest.raises(UsageError, match="rank 1 asks for rows=8, but batch 0 was agreed with rows=4"):
        ask(clients, 1, 8)


def test_a_share_that_nobody_claims_goes_back_without_an_attempt() -> None:
    place, clients = ranks(2)
    clients[0].put(8)
    mine = ask(clients, 0, 4)
    clients[0].renew(mine, 60)
    place.pass_time(10)
    assert place.stats().tasks["x"].leased == 2
    assert place.table().tasks["x"].attempts.a[:8].sum() == 0
    again = ask(clients, 1, 4).rows  # the first batch is gone: this is the second
    assert sorted(again + ask(clients, 0, 4).rows) == [1, 3, 4, 5] or sorted(again) != sorted(mine.rows)
    clients[0].ack(mine)


def test_a_rank_that_dies_breaks_up_the_step() -> None:
    place, clients = ranks(3)
    clients[0].put(12)
    first = [ask(clients, rank, 6) for rank in (0, 1)]
    clients[1].close()
    stats = place.stats().tasks["x"]
    assert (stats.leased, stats.ready) == (2, 10)
    clients[1] = place.client("rank-1 again")
    second = [ask(clients, rank, 6).rows for rank in (2, 1, 0)]
    assert all(not set(rows) & set(first[0].rows) for rows in second)
    assert len({row for rows in second for row in rows}) == 6
    clients[0].ack(first[0])


def test_what_is_left_of_a_sealed_table_is_shared_even_if_it_does_not_divide() -> None:
    _, clients = ranks(3)
    clients[0].put(8)
    clients[0].seal()
    for step in ([2, 2, 2], [1, 1, 0]):
        given = [ask(clients, rank, 6) for rank in range(3)]
        assert [len(one.rows) for one in given] == step
        for client, one in zip(clients, given, strict=True):
            client.ack(one)
    for rank in range(3):
        with pytest.raises(EndOfTable):
            ask(clients, rank, 6)


def test_groups_are_dealt_whole() -> None:
    _, clients = ranks(2, groups=Complete())
    clients[0].put(16, group_id=np.repeat([1, 2, 3, 4], 4), group_size=4, tokens=np.repeat([9, 1, 1, 9], 4))
    left, right = ask(clients, 0, 0, groups=4), ask(clients, 1, 0, groups=4)
    assert left.rows == [0, 1, 2, 3, 4, 5, 6, 7]
    assert right.rows == [8, 9, 10, 11, 12, 13, 14, 15]


def test_a_token_budget_gives_each_rank_something() -> None:
    _, clients = ranks(2)
    clients[0].put(5, tokens=[100, 90, 3, 4, 5])
    assert [ask(clients, rank, 0, tokens=100).rows for rank in range(2)] == [[0], [1]]
    assert [ask(clients, rank, 0, tokens=10, at_least=1).rows for rank in range(2)] == [[3], [2]]


def test_rows_dropped_from_a_share_before_it_is_claimed_are_not_in_it() -> None:
    _, clients = ranks(2)
    clients[0].put(8, tokens=1)
    ask(clients, 0, 8)
    waiting = [row for row in range(8) if row % 2]
    clients[0].drop(waiting[:3])
    other = ask(clients, 1, 8)
    assert other.rows == waiting[3:]
    clients[1].ack(other, other.rows)


def test_a_share_whose_rows_were_all_dropped_is_empty_and_keeps_the_step() -> None:
    place, clients = ranks(2)
    clients[0].put(4)
    mine = ask(clients, 0, 4)
    clients[0].drop([1, 3])
    empty = ask(clients, 1, 4)
    assert (mine.rows, empty.rows) == ([0, 2], [])
    clients[1].ack(empty)
    clients[0].ack(mine)
    assert place.audit().balanced


@pytest.mark.parametrize("policy", [DropStale(), HoldClock()])
def test_a_share_is_in_bound_when_it_is_claimed(policy: Any) -> None:
    place = World()
    clients = [place.client(), place.client()]
    pacing = Pacing("x", 4, 1, max_staleness=1, on_stale=policy)
    clients[0].create(tasks=[Task("x", selector=TokenBalanced())], pacing=pacing)
    clients[0].put(4, policy_version=[0, 0, 0, 1])
    ask(clients, 0, 4)
    if isinstance(policy, HoldClock):
        with pytest.raises(DeadlineExceeded, match="1 row of versions below 1"):
            clients[0].advance(2)
        return
    clients[0].advance(2)
    assert ask(clients, 1, 4).rows == [3]
    assert place.table().rows_dropped == {"stale": 1}


# ---------------------------------------------------------------- replicas


def replica(clients: list[Driver], number: int, rows: int = 4, **terms: Any) -> Any:
    return clients[number].lease("x", rows, replica=number, replicas=len(clients), **terms)


def test_replicas_get_the_identical_batch_and_all_must_ack() -> None:
    place, clients = ranks(2)
    clients[0].put(4, ["ids"], inline={"s": 1.0})
    first = replica(clients, 0, fields=["ids", "s"])
    place.pass_time(4)
    second = replica(clients, 1, fields=["ids", "s"])
    assert first.reply.content == second.reply.content
    assert (first.lease, first.token) == (second.lease, second.token)
    assert second.reply.lease_s == 6.0
    clients[0].ack(first)
    assert place.stats().rows_done == 0
    with pytest.raises(LeaseExpired, match="was acked by this replica before"):
        clients[0].ack(first)
    clients[1].ack(second)
    assert place.stats().rows_done == 4
    for client in clients:
        client.unpin(first.blocks())
    assert not place.taken


def test_columns_come_from_the_first_replica_that_has_them() -> None:
    place = World()
    clients = [place.client() for _ in range(3)]
    clients[0].create(tasks=[Task("x"), Task("y", ["out", "n"])])
    clients[0].put(4)
    given = [replica(clients, number) for number in range(3)]
    clients[0].ack(given[0])
    results = clients[1].columns(4, ["out"], {"n": [4.0, 3.0, 2.0, 1.0]})
    order = [3, 2, 1, 0]
    clients[1].ack(given[1], order, columns=results)
    with pytest.raises(DeadlineExceeded):
        clients[0].lease("y", 4)
    clients[2].ack(given[2], columns=clients[2].columns(4, ["out"], {"n": 9.0}))
    found = clients[0].lease("y", 4)
    (part,) = found.reply.content.parts
    slots = codec.decode_ascending(part.slot_of_row, "<i4", 4).tolist()
    assert sorted(zip(found.rows, found.column("n"), slots, strict=True)) == [
        (0, 1.0, 3),
        (1, 2.0, 2),
        (2, 3.0, 1),
        (3, 4.0, 0),
    ]
    assert len(found.blocks()) == 1
    clients[0].ack(found)
    clients[0].unpin(found.blocks())
    assert not place.taken


@pytest.mark.parametrize("freed", [False, True])
@pytest.mark.parametrize("sets", [0, PARTS_MAX - 3])
@pytest.mark.parametrize("second_has_results", [False, True])
def test_the_last_ack_outranks_what_the_rows_got_since_the_first(
    freed: bool, sets: int, second_has_results: bool
) -> None:
    """Blocks are numbered when they are committed, and results that wait for the last ack are older than an update of
    meanwhile. sets: of fields that were written together before: beyond `PARTS_MAX`, what makes way lies field by
    field.
    """
    place, clients = ranks(2)
    one, other = clients
    one.add_task(Task("never", ["late"]))  # so that the rows live on
    names = [f"f{number}" for number in range(24)]
    for row, pair in enumerate(list(itertools.combinations(names, 2))[:sets]):
        one.put(1, list(pair))
        one.delete([row])
    one.put(3, ["in"])
    first, second = replica(clients, 0, 3), replica(clients, 1, 3)
    for client in clients:
        client.unpin(first.blocks())
    results = one.columns(3, ["a", "n"])
    one.ack(first, columns=results)
    one.drop(first.rows[2:])
    rows = first.rows[:2]
    newer = one.columns(2, ["a", "b", "c"])
    one.apply(m.Update("t", i64(rows), newer, overwrite=True))
    one.update(rows[:1], ["c"], overwrite=True)
    if freed:
        one.free(rows, ["a", "c"])
    other.ack(second, columns=other.columns(3, ["a", "n"]) if second_has_results else None)
    for fields, extent in ((["a"], results.blocks[0].extent), (["b"], newer.blocks[0].extent)):
        (part,) = one.read(rows, fields=fields).parts
        assert [(at.extent, part.fields) for at in part.blocks] == [(extent, fields)]
        one.unpin([at.block for at in part.blocks])
    assert place.audit().balanced
    one.update(rows, ["b", "c"], overwrite=True)
    one.update(rows, ["a", "n"], overwrite=True)
    assert {results.blocks[0].extent, newer.blocks[0].extent} <= set(place.freed)
    one.delete(rows)
    assert not place.taken


def test_a_key_that_waits_for_the_last_ack_is_looked_at_again() -> None:
    place, clients = ranks(2)
    one, other = clients
    one.add_task(Task("never", ["late"]))
    one.put(2, ["in"])
    first, second = replica(clients, 0, 2), replica(clients, 1, 2)
    one.ack(first, columns=one.columns(2, keys=["p", "q"]))
    one.put(1, ["in"], keys=["p"])
    for ack in (lambda: other.ack(second), lambda: other.ack_leases([second])):
        with pytest.raises(AlreadyExists, match="key 'p' of table \"t\" names row 2"):
            ack()
        assert place.stats().tasks["x"].leased == 2
    one.drop([0])  # the row that would get it
    other.ack(second)
    assert place.table().rows.row_of_key == {"p": 2, "q": 1}
    one.delete([1, 2])


def test_two_leases_that_end_together_give_a_key_to_one_row() -> None:
    place, clients = ranks(2)
    one, other = clients
    one.put(2, ["in"])
    leases = []
    for _ in range(2):
        first, second = replica(clients, 0, 1), replica(clients, 1, 1)
        one.ack(first, columns=one.columns(1, keys=["p"]))
        leases.append(second)
    with pytest.raises(AlreadyExists, match="results give key 'p' to rows 0 and 1; a key names one row: ack"):
        other.ack_leases(leases)
    other.ack(leases[0], drop="double")
    other.ack(leases[1])
    assert not place.table().rows.row_of_key  # the rows ended


@pytest.mark.parametrize("how", ["release", "expire", "die"])
def test_one_replica_that_fails_fails_for_all(how: str) -> None:
    place, clients = ranks(2)
    clients[0].put(4)
    first, second = replica(clients, 0), replica(clients, 1)
    clients[0].ack(first, columns=clients[0].columns(4, ["out"]))
    if how == "release":
        clients[1].release(second)
    elif how == "expire":
        place.pass_time(10)
    else:
        clients[1].close()
        clients[1] = place.client()
    with pytest.raises(LeaseExpired):
        clients[1].ack(second)
    assert place.stats().tasks["x"].ready == 4
    assert not place.taken  # the results of the first were given up
    again = [replica(clients, number) for number in range(2)]
    for client, one in zip(clients, again, strict=True):
        client.ack(one, columns=client.columns(4, ["out"]))
    assert place.stats().rows_done == 4


def test_a_replica_that_acked_may_die() -> None:
    place, clients = ranks(2)
    clients[0].put(4)
    first, second = replica(clients, 0), replica(clients, 1)
    clients[0].ack(first)
    clients[0].close()
    clients[1].ack(second)
    assert place.stats().rows_done == 4


def test_a_drop_by_one_replica_drops() -> None:
    place, clients = ranks(2)
    clients[0].put(4)
    first, second = replica(clients, 0), replica(clients, 1)
    clients[0].ack(first, drop="bad")
    clients[1].ack(second, columns=clients[1].columns(4, ["out"]))
    assert place.table().rows_dropped == {"bad": 4}
    assert not place.taken


def test_a_lease_that_ended_before_a_replica_asked_is_not_waited_for() -> None:
    place, clients = ranks(2)
    clients[0].put(8)
    first = replica(clients, 0)
    clients[0].release(first)
    assert isinstance(replica(clients, 1, 16, wait_s=1), Blocked)
    assert replica(clients, 1).rows == [0, 1, 2, 3]
    assert replica(clients, 0).rows == [0, 1, 2, 3]
    clients[0].drop([0, 1, 2, 3])
    assert replica(clients, 0).rows == replica(clients, 1).rows == [4, 5, 6, 7]
    assert place.audit().balanced


def test_replicas_end_the_lease_as_a_whole_and_ask_for_the_same_fields() -> None:
    _, clients = ranks(2)
    clients[0].put(4, inline={"s": 1.0})
    first = replica(clients, 0)
    with pytest.raises(UsageError, match="all replicas must ask for the same"):
        replica(clients, 1, fields=["s"])
    second = replica(clients, 1)
    with pytest.raises(UsageError, match="who ack all of its rows together"):
        clients[0].ack(first, [0])
    with pytest.raises(UsageError, match="release all of its rows"):
        clients[1].release(second, [0])


def test_ranks_times_replicas() -> None:
    place = World()
    clients = [place.client() for _ in range(4)]
    clients[0].create(tasks=[Task("x", selector=TokenBalanced())])
    clients[0].put(8)
    given = {
        (rank, peer): clients[2 * rank + peer].lease("x", 8, rank=rank, world=2, replica=peer, replicas=2)
        for rank, peer in [(1, 1), (0, 0), (0, 1), (1, 0)]
    }
    assert given[0, 0].rows == given[0, 1].rows
    assert given[1, 0].rows == given[1, 1].rows
    assert sorted(given[0, 0].rows + given[1, 0].rows) == list(range(8))
    for (rank, peer), one in given.items():
        clients[2 * rank + peer].ack(one)
    assert place.stats().rows_done == 8
    assert not place.ledger.state.core.leases.by_id


def test_one_process_may_be_several_replicas() -> None:
    place, clients = ranks(1)
    clients[0].put(4)
    pair = [clients[0].lease("x", 4, replica=number, replicas=2) for number in range(2)]
    for one in pair:
        clients[0].ack(one)
    assert place.stats().rows_done == 4


def test_fewer_rows_than_ranks() -> None:
    _, clients = ranks(2, TokenBalanced(equal_counts=False))
    with pytest.raises(Impossible, match="rows=1 cannot give each of world=2 ranks a row"):
        ask(clients, 0, 1)
