"""Bad input: the type says who must act, the message says what, and nothing is changed."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import transferqueue as tq
from tests.client.deployments import Served, served
from transferqueue.transport import Wakeup, dial
from transferqueue.wire import messages as m
from transferqueue.wire.codec import decode_answer

CYCLE: list[Any] = []
CYCLE.append(CYCLE)


@pytest.fixture(scope="module")
def opened(server: Served) -> Any:
    with tq.connect(server.ipc) as found:
        yield found


@pytest.fixture
def table(opened: tq.Queue, name: str) -> tq.Table:
    found = opened.create_table(
        name,
        fields=[
            tq.Field("dense", "float32", (3,)),
            tq.Field("ragged", "int64", (None,)),
            tq.Field("score", "float32"),
            tq.Field("text", "str"),
        ],
        tasks=[tq.Task("train", needs=["text"]), tq.Task("whole", needs=["score"], groups=tq.Complete())],
        limits=tq.Limits(rows=16, bytes="64KiB"),
        extra_fields=True,
    )
    found.put(text=["zero", "one"], dense=np.zeros((2, 3), np.float32), group_id=1, group_size=2, key=["k0", "k1"])
    return found


def state(table: tq.Table) -> tuple[Any, ...]:
    """What must be as before."""
    with table.read() as found:
        facts = [found.rows.tolist(), found.policy_version.tolist(), found.keys, found.tags, found["text"].list()]
    stats = table.stats()
    return table.audit(), facts, stats.bytes, table.fields


def freed(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its memory, as FSDP leaves parameters between their uses."""
    tensor.untyped_storage().resize_(0)
    return tensor


def freed_view() -> torch.Tensor:
    """A view into freed memory: its address is not 0."""
    whole = torch.ones(10)
    view = whole[4:7]
    freed(whole)
    return view


Call = Callable[[tq.Table], object]

