"""Ranks and replicas: several clients that share one batch, each over its own session."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest

import transferqueue as tq
from tests.client.deployments import Served


@pytest.fixture
def ranks(server: Served, name: str) -> Iterator[list[tq.Table]]:
    """The same table, seen by four clients."""
    with ExitStack() as opened:
        queues = [opened.enter_context(tq.connect(server.ipc, label=f"rank {rank}")) for rank in range(4)]
        queues[0].create_table(name, tasks=[tq.Task("train", needs=["x"], selector=tq.TokenBalanced())])
        yield [queue.table(name) for queue in queues]


def test_ranks_share_one_agreed_batch_by_tokens(ranks: list[tq.Table]) -> None:
    tokens = np.arange(1, 17)
    rows = ranks[0].put(x=[np.zeros(n) for n in tokens], tokens=tokens)
    with ThreadPoolExecutor(4) as pool:
        batches = list(pool.map(lambda at: ranks[at].lease("train", rows=16, rank=at, world=4, timeout_s=20), range(4)))
    assert sorted(row for batch in batches for row in batch.rows.tolist()) == rows.tolist()
    assert [len(batch) for batch in batches] == [4] * 4
    assert max(batch.tokens.sum() for batch in batches) <= 1.34 * tokens.sum() / 4
    for batch in batches:
        batch.ack()
    assert ranks[0].audit().rows_done == 16


def test_replicas_get_the_identical_batch_and_it_is_done_when_all_have_acked(ranks: list[tq.Table]) -> None:
    rows = ranks[0].put(x=np.arange(8.0))
    batches = [ranks[at].lease("train", rows=8, replica=(at, 2), timeout_s=20) for at in range(2)]
    assert [batch.rows.tolist() for batch in batches] == [rows.tolist()] * 2
    assert batches[0]["x"].numpy().tolist() == batches[1]["x"].numpy().tolist()
    batches[0].ack(loss=np.zeros(8))
    assert ranks[0].audit().rows_done == 0
    batches[1].ack()
    assert ranks[0].audit().rows_done == 8


def test_a_replica_that_gives_up_gives_up_for_all(ranks: list[tq.Table]) -> None:
    ranks[0].put(x=np.arange(2.0))
    first, second = (ranks[at].lease("train", rows=2, replica=(at, 2), timeout_s=20) for at in range(2))
    first.release()
    with pytest.raises(tq.LeaseExpired):
        second.ack()
    with ranks[2].lease("train", rows=2, timeout_s=20) as batch:
        assert len(batch) == 2


def test_where_and_budgets(ranks: list[tq.Table]) -> None:
    table = ranks[0]
    table.add_task(tq.Task("score", needs=["x"]))
    table.put(x=np.arange(6), tokens=10, tags=[{"split": "a"}, {"split": "b"}] * 3, policy_version=range(6))
    with table.lease("score", rows=2, where=tq.TagIs("split", "b")) as batch:
        assert batch["x"].list() == [1, 3]
    with table.lease("score", rows=2, where=[tq.TagIs("split", "a"), tq.VersionBetween(low=1)]) as batch:
        assert batch["x"].list() == [2, 4]
    with table.lease("score", tokens=25, at_least=1, timeout_s=5) as batch:
        assert batch.tokens.sum() <= 25


def test_whole_groups(ranks: list[tq.Table]) -> None:
    table = ranks[0]
    table.add_task(tq.Task("whole", needs=["x"], groups=tq.Complete()))
    table.put(x=np.arange(7), group_id=[0, 0, 0, 1, 1, 1, 1], group_size=4)
    with table.lease("whole", groups=1, timeout_s=5) as batch:
        assert batch.group_id.tolist() == [1] * 4
    with pytest.raises(tq.UsageError, match=r"group.*4.*2|2.*group.*4"):  # it could never fit
        table.lease("whole", rows=2, timeout_s=5)


def test_an_empty_share_has_facts_of_no_rows(ranks: list[tq.Table]) -> None:
    table = ranks[0]
    table.put(x=np.arange(1.0))
    table.seal()
    with ThreadPoolExecutor(2) as pool:
        batches = list(pool.map(lambda at: ranks[at].lease("train", rows=2, rank=at, world=2, timeout_s=20), range(2)))
    assert sorted(len(batch) for batch in batches) == [0, 1]
    for batch in batches:
        facts = (batch.policy_version, batch.tokens, batch.group_id, batch.group_size, batch.ordinal)
        assert [len(fact) for fact in facts] == [len(batch)] * 5
        batch.ack()
