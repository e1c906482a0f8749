"""A hundred misuses of the public API: each is refused at once, by an error of our tree that names the subject and the
remedy, and changes nothing."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import threading
import time
import warnings
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch

import transferqueue as tq

AT_ONCE_S: Final = 1.0
LENGTH_MAX: Final = 900
"""Characters of the longest refusal."""
NAN: Final = float("nan")
INFINITE: Final = float("inf")
TENSORS: Final = {"w": np.zeros((4, 2), np.float32)}


class World:
    """A table with two rows and a batch of them, on a queue with other handles to misuse."""

    def __init__(self, queue: tq.Queue, empty: tq.Queue, name: str) -> None:
        self.queue, self.empty, self.name = queue, empty, name
        fields = [
            tq.Field("response_ids", "int32", (None,)),
            tq.Field("image", "float32", (3,)),
            tq.Field("score", "float32"),
            tq.Field("text", "str"),
        ]
        tasks = [
            tq.Task("reward", needs=["response_ids"], gives=["rewards"]),
            tq.Task("train", needs=["response_ids", "rewards"]),
            tq.Task("whole", needs=["text"], groups=tq.Complete()),
        ]
        self.table = queue.create_table(name, fields=fields, tasks=tasks, limits=tq.Limits(rows=8))
        self.table.put(response_ids=[[1], [2, 3]], text=["a", "b"], group_id=1, group_size=2, key=["a", "b"])
        self.batch = self.table.lease("reward", rows=2)
        self.then()

    def then(self, *_: object) -> World:
        """All before this was right, and the next call is the misuse."""
        self.before = self.table.audit()
        return self

    def create(self, **terms: Any) -> tq.Table:
        """A second table."""
        given: dict[str, Any] = {"tasks": [tq.Task("train", needs=["x"])], **terms}
        return self.queue.create_table(f"{self.name}_other", **given)

    def paced(self) -> tq.Table:
        """A second table, for a trainer that takes two rows a step."""
        return self.create(pacing=tq.Pacing("train", 2, depth=0))

    def published(self, *versions: int) -> tq.WeightChannel:
        """A channel with these versions."""
        channel = self.queue.weights(f"{self.name}_weights")
        for version in versions:
            channel.publish(version, TENSORS)
        return channel

    def closed(self) -> tuple[tq.Queue, tq.Table]:
        """A queue that was closed, and its table."""
        with tq.connect(self.queue.address) as queue:
            return queue, queue.table(self.name)

    def expired(self) -> tq.Batch:
        """A batch whose time limit has passed, so that another worker has its rows."""
        self.batch.release()
        batch = self.table.lease("reward", rows=2, lease_s=0.05, time_limit_s=0.05)
        self.table.lease("reward", rows=2, timeout_s=10).release()
        self.then()
        return batch

    def acked_elsewhere(self) -> tq.Batch:
        """A batch that another thread has acked."""
        thread = threading.Thread(target=lambda: self.batch.ack(rewards=[1.0, 2.0]))
        thread.start()
        thread.join()
        self.then()
        return self.batch

    def in_a_child(self, call: Callable[[], object]) -> None:
        """Raise what the call raises in a forked child."""
        read, write = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of forks beside threads
            child = os.fork()
        if child == 0:
            try:
                call()
            except tq.TransferQueueError as error:
                os.write(write, json.dumps([type(error).__name__, str(error)]).encode())
            finally:
                os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            kind, text = json.load(pipe)
        os.waitpid(child, 0)
        raise getattr(tq, kind)(text)

    def in_a_loop(self, call: Callable[[tq.AsyncQueue], Awaitable[object]]) -> object:
        """Call with a queue of an event loop."""

        async def main() -> object:
            async with tq.aconnect(self.queue.address) as queue:
                return await call(queue)

        return asyncio.run(main())


Misuse = tuple[Callable[[Any], object], type[Exception], str]
"""What is called, with a `World`; the exact type of its error; what its text has: the subject and the remedy."""
UNKNOWN_KIND: Final = r"has an unknown form; give ipc:///path/of/socket or tcp://host:port"
GIVE_SECONDS: Final = r"give a number of seconds"
OUT_OF_RANGE: Final = r"is out of range; give 0 \(do not wait\) to"

CONNECT: dict[str, Misuse] = {
    "no scheme": (lambda w: tq.connect("localhost:5000"), tq.UsageError, f"'localhost:5000' {UNKNOWN_KIND}"),
    "http": (lambda w: tq.connect("http://localhost:5000"), tq.UsageError, f"'http://localhost:5000' {UNKNOWN_KIND}"),
    "a slip": (lambda w: tq.connect("embeded"), tq.UsageError, f"'embeded' {UNKNOWN_KIND}.*'embedded'"),
    "empty": (lambda w: tq.connect(""), tq.UsageError, f"address '' {UNKNOWN_KIND}"),
    "no port": (lambda w: tq.connect("tcp://localhost"), tq.UsageError, r"has no host and port; write tcp://host:port"),
    "a port of a "
    "listener": (lambda w: tq.connect("tcp://localhost:0"), tq.UsageError, r"to connect, name the host and"),
    "a port out of range": (
        lambda w: tq.connect("tcp://localhost:70000"),
        tq.UsageError,
        r"has port '70000'; a port is a number from 1 to 65535",
    ),
    "a relative socket": (lambda w: tq.connect("ipc://q.sock"), tq.UsageError, r"write ipc:///directory/name.sock"),
    "a long socket": (lambda w: tq.connect(f"ipc:///tmp/{'x' * 200}"), tq.UsageError, r"use a shorter directory"),
    "bytes": (lambda w: tq.connect(b"tcp://a:1"), tq.UsageError, r"is bytes; an address is text"),
    "no addresses": (lambda w: tq.connect([]), tq.UsageError, r"the list of addresses is empty; give those of all"),
    "one address twice": (
        lambda w: tq.connect([w.queue.address] * 2),
        tq.UsageError,
        r"not all coordinators of one deployment.*give the addresses of all of it",
    ),
    "half a token": (lambda w: tq.connect("tqjoin_abc"), tq.UsageError, r"was changed or cut short; paste all of it"),
    "a key that is none": (
        lambda w: tq.connect(w.queue.address, key="secret"),
        tq.UsageError,
        r"does not begin with tqjoin_; see transferqueue keys",
    ),
    "nobody there": (
        lambda w: tq.connect("tcp://127.0.0.1:1", timeout_s=0.1),
        tq.Unreachable,
        r"nothing answered at tcp://127.0.0.1:1 within 0.1 s.*Start one: transferqueue serve",
    ),
    "memory of a server that runs": (
        lambda w: tq.connect(w.queue.address, arena_bytes="1GiB"),
        tq.UsageError,
        r"are for an embedded server.*runs already; give them there",
    ),
    "a size that is none": (lambda w: tq.connect(arena_bytes="8 gigs"), tq.UsageError, r"text such as '8GiB'"),
    "endless": (lambda w: tq.connect("tcp://a:1", timeout_s=INFINITE), tq.UsageError, f"timeout_s=inf {OUT_OF_RANGE}"),
    "a time as text": (lambda w: tq.connect("tcp://a:1", timeout_s="5"), tq.UsageError, f"'5' is str; {GIVE_SECONDS}"),
    "another keyword": (lambda w: tq.connect("embedded", timeout=5), TypeError,
    "unexpected keyword argument 'timeout'"),
}  # fmt: skip

TABLES: dict[str, Misuse] = {
    "another name": (lambda w: w.queue.table("rolouts"), tq.NotFound, r'"rolouts" does not exist; there are .*t\d'),
    "exists": (lambda w: w.queue.create_table(w.name), tq.AlreadyExists, r"pass exist_ok=True to open it"),
    "other terms": (
        lambda w: w.queue.create_table(w.name, exist_ok=True),
        tq.AlreadyExists,
        r"exists with other terms: .*limits.*; give the terms that it was made with, open it by Queue.table",
    ),
    "exist_ok as text": (
        lambda w: w.queue.create_table(w.name, exist_ok="no"),
        tq.UsageError,
        r"exist_ok='no' is str; give True or False",
    ),
    "fields by "
    "name": (lambda w: w.create(fields={"a": "int32"}), tq.UsageError, r"fields=.* is not a list; give a list"),
    "tasks by name": (lambda w: w.create(tasks=["train"]), tq.UsageError, r"tasks='train' is str; give Task"),
    "a policy's class": (lambda w: w.create(retention=tq.Manual), tq.UsageError, r"retention=.*give Acked \| Manual"),
    "more copies than shards": (lambda w: w.create(replicas=2), tq.Impossible, r"2 > 1; start remote shards"),
    "groups over the limit": (
        lambda w: w.create(
            limits=tq.Limits(rows=2), tasks=[tq.Task("train", needs=["x"], groups=tq.Complete(min_size=4))]
        ),
        tq.Impossible,
        r'"train" takes groups of min_size=4 or more.*4 > 2; give a smaller min_size, or a larger limits.rows',
    ),
    "a batch over the limit": (
        lambda w: w.create(limits=tq.Limits(rows=4), pacing=tq.Pacing("train", batch_rows=8)),
        tq.Impossible,
        r"batch_rows=8 never fits table .* of limits.rows=4: 8 > 4",
    ),
    "pacing of another task": (
        lambda w: w.create(pacing=tq.Pacing("trian", 4)),
        tq.Impossible,
        r'names task "trian", which is not declared; it has train',
    ),
    "stale rows for a task that gives nothing": (
        lambda w: w.create(
            tasks=[tq.Task("sample", needs=["x"]), tq.Task("train", needs=["x"])],
            pacing=tq.Pacing("train", 4, max_staleness=1, on_stale=tq.Requeue("sample")),
        ),
        tq.Impossible,
        r'Requeue\("sample"\): that task declares no gives.*; declare them',
    ),
    "dropped only when empty": (
        lambda w: w.queue.drop_table(w.name, empty=True),
        tq.UsageError,
        r"has 2 rows and is dropped only when empty; delete them first",
    ),
    "dropped, empty as text": (lambda w: w.queue.drop_table(w.name, empty="no"), tq.UsageError, r"give True or False"),
    "gone": (
        lambda w: (table := w.create(), w.queue.drop_table(table.name), table.put(x=[1])),
        tq.NotFound,
        r'_other" does not exist; there are',
    ),
    "a field twice": (
        lambda w: w.table.add_fields([tq.Field("score", "int64")]),
        tq.SchemaError,
        r'"score" of table .* is float32, not int64; give values of the declared dtype',
    ),
    "a task twice": (
        lambda w: w.table.add_task(tq.Task("train", needs=["text"])),
        tq.AlreadyExists,
        r'task "train".*exists with other terms.*; give the same, or another name',
    ),
    "a need that is near another": (
        lambda w: w.table.add_task(tq.Task("judge", needs=["respones_ids"])),
        tq.UsageError,
        r"needs 'respones_ids', and no field has that name.*; did you mean 'response_ids'",
    ),
    "a class for groups": (
        lambda w: w.table.add_task(tq.Task("judge", needs=["text"], groups=tq.Complete)),
        tq.UsageError,
        r"task: groups=<class .*Complete'> is not Complete \| None; give one",
    ),
    "a plug-in that is not there": (
        lambda w: w.table.add_task(tq.Task("judge", needs=["text"], selector=tq.Plugin("mine"))),
        tq.NotFound,
        r'"mine" is not installed on the server.*Register it there by entry point',
    ),
    "a shard that is not there": (lambda w: w.queue.drain_shard(7), tq.NotFound, r"shard 7 .* this deployment has"),
}  # fmt: skip

POLICIES: dict[str, Misuse] = {
    "a dtype that is none": (lambda w: tq.Field("a", "float"), tq.SchemaError, r"dtype 'float' is unknown; known are"),
    "a dtype of torch": (lambda w: tq.Field("a", torch.float32), tq.SchemaError, r"torch.float32 is unknown; known"),
    "text with a shape": (
        lambda w: tq.Field("a", "str", (3,)),
        tq.SchemaError,
        r"'str' has no shape; omit shape=\(3,\)",
    ),
    "finite integers": (lambda w: tq.Field("a", "int32", finite=True), tq.SchemaError, r"each int32 is finite"),
    "a slice backwards": (lambda w: tq.Slice((5, 2)), tq.UsageError, r"\(5, 2\).*; give 0 <= start < stop"),
    "a share beyond": (lambda w: tq.Share(4, 4), tq.UsageError, r"Share\(4, 4\).*0 <= index < of"),
    "needs as text": (lambda w: tq.Task("a", needs="x"), tq.UsageError,
    r'"a": needs and gives are lists of field names'),
    "a task that waits for itself": (
        lambda w: tq.Task("a", needs=["x"], gives=["x"]),
        tq.Impossible,
        r'task "a" both needs and gives x: it would wait for itself',
    ),
    "a lease of no time": (lambda w: tq.Task("a", needs=["x"], lease_s=0), tq.UsageError, r"is not a positive number"),
    "a limit below the lease": (
        lambda w: tq.Task("a", needs=["x"], lease_s=30, time_limit_s=1),
        tq.UsageError,
        r"time_limit_s=1 is below lease_s=30.*; give a longer limit or a shorter lease",
    ),
    "another keyword": (lambda w: tq.Task("a", need=["x"]), TypeError, r"nexpected keyword argument 'need'"),
    "attempts for a policy": (
        lambda w: tq.Task("a", needs=["x"], retry=3),
        tq.UsageError,
        r"retry=3 is no policy; give tq.Retry\(...\)",
    ),
    "a negative wait": (lambda w: tq.Retry(first_s=-1), tq.UsageError, r"first_s=-1 .* from 0 on; 0 means at once"),
    "shorter waits": (lambda w: tq.Retry(factor=0.5), tq.UsageError, r"factor=0.5 is below 1.*1 makes all waits equal"),
    "no attempts": (lambda w: tq.Retry(attempts=0), tq.UsageError, r"attempts=0 .*; None means that no row is dropped"),
    "staleness that hands out nothing": (
        lambda w: tq.Pacing("train", 4, max_staleness=-1),
        tq.Impossible,
        r"max_staleness=-1: no row could ever be handed over; 0 is synchronous",
    ),
    "a negative depth": (lambda w: tq.Pacing("train", 4, depth=-1), tq.UsageError, r"depth=-1 .*; 0 means one batch"),
    "versions that are none": (
        lambda w: w.table.lease("train", rows=1, where=tq.VersionBetween(5, 2)),
        tq.Impossible,
        r"VersionBetween\(low=5, high=2\): no version is both; give low <= high",
    ),
    "no rows at all": (lambda w: tq.Limits(rows=0), tq.UsageError, r"rows=0 is not a positive number of rows"),
}  # fmt: skip

PUT: dict[str, Misuse] = {
    "another dtype": (
        lambda w: w.table.put(score=np.zeros(2)),
        tq.SchemaError,
        r'"score" is float32, but the values are float64; convert them',
    ),
    "another shape": (
        lambda w: w.table.put(image=np.zeros((1, 4), np.float32)),
        tq.SchemaError,
        r'"image" is float32\[3\], but rows of the values have shape \[4\]; reshape them',
    ),
    "ragged where dense": (
        lambda w: w.table.put(image=[np.zeros(3, np.float32), np.zeros(2, np.float32)]),
        tq.SchemaError,
        r'"image".*row 1 has shape \[2\]; rows of different sizes need a field declared with None',
    ),
    "dense where ragged": (
        lambda w: w.table.put(response_ids=np.zeros((2, 4), np.int32)),
        tq.SchemaError,
        r'"response_ids".*one dense array of rows \[4\]; give a list of rows or a nested tensor',
    ),
    "lengths that differ": (
        lambda w: w.table.put(text=["a", "b"], score=np.zeros(1, np.float32)),
        tq.SchemaError,
        r'"score" has 1 row, but this call has 2; give one value for each row',
    ),
    "a generator": (
        lambda w: w.table.put(text=(text for text in "ab")),
        tq.SchemaError,
        r"given for text \(generator\); give at least one as a list or an array",
    ),
    "nothing": (lambda w: w.table.put(), tq.SchemaError, r"no column and no fact.*give at least one as a list"),
    "None in a column": (
        lambda w: w.table.put(text=["a", None]),
        tq.SchemaError,
        r'"text": row 1 is None; .*fill in one of the others\' kind',
    ),
    "a column by another name": (
        lambda w: w.table.put(respons_ids=[[1]], text=["a"]),
        tq.UsageError,
        r"has a column 'respons_ids', which table .* does not have; did you mean 'response_ids'",
    ),
    "a list of rows": (
        lambda w: w.table.put([{"text": "a"}]),
        tq.UsageError,
        r"put was given list without a name.*give each column by name, put\(name=values\)",
    ),
    "a group of another size": (
        lambda w: w.table.put(text=["a"] * 3, group_id=5, group_size=2),
        tq.UsageError,
        r"group 5 .* would have 0 \+ 3 = 3 rows; its group_size is 2; give another group_id",
    ),
    "a size without a group": (
        lambda w: w.table.put(text=["a"], group_size=1),
        tq.UsageError,
        r"group_size without group_id; pass both",
    ),
    "a negative version": (
        lambda w: w.table.put(text=["a"], policy_version=-3),
        tq.UsageError,
        r"policy_version -3 is out of range; policy_version is -1 to",
    ),
    "versions in another order": (
        lambda w: w.table.put(text=["a", "b"], policy_version=[1, 3], policy_version_max=[1, 2]),
        tq.UsageError,
        r"policy_version_max=2 of row 1 is below its policy_version=3; give the newest version",
    ),
    "a key twice": (
        lambda w: w.table.put(text=["c", "d"], key=["k", "k"]),
        tq.UsageError,
        r"key 'k' appears twice in one request; a key names one row",
    ),
    "a key that is taken": (
        lambda w: w.table.put(text=["c"], key=["a"]),
        tq.AlreadyExists,
        r"key 'a' .* names row 0; .*give another key, or update that row",
    ),
    "a key that is a "
    "number": (lambda w: w.table.put(text=["c"], key=[3]), tq.UsageError, r"3 is int; keys are strings"),
    "a tag of a list": (
        lambda w: w.table.put(text=["c"], tags={"level": [1]}),
        tq.UsageError,
        r'tag "level" is list; tags are str, int, float or bool',
    ),
    "a tag named by a number": (
        lambda w: w.table.put(text=["c"], tags={3: 1}),
        tq.UsageError,
        r"tag name 3 is int; names are strings",
    ),
    "a function": (
        lambda w: w.table.put(text=[lambda: 1]),
        tq.SchemaError,
        r'"text": rows of type function are not a column; give numbers, text',
    ),
    "an object in a dict": (
        lambda w: w.create().put(x=[{"a": 3, "b": object()}]),
        tq.SchemaError,
        r'"x", row 0: a value holds builtins.object, which is not stored: give its parts .* or register the class',
    ),
    "a meta tensor": (
        lambda w: w.table.put(score=torch.zeros(2, device="meta")),
        tq.SchemaError,
        r'"score": a meta tensor has no values; give a tensor with memory',
    ),
    "a sparse tensor": (
        lambda w: w.table.put(image=torch.eye(3).to_sparse()),
        tq.SchemaError,
        r'"image": a tensor of layout torch.sparse_coo is not stored; give .to_dense\(\)',
    ),
    "another name of timeout_s": (
        lambda w: w.create().put(x=[1], timeout=1),
        tq.UsageError,
        r"'timeout'.*did you mean timeout_s",
    ),
    "a wait that is no number": (
        lambda w: w.table.put(text=["a"], timeout_s=NAN),
        tq.UsageError,
        f"timeout_s=nan {OUT_OF_RANGE}",
    ),
    "more rows than ever fit": (lambda w: w.table.put(text=["a"] * 9), tq.Impossible, r"holds at most 8: 9 > 8"),
    "above the limit, not waiting": (
        lambda w: w.table.put(text=["a"] * 7, timeout_s=0),
        tq.Full,
        r"7 rows do not fit: 2 are resident.*no worker of \"train\" has connected.*start it",
    ),
    "above the limit, waiting": (
        lambda w: w.table.put(text=["a"] * 7, timeout_s=0.05),
        tq.DeadlineExceeded,
        r"7 rows do not fit.*timeout_s=None waits until the table ends",
    ),
    "sealed": (
        lambda w: w.then(w.table.seal()).table.put(text=["a"]),
        tq.Sealed,
        r"is sealed; it takes no further rows; put before the seal, or into another table",
    ),
    "sealed twice": (
        lambda w: w.then(w.table.seal()).table.seal(),
        tq.Sealed,
        r"is sealed already; leave this call out",
    ),
    "a reward that is not finite": (
        lambda w: w.batch.ack(rewards=[1.0, NAN]),
        tq.SchemaError,
        r'"rewards": row 1 has nan.*; mask it or drop the row, or declare the field with finite=False',
    ),
    "a repeat of "
    "nothing": (lambda w: tq.Repeat(["a"], 0), tq.SchemaError, r"count 0 is not positive; leave out values"),
}  # fmt: skip

RESERVE: dict[str, Misuse] = {
    "more than ever": (
        lambda w: w.paced().reserve(5),
        tq.Impossible,
        r"5 rows can never be reserved in table .*; reserve at most 2",
    ),
    "more than now, not waiting": (
        lambda w: (table := w.paced(), table.put(x=[1, 2]), table.reserve(2, timeout_s=0)),
        tq.Full,
        r"2 rows cannot be reserved .* now: 2 of 2 rows are ahead of task \"train\" ",
    ),
    "of another table": (
        lambda w: w.table.put(text=["a"], reservation=w.paced().reserve(1)),
        tq.UsageError,
        r"is not one of table .*; give one that its reserve\(\) returned",
    ),
    "less than is put": (
        lambda w: (table := w.paced(), table.put(x=[1, 2], reservation=table.reserve(1))),
        tq.UsageError,
        r"has 1 row left; the put has 2: reserve more first",
    ),
    "of a sealed table": (
        lambda w: (table := w.paced(), table.seal(), table.reserve(1)),
        tq.Sealed,
        r"is sealed; no row may enter it, so none can be reserved",
    ),
}

UPDATE: dict[str, Misuse] = {
    "a row that never was": (
        lambda w: w.table.update([99], text=["x"]),
        tq.NotFound,
        r"row 99 was never put into table .*; ids so far end at 1",
    ),
    "a field that is set": (
        lambda w: w.table.update([0], text=["x"]),
        tq.AlreadyExists,
        r'"text" of row 0 .* is already set; table.update\(rows, overwrite=True, ...\) replaces it',
    ),
    "overwrite as text": (
        lambda w: w.table.update([0], overwrite="no", text=["x"]),
        tq.UsageError,
        r"overwrite='no' is str; give True or False",
    ),
    "a row twice": (
        lambda w: w.table.update([0, 0], overwrite=True, text=["x", "y"]),
        tq.UsageError,
        r"row 0 is named 2 times; name each row once",
    ),
    "no change": (lambda w: w.table.update([0]), tq.UsageError, r"would change nothing; give both"),
    "unchanged rows of another table": (
        lambda w: (
            (other := w.create()).put(text=["a", "b"]),
            w.table.update([0, 1], overwrite=True, if_unchanged=other.read(), text=["x", "y"]),
        ),
        tq.UsageError,
        r'if_unchanged has rows of table ".*_other", and the update is of table ".*"; read the rows there',
    ),
    "unchanged without the column": (
        lambda w: w.table.update(
            [0, 1], overwrite=True, if_unchanged=w.table.read(fields=["response_ids"]), text=["x", "y"]
        ),
        tq.UsageError,
        r"if_unchanged has response_ids, and the update replaces text too.*; read it first",
    ),
    "the group": (
        lambda w: w.table.update([0], group_id=3, group_size=2),
        tq.UsageError,
        r"set by put and cannot be updated",
    ),
    "deleted while leased": (
        lambda w: w.table.delete([0]),
        tq.UsageError,
        r'row 0 .* is leased by task "reward"; wait for its ack, or drop it',
    ),
    "the clock backwards": (
        lambda w: w.then(w.table.advance(3)).table.advance(1),
        tq.UsageError,
        r"the clock of table .* is 3; it never goes back to 1: give a higher number",
    ),
    "a retry of a row that lives": (
        lambda w: w.table.retry([0]),
        tq.NotFound,
        r"row 0 .* cannot be taken again: only rows that were dropped",
    ),
    "freed while needed": (
        lambda w: w.table.free_columns([0], ["text"]),
        tq.UsageError,
        r'"text" of row 0 .* is not freed: task "whole".*free it when the task is done',
    ),
    "freed, again as text": (
        lambda w: w.table.free_columns([0], ["text"], again="no"),
        tq.UsageError,
        r"again='no' is str; give True or False",
    ),
    "a read of a field that is not there": (
        lambda w: w.table.read(fields=["txt"]),
        tq.NotFound,
        r'"txt" is not in table .*; it has image, response_ids',
    ),
    "values as text": (lambda w: w.table.read(values="no"), tq.UsageError, r"values='no' is str; give True or False"),
    "a column of a list": (
        lambda w: tq.Column.of_inline(tq.Field("reward", "float32"), [1.0]),
        tq.UsageError,
        r'values of field "reward" are list; give a numpy array, or bytes',
    ),
    "a ragged column of scalars": (
        lambda w: tq.Column.of_inline(tq.Field("ids", "int32", (None,)), np.zeros(1, np.int32)),
        tq.UsageError,
        r"is no field of one number a row; give a Field of a number's dtype, without a shape",
    ),
    "an array of ragged rows": (
        lambda w: w.table.read()["response_ids"].numpy(),
        tq.UsageError,
        r'.numpy\(\) does not fit field "response_ids".*; use .nested\(\), .padded\(value\)',
    ),
    "a device that is none": (lambda w: w.table.read(device="gpu"), tq.UsageError, r"device='gpu' .*; give 'cpu'"),
}  # fmt: skip

LEASE: dict[str, Misuse] = {
    "another task": (
        lambda w: w.table.lease("trian", rows=1),
        tq.NotFound,
        r'"trian" is not in table .*; it has reward, train, whole',
    ),
    "no rows": (lambda w: w.table.lease("train", rows=0), tq.UsageError, r"rows=0 is out of range; give 1 to"),
    "rows as a "
    "flag": (lambda w: w.table.lease("train", rows=True), tq.UsageError, r"rows=True is bool; give an integer"),
    "rows and tokens": (
        lambda w: w.table.lease("train", rows=1, tokens=5),
        tq.UsageError,
        r"give exactly one of rows=, tokens=, groups=; rows=1 and tokens=5",
    ),
    "at least more": (
        lambda w: w.table.lease("train", rows=1, at_least=2),
        tq.UsageError,
        r"at_least=2 is above rows=1; it is the least of that number",
    ),
    "more rows than the table": (
        lambda w: w.table.lease("train", rows=9),
        tq.Impossible,
        r"a lease of 9 rows can never be filled.*at most 8 rows; ask for fewer, or set at_least",
    ),
    "less than a group": (
        lambda w: w.table.lease("whole", rows=1),
        tq.Impossible,
        r"with rows=1 can never hold one: 2 > 1; ask for rows >= 2, or for groups=1",
    ),
    "groups of a task without": (
        lambda w: w.table.lease("train", groups=1),
        tq.UsageError,
        r'"train" does not take groups \(declare it with groups=Complete\(...\)\); lease rows',
    ),
    "a rank beyond": (
        lambda w: w.table.lease("train", rows=2, rank=2, world=2),
        tq.UsageError,
        r"rank=2 is not below world=2; ranks are 0 to 1",
    ),
    "rows that cannot be split": (
        lambda w: w.table.lease("train", rows=3, world=2),
        tq.Impossible,
        r"rows=3 cannot be split in equal counts over world=2: 3 % 2 = 1; use a multiple",
    ),
    "a condition as text": (
        lambda w: w.table.lease("train", rows=1, where="score > 1"),
        tq.UsageError,
        r"where='score > 1' is str; give TagIs, VersionBetween or Compare",
    ),
    "a wait as "
    "text": (lambda w: w.table.lease("train", rows=1, timeout_s="1"), tq.UsageError, f"is str; {GIVE_SECONDS}"),
    "a negative wait": (lambda w: w.table.lease("train", rows=1, timeout_s=-1), tq.UsageError, OUT_OF_RANGE),
    "too short a wait": (
        lambda w: w.table.lease("train", rows=1, timeout_s=0.05),
        tq.DeadlineExceeded,
        r'2 rows lack "rewards" \(given by "reward".*timeout_s=None waits',
    ),
    "another keyword": (lambda w: w.table.lease("train", row=1), TypeError, "unexpected keyword argument 'row'"),
    "no prefetch": (lambda w: w.table.loader("train", rows=1, prefetch=-1), tq.UsageError,
    r"prefetch=-1 .*; give 1 to"),
    "a closed loader": (
        lambda w: ((loader := w.table.loader("train", rows=1)).close(), next(loader)),
        tq.UsageError,
        r'the loader of task "train" .* is closed; make another one',
    ),
}  # fmt: skip

BATCH: dict[str, Misuse] = {
    "acked twice": (
        lambda w: w.then(w.batch.ack(rewards=[1.0, 2.0])).batch.ack(rewards=[1.0, 2.0]),
        tq.BatchEnded,
        r'of task "reward".* was acked; lease another one',
    ),
    "acked by another thread": (
        lambda w: w.acked_elsewhere().ack(rewards=[1.0, 2.0]),
        tq.BatchEnded,
        r'of task "reward".* was acked; lease another one',
    ),
    "without results": (
        lambda w: w.batch.ack(),
        tq.UsageError,
        r'has no "rewards", which task "reward" gives.*: ack them with rewards=...',
    ),
    "results by another name": (
        lambda w: w.batch.ack(reward=[1.0, 2.0]),
        tq.UsageError,
        r"has a column 'reward', which table .* does not have; did you mean 'rewards'",
    ),
    "fewer results": (
        lambda w: w.batch.ack(rewards=[1.0]),
        tq.SchemaError,
        r'"rewards" has 1 row, but this call has 2; give one value for each row',
    ),
    "rows of another": (
        lambda w: w.batch.ack(rows=[7], rewards=[1.0]),
        tq.NotFound,
        r"row 7 is not, or not any more, in this batch .*; it has 0, 1",
    ),
    "rows as a mask": (
        lambda w: w.batch.ack(rows=[True, False], rewards=[1.0]),
        tq.UsageError,
        r"rows are bool\[2\]; give row ids",
    ),
    "after the release": (
        lambda w: w.then(w.batch.release()).batch.ack(rewards=[1.0, 2.0]),
        tq.BatchEnded,
        r"was released; lease another one",
    ),
    "after the lease": (
        lambda w: w.expired().ack(rewards=[1.0, 2.0]),
        tq.LeaseExpired,
        r"is not held: it expired .*with another worker, so lease again",
    ),
    "read after the end": (
        lambda w: w.then(w.batch.ack(rewards=[1.0, 2.0])).batch["response_ids"].list(),
        tq.BatchEnded,
        r"its memory was returned; take its values before",
    ),
    "a column that did not come": (
        lambda w: w.batch["txt"],
        tq.NotFound,
        r'"txt" is not in this batch .*; it has response_ids; name others with fields=',
    ),
    "dropped without a reason": (lambda w: w.batch.drop(""), tq.UsageError, r"drop reason name '' .*; use letters"),
    "failed as "
    "text": (lambda w: w.batch.release(failed="no"), tq.UsageError, r"failed='no' is str; give True or False"),
    "renewed for nothing": (lambda w: w.batch.renew(0), tq.UsageError, r"lease_s=0 would end at once; give a positive"),
    "one for a list": (lambda w: w.table.ack(w.batch), tq.UsageError, r"batches=.* is Batch; give a list of batches"),
    "row ids for "
    "batches": (lambda w: w.table.ack([0, 1]), tq.UsageError, r"batch 0 is int; give a batch that was leased"),
    "one twice": (lambda w: w.table.ack([w.batch, w.batch]), tq.UsageError,
    r"one of them is given twice; give each once"),
    "row ids in a pipeline": (
        lambda w: pipelined(w.table, lambda pipeline: pipeline.ack([0], rewards=[1.0])),
        tq.UsageError,
        r"batch \[0\] is list; give a batch that was leased",
    ),
    "a pipeline outside its block": (
        lambda w: w.table.pipeline().put(text=["a"]),
        tq.UsageError,
        r"a pipeline is used inside its block.*; write: with table.pipeline\(\) as pipeline",
    ),
    "copied": (lambda w: copy.copy(w.batch), tq.UsageError, r"cannot be pickled or copied; pass its values"),
    "a table copied": (lambda w: copy.deepcopy(w.table), tq.UsageError,
    r"cannot be pickled or copied; pass queue.address"),
}  # fmt: skip

QUEUE: dict[str, Misuse] = {
    "a put after close": (
        lambda w: w.closed()[1].put(text=["a"]),
        tq.Disconnected,
        r"the queue at ipc://.* was closed; connect again: tq.connect\(address\)",
    ),
    "a list after close": (lambda w: w.closed()[0].tables(), tq.Disconnected, r"was closed; connect again"),
    "after a fork": (
        lambda w: w.in_a_child(lambda: w.table.put(text=["a"])),
        tq.Forked,
        r"was opened before os.fork; connect again in the child",
    ),
    "an unawaited queue": (
        lambda w: tq.aconnect(w.queue.address).tables(),
        tq.UsageError,
        r"a call that is not awaited has no 'tables'; write \(await ...\).tables",
    ),
    "an unawaited batch": (
        lambda w: w.in_a_loop(lambda queue: unawaited(queue, w.name)),
        tq.UsageError,
        r"a call that is not awaited has no 'text'; write \(await ...\)\['text'\]",
    ),
    "with for async with": (
        lambda w: enter(tq.aconnect(w.queue.address)),
        tq.UsageError,
        r"an event loop enters this call; write async with",
    ),
    "a snapshot without a directory": (lambda w: w.queue.snapshot(""), tq.UsageError, r"path is empty, which names no"),
    "a snapshot elsewhere": (
        lambda w: w.queue.snapshot("/etc/x"),
        tq.UsageError,
        r"'/etc/x' is outside .*; name one under it, or start the server with another --snapshots",
    ),
    "a snapshot that is not there": (
        lambda w: w.empty.restore("nowhere"),
        tq.NotFound,
        r"no snapshot at .*nowhere; name the directory of a snapshot",
    ),
    "a restore over tables": (
        lambda w: w.queue.restore("nowhere"),
        tq.UsageError,
        r"restored into an empty deployment; .*start another server",
    ),
}  # fmt: skip

WEIGHTS: dict[str, Misuse] = {
    "a lower version": (
        lambda w: w.published(3).publish(2, TENSORS),
        tq.UsageError,
        r"is at version 3; it never goes back to 2: give a higher number",
    ),
    "a version twice": (
        lambda w: w.published(3).publish(3, TENSORS),
        tq.AlreadyExists,
        r"version 3 .* is published; versions are published once: give a higher number",
    ),
    "the tensors first": (lambda w: w.published().publish(TENSORS, 1), tq.UsageError, r"is dict; give an integer"),
    "a list of tensors": (
        lambda w: w.published().publish(1, [np.zeros(1)]),
        tq.UsageError,
        r"weights are list of no tensors; give a mapping of names to tensors",
    ),
    "text for a tensor": (
        lambda w: w.published().publish(1, {"w": np.array(["a"])}),
        tq.SchemaError,
        r'tensor "w" has no numbers, but <U1; weights are tensors or arrays of numbers',
    ),
    "a meta tensor": (
        lambda w: w.published().publish(1, {"w": torch.zeros(2, device="meta")}),
        tq.SchemaError,
        r'tensor "w": a meta tensor has no values; give a tensor with memory',
    ),
    "an adapter without a base": (
        lambda w: w.published().publish(1, TENSORS, adapter="lora"),
        tq.NotFound,
        r'"lora" has no base.*; publish the base first',
    ),
    "a part of nothing": (
        lambda w: w.published().publish(1, TENSORS, part=1),
        tq.UsageError,
        r"part 1 of version 1 .* names no pending version; begin one",
    ),
    "a version that is gone": (
        lambda w: w.published(0, 1, 2, 3).pull(version=0),
        tq.NotFound,
        r"version 0 .* is not kept; it has 2, 3: pull a newer one",
    ),
    "nothing yet": (
        lambda w: w.published().pull(timeout_s=0.05),
        tq.DeadlineExceeded,
        r"nothing was published yet; timeout_s=None waits",
    ),
    "since a number": (
        lambda w: w.published(1).pull(since=1),
        tq.UsageError,
        r"since=1 is int; give the Weights that were pulled, or a version as above=",
    ),
    "a tensor that is not there": (
        lambda w: w.published(1).pull(only=["v"]),
        tq.NotFound,
        r"version 1 .* has no tensor v, or not these rows of it; it has w",
    ),
    "after their release": (
        lambda w: ((weights := w.published(1).pull()).release(), weights["w"]),
        tq.BatchEnded,
        r"was released and its memory was returned; pull it again",
    ),
}

ROOMS: Final = {
    "connect": CONNECT,
    "tables": TABLES,
    "policies": POLICIES,
    "put": PUT,
    "reserve": RESERVE,
    "update": UPDATE,
    "lease": LEASE,
    "batch": BATCH,
    "queue": QUEUE,
    "weights": WEIGHTS,
}


def pipelined(table: tq.Table, call: Callable[[tq.Pipeline], object]) -> None:
    with table.pipeline() as pipeline:
        call(pipeline)


async def unawaited(queue: tq.AsyncQueue, name: str) -> object:
    table = await queue.table(name)
    return table.lease("whole", rows=2)["text"]  # type: ignore[index]


def enter(context: Any) -> None:
    with context:
        pass


@pytest.fixture(scope="module")
def queues(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[tq.Queue, tq.Queue]]:
    """A queue for all cases, and one that stays empty."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRANSFERQUEUE_SNAPSHOTS", str(tmp_path_factory.mktemp("snapshots")))
        with (
            tq.connect("embedded", arena_bytes="64MiB") as queue,
            tq.connect("embedded", arena_bytes="16MiB") as empty,
        ):
            yield queue, empty