PUTS: dict[str, tuple[Call, type[Exception], str]] = {
    "other dtype": (
        lambda t: t.put(score=np.zeros(2, np.float64)),
        tq.SchemaError,
        r'field "score" is float32, but the values are float64; convert them',
    ),
    "other shape": (
        lambda t: t.put(dense=np.zeros((2, 4), np.float32)),
        tq.SchemaError,
        r'field "dense" is float32\[3\], but rows of the values have shape \[4\]',
    ),
    "row counts differ": (
        lambda t: t.put(text=["a", "b"], score=np.zeros(3, np.float32)),
        tq.SchemaError,
        r'field "score" has 3 rows, but this call has 2',
    ),
    "ragged where dense": (
        lambda t: t.put(dense=[np.zeros(3, np.float32), np.zeros(2, np.float32)]),
        tq.SchemaError,
        r'field "dense" is float32\[3\], but row 1 has shape \[2\]',
    ),
    "dense where ragged": (
        lambda t: t.put(ragged=np.zeros((2, 4), np.int64)),
        tq.SchemaError,
        r'field "ragged" is int64\[None\] with rows of different sizes, but the values are one dense array',
    ),
    "object dtype": (
        lambda t: t.put(extra=np.array([{"a": 1}, None], dtype=object)),
        tq.SchemaError,
        r'field "extra": numpy dtype object cannot be stored; give a list',
    ),
    "an object": (
        lambda t: t.put(extra=[threading.Lock(), threading.Lock()]),
        tq.SchemaError,
        r'field "extra".*lock',
    ),
    "memory that was freed": (
        lambda t: t.put(extra=freed(torch.ones(2, 3))),
        tq.SchemaError,
        r'field "extra": a tensor whose values end at byte 24 of a storage of 0: its memory was freed',
    ),
    "a row whose memory was freed": (
        lambda t: t.put(extra=[torch.ones(2), freed_view()]),
        tq.SchemaError,
        r'field "extra": a tensor whose values end at byte 28 of a storage of 0',
    ),
    "a ragged tensor whose memory was freed": (
        lambda t: t.put(extra=torch.nested.nested_tensor_from_jagged(freed(torch.ones(4)), torch.tensor([0, 1, 4]))),
        tq.SchemaError,
        r'field "extra": a tensor whose values end at byte 16 of a storage of 0',
    ),
    "four-bit integers": (
        lambda t: t.put(extra=np.ones(2, ml_dtypes.int4)),
        tq.SchemaError,
        r'field "extra": numpy dtype int4 cannot be stored; convert it to one of ',
    ),
    "sparse tensor": (
        lambda t: t.put(extra=torch.eye(2).to_sparse()),
        tq.SchemaError,
        r'field "extra".*sparse',
    ),
    "quantised tensor": (
        lambda t: t.put(extra=torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8)),
        tq.SchemaError,
        r'field "extra".*(quantize|qint8)',
    ),
    "cyclic value": (lambda t: t.put(extra=[{"a": CYCLE}]), tq.SchemaError, r'field "extra".*contains itself'),
    "row over the table's bytes": (
        lambda t: t.put(ragged=[np.zeros(65536, np.int64)]),
        tq.Impossible,
        r"65536",
    ),
    "more rows than the table": (lambda t: t.put(text=["x"] * 17), tq.Impossible, r"17.*16"),
    "group larger than its size": (
        lambda t: t.put(text=["third"], group_id=1, group_size=2),
        tq.UsageError,
        r"group 1.*(3|third|more|full|larger)",
    ),
    "nothing to count rows by": (lambda t: t.put(policy_version=3), tq.SchemaError, r"no column and no fact"),
    "no rows": (lambda t: t.put(text=[]), tq.SchemaError, r'field "text" has no rows'),
    "name too long": (lambda t: t.put(**{"x" * 129: [1]}), tq.UsageError, r"field name 'x+'\.\.\. has 129 characters"),
    "odd name": (lambda t: t.put(**{"a b": [1]}), tq.UsageError, r"field name 'a b' has characters"),
    "fact of another length": (
        lambda t: t.put(text=["a", "b"], policy_version=[1, 2, 3]),
        tq.SchemaError,
        r"policy_version has shape \(3,\) for 2 rows",
    ),
    "fact of another kind": (lambda t: t.put(text=["a"], ordinal=1.5), tq.SchemaError, r"ordinal is float64"),
    "fact out of range": (lambda t: t.put(text=["a"], group_id=1 << 70), tq.SchemaError, r"group_id"),
    "priority that is none": (lambda t: t.put(text=["a"], priority=float("nan")), tq.SchemaError, r"not a number"),
    "tag of another type": (lambda t: t.put(text=["a"], tags={"a": [1]}), tq.UsageError, r'tag "a" is list'),
    "key too long": (lambda t: t.put(text=["a"], key="k" * 513), tq.UsageError, r"has 513 characters; at most 512"),
    "counts whose sum wraps around to the rows": (
        lambda t: t.put(text=["a", "b"], extra=tq.Repeat([[1, 2]] * 5, [1 << 62] * 4 + [2])),
        tq.SchemaError,
        r'field "extra"',
    ),
    "key that is none": (lambda t: t.put(text=["a"], key=3), tq.UsageError, r"key 3 is int; keys are strings"),
    "key that exists": (lambda t: t.put(text=["a"], key="k0"), tq.AlreadyExists, r"k0"),
    "waiting for ever": (lambda t: t.put(text=["a"], timeout_s=float("inf")), tq.UsageError, r"timeout_s=inf"),
    "a reservation that is none": (
        lambda t: t.put(text=["a"], reservation=7),  # type: ignore[arg-type]
        tq.UsageError,
        r"reservation 7 is not one of table",
    ),
}
OTHERS: dict[str, tuple[Call, type[Exception], str]] = {
    "update of a missing row": (lambda t: t.update([10**6], text=["x"]), tq.NotFound, r"1000000"),
    "update of a field already set": (
        lambda t: t.update([0], text=["x"]),
        tq.AlreadyExists,
        r'field "text" of row 0 .* is already set; table.update\(rows, overwrite=True',
    ),
    "update of nothing": (lambda t: t.update([], text=[]), tq.UsageError, r"would change nothing"),
    "update of rows that are none": (lambda t: t.update([0.5], text=["x"]), tq.UsageError, r"rows are float64"),
    "unknown task": (lambda t: t.lease("nobody", rows=1), tq.NotFound, r'task "nobody".*train'),
    "unknown field": (
        lambda t: t.lease("train", rows=1, fields=["nothing"]),
        tq.NotFound,
        r'field "nothing".*dense, ragged, score, text',
    ),
    "no rows": (lambda t: t.lease("train", rows=0), tq.UsageError, r"rows=0 is out of range; give 1"),
    "rows and tokens": (
        lambda t: t.lease("train", rows=1, tokens=5),
        tq.UsageError,
        r"exactly one of rows=, tokens=, groups=; rows=1 and tokens=5 was given",
    ),
    "neither": (lambda t: t.lease("train"), tq.UsageError, r"exactly one of rows=, tokens=, groups=; none of them"),
    "rank beyond world": (lambda t: t.lease("train", rows=4, rank=2, world=2), tq.UsageError, r"rank.*2.*world.*2"),
    "replica beyond": (lambda t: t.lease("train", rows=1, replica=(2, 2)), tq.UsageError, r"replica's i=2"),
    "replica that is none": (
        lambda t: t.lease("train", rows=1, replica=3),  # type: ignore[arg-type]
        tq.UsageError,
        r"replica=3 is not a pair",
    ),
    "negative wait": (lambda t: t.lease("train", rows=1, timeout_s=-1), tq.UsageError, r"timeout_s=-1 is out of range"),
    "where that is none": (
        lambda t: t.lease("train", rows=1, where="score > 1"),  # type: ignore[arg-type]
        tq.UsageError,
        r"where=.*give TagIs, VersionBetween or Compare",
    ),
    "where of another type": (
        lambda t: t.lease("train", rows=1, where=tq.Compare("score", "~", 3)),  # type: ignore[arg-type]
        tq.UsageError,
        r"where: op='~' is not Literal\['<', '<=', .*; give one",
    ),
    "terms of another type": (
        lambda t: t.add_task(tq.Task("b", groups=True)),  # type: ignore[arg-type]
        tq.UsageError,
        r"task: groups=True is not Complete \| None; give one",
    ),
    "a selector that is a class": (
        lambda t: t.add_task(tq.Task("b", selector=tq.Fifo)),  # type: ignore[arg-type]
        tq.UsageError,
        r"task: selector=<class '.*Fifo'> is not Fifo \| OldestVersionFirst",
    ),
    "a group size that is text": (
        lambda t: t.add_task(tq.Task("b", groups=tq.Complete(min_size="a"))),  # type: ignore[arg-type]
        tq.UsageError,
        r"min_size='a' is str; give a number",
    ),
    "needs that are none": (lambda t: t.add_task(tq.Task("b", needs=None)), tq.UsageError, r"needs=None"),  # type: ignore[arg-type]
    "groups of a task without": (lambda t: t.lease("train", groups=1, timeout_s=0), tq.UsageError, r"group"),
    "read of a missing row": (lambda t: t.read([10**6]), tq.NotFound, r"1000000"),
    "drop of a missing row": (lambda t: t.drop([10**6], "x"), tq.NotFound, r"1000000"),
    "drop without a reason": (lambda t: t.drop([0], ""), tq.UsageError, r"drop reason"),
    "reserve nothing": (lambda t: t.reserve(0), tq.UsageError, r"rows=0 is out of range"),
    "advance backwards": (lambda t: t.advance(-1), tq.UsageError, r"version=-1"),
    "task that exists": (lambda t: t.add_task(tq.Task("train", needs=["score"])), tq.AlreadyExists, r'"train"'),
    "task that is none": (lambda t: t.add_task("train"), tq.UsageError, r"task='train' is str; give Task"),  # type: ignore[arg-type]
    "field that exists": (
        lambda t: t.add_fields([tq.Field("text", "int64")]),
        tq.UsageError,
        r'"text".*(str|int64)',
    ),
    "fields that are none": (lambda t: t.add_fields("text"), tq.UsageError, r"fields='text' is not a list"),  # type: ignore[arg-type]
    "keys that are none": (lambda t: t.find([3]), tq.UsageError, r"key 3 is int"),  # type: ignore[list-item]
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("case", PUTS)
def test_a_put_that_is_refused_changes_nothing(table: tq.Table, case: str) -> None:
    refused(table, *PUTS[case])


@pytest.mark.parametrize("case", OTHERS)
def test_a_call_that_is_refused_changes_nothing(table: tq.Table, case: str) -> None:
    refused(table, *OTHERS[case])


def refused(table: tq.Table, call: Call, error: type[Exception], text: str) -> None:
    before = state(table)
    with pytest.raises(error, match=text) as raised:
        call(table)
    assert type(raised.value).__module__ == "transferqueue.errors"
    assert state(table) == before


QUEUES: dict[str, tuple[Callable[[tq.Queue], object], type[Exception], str]] = {
    "unknown table": (lambda q: q.table("nowhere"), tq.NotFound, r'table "nowhere".*'),
    "name too long": (lambda q: q.create_table("t" * 129), tq.UsageError, r"has 129 characters; at most 128"),
    "odd name": (lambda q: q.create_table("a b"), tq.UsageError, r"table name 'a b' has characters"),
    "name that is none": (lambda q: q.create_table(3), tq.UsageError, r"table name 3 is int"),  # type: ignore[arg-type]
    "one task": (lambda q: q.create_table("x", tasks=tq.Task("a")), tq.UsageError, r"is not a list"),  # type: ignore[arg-type]
    "limits that are none": (lambda q: q.create_table("x", limits=5), tq.UsageError, r"limits=5 is int; give Limits"),  # type: ignore[arg-type]
    "groups that never fit": (
        lambda q: q.create_table("x", tasks=[tq.Task("a")], pacing=tq.Pacing("b", batch_rows=4)),
        tq.UsageError,
        r'"b"',
    ),
    "unknown task of pacing": (
        lambda q: q.create_table("x", pacing=tq.Pacing("b", batch_rows=4)),
        tq.UsageError,
        r'"b"',
    ),
    "a policy by its name": (
        lambda q: q.create_table("x", tasks=[tq.Task("a", selector="fifo")]),  # type: ignore[arg-type]
        tq.UsageError,
        r"tasks: selector='fifo' is not Fifo \| OldestVersionFirst \| .* \| Plugin; give one",
    ),
    "a policy in a policy by its name": (
        lambda q: q.create_table("x", tasks=[tq.Task("a", groups=tq.Complete(incomplete="drop"))]),  # type: ignore[arg-type]
        tq.UsageError,
        r"tasks: groups.incomplete='drop' is not Refill \| DeliverPartial \| DropGroup; give one",
    ),
    "half an attempt": (
        lambda q: q.create_table("x", tasks=[tq.Task("a", retry=tq.Retry(attempts=1.5))]),  # type: ignore[arg-type]
        tq.UsageError,
        r"retry.attempts=1.5 is not int",
    ),
    "a number for extra_fields": (
        lambda q: q.create_table("x", extra_fields=1),  # type: ignore[arg-type]
        tq.UsageError,
        r"extra_fields=1 is int; give True, False or None",
    ),
    "a row of no name": (lambda q: q.inspect(None, 0), tq.UsageError, r"table name None is NoneType"),  # type: ignore[arg-type]
    "no such row": (lambda q: q.inspect("nowhere", 0), tq.NotFound, "nowhere"),
    "drop of no table": (lambda q: q.drop_table("nowhere"), tq.NotFound, "nowhere"),
    "odd channel": (lambda q: q.weights("a b"), tq.UsageError, r"channel name 'a b'"),
    "keep nothing": (lambda q: q.weights("c", keep=0), tq.UsageError, r"keep=0 is out of range"),
    "no tensors": (lambda q: q.weights("c").publish(0, {}), tq.UsageError, r"mapping of names to tensors"),
    "no tensor": (lambda q: q.weights("c").publish(0, {"w": 3}), tq.SchemaError, r'tensor "w" is int'),
    "a tensor by its number": (
        lambda q: q.weights("c").publish(0, {5: np.ones(1)}),  # type: ignore[dict-item]
        tq.UsageError,
        r"tensor name 5 is int; names are strings",
    ),
    "a ragged tensor": (
        lambda q: q.weights("c").publish(0, {"w": torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)}),
        tq.SchemaError,
        r'tensor "w" cannot be read as one array: ',
    ),
    "a tensor whose memory was freed": (
        lambda q: q.weights("c").publish(0, {"w": freed(torch.ones(3))}),
        tq.SchemaError,
        r'tensor "w" cannot be read as one array: ',
    ),
    "tensors that are a number": (lambda q: q.weights("c").pull(only=5), tq.UsageError, r"only=5 is int; give names"),  # type: ignore[arg-type]
    "a tensor without a hash": (
        lambda q: q.weights("c").pull(only=[["w"]]),  # type: ignore[list-item]
        tq.UsageError,
        r"tensor name \['w'\] is list",
    ),
    "a snapshot without a path": (lambda q: q.snapshot(""), tq.UsageError, r"path is empty, which names no directory"),
    "a snapshot at a number": (lambda q: q.snapshot(5), tq.UsageError, r"path=5 is int; give a path"),  # type: ignore[arg-type]
    "a snapshot at bytes": (lambda q: q.snapshot(b"x"), tq.UsageError, r"path=b'x' is bytes; give a path"),  # type: ignore[arg-type]
    "a long path": (lambda q: q.restore("x" * 5000), tq.UsageError, r"path 'x{40}'... has 5000 characters; at most"),
    "progress that is none": (
        lambda q: q.snapshot("x", progress=5),  # type: ignore[arg-type]
        tq.UsageError,
        r"progress=5 is int; give a function",
    ),
    "a restore of nothing": (lambda q: q.restore(None), tq.UsageError, r"path=None is NoneType"),  # type: ignore[arg-type]
    "half a character": (
        lambda q: q.snapshot("a\ud800"),
        tq.UsageError,
        r"Snapshot cannot be sent: the text 'a\\ud800' is not Unicode \(surrogates not allowed\)",
    ),
    "negative version": (lambda q: q.weights("c").publish(-1, {"w": np.ones(1)}), tq.UsageError, r"version=-1"),
    "a version that is not": (lambda q: q.weights("c").pull(timeout_s=0.01), tq.DeadlineExceeded, r'"c"'),
}


