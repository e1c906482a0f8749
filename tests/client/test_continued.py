"""Rows that continue rows: whole for readers, stored and sent once, kept for as long as a row that continues them."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings

import transferqueue as tq
from tests.client.deployments import Served
from tests.client.test_recorded import wait_until_recorded
from tests.client.test_remote import Between
from tests.client.test_restart import Supervised
from tests.ledger.driver import Driver, World, i64
from tests.scale import examples, only_long
from tests.server.test_spill_served import served as spilling
from transferqueue.adapters.snapshots import read_table
from transferqueue.client.operations import column_source
from transferqueue.ledger import Ledger
from transferqueue.ledger.requests import lease, read, reply_rows
from transferqueue.ledger.rows import blocks
from transferqueue.ledger.rules import continuation, recording
from transferqueue.limits import CONTINUED_MAX, END_INTERVAL_S, ENDS_MAX, NODES_MAX
from transferqueue.policies import Task
from transferqueue.server.durability import snapshot_files
from transferqueue.server.durability.snapshots import SNAPSHOTS_VARIABLE
from transferqueue.wire import messages as m

FIELDS = [tq.Field("ids", "int64", (None,)), tq.Field("logprobs", "float32", (None,))]
TASKS = [tq.Task("train", needs=["ids", "logprobs"])]
TOKEN_BYTES = 8 + 4
_tokens = itertools.count(1)


class Forest:
    """A table, and what each of its rows must be, in lists of this process."""

    def __init__(self, table: tq.Table) -> None:
        self.table = table
        self.whole: dict[int, list[int]] = {}
        self.chains: dict[int, tuple[int, ...]] = {}
        """The rows that a row is made of, from the root to itself."""
        self.own: dict[int, int] = {}
        """Tokens that a row has beyond its parent."""

    def put(self, parents: list[int], lengths: list[int], **facts: Any) -> list[int]:
        new = [[next(_tokens) for _ in range(length)] for length in lengths]
        logprobs = [np.array(tokens, np.float32) for tokens in new]
        rows = self.table.put(
            ids=[np.array(tokens, np.int64) for tokens in new], logprobs=logprobs, parent=parents, **facts
        )
        for row, parent, tokens in zip(rows.tolist(), parents, new, strict=True):
            self.whole[row] = [*self.whole.get(parent, []), *tokens]
            self.chains[row] = (*self.chains.get(parent, ()), row)
            self.own[row] = len(tokens)
        return rows.tolist()

    def unique(self, rows: list[int]) -> int:
        """The tokens of these rows, each stored value counted once."""
        return sum(self.own[row] for row in {one for row in rows for one in self.chains[row]})

    def check(self, found: Any, rows: list[int]) -> None:
        """`found` has these rows, whole and as trees."""
        assert found.rows.tolist() == rows
        assert found["ids"].list() == [self.whole[row] for row in rows]
        assert [one.tolist() for one in found["logprobs"]] == [self.whole[row] for row in rows]
        assert found["ids"].lengths.tolist() == [len(self.whole[row]) for row in rows]
        for name in ("ids", "logprobs"):
            nodes, parents, node_of_row = found.tree(name)
            assert int(nodes.lengths.sum()) == self.unique(rows)
            assert len(nodes) == len({one for row in rows for one in self.chains[row]})
            assert (parents < np.arange(len(parents))).all()
            for row, node in zip(rows, node_of_row.tolist(), strict=True):
                chain = [node]
                while parents[chain[-1]] >= 0:
                    chain.append(int(parents[chain[-1]]))
                assert [token for one in reversed(chain) for token in nodes[one].tolist()] == self.whole[row]
                assert len(chain) == len(self.chains[row])


@pytest.fixture(scope="module")
def embedded() -> Iterator[tq.Queue]:
    with tq.connect("embedded") as found:
        yield found


_names = itertools.count()


@settings(max_examples=examples(40))
@given(data=st.data())
def test_any_forest_is_read_whole_and_as_trees(embedded: tq.Queue, data: st.DataObject) -> None:
    table = embedded.create_table(f"forest{next(_names)}", fields=FIELDS, tasks=TASKS)
    forest = Forest(table)
    live: list[int] = []
    for _ in range(data.draw(st.integers(1, 8), "puts")):
        count = data.draw(st.integers(1, 4), "rows")
        parents = data.draw(st.lists(st.sampled_from([-1, *live]), min_size=count, max_size=count), "parents")
        live += forest.put(parents, data.draw(st.lists(st.integers(0, 5), min_size=count, max_size=count), "lengths"))
        some = data.draw(st.lists(st.sampled_from(live), min_size=1, max_size=6, unique=True), "read")
        forest.check(table.read(some), some)
        gone = data.draw(st.lists(st.sampled_from(live), max_size=3, unique=True), "gone")
        if gone:
            table.drop(gone, reason="test")
            live = [row for row in live if row not in gone]
    while live:
        with table.lease("train", rows=min(len(live), data.draw(st.integers(1, 4), "leased"))) as batch:
            forest.check(batch, batch.rows.tolist())
        live = live[len(batch) :]
    assert table.stats().bytes == 0


@pytest.mark.parametrize("way", ["mapped", "remote"])
def test_what_rows_share_is_stored_once_and_sent_once(server: Served, name: str, way: str) -> None:
    """A prompt, 16 answers to it, and turns that go on from some of them."""
    with Between(server) as between, tq.connect(between.control.address, data="remote") as queue:
        forest = Forest(queue.create_table(name, fields=FIELDS, tasks=TASKS))
        (prompt,) = forest.put([-1], [4000])
        answers = forest.put([prompt] * 16, [400] * 16)
        for _ in range(8):
            answers += forest.put(answers[-4:], [300] * 4)
        rows = [prompt, *answers]
        bytes_unique = TOKEN_BYTES * forest.unique(rows)
        bytes_whole = TOKEN_BYTES * sum(len(forest.whole[row]) for row in rows)
        assert bytes_whole > 9 * bytes_unique
        assert bytes_unique < forest.table.stats().bytes < 1.1 * bytes_unique
        passed = {True: 0, False: 0}

        def count(_passed: int, data: bytes, up: bool) -> bytes:
            passed[up] += len(data)
            return data

        between.bulk.meddle = count
        with tq.connect(server.ipc) if way == "mapped" else tq.connect(between.control.address, data="remote") as other:
            found = other.table(name).read(rows)
            forest.check(found, rows)
        assert passed[False] < (1.1 * bytes_unique if way == "remote" else 1)
        with forest.table.lease("train", rows=len(rows)) as batch:
            forest.check(batch, rows)
        assert forest.table.stats().bytes == 0


def test_a_row_ends_and_those_that_continue_it_stay_whole(queue: Any, name: str) -> None:
    """By every way and both fronts."""
    table = queue.create_table(name, tasks=[tq.Task("train", needs=["ids"])])
    first = table.put(ids=[[1, 2, 3]], tokens=3)
    second = table.put(ids=[[4], [5, 6]], parent=first[0])
    with table.lease("train", rows=1) as batch:
        assert batch["ids"].list() == [[1, 2, 3]]
    third = table.put(ids=[[7]], parent=second[1:], policy_version=3)
    table.drop([second[1]], reason="bad")
    found = table.read([second[0], third[0]])
    assert found["ids"].list() == [[1, 2, 3, 4], [1, 2, 3, 5, 6, 7]]
    assert found.tree("ids").nodes.list() == [[1, 2, 3], [4], [5, 6], [7]]
    assert found.tree("ids").parents.tolist() == [-1, 0, 0, 2]
    with pytest.raises(tq.NotFound, match=r"row 0 .* finished and was freed"):
        table.put(ids=[[8]], parent=first[0])


def test_a_value_that_is_replaced_is_whole_and_those_that_continue_the_old_one_keep_it(embedded: tq.Queue) -> None:
    table = embedded.create_table("replaced", tasks=[tq.Task("train", needs=["ids"])])
    first = table.put(ids=[[1, 2]])
    second = table.put(ids=[[3]], parent=first)
    third = table.put(ids=[[4]], parent=second)
    read = table.read(second)
    table.update(second, overwrite=True, if_unchanged=read, ids=[[9]])
    assert table.read([*first, *second, *third])["ids"].list() == [[1, 2], [9], [1, 2, 3, 4]]
    with pytest.raises(tq.RowsChanged):
        table.update(second, overwrite=True, if_unchanged=read, ids=[[8]])


def test_named_columns_are_continued_and_tokens_are_counted_whole(embedded: tq.Queue) -> None:
    table = embedded.create_table("named", tasks=[tq.Task("train", needs=["input_ids"])])
    first = table.put(input_ids=[[1, 2, 3]], note=[[1]])
    second = table.put(input_ids=[[4, 5]], note=[[2, 2]], parent=first, continued=["input_ids"], tokens=5)
    given = table.put(input_ids=[[6]], parent=second, tokens=77)
    with table.pipeline() as pipeline:
        (last,) = pipeline.put(input_ids=[[7]], parent=second, tokens=6).result().tolist()
    found = table.read([*second, *given, last], fields=["input_ids"])
    assert found.tokens.tolist() == [5, 77, 6]
    assert found["input_ids"].list() == [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7]]
    assert table.read(second)["note"].list() == [[2, 2]]
    plain = table.read(first).tree("input_ids")
    assert (plain.nodes.list(), plain.parents.tolist(), plain.node_of_row.tolist()) == ([[1, 2, 3]], [-1], [0])


@pytest.mark.parametrize("data", ["auto", "remote"])
def test_slices_are_cut_from_whole_rows(server: Served, name: str, data: Any) -> None:
    with tq.connect(server.tcp, data=data) as queue:
        table = queue.create_table(name, tasks=[tq.Task("train", needs=["ids"])])
        first = table.put(ids=[[1, 2, 3]])
        second = table.put(ids=[[4, 5], [6]], parent=first[0], x=[1.0, 2.0])
        with table.lease("train", rows=3, fields={"ids": tq.Slice((2, 4))}) as batch:
            assert batch["ids"].list() == [[3], [3, 4], [3, 6]]
            with pytest.raises(tq.UsageError, match="was leased or read in part"):
                batch.tree("ids")
        assert len(second) == 2


def test_what_cannot_be_continued_is_refused_and_changes_nothing(embedded: tq.Queue) -> None:
    table = embedded.create_table(
        "refused",
        fields=[
            tq.Field("ids", "int64", (None,)),
            tq.Field("dense", "int64", (9,)),
            tq.Field("other", "int64", (None,)),
        ],
        tasks=[tq.Task("train", needs=["ids"])],
        retention=tq.Manual(),
        extra_fields=True,
    )
    first = table.put(ids=[[1, 2]], dense=np.zeros((1, 9), np.int64), text=["a"])
    freed = table.put(ids=[[1, 2]], other=[[1]])
    table.free_columns(freed, ["other"])
    before = table.stats()

    def memory() -> tuple[int, int]:
        arena = embedded.stats().bytes
        return arena.extents_open, arena.granted

    def refuses(error: type[Exception], match: str, **put: Any) -> None:
        lent = []
        for _ in range(3):
            with pytest.raises(error, match=match):
                table.put(**put)
            lent.append(memory())
        assert lent == lent[:1] * 3, "memory of a refused put is used again"
        after = table.stats()
        assert (after.rows_put, after.bytes, after.rows_live) == (before.rows_put, before.bytes, before.rows_live)

    refuses(tq.NotFound, "row 99 was never put", ids=[[1]], parent=99)
    refuses(tq.NotFound, "rows -5 was never put|row -5 was never put", ids=[[1]], parent=-5)
    refuses(tq.NotFound, 'row 0 .* does not have "other", so no row continues it', ids=[[1]], other=[[1]], parent=first)
    refuses(tq.ColumnFreed, 'column "other" of row 1', other=[[1]], parent=freed)
    refuses(tq.SchemaError, "only ragged columns are continued", ids=[[1]], dense=np.ones((1, 9), np.int64),
            parent=first, continued=["dense"])  # fmt: skip
    refuses(tq.SchemaError, "only ragged columns are continued", text=["b"], parent=first, continued=["text"])
    refuses(tq.UsageError, "has no column of that name", ids=[[1]], parent=first, continued=["other"])
    refuses(tq.UsageError, "shared by rows or puts", ids=tq.Repeat([[1] * 999]), parent=first)
    refuses(tq.UsageError, "parent names 2 rows, and the put has 1", ids=[[1]], parent=[0, 0])
    refuses(tq.UsageError, "parent names 2 rows", ids=[np.zeros(1 << 17, np.int64)], parent=[0, 0])
    refuses(tq.UsageError, "parent names 1 row, and the put has 2", ids=[[1], [2]], parent=first)
    refuses(tq.UsageError, "without parent=", ids=[[1]], continued=["ids"])
    refuses(tq.UsageError, "has no ragged column", text=["b"], parent=first)
    refuses(tq.UsageError, "give row ids", ids=[[1]], parent="first")


def test_the_arguments_are_no_fields(embedded: tq.Queue) -> None:
    for name in ("parent", "continued"):
        fields = [tq.Field("ids", "int64", (None,)), tq.Field(name, "int64")]
        with pytest.raises(tq.UsageError, match=f"take {name}= for something else"):
            embedded.create_table(f"with_{name}", fields=fields)
        with pytest.raises(tq.UsageError, match=f"{name}= for something else"):
            embedded.create_table(f"with_{name}", tasks=[tq.Task("train", needs=["ids"], gives=[name])])
    table = embedded.create_table("older", tasks=[tq.Task("train", needs=["ids"])], extra_fields=True)
    table.put({"ids": [[1]]})
    table.update([0], parent=[7])  # such a table takes any column
    with pytest.raises(tq.UsageError, match='has a field "parent", and put takes parent= for rows'):
        table.put(ids=[[1]], parent=[-1])


def test_lengths_are_compared_only_with_those_of_the_same_part(embedded: tq.Queue) -> None:
    ragged = [tq.Field(name, "int64", (None,)) for name in ("ids", "prompt_ids", "response_ids")]
    mask = tq.Field("mask", "int64", (None,), like="ids")
    table = embedded.create_table(
        "lengths", fields=[*ragged, mask, tq.Field("logprobs", "float32", (None,))], tasks=[tq.Task("train", ["ids"])]
    )
    first = table.put(ids=[[1, 2]], mask=[[0, 0]], prompt_ids=[[1, 2]], response_ids=[[3]], logprobs=[[0.0]])
    both = table.put(ids=[[3]], mask=[[1]], parent=first)
    assert table.read(both)["mask"].list() == [[0, 0, 1]]
    for values in ([[1]], [[0, 0, 1]]):
        with pytest.raises(tq.SchemaError, match=r'"ids" continues the parent.s while "mask" does not'):
            table.put(ids=[[3]], mask=values, parent=first, continued=["ids"])
    empty = [np.zeros(0, np.int64)]
    rows = table.put(prompt_ids=empty, response_ids=[[4, 5]], logprobs=[[0.0] * 4], parent=first,
                     continued=["prompt_ids"], tokens=4)  # fmt: skip
    assert table.read(rows)["prompt_ids"].list() == [[1, 2]]
    with pytest.raises(tq.SchemaError, match="row 0 has 1 value"):
        table.put(response_ids=[[4, 5]], logprobs=[[0.0]], parent=first, continued=["response_ids", "logprobs"])


def test_tokens_are_given_if_their_columns_continue_others(embedded: tq.Queue) -> None:
    table = embedded.create_table("counted", tasks=[tq.Task("train", needs=["response_ids"])])
    first = table.put(prompt_ids=[[1] * 9], response_ids=[[2] * 5])
    row = table.put(response_ids=[[3]], parent=first, tokens=6)
    with_note = table.put(response_ids=[[3]], note=[[1]])
    other = table.put(response_ids=[[3, 4]], note=[[1]], parent=with_note, continued=["note"])
    assert table.read([*row, *other], fields=["response_ids"]).tokens.tolist() == [6, 2]
    with pytest.raises(tq.UsageError, match=r'"response_ids" continues the parent.s, .* give tokens='):
        table.put(response_ids=[[3]], parent=first)


def test_failed_rows_keep_no_more_bytes_than_they_may(embedded: tq.Queue) -> None:
    """A row that failed too often can be taken again, unless what it continues takes too much of the table."""
    retry = tq.Retry(first_s=0, attempts=1)
    table = embedded.create_table(
        "failed", limits=tq.Limits(bytes=24 << 20), tasks=[tq.Task("train", needs=["ids"], retry=retry)]
    )
    first = table.put(ids=[np.zeros(16 << 17, np.int64)])
    second = table.put(ids=[[1]], parent=first)
    table.put(ids=[[1]], parent=second)
    with table.lease("train", rows=2):
        pass
    with pytest.raises(ValueError, match="no"), table.lease("train", rows=1):
        raise ValueError("no")
    assert table.stats().rows_live == 0
    table.put(ids=[np.zeros(16 << 17, np.int64)], timeout_s=0)


def test_whole_columns_beside_continued_ones_stay_as_they_are(
    embedded: tq.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same block, dense or ragged; a reply names them beyond its values that continue others."""
    monkeypatch.setattr(read, "NODES_MAX", 5)
    table = embedded.create_table("beside", tasks=[tq.Task("train", needs=["ids", "image", "note"])])
    parent = table.put(ids=[[1]], image=np.zeros((1, 3)), note=[[1]])
    for number in range(1, 4):
        parent = table.put(
            ids=[[number + 1]], image=np.full((1, 3), float(number)), note=[[number]], parent=parent, continued=["ids"]
        )
    found = table.read([*parent, *(parent - 1)])
    kinds = {name: type(part).__name__ for part in found._content.parts for name in part.fields}
    assert kinds == {"ids": "ReplyTree", "image": "ReplyColumns", "note": "ReplyColumns"}
    assert (found["ids"].list(), found["note"].list()) == ([[1, 2, 3, 4], [1, 2, 3]], [[3], [2]])
    assert found["image"][0].tolist() == [3.0] * 3