@pytest.fixture
def world(queues: tuple[tq.Queue, tq.Queue], name: str) -> Iterator[World]:
    world = World(*queues, name)
    yield world
    for table in world.queue.tables():
        world.queue.drop_table(table)


@pytest.mark.filterwarnings("ignore:a sync call waits inside a running event loop")
@pytest.mark.parametrize(
    ("room", "case"), [pytest.param(room, case, id=f"{room}: {case}") for room in ROOMS for case in ROOMS[room]]
)
def test_a_misuse_is_refused_at_once_with_the_remedy(world: World, room: str, case: str) -> None:
    call, kind, text = ROOMS[room][case]
    started = time.monotonic()
    with pytest.raises(Exception, match=rf"(?s){text}") as refused:
        call(world)
    assert time.monotonic() - started < AT_ONCE_S
    assert type(refused.value) is kind
    assert len(str(refused.value)) < LENGTH_MAX
    assert world.table.audit() == world.before


@pytest.mark.parametrize("variable", ["TRANSFERQUEUE_ADDRESS", "TRANSFERQUEUE_TOKEN"])
def test_an_empty_variable_is_refused(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "")
    with pytest.raises(
        tq.UsageError, match=f"{variable} is set and empty; give it the address of the server, or unset"
    ):
        tq.connect()


def test_a_variable_with_another_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSFERQUEUE_ADDRESS", "localhost:5000")
    with pytest.raises(tq.UsageError, match=UNKNOWN_KIND):
        tq.connect()


def test_a_runtime_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(tq.UsageError, match="cannot be made: File exists; name another"):
        tq.connect("embedded", runtime=tmp_path / "file")


def test_a_task_of_a_call_can_be_shown(queues: tuple[tq.Queue, tq.Queue]) -> None:
    async def main() -> str:
        task = asyncio.create_task(tq.aconnect(queues[0].address))
        text = repr(task)
        await (await task).close()
        return text

    assert "AwaitableContext" in asyncio.run(main())


def test_these_are_a_hundred() -> None:
    assert sum(map(len, ROOMS.values())) >= 100