@pytest.mark.parametrize("case", QUEUES)
def test_a_refused_call_on_a_queue_changes_nothing(opened: tq.Queue, case: str) -> None:
    call, error, text = QUEUES[case]
    before = opened.tables()
    with pytest.raises(error, match=text):
        call(opened)
    assert opened.tables() == before


def test_unknown_names_are_answered_with_those_that_exist() -> None:
    with tq.connect() as queue:
        queue.create_table("rollouts")
        with pytest.raises(tq.NotFound, match=r'table "nowhere" does not exist; there are rollouts'):
            queue.table("nowhere")


@pytest.mark.parametrize("rows", [[0.5], [True, False], "a", [None], [[0], [1]], [1 << 70]], ids=str)
@pytest.mark.parametrize("verb", ["ack", "release", "drop"])
def test_rows_of_a_batch_that_are_no_ids(table: tq.Table, verb: str, rows: Any) -> None:
    with table.lease("train", rows=2, timeout_s=10) as batch:
        call = (lambda: batch.drop("bad", rows)) if verb == "drop" else (lambda: getattr(batch, verb)(rows))
        before = state(table)
        with pytest.raises(tq.UsageError, match=r"rows are .*; give row ids: integers, in one dimension"):
            call()
        assert state(table) == before
        assert len(batch.rows) == 2
        batch.release()