def test_fields_that_continue_the_same_rows_are_one_tree(embedded: tq.Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    table = embedded.create_table("alike", tasks=[tq.Task("train", needs=["a", "b", "c"])])
    first = table.put(a=[[1]], b=[[1]], c=[[1]])
    second = table.put(a=[[2]], b=[[2]], c=[[2]], parent=first, continued=["a", "b"])
    third = table.put(a=[[3]], b=[[3]], c=[[3]], parent=second)
    found = table.read([*second, *third])
    assert [(type(part).__name__, part.fields) for part in found._content.parts] == [
        ("ReplyTree", ["a"]), ("ReplyTree", ["b"]), ("ReplyTree", ["c"])
    ]  # fmt: skip
    assert [found[name].list() for name in "abc"] == [[[1, 2], [1, 2, 3]], [[1, 2], [1, 2, 3]], [[2], [2, 3]]]
    assert "[1, 2, 3]" in found._repr_html_()
    whole = table.put(a=[[1]], b=[[1]], c=[[1]], parent=first)
    assert [part.fields for part in table.read(whole)._content.parts] == [["a", "b", "c"]]
    monkeypatch.setattr(column_source, "join", lambda *_: np.empty(1 << 60, np.uint8))
    with pytest.raises(tq.OutOfMemory, match=r"no memory for 3 whole rows .* use tree\(.a.\)"):
        _ = table.read([*first, *second, *third])["a"]


DEPTH = 12


def deep(table: tq.Table, rows: int, **facts: Any) -> list[int]:
    """Rows of `DEPTH` values, of which only the last ones are left."""
    last = table.put(ids=[[0]] * rows, **facts)
    for number in range(1, DEPTH):
        parents, last = last, table.put(ids=[[number]] * rows, parent=last, **facts)
        table.drop(parents, reason="continued")
    return last.tolist()


@pytest.fixture
def few_nodes(monkeypatch: pytest.MonkeyPatch) -> int:
    """A bound of the stored values of a reply, of 40 rows of `deep`."""
    most = 40 * DEPTH
    for module in (lease, read, recording, continuation):
        monkeypatch.setattr(module, "NODES_MAX", most)
    return most


def test_a_reply_names_as_many_values_as_it_may(embedded: tq.Queue, few_nodes: int) -> None:
    """A read of more is refused, with the number that it may have, and so is a lease, unless fewer suffice."""
    table = embedded.create_table("large", tasks=[tq.Task("train", needs=["ids"])])
    rows = deep(table, 100)
    with pytest.raises(tq.UsageError, match=r"100 rows, which continue others, .* read at most 40 of them"):
        table.read(rows)
    assert len(table.read(rows[:40])) == 40
    for least in (None, 41):
        with pytest.raises(tq.UsageError, match="40 rows fit; ask for rows=40, for at_least=40 or less"):
            table.lease("train", rows=64, at_least=least).__enter__()
    seen: list[int] = []
    while len(seen) < len(rows):
        with table.lease("train", rows=64, at_least=1) as batch:
            assert len(batch) == min(40, len(rows) - len(seen))
            assert batch["ids"].list() == [list(range(DEPTH))] * len(batch)
            seen += batch.rows.tolist()
    assert seen == rows


def test_the_rest_of_a_sealed_table_may_be_fewer(embedded: tq.Queue, few_nodes: int) -> None:
    table = embedded.create_table("rest", tasks=[tq.Task("train", needs=["ids"])])
    deep(table, 50)
    table.seal()
    for size in (40, 10):
        with table.lease("train", rows=50) as batch:
            assert len(batch) == size
    with pytest.raises(tq.EndOfTable):
        table.lease("train", rows=50).__enter__()


def test_what_rows_have_in_common_counts_once(embedded: tq.Queue, few_nodes: int) -> None:
    """As the turns of an episode, each of which is trained."""
    table = embedded.create_table("turns", tasks=[tq.Task("train", needs=["ids"])])
    row = table.put(ids=[[0]])
    for number in range(1, 40):
        row = table.put(ids=[[number]], parent=row)
    with table.lease("train", rows=40) as batch:
        assert batch["ids"].lengths.tolist() == [*range(1, 41)]
        assert len(batch.tree("ids").nodes) == 40


def test_as_many_values_as_a_reply_may_name_come_from_another_host(server: Served, name: str) -> None:
    """The head of the bulk message names each of them."""
    with tq.connect(server.tcp, data="remote") as queue:
        table = queue.create_table(name, tasks=[tq.Task("train", needs=["ids"])])
        rows = deep(table, NODES_MAX // DEPTH + 1)
        with table.lease("train", rows=len(rows), at_least=1) as batch:
            assert len(batch) == NODES_MAX // DEPTH
            assert len(batch.tree("ids").nodes) == DEPTH * len(batch)
            assert batch["ids"].list() == [list(range(DEPTH))] * len(batch)


@pytest.mark.parametrize("equal_counts", [True, False])
def test_each_rank_of_a_batch_may_have_as_many_values(embedded: tq.Queue, few_nodes: int, equal_counts: bool) -> None:
    selector = tq.TokenBalanced(equal_counts=equal_counts)
    tasks = [tq.Task("train", needs=["ids"], selector=selector)]
    table = embedded.create_table(f"ranks{equal_counts}", tasks=tasks)
    rows = deep(table, 120)
    shares = [table.lease("train", rows=120, rank=rank, world=3).__enter__() for rank in range(3)]
    assert sorted(row for share in shares for row in share.rows.tolist()) == rows
    assert all(share["ids"].list() == [list(range(DEPTH))] * 40 for share in shares)
    more = deep(table, 129)
    with pytest.raises(tq.UsageError, match="120 rows fit; ask for rows=120"):
        table.lease("train", rows=129, rank=0, world=3).__enter__()
    shares = [table.lease("train", rows=129, at_least=3, rank=rank, world=3).__enter__() for rank in range(3)]
    assert sorted(row for share in shares for row in share.rows.tolist()) == more[:120]


def test_a_unit_of_more_values_comes_alone(embedded: tq.Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no task waits for ever behind it; a put refuses groups that are larger."""
    table = embedded.create_table("group", tasks=[tq.Task("train", needs=["ids"], groups=tq.Complete())])
    for group in range(2):
        rows = deep(table, 30)
        table.put(ids=[[1]] * 30, parent=rows, group_id=group, group_size=30)
        table.drop(rows, reason="continued")
    monkeypatch.setattr(lease, "NODES_MAX", 100)
    with pytest.raises(tq.UsageError, match="1 groups fit; ask for groups=1"):
        table.lease("train", groups=2).__enter__()
    monkeypatch.setattr(continuation, "NODES_MAX", 100)
    with table.lease("train", groups=2, at_least=1) as batch:
        assert batch["ids"].list() == [[*range(DEPTH), 1]] * 30
        with pytest.raises(tq.UsageError, match=r"a group of such rows would have 420 stored values, .* at most 100"):
            table.put(ids=[[1]], parent=batch.rows[0], group_id=5, group_size=30)


def test_long_chains_end_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What only ended rows continued is let go of in later turns, of itself."""
    monkeypatch.setattr(blocks, "ENDS_MAX", 8)
    client = World().client()
    client.create(tasks=[Task("train", ["ids"])])
    rows = [client.put(1, ["ids"])[0]]
    for _ in range(19):
        columns = client.columns(1, ["ids"])
        rows += [client.apply(m.ContinueRequest("t", 1, columns, 0, 0.0, i64(rows[-1:]), ["ids"])).first]
    nbytes = client.world.table().usage.bytes // 20
    client.create("u", tasks=[Task("train", ["ids"])])
    client.apply(m.Drop("t", i64(rows), "done"))
    assert client.world.table().usage.bytes == 11 * nbytes
    client.world.ledger = Ledger.from_image(client.world.ledger.image())
    for left in (3, 0):
        client.world.woken.clear()
        assert client.world.ledger.next_deadline() == client.world.now + END_INTERVAL_S
        client.world.pass_time(0.001)
        client.world.pass_time(0.0)
        assert client.world.table().usage.bytes == left * nbytes
        assert ("room", "t") in client.world.woken
    assert client.world.ledger.next_deadline() is None
    assert not client.world.taken


def test_what_ends_in_later_turns_wakes_those_who_wait_for_its_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever request, also of another table, has the turn."""
    monkeypatch.setattr(blocks, "ENDS_MAX", 8)
    client = World().client()
    for name in ("t", "u"):
        client.create(name, tasks=[Task("train", ["ids"])])
    (row,) = chained(client, 1, 24)
    while client.world.ledger.state.core.blocks.ending:
        client.world.pass_time(0.001)
    client.apply(m.Drop("t", i64([row]), "done"))
    turns = 0
    while client.world.table().usage.bytes:
        client.world.collect()
        client.world.woken.clear()
        client.put(1, ["ids"], table="u")
        client.world.collect()
        assert ("room", "t") in client.world.woken
        turns += 1
    assert turns
    assert client.world.ledger.next_deadline() is None


def test_tables_without_such_rows_do_not_look_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    client = World().client()
    for name in ("t", "u"):
        client.create(name, tasks=[Task("train", ["ids"])])
    chained(client, 1, 3)
    rows = client.put(4, ["ids"], table="u")
    monkeypatch.setattr(reply_rows, "forests", None)
    assert not client.world.table("u").usage.continued
    client.apply(m.ReadRequest("u", i64(rows)))
    assert client.lease("train", 4, table="u").rows == rows
    with pytest.raises(TypeError):
        client.apply(m.ReadRequest("t", i64([2])))


def test_a_put_looks_at_each_place_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many fields lie there; and many that lie apart are refused."""
    looks = []
    look = continuation.values_of
    monkeypatch.setattr(continuation, "values_of", lambda *args: looks.append(0) or look(*args))
    client = World().client()
    names = [f"f{number}" for number in range(700)]
    client.create(tasks=[Task("train", ["f0"])], extra_fields=True)
    (parent,) = client.put(1, names)
    put = m.ContinueRequest("t", 16, client.columns(16, names[:100]), 0, 0.0, i64([parent] * 16), names[:100])
    client.apply(put)
    assert len(looks) == 1
    columns = client.columns(16, names)
    with pytest.raises(tq.UsageError, match=r"16 rows that continue others in 700 fields takes the server about"):
        client.apply(m.ContinueRequest("t", 16, columns, 0, 0.0, i64([parent] * 16), names))


def test_a_chain_is_bounded(embedded: tq.Queue) -> None:
    table = embedded.create_table("chain", tasks=[tq.Task("train", needs=["ids"])])
    row = table.put(ids=[[0]])
    for number in range(1, CONTINUED_MAX + 1):
        row = table.put(ids=[[number]], parent=row)
    assert table.read(row)["ids"].list() == [list(range(CONTINUED_MAX + 1))]
    with pytest.raises(tq.UsageError, match=f"{CONTINUED_MAX} rows come before, .* at most {CONTINUED_MAX}"):
        table.put(ids=[[1]], parent=row)
    table.drop(list(range(CONTINUED_MAX)), reason="old")
    assert table.read(row)["ids"].list() == [list(range(CONTINUED_MAX + 1))]
    table.drop(row, reason="old")
    assert table.stats().bytes == 0


@pytest.mark.slow
def test_a_server_ends_long_chains_of_itself(embedded: tq.Queue) -> None:
    """More values than one turn lets go of."""
    chains = ENDS_MAX // CONTINUED_MAX + 1
    table = embedded.create_table("ending", tasks=[tq.Task("train", needs=["ids"])])
    rows = [table.put(ids=[[0]])[0] for _ in range(chains)]
    for _ in range(CONTINUED_MAX):
        parents, rows = rows, [table.put(ids=[[1]], parent=row)[0] for row in rows]
        table.drop(parents, reason="continued")
    assert table.read(rows)["ids"].lengths.tolist() == [CONTINUED_MAX + 1] * chains
    table.drop(rows, reason="done")
    deadline = time.monotonic() + 30
    while table.stats().bytes:
        assert time.monotonic() < deadline
    assert embedded.audit().balanced


@pytest.mark.slow
@pytest.mark.parametrize("level", ["process", *only_long("disk")])
def test_forests_outlive_kills(level: str, tmp_path: Path) -> None:
    """The server is killed between puts, reads and ends; what it answered is there, whole."""
    chance = random.Random(4)
    with Supervised(tmp_path, level) as server, tq.connect(server.address) as queue:
        forest = Forest(queue.create_table("t", fields=FIELDS, tasks=TASKS))
        live: list[int] = []
        for number in range(24):
            live += forest.put([chance.choice([-1, *live]) for _ in range(3)], [chance.randint(0, 60)] * 3)
            if number % 4 == 3:
                server.kill()
            gone = chance.sample(live, 2)
            forest.table.drop(gone, reason="test")
            live = [row for row in live if row not in gone]
            if number % 6 == 5:
                server.kill()
            found = forest.table.read(live)
            forest.check(found, live)
            assert [part.fields for part in found._content.parts] == [["ids", "logprobs"]]
        while live:
            with forest.table.lease("train", rows=min(5, len(live))) as batch:
                forest.check(batch, batch.rows.tolist())
                if len(live) % 3 == 0:
                    server.kill()
            live = live[len(batch) :]
        assert forest.table.stats().bytes == 0
        assert queue.audit().balanced


@pytest.mark.slow
def test_what_rows_continue_comes_back_from_a_disk(tmp_path: Path) -> None:
    with spilling(tmp_path / "server") as server, tq.connect(server.address) as queue:
        table = queue.create_table("rows", tasks=[tq.Task("train", needs=["ids"])])
        noise = np.random.default_rng(0).integers(0, 1 << 60, (24, 1 << 16))
        first = table.put(ids=[noise[0]])
        rows = [int(table.put(ids=[one], parent=first[0])[0]) for one in noise[1:]]
        table.drop(first, reason="test")
        assert queue.stats().server.spill.bytes > 0
        queue.snapshot("kept")
        for row, one in zip(rows, noise[1:], strict=True):
            with table.lease("train", rows=1, timeout_s=30) as batch:
                assert batch.rows.tolist() == [row]
                assert np.array_equal(batch["ids"][0], np.concatenate([noise[0], one]))
        assert (queue.stats().server.spill.blocks, table.stats().bytes) == (0, 0)
    with spilling(tmp_path / "next", 64, spills=False) as server, tq.connect(server.address) as queue:
        queue.restore("kept")
        assert 1.9 * noise.nbytes < queue.table("rows").stats().bytes < 2.1 * noise.nbytes
        found = queue.table("rows").read(rows)
        assert np.array_equal(found["ids"][5], np.concatenate([noise[0], noise[6]]))


def test_recorded_rows_are_whole(tmp_path: Path) -> None:
    with tq.connect("embedded") as queue:
        kept = tq.Recorded(str(tmp_path / "run"))
        forest = Forest(queue.create_table("t", fields=FIELDS, tasks=TASKS, retention=kept))
        rows = forest.put([-1, -1], [3, 0])
        rows += forest.put([rows[0], rows[0], rows[1], -1], [2, 3, 1, 4])
        rows += forest.put([rows[2]], [5])
        with forest.table.lease("train", rows=2):
            pass
        forest.table.seal()
        with forest.table.lease("train", rows=5) as batch:
            forest.check(batch, rows[2:])
        wait_until_recorded(forest.table, 7)
        assert forest.table.stats().bytes == 0
    recorded = tq.open_run(tmp_path / "run").table("t")
    assert recorded.check() == []
    found = recorded.arrow(["_row", "ids", "logprobs"]).sort_by("_row")
    assert found["ids"].to_pylist() == [forest.whole[row] for row in rows]
    assert found["logprobs"].to_pylist() == [forest.whole[row] for row in rows]


def chained(client: Driver, chains: int, depth: int, fields: tuple[str, ...] = ("ids",)) -> list[int]:
    """The last rows of so many chains, each value in a block of its own; the others have ended."""
    last = []
    for _ in range(chains):
        rows = client.put(1, fields)
        for _ in range(depth - 1):
            put = m.ContinueRequest("t", 1, client.columns(1, fields), 0, 0.0, i64(rows[-1:]), [*fields])
            rows.append(client.apply(put).first)
        last.append(rows.pop())
        client.apply(m.Drop("t", i64(rows), "turn"))
    return last


@pytest.mark.parametrize("together", [True, False])
def test_a_batch_of_the_record_has_as_many_values_as_it_may(monkeypatch: pytest.MonkeyPatch, together: bool) -> None:
    """Rows that ended in one request are written in several batches, in order; one of more values comes alone."""
    monkeypatch.setattr(recording, "NODES_MAX", 100)
    client = World().client()
    client.create(tasks=[Task("train", ["ids", "logprobs"])], retention=tq.Recorded("run"))
    wanted = [
        *chained(client, 30, 10, ("ids", "logprobs")),
        *chained(client, 1, 120, ("ids", "logprobs")),
        *chained(client, 3, 10, ("ids", "logprobs")),
    ]
    ledger = client.world.ledger
    while (
        (batch := ledger.next_ended("t", 1 << 16, 0.0)) is not None
        and len(batch.rows)
        and "turn" in {one.reason for one in batch.ended}
    ):
        client.world.ledger.rows_recorded("t", batch.number, batch.rows, 0.0)
    for rows in [wanted] if together else [wanted[:12], wanted[12:20], wanted[20:]]:
        client.apply(m.Drop("t", i64(rows), "done"))
    found, sizes = [], []
    while (batch := ledger.next_ended("t", 1 << 16, 0.0)) is not None:
        assert batch.nodes["ids"] is batch.nodes["logprobs"]
        assert [row for one in batch.ended for row in one.rows.tolist()] == batch.rows.tolist()
        found += batch.rows.tolist()
        sizes.append(len(batch.rows))
        ledger.rows_recorded("t", batch.number, batch.rows, 0.0)
    assert found == wanted
    assert sizes == [10, 10, 10, 1, 3]
    assert not client.world.table().usage.continued


def test_each_field_has_its_own_chains_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a snapshot, after its restore, and in the record of ended rows."""
    monkeypatch.setenv(SNAPSHOTS_VARIABLE, str(tmp_path / "snapshots"))
    want = {"a": [[1, 2], [1, 2, 3], [1, 2, 3, 4]], "b": [[8], [6], [6, 7]], "c": [[1], [1, 2], [1, 2, 3]]}

    def check(rows: Any) -> None:
        assert {name: rows[name].list() for name in want} == want

    with tq.connect("embedded") as queue:
        kept = tq.Recorded(str(tmp_path / "run"))
        table = queue.create_table("t", tasks=[tq.Task("train", needs=[*want])], retention=kept)
        first = table.put(a=[[1, 2]], b=[[5]], c=[[1]])
        table.update(first, b=[[8]], overwrite=True)
        second = table.put(a=[[3]], b=[[6]], c=[[2]], parent=first, continued=["a", "c"])
        third = table.put(a=[[4]], b=[[7]], c=[[3]], parent=second)
        fourth = table.put(a=[[5]], b=[[9]], c=[[4]], parent=first)
        check(table.read([*first, *second, *third]))
        queue.snapshot("s")
        table.seal()
        with table.lease("train", rows=4) as batch:
            assert batch["b"].list()[3] == [8, 9]
        wait_until_recorded(table, 4)
    found = tq.open_run(tmp_path / "run").table("t").arrow(["_row", *want]).sort_by("_row")
    assert {name: found[name].to_pylist()[:3] for name in want} == want
    snapshot = read_table(tmp_path / "snapshots" / "s", "t")
    assert {name: snapshot[name].to_pylist()[:3] for name in want} == want
    with tq.connect("embedded") as queue:
        queue.restore("s")
        table = queue.table("t")
        check(table.read([*first, *second, *third]))
        assert table.read(fourth)["b"].list() == [[8, 9]]
        last = table.put(a=[[6]], b=[[6]], c=[[6]], parent=third)
        assert table.read(last)["b"].list() == [[6, 7, 6]]


def test_a_snapshot_has_whole_values_in_bounded_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some roots have ended. A restored row is continued as any other."""
    monkeypatch.setenv(SNAPSHOTS_VARIABLE, str(tmp_path))
    monkeypatch.setattr(snapshot_files, "CHUNK_BYTES", 1 << 16)
    with tq.connect("embedded") as queue:
        forest = Forest(queue.create_table("t", fields=FIELDS, tasks=TASKS))
        rows = forest.put([-1, -1], [3000, 2])
        rows += forest.put([rows[0], rows[0], rows[1]], [1, 2, 3])
        rows += forest.put([rows[3], -1, rows[0]] * 8, [4, 5, 6] * 8)
        with forest.table.lease("train", rows=2):
            pass
        queue.snapshot("s")
    files = sorted((tmp_path / "s/000001/tables/0").glob("field-*.arrow"))
    for file in files:
        with pa.memory_map(str(file)) as source:
            batches = pa.ipc.open_file(source)
            sizes = [batches.get_batch(at).nbytes for at in range(batches.num_record_batches)]
        assert len(sizes) > 2
        assert max(sizes) < 2 << 16
    table = read_table(tmp_path / "s", "t")
    for name in ("ids", "logprobs"):
        assert table[name].to_pylist() == [forest.whole[row] for row in rows[2:]]
    with tq.connect("embedded") as queue:
        queue.restore("s")
        restored = Forest(queue.table("t"))
        found = restored.table.read(rows[2:])
        restored.whole = {row: forest.whole[row] for row in rows[2:]}
        restored.chains = {row: (row,) for row in rows[2:]}
        restored.own = {row: len(whole) for row, whole in restored.whole.items()}
        restored.check(found, rows[2:])
        more = restored.put([rows[5], rows[2]], [2, 2])
        more += restored.put(more, [1, 1])
        with restored.table.lease("train", rows=len(rows) - 2):
            pass
        restored.check(restored.table.read(more), more)
        restored.table.drop(more, reason="test")
        assert restored.table.stats().bytes == 0
        assert queue.audit().balanced
