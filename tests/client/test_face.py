"""The public face, verb by verb: the same through embedded, ipc and tcp, by the sync and the async front."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import numpy as np
import pytest
import torch

import transferqueue as tq
from transferqueue.storage.elements.torch_interop import require_torch

Queue = Any


@pytest.fixture
def table(queue: Queue, name: str) -> Any:
    return queue.create_table(name, tasks=[tq.Task("train", needs=["text"])])


def test_put_lease_ack(queue: Queue, name: str) -> None:
    table = queue.create_table(
        name,
        tasks=[tq.Task("reward", needs=["response_ids"]), tq.Task("train", needs=["response_ids", "rewards"])],
    )
    rows = table.put(response_ids=[np.arange(3), np.arange(5)], group_id=7, group_size=2, policy_version=[3, 4])
    assert rows.dtype == np.int64
    with table.lease("reward", rows=2, timeout_s=10) as batch:
        assert batch.rows.tolist() == rows.tolist()
        assert [row.tolist() for row in batch["response_ids"]] == [[0, 1, 2], [0, 1, 2, 3, 4]]
        batch.ack(rewards=np.array([0.5, 1.0], np.float32))
    with table.lease("train", rows=2, timeout_s=10) as batch:
        assert batch["rewards"].numpy().tolist() == [0.5, 1.0]
        assert batch.policy_version.tolist() == [3, 4]
        assert (batch.group_id.tolist(), batch.group_size.tolist(), batch.tokens.tolist()) == ([7, 7], [2, 2], [3, 5])
    audit = table.audit()
    assert (audit.rows_put, audit.rows_done, audit.rows_live) == (2, 2, 0)


def test_facts_come_back_as_given(queue: Queue, name: str) -> None:
    table = queue.create_table(name, tasks=[tq.Task("train", needs=["text"])])
    table.put(
        text=["a", "b", "c"],
        key=["k0", "k1", "k2"],
        tags=[{"split": "easy"}, {"n": 1}, {}],
        ordinal=torch.arange(3),
        priority=[0.5, 2, -1],
        policy_version=4,
        policy_version_max=np.int64(5),
        tokens=9,
    )
    with table.lease("train", rows=3) as batch:
        assert batch.keys == ["k0", "k1", "k2"]
        assert batch.tags == [{"split": "easy"}, {"n": 1}, {}]
        assert batch.ordinal.tolist() == [0, 1, 2]
        assert batch.priority.tolist() == [0.5, 2.0, -1.0]
        assert batch.policy_version.tolist() == [4] * 3
        assert batch.policy_version_max.tolist() == [5] * 3
        assert batch.tokens.tolist() == [9] * 3
        batch.rows[0] = 99  # this process's own


def test_facts_that_were_not_given(table: Any) -> None:
    table.put(text=["a"])
    with table.lease("train", rows=1) as batch:
        assert (batch.keys, batch.tags) == ([""], [{}])
        assert (batch.group_id[0], batch.policy_version[0], batch.ordinal[0]) == (-1, -1, -1)
        assert len(batch) == 1


@pytest.mark.parametrize(
    ("columns", "tokens"),
    [
        ({"input_ids": [[1, 2], [3]], "prompt_ids": [[1], [2]]}, [2, 1]),
        ({"prompt_ids": [[1], [2]], "response_ids": [[1, 2, 3], [4]]}, [4, 2]),
        ({"response_ids": np.zeros((2, 5), np.int64)}, [5, 5]),
        ({"text": ["a", "b"]}, [0, 0]),
        ({"input_ids": [[1, 2], [3]], "tokens": [7, 8]}, [7, 8]),
    ],
)
def test_tokens_are_taken_from_the_ids_of_the_put(queue: Queue, name: str, columns: Any, tokens: list[int]) -> None:
    table = queue.create_table(name, tasks=[tq.Task("train")])
    rows = table.put(**columns)
    table.update(rows, teacher_ids=[[1, 2, 3], [4, 5, 6]])
    table.update(rows, input_ids=[[1] * 9] * 2, overwrite=True)
    with table.read(rows) as found:
        assert found.tokens.tolist() == tokens


def test_scalars_are_given_to_all_rows(queue: Queue, name: str) -> None:
    table = queue.create_table(name, tasks=[tq.Task("train")])
    rows = table.put(x=np.arange(3), source="gsm8k", weight=0.5, extra={"a": [1]})
    with table.read(rows) as found:
        assert found["source"].list() == ["gsm8k"] * 3
        assert found["weight"].list() == [0.5] * 3
        assert found["extra"].list() == [{"a": [1]}] * 3


def test_rows_that_share_values_store_them_once(queue: Queue, name: str) -> None:
    table = queue.create_table(name, tasks=[tq.Task("train")])
    prompts = [np.arange(1000), np.arange(2000)]
    rows = table.put(
        prompt_ids=tq.Repeat(prompts, 4), response_ids=[[i] for i in range(8)], score=tq.Repeat([1.0, 2.0], 4)
    )
    assert len(rows) == 8
    assert table.stats().bytes < 2 * 3000 * 8
    with table.read(rows) as found:
        assert [len(row) for row in found["prompt_ids"]] == [1000] * 4 + [2000] * 4
        assert found["score"].list() == [1.0] * 4 + [2.0] * 4
        assert found["response_ids"].list() == [[i] for i in range(8)]


def test_late_columns_complete_rows(queue: Queue, name: str) -> None:
    table = queue.create_table(name, tasks=[tq.Task("train", needs=["a", "b"])])
    rows = table.put(a=["x", "y", "z"])
    table.update(rows[1:], b=[np.ones(2), np.ones(3)], policy_version=6)
    with table.lease("train", rows=2) as batch:
        assert batch.rows.tolist() == rows[1:].tolist()
        assert batch.policy_version.tolist() == [6, 6]
    with pytest.raises(tq.AlreadyExists, match="overwrite=True"):
        table.update(rows[:1], a=["w"])
    table.update(rows[:1], a=["w"], overwrite=True)
    assert table.read(rows[:1])["a"].list() == ["w"]


def test_an_exception_gives_the_rows_back_as_failed(table: Any) -> None:
    rows = table.put(text=["a", "b"])
    with pytest.raises(RuntimeError, match="no good"), table.lease("train", rows=2):
        raise RuntimeError("no good")
    with table.lease("train", rows=2, timeout_s=5) as batch:
        assert batch.rows.tolist() == rows.tolist()


def test_parts_of_a_batch_end_on_their_own(table: Any) -> None:
    rows = table.put(text=["a", "b", "c", "d"])
    with table.lease("train", rows=4) as batch:
        batch.ack(rows[:1], score=[1.0])
        batch.drop("unparsable", rows[1:2])
        batch.release(rows[2:3])
        assert not batch.ended
        with pytest.raises(tq.NotFound, match="is not, or not any more, in this batch"):
            batch.ack(rows[:1])
    assert batch.ended
    audit = table.audit()
    assert (audit.rows_done, audit.dropped, audit.rows_live) == (2, {"unparsable": 1}, 1)


def test_a_batch_that_is_collected_is_released(table: Any) -> None:
    rows = table.put(text=["a", "b"])
    batch = table.lease("train", rows=2)
    del batch
    with table.lease("train", rows=2, timeout_s=5) as batch:
        assert batch.rows.tolist() == rows.tolist()


def test_a_batch_after_its_end(table: Any) -> None:
    table.put(text=["a", "b"], big=np.arange(200_000).reshape(2, -1))
    with table.lease("train", rows=2, fields=["text", "big", "text"]) as batch:
        taken = batch["big"].numpy()
    assert taken[1, -1] == 199_999
    for column in ("big", "text"):
        with pytest.raises(tq.BatchEnded, match=r"was acked, and its memory was returned; take its values before"):
            batch[column].list()
    for verb in (batch.ack, batch.release, batch.renew, lambda: batch.drop("late")):
        with pytest.raises(tq.BatchEnded, match="was acked"):
            verb()
    assert batch.rows.tolist()


def test_renewing(table: Any) -> None:
    table.put(text=["a"])
    batch = table.lease("train", rows=1, lease_s=30)
    assert batch.lease_s == 30
    assert batch.renew(90) == 90
    assert batch.lease_s == 90
    batch.ack()


def test_leases_end_with_the_table(table: Any) -> None:
    rows = table.put(text=["a", "b", "c", "d", "e"])
    table.seal()
    seen: list[int] = []
    for batch in table.leases("train", rows=2, timeout_s=5):
        with batch:
            seen += batch.rows.tolist()
    assert seen == rows.tolist()
    with pytest.raises(tq.EndOfTable):
        table.lease("train", rows=1)


def test_reading_finding_dropping_deleting(queue: Queue, name: str) -> None:
    table = queue.create_table(name, tasks=[tq.Task("train", needs=["text"])], retention=tq.Manual())
    rows = table.put(text=["a", "b", "c"], key=["x", "y", "z"], score=[1.0, 2.0, 3.0])
    assert table.find(["z", "nobody", "x"]).tolist() == [rows[2], -1, rows[0]]
    assert table.find("y").tolist() == [rows[1]]
    with table.read(where=tq.Compare("score", ">", 1.5)) as found:
        assert found["text"].list() == ["b", "c"]
    assert table.read(where=[tq.Compare("score", ">", 0.5)], limit=1).rows.tolist() == [rows[0]]
    assert table.drop(rows[:1], "filtered") == 1
    with table.lease("train", rows=2) as batch:
        assert batch.rows.tolist() == rows[1:].tolist()
    assert table.read(rows[1:])["text"].list() == ["b", "c"]
    assert table.delete(rows[1:]) == 2
    with pytest.raises(tq.NotFound):
        table.read(rows[1:])


def test_reservations(queue: Queue, name: str) -> None:
    table = queue.create_table(
        name, tasks=[tq.Task("train", needs=["x"])], pacing=tq.Pacing("train", batch_rows=4, depth=0, max_staleness=0)
    )
    with table.reserve(4) as reservation:
        assert (reservation.rows, reservation.left, reservation.version, reservation.refills) == (
            4,
            4,
            reservation.version,
            [],
        )
        with pytest.raises(tq.DeadlineExceeded):
            table.reserve(1, timeout_s=0.01)
        table.put(x=np.arange(3), reservation=reservation)
        assert reservation.left == 1
    with table.reserve(1, timeout_s=5):  # what was left has returned
        pass
    discarded = table.reserve(1, timeout_s=5)
    del discarded
    table.reserve(1, timeout_s=5).release()


def test_the_clock(queue: Queue, name: str) -> None:
    table = queue.create_table(name, tasks=[tq.Task("train", needs=["x"])], pacing=tq.Pacing("train", batch_rows=4))
    table.advance(3)
    table.put(x=np.arange(1), policy_version=3)
    with table.lease("train", rows=1) as batch:
        assert batch.version == 3


def test_terms(queue: Queue, name: str) -> None:
    table = queue.create_table(name, fields=[tq.Field("a", "float32", (None,))], limits=tq.Limits(rows=8, bytes="1MiB"))
    assert (table.name, table.limits.rows, table.pacing, table.retention) == (name, 8, None, tq.Acked())
    table.add_task(tq.Task("late", needs=["a"]))
    table.add_fields([tq.Field("b", "int64")])
    assert list(table.tasks) == ["late"]
    assert table.fields == {"a": tq.Field("a", "float32", (None,)), "b": tq.Field("b", "int64")}
    again = queue.table(name)
    assert again.fields == table.fields
    assert name in queue.tables()
    queue.drop_table(name)
    assert name not in queue.tables()
    with pytest.raises(tq.NotFound, match=name):
        table.put(a=[np.zeros(1, np.float32)])


def test_observing(queue: Queue, table: Any, name: str) -> None:
    row = int(table.put(text=["a"], key="k")[0])
    assert queue.inspect(name, row)
    assert queue.sessions()
    assert queue.doctor(name)
    assert queue.doctor()
    assert queue.stats()
    assert queue.audit()
    assert table.stats()


def test_columns_reach_arrow_and_tensordict(queue: Queue, name: str) -> None:
    table = queue.create_table(name, tasks=[tq.Task("train")])
    table.put(ids=[[1, 2], [3]], dense=torch.ones(2, 3), score=[1.0, 2.0], text=["a", "b"], extra=[{"x": 1}, [2]])
    with table.lease("train", rows=2, fields=["ids", "dense", "score", "text", "extra"]) as batch:
        arrow, tensors = batch.arrow(), batch.tensordict()
        assert set(batch.fields) == {"ids", "dense", "score", "text", "extra"}
        assert "ids" in batch
        assert sorted(batch) == sorted(batch.fields)
    assert arrow.column("ids").to_pylist() == [[1, 2], [3]]
    assert arrow.column("text").to_pylist() == ["a", "b"]
    assert tensors.batch_size == torch.Size([2])
    assert [row.tolist() for row in tensors["ids"].unbind()] == [[1, 2], [3]]
    assert tensors["dense"].shape == (2, 3)
    assert tensors["text"] == ["a", "b"]
    assert tensors["extra"] == [{"x": 1}, [2]]


def test_two_clients_see_each_others_fields(queue: Queue, name: str) -> None:
    mine = queue.create_table(name, tasks=[tq.Task("train", needs=["b"])])
    with tq.connect(queue.address) as other:
        theirs = other.table(name)
        rows = theirs.put(a=[np.zeros((2, 2)), np.zeros((1, 2))], b=["x", "y"])
        with mine.lease("train", rows=2) as batch:  # `a` lies in the same block, and was never heard of here
            assert batch["b"].list() == ["x", "y"]
        more = mine.put(a=[np.zeros((5, 2))], b=["z"])
        theirs.add_fields([tq.Field("c", "float32", (None, None))])
        mine.update(more, c=[np.zeros((2, 3), np.float32)])
        assert theirs.read(more)["c"][0].shape == (2, 3)
        assert len(rows) == 2


def test_an_unfinished_row_is_given_back_with_what_was_made_of_it(queue: Queue, name: str) -> None:
    table = queue.create_table(name, tasks=[tq.Task("write", needs=["so_far"], gives=["text"])])
    table.put(so_far=[[1], [2]], policy_version=-1)
    first = table.lease("write", rows=2, timeout_s=10)
    first.release(first.rows[:1], so_far=[[1, 10]], policy_version=4, policy_version_max=5, tokens=2)
    with pytest.raises(tq.SchemaError):
        first.release(so_far=["not ids"])
    first.release(so_far=[[2, 20]])
    with pytest.raises(tq.BatchEnded):
        first.release(so_far=[[2, 20]])
    second = table.lease("write", rows=2, timeout_s=10)
    assert [ids.tolist() for ids in second["so_far"]] == [[1, 10], [2, 20]]
    assert second.policy_version.tolist() == [4, -1]
    assert second.policy_version_max.tolist() == [5, -1]
    assert second.tokens.tolist() == [2, 0]
    second.ack(text=["a", "b"])
    assert table.audit().rows_done == 2


def test_a_nested_tensor_alone_is_a_column(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch says that its nested tensors may change
        ragged = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)])
    with tq.connect() as queue:
        table = queue.create_table(name)
        assert len(table.put(x=ragged)) == 2
        assert table.read()["x"].list() == [[1, 1], [0, 0, 0]]


@pytest.mark.parametrize("absent", ["torch", "tensordict"])
def test_tensors_without_torch_are_refused_with_the_remedy(
    name: str, absent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tq.connect() as queue:
        table = queue.create_table(name)
        table.put(x=[[1, 2], [3]])
        require_torch.cache_clear()  # as in a process that asks for the first time
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, absent, None)
            ask = table.read()["x"].nested if absent == "torch" else table.read().tensordict
            with pytest.raises(tq.UsageError, match=rf"{absent} is not installed here.*\[torch\]'.* ask for .numpy"):
                ask()


def test_things_say_what_they_are(name: str) -> None:
    with tq.connect() as queue:
        table = queue.create_table(name, tasks=[tq.Task("train", needs=["x"])])
        table.put(x=[1, 2], y=["a", "b"])
        assert repr(table.read()) == "<Rows of 2 rows: x, y>"
        with table.lease("train", rows=2, timeout_s=10) as batch:
            assert repr(batch) == f"<Batch of 2 rows: x; task 'train' of table '{name}'>"
        assert repr(batch) == f"<Batch of 2 rows: x; task 'train' of table '{name}', was acked>"
        with table.reserve(3) as reservation:
            assert repr(reservation) == f"<Reservation of 3 rows of table '{name}' at version 0, 3 left>"
        channel = queue.weights(name)
        channel.publish(4, {"w": np.ones(1)})
        assert repr(channel) == f"<WeightChannel '{name}' at {queue.address}>"
        with channel.pull() as weights:
            assert repr(weights) == f"<Weights of channel '{name}': version 4, 1 tensors>"