def test_a_result_that_is_set_already_is_refused_with_the_call_that_replaces_it(opened: tq.Queue, name: str) -> None:
    givers = [tq.Task(task, needs=["x"], gives=["y"]) for task in ("a", "b")]
    table = opened.create_table(name, tasks=[*givers, tq.Task("c", needs=["y"])])
    table.put(x=[1])
    first, second = table.lease("a", rows=1), table.lease("b", rows=1)
    first.ack(y=[1])
    with pytest.raises(
        tq.AlreadyExists, match=r"is already set; table.update\(rows, overwrite=True, ...\) replaces it"
    ):
        second.ack(y=[2])
    with pytest.raises(tq.UsageError, match="ack takes no overwrite"):
        second.ack(y=[2], overwrite=True)
    second.ack()


def test_a_result_that_does_not_fit_leaves_the_rows_leased(table: tq.Table) -> None:
    batch = table.lease("train", rows=2)
    before = state(table)
    with pytest.raises(tq.SchemaError, match=r'field "score" has 3 rows, but this call has 2'):
        batch.ack(score=np.zeros(3, np.float32))
    with pytest.raises(tq.SchemaError, match="float64"):
        batch.ack(score=np.zeros(2))
    assert state(table) == before
    batch.ack(score=np.zeros(2, np.float32))


