"""The same calls give the same replies, effects and state, byte for byte, in any process; and a fuzzer's calls
give typed errors or replies, never a broken ledger."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
from typing import Any

import msgspec
import numpy as np
import pytest

from transferqueue.errors import TransferQueueError
from transferqueue.ledger import Blocked, FreeExtent, Ledger
from transferqueue.ledger.tasks.task_state import LEASED, READY, WAITING_FOR_GROUP
from transferqueue.limits import Limits
from transferqueue.policies import (
    Compare,
    Complete,
    DeliverPartial,
    Freshest,
    LongestFirst,
    Pacing,
    Refill,
    Requeue,
    Retry,
    TagIs,
    Task,
    VersionBetween,
)
from transferqueue.schema import Field, layout
from transferqueue.wire import messages as m

TASKS = [
    Task("roll", [], ["a"], lease_s=9.0),
    Task("grade", ["a"], ["score"], LongestFirst(), retry=Retry(attempts=2), lease_s=7.0),
    Task(
        "adv", ["score"], ["adv"], groups=Complete(min_size=2, incomplete=DeliverPartial(), deadline_s=8.0), lease_s=8.0
    ),
    Task("train", ["a", "adv"], [], Freshest(), Complete(incomplete=Refill(), deadline_s=11.0), lease_s=12.0),
]
FIELDS = [Field("a", "int64", (None,)), Field("b", "float32", (3,)), Field("score", "float64"), Field("adv", "float32")]


class Fuzz:
    """A seeded client of several sessions: mostly sensible requests, some of them spoiled at random."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.ledger = Ledger()
        self.now = 0.0
        self.calls = dict.fromkeys((1, 2, 3), 0)
        self.extents: list[m.Granted] = []
        self.leases: list[m.Leased] = []
        self.holder: dict[int, int] = {}
        self.room = 0
        self.writer = 1
        self.reservation = 0
        self.log = hashlib.sha256()
        self.refused: dict[str, int] = {}
        self.done: dict[str, int] = {}
        for number in self.calls:
            self.ledger.open_session(number, bytes([number] * 16), 0.0)
        pacing = Pacing("train", 8, 5, 2, Requeue("roll"), "policy")
        self.apply(m.CreateTable("t", FIELDS[:2], TASKS, Limits(rows=64, bytes="64KiB"), pacing))

    # ------------------------------------------------------------ requests

    def number(self, most: int) -> int:
        """Mostly small; now and then one that tries a bound."""
        if self.dice.random() < 0.03:
            return self.dice.choice([-1, 0, 1 << 20, (1 << 20) + 1, 1 << 31, 1 << 40, (1 << 62) - 1, -(1 << 63)])
        return self.dice.randint(1, most)

    def data(self, count: int, dtype: str, most: int) -> bytes:
        values = np.array([self.dice.randint(-1 if self.dice.random() < 0.1 else 0, most) for _ in range(count)], dtype)
        data = values.tobytes()
        return data[:-1] if self.dice.random() < 0.02 else data

    def rows(self, count: int) -> bytes:
        known = self.ledger.state.tables["t"].rows.pages.next_row if "t" in self.ledger.state.tables else 0
        picked = [self.dice.randint(max(-1, known - 40), known) for _ in range(count)]
        if self.dice.random() < 0.9:
            picked = sorted(set(picked))
        return np.array(picked, "<i8").tobytes()

    def facts(self, count: int) -> m.RowFacts:
        given: dict[str, Any] = {}
        for name, dtype, most in [("policy_version", "<i8", 6), ("tokens", "<i8", 90), ("priority", "<f8", 3)]:
            if self.dice.random() < 0.4:
                given[name] = self.data(count, dtype, most)
        if self.dice.random() < 0.6:
            size = self.dice.choice([count, count, 4])
            given["group_id"] = np.full(count, self.dice.randint(0, 9), "<i8").tobytes()
            given["group_size"] = np.full(count, max(1, size), "<i4").tobytes()
        if self.dice.random() < 0.1:
            given["tags"] = [{"kind": self.dice.choice(["a", "b"])} for _ in range(count)]
        if self.dice.random() < 0.05:
            given["keys"] = [f"k{self.dice.randint(0, 30)}" for _ in range(count)]
        return m.RowFacts(**given)

    def columns(self, count: int, names: list[str]) -> m.Columns:
        fields = [field for field in FIELDS if field.name in names]
        if self.dice.random() < 0.03:
            fields.append(Field("a", "int32", (None,)))
        placed = [field for field in fields if not field.inline and field.name in names][:2]
        return m.Columns(
            fields,
            [self.placed(placed, count)] if placed and self.extents else [],
            [m.Inline(field.name, self.data(count, np.dtype(field.dtype).str, 5)) for field in fields if field.inline],
            self.facts(count),
        )

    def placed(self, fields: list[Field], count: int) -> m.WrittenBlock:
        given = self.extents[-1 if self.dice.random() < 0.95 else self.dice.randrange(len(self.extents))]
        counts = [0 if field.dense else self.dice.randint(0, 2 * count) for field in fields]
        nbytes = layout(fields, count, counts)[1] if count > 0 and self.dice.random() < 0.97 else self.number(999)
        offset = given.offset + self.room + (self.dice.random() < 0.03) * self.number(99)
        self.room += -(-max(0, min(nbytes, 9999)) // 64) * 64
        slots = self.data(count, "<i4", count) if self.dice.random() < 0.05 else None
        return m.WrittenBlock(
            given.extent, max(0, offset), max(0, nbytes), max(0, count), [f.name for f in fields], counts, slots
        )

    def make(self) -> m.Request:
        kinds = [
            (10, self.put), (8, self.update), (14, self.lease), (12, self.ack), (3, self.release), (2, self.renew),
            (3, self.reserve), (6, self.other),
        ]  # fmt: skip
        (chosen,) = self.dice.choices([make for _, make in kinds], [weight for weight, _ in kinds])
        return chosen()

    def wait(self) -> float:
        return self.dice.choice([0.0, 5.0])

    def where(self) -> list[Any]:
        if self.dice.random() < 0.8:
            return []
        tests = [TagIs("kind", "a"), VersionBetween(1, 4), Compare("tokens", ">", 9), Compare("score", "<", 3)]
        return [self.dice.choice(tests)]

    def some_lease(self) -> tuple[int, int, int, bytes | None]:
        """Number, token, rows, and which of them."""
        if not self.leases:
            return 1, 1, 0, None
        lease = self.dice.choice(self.leases[-6:])
        some = self.rows(2) if self.dice.random() < 0.15 else None
        token = lease.token + (self.dice.random() < 0.02)
        return lease.lease, token, len(some or lease.content.rows) // 8, some

    def put(self) -> m.Request:
        names = self.dice.choice([["a"], ["a"], ["a", "score"], ["a", "b"], []])
        count = min(max(self.number(5), 1), 4000)
        held = self.reservation if self.dice.random() < 0.3 else 0
        columns = self.columns(count, names)
        if self.dice.random() < 0.4:
            next_row = self.ledger.state.tables["t"].rows.pages.next_row
            parents = np.array([self.dice.randint(max(-1, next_row - 20), next_row) for _ in range(count)], "<i8")
            continued = [name for name in names if name != "score"]
            return m.ContinueRequest("t", count, columns, held, self.wait(), parents.tobytes(), continued)
        return m.PutRequest("t", count, columns, held, self.wait())

    def update(self) -> m.Request:
        rows = self.rows(self.dice.randint(1, 5))
        names = self.dice.choice([["a"], ["score"], ["adv"], ["b"]])
        return m.Update("t", rows, self.columns(len(rows) // 8, names), self.dice.random() < 0.3)

    def lease(self) -> m.Request:
        dice, world = self.dice, self.dice.choice([1, 1, 1, 2])
        task = "nobody" if dice.random() < 0.02 else dice.choice(TASKS).name
        what = {dice.choice(["rows", "rows", "tokens", "groups"]): abs(self.number(6))}
        return m.LeaseRequest(
            "t", task, **what, at_least=dice.choice([0, 1, 1]), wait_s=self.wait(), where=self.where(),
            rank=dice.randrange(world), world=world, replica=0, replicas=dice.choice([1, 1, 1, 2]),
        )  # fmt: skip

    def ack(self) -> m.Request:
        number, token, size, some = self.some_lease()
        names = self.dice.choice([["score"], ["adv"], ["a"], []])
        columns = self.columns(size, names) if size and self.dice.random() < 0.8 else None
        return m.Ack("t", number, token, some, columns, self.dice.choice(["", "", "", "bad"]))

    def release(self) -> m.Request:
        number, token, _, some = self.some_lease()
        return m.ReleaseRequest("t", number, token, some, self.dice.random() < 0.5, "why")

    def renew(self) -> m.Request:
        number, token, _, _ = self.some_lease()
        return m.Renew("t", number, token, float(self.dice.randint(0, 9)))

    def reserve(self) -> m.Request:
        if self.dice.random() < 0.3:
            return m.Unreserve("t", self.reservation, self.dice.randint(0, 4))
        return m.Reserve("t", max(1, abs(self.number(5))), self.dice.randint(-1, 6), self.wait())

    def other(self) -> m.Request:
        dice, field = self.dice, [Field("w", "float32", (2,))]
        what = dice.choice(["stats", "audit", "row", "doctor", "sessions"])
        made: list[m.Request] = [
            m.Drop("t", self.rows(2), "user"),
            m.Delete("t", self.rows(2)),
            m.ReadRequest(
                "t", self.rows(2) if dice.random() < 0.5 else None, where=self.where(), limit=dice.randint(0, 9)
            ),
            m.Unpin(self.data(2, "<i8", 30), self.data(2, "<i8", 2)),
            m.Pull("policy", dice.randint(-1, 5), dice.choice([-1, -1, 3]), self.wait()),
            m.ReturnGrant(dice.choice(self.extents).extent),
            m.Observe(what, dice.choice(["", "t"]), dice.randint(0, 99)),
        ]
        if dice.random() < 0.2:
            return m.Publish("policy", dice.randint(0, 9), field, [self.placed(field, 1)])
        return dice.choice(made)

    # ------------------------------------------------------------ steps

    def apply(self, request: m.Request) -> None:
        session = self.session_for(request)
        self.calls[session] += 1
        kind = m.tag_of(request)
        try:
            reply = self.ledger.apply(request, session=session, call=self.calls[session], now=self.now)
        except TransferQueueError as error:
            self.refused[kind] = self.refused.get(kind, 0) + 1
            self.note(repr(error).encode())
            return
        self.done[kind] = self.done.get(kind, 0) + 1
        if isinstance(reply, m.Leased):
            self.leases.append(reply)
            self.holder[reply.lease] = session
        if isinstance(reply, m.Reserved):
            self.reservation = reply.reservation
        self.note(msgspec.msgpack.encode(reply) if not isinstance(reply, Blocked) else repr(reply).encode())
        if isinstance(reply, Blocked):
            self.note(self.ledger.explain(request, self.now).encode())

    def session_for(self, request: m.Request) -> int:
        """Whoever holds the lease or the extent; now and then somebody else."""
        if self.dice.random() < 0.1:
            return self.dice.choice([1, 2, 3])
        if isinstance(request, m.Ack | m.ReleaseRequest | m.Renew):
            return self.holder.get(request.lease, 1)
        return (
            self.writer
            if isinstance(request, m.PutRequest | m.Update | m.Publish | m.ReturnGrant)
            else self.dice.choice([1, 2, 3])
        )

    def step(self) -> None:
        dice = self.dice
        self.now += dice.choice([0.0, 0.0, 0.1, 1.0])
        if not self.extents or self.room > 50_000 or dice.random() < 0.02:
            self.writer = dice.choice([1, 1, 2])
            self.extents.append(
                self.ledger.grant(self.writer, dice.randint(0, 2), len(self.extents) << 20, 1 << 16, self.now)
            )
            self.room = 0
        if dice.random() < 0.01:
            self.note(repr(self.ledger.shard_lost(dice.randint(0, 2), self.now)).encode())
        if dice.random() < 0.003:
            session = dice.choice(list(self.calls))
            self.ledger.close_session(session, self.now)
            self.ledger.open_session(session, bytes([session] * 16), self.now)
            self.calls[session] += 1
            self.extents.clear()
            return
        self.apply(self.make())
        effects = self.ledger.take_effects()
        self.note(repr(effects).encode())
        freed = [one.extent for one in effects if isinstance(one, FreeExtent)]
        assert len(set(freed)) == len(freed)

    def note(self, data: bytes) -> None:
        self.log.update(data)

    def check(self) -> None:
        """What must hold in any state."""
        table = self.ledger.state.tables["t"]
        assert self.ledger.observe(m.Observe("audit"), self.now).balanced
        blocks = self.ledger.state.core.blocks
        refs: dict[int, int] = {}
        rows = table.rows.pages.resident_rows()
        at = table.rows.pages.index(rows)
        for part in table.column_groups._by_fields.values():
            for number in part.block.a[at].tolist():
                if number:
                    refs[number] = refs.get(number, 0) + 1
        for continued in table.usage.continued.values():
            for above in continued.above:
                refs[above] = refs.get(above, 0) + 1
        for above in blocks.ending:
            refs[above] = refs.get(above, 0) + 1
        assert all(blocks.blocks[number].refs for number in table.usage.continued)
        mine = {number: one.refs for number, one in blocks.blocks.items() if one.usage is table.usage and one.refs}
        for lease in self.ledger.state.core.leases.by_id.values():
            if lease.staged is not None:
                for number, parts in zip(lease.staged.blocks, lease.staged.parts, strict=True):
                    refs[number] = refs.get(number, 0) + lease.staged.rows * len(parts)
        assert refs == mine
        for extent in blocks.extents.values():
            inside = [one for one in blocks.blocks.values() if one.extent is extent]
            assert extent.blocks == len(inside)
            assert inside or extent.open
        for name, task in table.tasks.items():
            live = at[table.rows.pages.fate.a[at] == 1]
            counted = np.bincount(task.state.a[live], minlength=10)[:5].tolist()
            assert counted == task.counts[:5], name
            ready = live[(task.state.a[live] == WAITING_FOR_GROUP) | (task.state.a[live] == READY)]
            assert task.completed(ready).all(), name
            held = [row for one in self.ledger.state.core.leases.by_id.values() if one.task == name
                    for row in one.rows[one.held].tolist()]  # fmt: skip
            assert len(held) == len(set(held)) == task.counts[LEASED]


def run(seed: int, steps: int) -> tuple[str, Fuzz]:
    fuzz = Fuzz(seed)
    for step in range(steps):
        fuzz.step()
        if step % 20 == 0:
            fuzz.check()
    fuzz.check()
    return fuzz.log.hexdigest(), fuzz


@pytest.mark.parametrize("seed", range(6))
def test_no_message_breaks_the_ledger(seed: int) -> None:
    _, fuzz = run(seed, 500)
    assert sum(fuzz.done.values()) > 100


def test_a_fuzzed_run_reaches_everything() -> None:
    done: dict[str, int] = {}
    for seed in range(6):
        for kind, count in run(seed, 300)[1].done.items():
            done[kind] = done.get(kind, 0) + count
    missing = {
        *("Put", "Continue", "Update", "Lease", "Ack", "Release", "Renew", "Reserve", "Drop", "Read", "Publish", "Pull")
    } - set(done)
    assert not missing


@pytest.mark.slow
def test_the_same_calls_give_the_same_bytes_in_any_process() -> None:
    """Hash seeds differ between the processes: nothing may depend on the order of a set."""
    here, _ = run(7, 600)
    code = "from tests.ledger.test_determinism import run; print(run(7, 600)[0])"
    for hash_seed in ("1", "4711"):
        out = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100,
            env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join([".", *sys.path])},
        )  # fmt: skip
        assert out.stdout.strip() == here
