"""`Field.like` and `Field.finite`, and what a put is told of: lengths that differ, NaN, a column that no task gives,
rows that are stale."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import transferqueue as tq
from tests.client.deployments import Served
from transferqueue.limits import BY_CONTENT_BYTES_MIN

RAGGED = (None,)
FIELDS = [
    tq.Field("prompt_ids", "int32", RAGGED),
    tq.Field("response_ids", "int32", RAGGED),
    tq.Field("rollout_logprobs", "float32", RAGGED),
    tq.Field("loss_mask", "bool", RAGGED),
    tq.Field("advantages", "float32"),
    tq.Field("experts", "uint8", (None, 4), like="response_ids"),
    tq.Field("scores", "float32", RAGGED, like="experts", finite=True),
    tq.Field("ref_logprobs", "float32", RAGGED, like="", finite=False),
]


@pytest.fixture(params=["local", "remote"])
def table(request: pytest.FixtureRequest, server: Served, name: str) -> Iterator[tq.Table]:
    how: dict[str, Any] = {"data": "remote"} if request.param == "remote" else {}
    with tq.connect(server.tcp if how else server.ipc, **how) as queue:
        queue.create_table(name, fields=FIELDS, tasks=[tq.Task("score", needs=["response_ids"])])
        yield queue.table(name)  # as another process would open it


def ids(*lengths: int) -> list[Any]:
    return [np.zeros(length, np.int32) for length in lengths]


def logprobs(*lengths: int) -> list[Any]:
    return [np.zeros(length, np.float32) for length in lengths]


def test_one_value_for_each_token_of_the_response_or_of_all_is_stored(table: tq.Table) -> None:
    both = {"prompt_ids": ids(2, 3), "response_ids": ids(3, 1)}
    for lengths in ((3, 1), (5, 4), (4, 3)):  # of the response, of all, of all but the first
        table.put(**both, rollout_logprobs=logprobs(*lengths))
    table.put(response_ids=ids(3, 1), loss_mask=[[True] * 5, [False] * 4])  # the prompt is not known here
    table.put(rollout_logprobs=logprobs(7))  # nor the response
    table.put(response_ids=ids(3, 1), ref_logprobs=logprobs(9, 9), advantages=[1.0, 2.0])
    table.put(response_ids=tq.Repeat(ids(3, 1), 2), rollout_logprobs=logprobs(3, 3, 1, 1))


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"rollout_logprobs": logprobs(3, 0)}, '"rollout_logprobs": row 1 has 0 values, and its "response_ids" has 1'),
        ({"rollout_logprobs": logprobs(2, 0)}, "row 0 has 2 values, .* give one for each token of the response, or of"),
        ({"rollout_logprobs": logprobs(4, 2), "prompt_ids": ids(2, 3)}, 'row 0 has 4 values, .* or declare like=""'),
        ({"loss_mask": torch.nested.nested_tensor([torch.ones(3).bool(), torch.ones(0).bool()], layout=torch.jagged)},
         '"loss_mask": row 1 has 0 values'),
        ({"experts": [np.zeros((3, 4), np.uint8), np.zeros((2, 4), np.uint8)]},
         '"experts": row 1 has 2 values, and its "response_ids" has 1; give as many as "response_ids" has in each row'),
        ({"experts": [np.zeros((3, 4), np.uint8), np.zeros((1, 4), np.uint8)], "scores": logprobs(3, 2)},
         '"scores": row 1 has 2 values, and its "experts" has 1'),
    ],
)  # fmt: skip
def test_other_lengths_are_refused_with_the_row(table: tq.Table, columns: dict[str, Any], text: str) -> None:
    with pytest.raises(tq.SchemaError, match=text):
        table.put(response_ids=ids(3, 1), **columns)
    rows = table.put(key=["a", "b"])
    with pytest.raises(tq.SchemaError, match=text):
        table.update(rows, response_ids=ids(3, 1), **columns)
    assert table.audit().rows_put == 2
    assert table.read(rows).fields == ()


def test_a_result_is_compared_with_what_the_rows_of_the_batch_have(table: tq.Table) -> None:
    rows = table.put(response_ids=ids(3, 1, 2))
    with table.lease("score", rows=3, timeout_s=5) as batch:
        for call in (batch.ack, batch.release):
            with pytest.raises(tq.SchemaError, match='row 1 has 0 values, and its "response_ids" has 1'):
                call(rollout_logprobs=logprobs(3, 0, 2))
        with pytest.raises(tq.SchemaError, match='row 0 has 1 value, and its "response_ids" has 2'):
            batch.ack(rows=[rows[2], rows[0]], rollout_logprobs=logprobs(1, 3))
        batch.ack(rows=[rows[2], rows[0]], rollout_logprobs=logprobs(2, 3))
        batch.release(response_ids=ids(4), rollout_logprobs=logprobs(4))  # what it has is replaced
    with table.read(rows[1:2], fields=["response_ids"]) as read:
        with pytest.raises(tq.SchemaError, match='row 0 has 5 values, and its "response_ids" has 4'):
            table.update(rows[1:2], if_unchanged=read, experts=[np.zeros((5, 4), np.uint8)])
        table.update(rows[1:2], if_unchanged=read, experts=[np.zeros((4, 4), np.uint8)])


NAN, INF = float("nan"), float("inf")
BIG = np.zeros(BY_CONTENT_BYTES_MIN // 4, np.float32)
BIG_NAN = np.append(BIG, np.float32(NAN))


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"advantages": [1.0, NAN]},
        '"advantages": row 1 has nan, and values of this field are finite; mask it or drop'),
        ({"advantages": tq.Repeat([1.0, INF], [1, 1])}, "row 1 has inf"),
        ({"rollout_logprobs": [[1.0, 2.0, 3.0], [-INF]]},
        '"rollout_logprobs": row 1 has -inf, .* or declare the field with'),
        ({"rollout_logprobs": torch.nested.nested_tensor([torch.ones(3), torch.tensor([NAN])], layout=torch.jagged)},
         "row 1 has nan"),
        ({"rollout_logprobs": tq.Repeat([np.full(3, NAN, np.float32), np.zeros(1, np.float32)])}, "row 0 has nan"),
        ({"rollout_logprobs": tq.Repeat([BIG, BIG_NAN])}, "row 1 has nan"),  # blocks of their own
    ],
)  # fmt: skip
def test_values_that_are_not_finite_are_refused_with_the_row(
    table: tq.Table, columns: dict[str, Any], text: str
) -> None:
    rows = table.put(response_ids=ids(3, 1))
    before = table.stats().bytes
    for call in (lambda: table.put(response_ids=ids(3, 1), **columns), lambda: table.update(rows, **columns)):
        with pytest.raises(tq.SchemaError, match=text):
            call()
    assert (table.stats().bytes, table.audit().rows_put) == (before, 2)
    table.put(response_ids=ids(1), ref_logprobs=[[NAN]])  # finite=False
    table.put(response_ids=ids(1, 1), rollout_logprobs=[[1e30], [1e38]])  # whose squares are not finite


@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float32", "float64", "complex64", "complex128", "float8_e5m2"]
)
@pytest.mark.parametrize("shape", [(), (2,), (None,), (None, 3)])
def test_each_floating_dtype_and_layout_is_looked_at(name: str, dtype: str, shape: tuple[int | None, ...]) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    good = [np.ones([2 if size is None else size for size in shape], kind) for _ in range(3)]
    with tq.connect("embedded", arena_bytes="64MiB") as queue:
        table = queue.create_table(name, fields=[tq.Field("x", dtype, shape, finite=True)])
        table.put(x=good)
        for bad in (NAN, -INF):
            wrong = [each.copy() for each in good]
            wrong[1][(-1,) * len(shape)] = bad
            with pytest.raises(tq.SchemaError, match=r'field "x": row 1 has .*(nan|inf).*, and values'):
                table.put(x=wrong)
        assert table.audit().rows_put == 3


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: tq.Field("a", "int32", finite=True), "finite=True is for floating dtypes, and each int32 is finite"),
        (lambda: tq.Field("a", "float32", finite=1), "finite=1 is int; give True or False"),  # type: ignore[arg-type]
        (lambda: tq.Field("a", "float32", like="b"), "like='b' is for rows of differing lengths"),
        (lambda: tq.Field("a", "float32", RAGGED, like="a"), "name that field, and give a shape that begins with None"),
        (lambda: tq.Field("a", "float32", RAGGED, like="a b"), "field name 'a b' has characters"),
    ],
)
def test_a_rule_that_no_value_could_keep_is_refused(make: Any, text: str) -> None:
    with pytest.raises(tq.UsageError, match=text):
        make()


def test_a_rule_about_a_field_that_is_none_is_refused(server: Served, name: str) -> None:
    ids_of = tq.Field("response_ids", "int32", RAGGED)
    with tq.connect(server.ipc) as queue:
        with pytest.raises(
            tq.UsageError, match=r"is like 'respnse_ids', and no field has that name; did you mean 'response_ids'"
        ):
            queue.create_table(name, fields=[ids_of, tq.Field("a", "float32", RAGGED, like="respnse_ids")])
        with pytest.raises(tq.UsageError, match='is like "b", which is float32: its rows have no lengths'):
            queue.create_table(name, fields=[tq.Field("b", "float32"), tq.Field("a", "float32", RAGGED, like="b")])
        queue.create_table(name, fields=[ids_of])
        with pytest.raises(tq.SchemaError, match=r'is int32\[None\], not int32\[None\] like="other"'):
            queue.table(name).add_fields([tq.Field("response_ids", "int32", RAGGED, like="other")])


def test_rules_are_in_a_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSFERQUEUE_SNAPSHOTS", str(tmp_path))
    with tq.connect("embedded", arena_bytes="64MiB") as queue:
        queue.create_table("t", fields=FIELDS).put(response_ids=ids(1))
        (written,) = queue.snapshot("s")
    with tq.connect("embedded", arena_bytes="64MiB") as queue:
        queue.restore(written)
        table = queue.table("t")
        assert table.fields == {field.name: field for field in FIELDS}
        with pytest.raises(tq.SchemaError, match="row 0 has 1 value"):
            table.put(response_ids=ids(2), scores=logprobs(1), experts=[np.zeros((2, 4), np.uint8)])


def test_a_put_without_a_column_that_no_task_gives_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    tasks = [tq.Task("score", needs=["text"], gives=["reward"]), tq.Task("train", needs=["text", "reward", "length"])]
    with tq.connect("embedded", arena_bytes="64MiB") as queue, caplog.at_level(logging.WARNING, "transferqueue.client"):
        table = queue.create_table("t", tasks=tasks)
        table.put(text=["a"], length=[1])
        assert not caplog.records
        for _ in range(3):
            table.put(text=["a"])
        (record,) = caplog.records
        assert record.message == (
            'a put into table "t" has no length, which no task gives: task train will never get these rows, unless an '
            "update brings it"
        )


@pytest.mark.parametrize(
    ("policy", "fate"),
    [
        (tq.DropStale(), "they are dropped"),
        (tq.KeepStale(), "it will not get them"),
        (tq.Requeue("score"), "made anew"),
    ],
)
def test_rows_that_are_stale_when_they_are_put_are_told(
    caplog: pytest.LogCaptureFixture, policy: Any, fate: str
) -> None:
    tasks = [tq.Task("score", needs=["text"], gives=["reward"]), tq.Task("train", needs=["text", "reward"])]
    with tq.connect("embedded", arena_bytes="64MiB") as queue, caplog.at_level(logging.WARNING, "transferqueue.client"):
        pacing = tq.Pacing("train", batch_rows=8, depth=8, max_staleness=2, on_stale=policy)
        table = queue.create_table("t", tasks=tasks, pacing=pacing)
        table.advance(5)
        for version in (3, 5, -1):
            table.put(text=["a", "b"], policy_version=version)
        assert not caplog.records
        for _ in range(2):
            table.put(text=["a", "b", "c"], policy_version=[5, 2, 1])
        (record,) = caplog.records
        assert record.message.startswith(
            '2 rows of a put into table "t" are older than version 3, the oldest that task'
        )
        assert fate in record.message
        table.advance(6)
        table.put(text=["a"], policy_version=2)
        assert caplog.records[1].message.startswith('1 row of a put into table "t" is older than version 4')