def test_ack_of_an_expired_lease(opened: tq.Queue, name: str) -> None:
    table = opened.create_table(name, tasks=[tq.Task("train", needs=["text"], lease_s=0.05, time_limit_s=0.05)])
    table.put(text=["a"])
    batch = table.lease("train", rows=1)
    with table.lease(
        "train", rows=1, timeout_s=5, lease_s=60
    ) as again:  # gets the row once the first lease has expired
        for verb in (batch.ack, batch.ack, batch.renew, batch.release, lambda: batch.drop("late")):
            with pytest.raises(tq.LeaseExpired):
                verb()
        assert len(again) == 1
    assert table.audit().rows_done == 1


def test_leaving_a_block_whose_lease_expired_is_an_error(opened: tq.Queue, name: str) -> None:
    table = opened.create_table(name, tasks=[tq.Task("train", needs=["text"], lease_s=0.05, time_limit_s=0.05)])
    table.put(text=["a"])
    with pytest.raises(tq.LeaseExpired), table.lease("train", rows=1):
        table.lease("train", rows=1, timeout_s=5, lease_s=60).ack()


def test_ack_of_a_foreign_lease(opened: tq.Queue, server: Served, table: tq.Table) -> None:
    batch = table.lease("train", rows=1)
    with tq.connect(server.ipc) as other:
        theirs = other.table(table.name).lease("train", rows=1)
        theirs._lease.number, theirs._lease.token = batch.lease, batch._lease.token
        with pytest.raises(tq.LeaseExpired, match="belongs to another session"):
            theirs.ack()
    batch.ack()


def test_update_of_a_row_that_is_gone(opened: tq.Queue, name: str) -> None:
    table = opened.create_table(name, tasks=[tq.Task("train", needs=["text"])])
    rows = table.put(text=["a", "b"])
    with table.lease("train", rows=1):
        pass
    table.drop(rows[1:], "filtered")
    for row in rows:
        with pytest.raises(tq.NotFound, match=f"row {row}"):
            table.update([row], score=[1.0])
    assert "score" not in opened.table(name).fields


def test_a_message_that_is_none(server: Served) -> None:
    channel, bell = dial(server.ipc), Wakeup()
    channel.send(b"\xc1 not a message")
    frame = None
    while frame is None:
        channel.wait(bell, 20)
        frame = channel.recv_nowait()
    channel.close()
    bell.close()
    reply = decode_answer(frame).reply
    assert isinstance(reply, m.Failed)
    assert reply.error == "ProtocolError"
    assert "not a message" in reply.text
    with tq.connect(server.ipc) as queue:
        assert isinstance(queue.tables(), list)


def test_sealing_twice_and_putting_after(opened: tq.Queue, name: str) -> None:
    table = opened.create_table(name, tasks=[tq.Task("train", needs=["text"])])
    table.seal()
    with pytest.raises(tq.Sealed, match=name):
        table.seal()
    with pytest.raises(tq.Sealed, match=name):
        table.put(text=["late"])


def test_a_second_server_on_one_address(server: Served) -> None:
    import subprocess
    import sys

    second = subprocess.run(
        [sys.executable, "-m", "transferqueue.server", "--address", server.ipc],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert second.returncode == 2
    assert "in use" in second.stderr


@pytest.mark.parametrize("place", ["ipc://{}/nobody.sock", "tcp://127.0.0.1:1"])
def test_an_address_where_nothing_listens(tmp_path: Path, place: str) -> None:
    with pytest.raises(tq.Unreachable, match=r"nothing answered at .* within 0.3 s"):
        tq.connect(place.format(tmp_path), timeout_s=0.3)


def test_looking_for_a_server_leaves_no_directory(tmp_path: Path) -> None:
    with pytest.raises(tq.Unreachable):
        tq.connect(f"ipc://{tmp_path}/a/b/nobody.sock", timeout_s=0.1)
    assert list(tmp_path.iterdir()) == []


def test_a_place_where_a_client_may_not_write() -> None:
    with pytest.raises(tq.UsageError, match=r"session file /proc/nowhere/sessions/\w+ cannot be made"):
        tq.connect("ipc:///proc/nowhere/q.sock", timeout_s=0.1)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"runtime": ""}, "runtime is empty, which names no directory"),
        ({"runtime": 5}, "runtime=5 is int; give a path"),
        ({"label": "x" * 5000}, r"label 'x{40}'\.\.\. has 5000 characters; at most 4096"),
        ({"address": b"ipc:///x"}, "address b'ipc:///x' is bytes"),
    ],
)
def test_an_argument_of_connect_that_cannot_be_used(given: Any, text: str) -> None:
    with pytest.raises(tq.UsageError, match=text):
        tq.connect(**given)


@pytest.mark.parametrize("address", ["nowhere", "http://a:1", "ipc://relative", "tcp://host", 7, ""])
def test_an_address_that_is_none(address: Any) -> None:
    with pytest.raises(tq.UsageError, match="address"):
        tq.connect(address)


def test_options_of_an_embedded_server_need_one(server: Served) -> None:
    with pytest.raises(tq.UsageError, match="embedded"):
        tq.connect(server.ipc, arena_bytes="1GiB")
    with pytest.raises(tq.UsageError, match="not a size"):
        tq.connect(arena_bytes="much")
    with pytest.raises(tq.UsageError, match="timeout_s"):
        tq.connect(server.ipc, timeout_s=-1)


def test_a_put_larger_than_the_arena(tmp_path: Path) -> None:
    with served(tmp_path, arena_bytes="1MiB") as small, tq.connect(small.ipc) as queue:
        table = queue.create_table("t", tasks=[tq.Task("a", needs=["x"])])
        with pytest.raises(tq.Impossible, match="arena"):
            table.put(x=np.zeros((1, 2 << 20), np.uint8))
        assert table.audit().rows_put == 0


def test_names_of_facts_are_no_columns() -> None:
    """A fact misspelt would be a column; a fact that a verb does not take must be refused, not stored."""
    facts = {
        "group_id",
        "group_size",
        "ordinal",
        "policy_version",
        "policy_version_max",
        "tokens",
        "priority",
        "key",
        "tags",
    }
    for verb in (
        tq.Table.put,
        tq.Table.update,
        tq.Batch.ack,
        tq.AsyncTable.put,
        tq.AsyncTable.update,
        tq.AsyncBatch.ack,
    ):
        assert facts <= set(inspect.signature(verb).parameters)


def test_too_many_rows_are_refused_before_a_value_is_read(table: tq.Table) -> None:
    """A column without memory: to read it would take minutes."""
    before = state(table)
    endless = np.broadcast_to(np.float32(1), (1 << 40,))
    for put in (lambda: table.put(score=endless), lambda: table.put(priority=endless)):
        with pytest.raises(
            tq.UsageError,
            match=(
                r"one request has 1,099,511,627,776 rows; at most 65,536 are carried out at once.*: send them in "
                r"pieces of 65,536"
            ),
        ):
            put()
    assert state(table) == before


def test_more_columns_or_fields_than_a_table_has_are_refused_before_any_is_looked_at(
    opened: tq.Queue, table: tq.Table
) -> None:
    """100,000 of them took 16 s."""
    before = state(table)
    columns: dict[str, Any] = {f"c{number}": [0] for number in range(100_000)}
    with pytest.raises(tq.UsageError, match="100000 columns are given; at most 1024 are allowed"):
        table.put(**columns)
    fields = [tq.Field("same", "int64")] * 100_000
    with pytest.raises(tq.UsageError, match="100000 fields are given; at most 1024"):
        table.add_fields(fields)
    with pytest.raises(tq.UsageError, match="100000 fields are given; at most 1024"):
        opened.create_table("wide", fields=fields)
    with pytest.raises(tq.UsageError, match="100000 fields are given; at most 1024"):
        table.read(fields=list(columns))
    with pytest.raises(tq.UsageError, match=r"keep=4611686018427387904 is out of range; give 1 to 1048576"):
        opened.snapshot("s", keep=1 << 62)
    assert state(table) == before
