"""Frames at their bounds: of every request, each count, length, number and depth just under, at and just over its
bound, and each frame's size.

The bounds are read from the types, so a new request is covered as soon as it has an example (`tests/wire/examples.py`).
`LARGEST` has requests that a server carries out, as large as they may be. Each is handed to a coordinator, and the
processor time of that turn is what counts.
"""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from msgspec import inspect

from tests.server.nodes import Bench, Client
from tests.wire import examples
from transferqueue.limits import (
    FIELDS_MAX,
    GROUPS_PER_REQUEST_MAX,
    KEY_CHARS_MAX,
    LEASES_PER_REQUEST_MAX,
    MIB,
    REQUEST_BYTES_MAX,
    ROWS_DESCRIBED_MAX,
    ROWS_PER_REQUEST_MAX,
    SPANS_AWAITED_MAX,
    TAG_CHARS_MAX,
    TAGS_MAX,
    TASKS_MAX,
    TURN_S_MAX,
    UNPINNED_MAX,
    Limits,
)
from transferqueue.policies import Complete, DeliverPartial, DropGroup, Pacing, Priority, Refill, Task, TokenBalanced
from transferqueue.schema import Field
from transferqueue.server.sessions.authorization import Authorizer
from transferqueue.transport.control.zeromq import KeyedPeer
from transferqueue.transport.security import keyring
from transferqueue.transport.security.keyring import Keyring
from transferqueue.wire import messages as m
from transferqueue.wire.messages.declarations import BY_TAG
from transferqueue.wire.roles import ROLES, Role
from transferqueue.wire.versions import PROTOCOL

WIDE: Final = FIELDS_MAX // 4
"""Inline fields of a wide table. Each page of one takes memory for 4,096 rows of all of them, which alone takes 40 ms
for `FIELDS_MAX`."""
PUBLISH_S_MAX: Final = 0.25
"""Of a publication of weights alone, at `PUBLISH_BYTES_MAX`: see there."""
LATE_S: Final = 3 * TURN_S_MAX
"""A turn above it fails a test: beside other work, all turns take two to three times as long. What the tests look for
takes ten times as long."""
TRIES: Final = 4
"""A turn that took too long is repeated, and its shortest time counts: a machine that does other work makes all times
longer."""
_INTEGERS: Final = (-(1 << 63), -1, 0, (1 << 62) - 1, 1 << 62, (1 << 63) - 1, (1 << 64) - 1)
_ONE_BYTE_HEADS: Final = (b"\x91", b"\x81\xa0")
Ask = Callable[[m.Request], Any]

# ---------------------------------------------------------------- frames by their types


def trees(request: m.Request) -> Iterator[Any]:
    """The request as plain values, each time with one node at, under or over a bound."""
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(request))
    most = BY_TAG[plain[0]].bytes_max
    yield plain
    yield from _changed(inspect.type_info(type(request)), plain, most)
    for size in (most - 200, most, most + 1):
        yield [plain[0], bytes(size)]
        yield [plain[0], "A" * size]
        yield [plain[0], [0] * size]
        yield [plain[0], msgspec.Raw(b"\x91" * size + b"\x00")]
        yield ["A" * size]


def _changed(kind: inspect.Type, tree: Any, most: int) -> Iterator[Any]:  # noqa: C901  (a case for each kind)
    match kind:
        case inspect.StructType() if isinstance(tree, list):
            first = int(kind.tag is not None)
            for at, field in enumerate(kind.fields, first):
                if at < len(tree):
                    for node in _changed(field.type, tree[at], most):
                        yield [*tree[:at], node, *tree[at + 1 :]]
        case inspect.ListType() | inspect.VarTupleType():
            item = tree[0] if tree else None
            for count in _around(kind.max_length or most, most):
                yield [item] * count
            yield msgspec.Raw(b"\xdd\xff\xff\xff\xff")
            for node in _changed(kind.item_type, item, most) if tree else ():
                yield [node]
        case inspect.DictType():
            for count in _around(kind.max_length or most, most):
                yield {f"a{number}": 1 for number in range(count)}
        case inspect.StrType():
            for count in _around(kind.max_length or most, most):
                yield "a" * count
                yield "é" * min(count, most // 2)
        case inspect.BytesType():
            for count in {
                *_around(kind.max_length or most, most),
                *(8 * (ROWS_PER_REQUEST_MAX + by) for by in (-1, 0, 1)),
            }:
                yield bytes(count)
        case inspect.IntType():
            yield from _INTEGERS
            yield from (end + by for end in (kind.ge, kind.lt, kind.le) if end is not None for by in (-1, 0))
        case inspect.UnionType():
            for each in kind.types:
                if not isinstance(each, inspect.StructType) or (
                    isinstance(tree, list) and tree and tree[0] == each.tag
                ):
                    yield from _changed(each, tree, most)
            if isinstance(tree, list):
                yield ["ShortestFirst" * 100, *tree[1:]]
        case _:
            for head in _ONE_BYTE_HEADS:
                yield msgspec.Raw(head * 33 + b"\x90")


def _around(bound: int, most: int) -> list[int]:
    """Just under, at and just over a bound, as far as a frame has room for it."""
    return sorted({min(count, most) for count in (bound - 1, bound, bound + 1)})


# ---------------------------------------------------------------- parts of requests

R: Final = Field("r", "float32")
X: Final = Field("x", "int32", (16,))


def int64s(count: int, first: int = 0) -> bytes:
    """Ascending numbers."""
    return np.arange(first, first + count, dtype="<i8").tobytes()


def columns(rows: int, **facts: Any) -> m.Columns:
    """One inline column, and facts."""
    return m.Columns([R], inline=[m.Inline("r", bytes(4 * rows))], facts=m.RowFacts(**facts))


def _begin(tree: Any) -> str:
    """How a request begins, for the name of its turn."""
    parts = tree[1:3] if isinstance(tree, list) else []
    return ", ".join(f"{part!r:.40}" for part in parts if isinstance(part, str | int))


def int64s_of(numbers: Any) -> bytes:
    """Numbers as a message carries them."""
    return np.fromiter(numbers, "<i8").tobytes()


def _block(ask: Ask, rows: int) -> m.WrittenBlock:
    grant = ask(m.Grant(64 * rows))
    return m.WrittenBlock(
        grant.extent, grant.offset, 64 * rows, rows, ["x"], [0], np.arange(rows, dtype="<i4").tobytes()
    )


# ---------------------------------------------------------------- turns


class Turn(msgspec.Struct, order=True):
    """The processor time of one frame, and what it was."""

    seconds: float
    of: str
    what: str


class Measured:
    """A coordinator with a client of each role. Turns are measured as a server runs them: without full garbage
    collections."""

    def __init__(self, directory: Path) -> None:
        keys = {role: keyring.add(directory / "keys", role, role).pair.public for role in ROLES}
        self.bench = Bench(arena_bytes=256 * MIB, door=Authorizer(Keyring(directory / "keys")))
        self._peers = {role: KeyedPeer(role.encode(), key) for role, key in keys.items()}
        self._clients: dict[Role, Client] = {}
        self.turns: list[Turn] = []
        self.frames = 0
        gc.collect()
        gc.freeze()
        self._thresholds = gc.get_threshold()
        gc.set_threshold(*self._thresholds[:2], 1 << 30)

    def close(self) -> None:
        """End the coordinator."""
        gc.set_threshold(*self._thresholds)
        gc.unfreeze()
        self.bench.close()

    def client(self, role: Role) -> Client:
        """The client of this role; a new one if its session has ended."""
        known = self._clients.get(role)
        if known is None or self.bench.coordinator.sessions.get(known.session) is None:
            self.bench.answered.clear()
            known = self._clients[role] = Client(self.bench, self._peers[role])
            assert known.session, known.welcome
        return known

    def ask(self, request: m.Request) -> Any:
        """The reply to a request of the admin, which is carried out."""
        reply = self.send("admin", msgspec.msgpack.decode(msgspec.msgpack.encode(request)), m.tag_of(request))
        may_fail = isinstance(request, m.Unpin) or getattr(
            request, "awaited", b""
        )  # nothing is pinned, and nothing is ready
        assert not isinstance(reply, m.Failed) or may_fail, (request, reply)
        return reply

    def most(self, rows: int, make: Callable[[int], m.Request]) -> Any:
        """The reply to a request of the admin with so many rows, or as many fewer as a refusal allows. The refusals are
        measured too."""
        while True:
            request = make(rows)
            reply = self.send("admin", msgspec.msgpack.decode(msgspec.msgpack.encode(request)), m.tag_of(request))
            if not isinstance(reply, m.Failed):
                return reply
            allowed = re.search(r"send at most ([\d,]+) ", reply.text)
            assert allowed, reply
            fewer = int(allowed[1].replace(",", ""))
            assert 0 < fewer < rows, reply
            rows = fewer

    def send(self, role: Role, tree: Any, what: str) -> m.Reply | None:
        """Hand the frame of a request to the coordinator, and measure the turn. A turn that is too long is repeated, if
        the repetition is refused too. Returns the answer."""
        client, reply = self.client(role), None
        for _ in range(TRIES):
            client.ids += 1
            frame = msgspec.msgpack.encode([PROTOCOL, client.session, client.ids, client.ids - 1, tree])
            began = time.thread_time()
            self.bench.coordinator.receive(client.peer, frame, self.bench.now)
            took = time.thread_time() - began
            self.bench.deliver()
            reply, self.frames = client.take(client.ids), self.frames + 1
            self.bench.answered.clear()
            if took <= TURN_S_MAX or not isinstance(reply, m.Failed):
                break  # what was carried out is not the same a second time
        self.turns.append(Turn(took, what, f"{role}: {what} {_begin(tree)} of {len(frame):,} bytes -> {reply!r:.200}"))
        return reply

    def late(self) -> list[Turn]:
        """The turns that took too long."""
        return [turn for turn in self.turns if turn.seconds > (PUBLISH_S_MAX if turn.of == "Publish" else LATE_S)]


# ---------------------------------------------------------------- the largest that are carried out


def largest(measured: Measured) -> None:
    """Requests that are carried out, each as large as it may be, in tables that hold what a table holds by default."""
    for requests in (_plain, _described, _grouped, _incomplete, _shared, _ranked, _of_many_tasks, _wide):
        requests(measured, measured.ask)
        for table in measured.ask(m.ListTables()).names:
            measured.ask(m.DropTable(table))
    for what in ("stats", "audit", "doctor", "sessions"):
        measured.ask(m.Observe(what))


def _plain(measured: Measured, ask: Ask) -> None:
    rows = ROWS_PER_REQUEST_MAX
    ask(m.CreateTable("plain", [R], [Task("train", ["r"]), Task("late", ["r", "x"])], extra_fields=True))
    numbers = {name: int64s(rows) for name in ("ordinal", "policy_version", "tokens")}
    ask(m.PutRequest("plain", rows, columns(rows, **numbers)))
    leased = ask(m.LeaseRequest("plain", "train", rows=rows))
    ask(m.ReleaseRequest("plain", leased.lease, leased.token, failed=True))
    measured.bench.pass_time(60.0)
    leased = ask(m.LeaseRequest("plain", "train", tokens=1 << 40, at_least=1))
    ask(m.Update("plain", leased.content.rows, m.Columns([X], [_block(ask, rows)])))
    ask(m.ReadRequest("plain", leased.content.rows))
    ask(m.Ack("plain", leased.lease, leased.token, leased.content.rows))
    leased = ask(m.LeaseRequest("plain", "late", rows=rows))
    ask(m.ReadRequest("plain"))
    ask(m.FreeColumns("plain", leased.content.rows, ["x"], again=True))
    ask(m.Drop("plain", leased.content.rows, "old"))
    ask(m.PutRequest("plain", rows, columns(rows)))
    leases = [ask(m.LeaseRequest("plain", "train", rows=256)) for _ in range(LEASES_PER_REQUEST_MAX)]
    ask(m.AckLeases("plain", int64s_of(lease.lease for lease in leases), int64s_of(lease.token for lease in leases)))
    ask(m.Unpin(int64s(UNPINNED_MAX), int64s(UNPINNED_MAX, 1)))


def _described(measured: Measured, ask: Ask) -> None:
    rows = ROWS_DESCRIBED_MAX
    ask(m.CreateTable("plain", [R], [Task("train", ["r"])]))
    keys = [f"{number:060}" for number in range(rows)]
    ask(m.PutRequest("plain", rows, columns(rows, keys=keys)))
    ask(m.Find("plain", keys))
    leased = ask(m.LeaseRequest("plain", "train", rows=rows))
    ask(m.Ack("plain", leased.lease, leased.token, leased.content.rows))
    few = REQUEST_BYTES_MAX // (KEY_CHARS_MAX + 20)
    ask(m.PutRequest("plain", few, columns(few, keys=[f"{number:0{KEY_CHARS_MAX}}" for number in range(few)])))
    for tags in (1, 4, TAGS_MAX):
        measured.most(
            min(rows, REQUEST_BYTES_MAX // (tags * 18)),
            lambda count, tags=tags: m.PutRequest(
                "plain", count, columns(count, tags=[{f"tag{at}": "x" * 8 for at in range(tags)}] * count)
            ),
        )
        measured.most(ROWS_PER_REQUEST_MAX, lambda count: m.LeaseRequest("plain", "train", rows=count, at_least=1))
        ask(m.ReadRequest("plain", limit=1000))
    wide = REQUEST_BYTES_MAX // (TAGS_MAX * (TAG_CHARS_MAX + 20))
    tags = [{f"t{at}": "x" * TAG_CHARS_MAX for at in range(TAGS_MAX)}] * wide
    ask(m.PutRequest("plain", wide, columns(wide, tags=tags)))


def grouped(rows: int, size: int, first: int = 0) -> dict[str, bytes]:
    """Facts of rows in whole groups."""
    ids = np.repeat(np.arange(first, first + rows // size), size).astype("<i8")
    return {"group_id": ids.tobytes(), "group_size": np.full(ids.size, size, "<i4").tobytes()}


def _grouped(measured: Measured, ask: Ask) -> None:
    """One step of GRPO first: 2,048 prompts with 8 answers each, as one put."""
    rows = 1 << 14
    ask(
        m.CreateTable(
            "groups", [R], [*(Task(f"t{at}", ["r"]) for at in range(3)), Task("train", ["r"], groups=Complete())]
        )
    )
    keys, tags = [f"step-1/sample-{number:08}" for number in range(rows)], [{"task": "math"}] * rows
    ask(m.PutRequest("groups", rows, columns(rows, **grouped(rows, 8), keys=keys, tags=tags)))
    leased = ask(m.LeaseRequest("groups", "train", groups=rows // 8))
    ask(m.ReleaseRequest("groups", leased.lease, leased.token))
    leased = ask(m.LeaseRequest("groups", "train", rows=rows))
    ask(m.Ack("groups", leased.lease, leased.token, leased.content.rows))
    ask(m.CreateTable("alone", [R], [Task("train", ["r"], groups=Complete())]))
    for size in (1, 2, 4, 64):
        put = measured.most(
            ROWS_PER_REQUEST_MAX // 4,
            lambda count, size=size: m.PutRequest(
                "alone", count // size * size, columns(count // size * size, **grouped(count, size, size << 20))
            ),
        )
        leased = ask(m.LeaseRequest("alone", "train", groups=min(put.rows // size, GROUPS_PER_REQUEST_MAX)))
        ask(m.ReleaseRequest("alone", leased.lease, leased.token))
        leased = ask(m.LeaseRequest("alone", "train", groups=min(put.rows // size, GROUPS_PER_REQUEST_MAX)))
        ask(m.Ack("alone", leased.lease, leased.token, leased.content.rows))
    rows_left = ask(m.ReadRequest("alone")).content.rows
    measured.most(len(rows_left) // 8, lambda count: m.Drop("alone", rows_left[: 8 * count], "old"))
    measured.most(ROWS_PER_REQUEST_MAX // 4, lambda count: m.PutRequest("alone", count, columns(count)))


def _incomplete(measured: Measured, ask: Ask) -> None:
    """The drop of one member ends its group; the seal of a table ends all that are not whole."""
    rows = 1 << 14
    for number, rule in enumerate((DropGroup(), DeliverPartial(), Refill())):
        table, least = f"part{number}", 4 if isinstance(rule, DeliverPartial) else None
        ask(m.CreateTable(table, [R], [Task("train", ["r"], groups=Complete(incomplete=rule, min_size=least))]))
        ask(m.PutRequest(table, rows, columns(rows, **grouped(rows, 8))))
        measured.most(rows // 8, lambda count, table=table: m.Drop(table, int64s(count), "bad"))
        ask(m.PutRequest(table, rows, columns(rows, **grouped(rows, 8, 1 << 20))))
        first = np.arange(rows, 2 * rows, 8).astype("<i8").tobytes()
        measured.most(rows // 8, lambda count, table=table, first=first: m.Drop(table, first[: 8 * count], "bad"))
        forming = grouped(rows, 8, 1 << 30) | {"group_size": np.full(rows, 9, "<i4").tobytes()}
        ask(m.PutRequest(table, rows, columns(rows, **forming)))
        ask(m.Seal(table))


def _shared(measured: Measured, ask: Ask) -> None:
    rows = ROWS_PER_REQUEST_MAX
    ask(m.CreateTable("shared", [R], [Task("train", ["r"], selector=TokenBalanced(equal_counts=False))]))
    for world in (8, 512, 2048):
        ask(m.PutRequest("shared", rows // 4, columns(rows // 4, tokens=int64s(rows // 4))))
        measured.most(
            rows // 4,
            lambda count, world=world: m.LeaseRequest("shared", "train", rows=count, at_least=1, world=world),
        )
    awaited = np.arange(2 * SPANS_AWAITED_MAX).astype("<i8").tobytes()
    ask(m.LeaseRequest("shared", "train", rows=1, awaited=awaited))


def _ranked(measured: Measured, ask: Ask) -> None:
    tasks = [Task(f"t{number}", ["r"], selector=Priority()) for number in range(4)]
    ask(m.CreateTable("ranked", [R], tasks, pacing=Pacing("t0", batch_rows=1 << 15, max_staleness=4)))
    chance = np.random.default_rng(1)
    numbers = chance.random(ROWS_PER_REQUEST_MAX).astype("<f8").tobytes()
    versions = int64s(ROWS_PER_REQUEST_MAX)
    for _ in range(3):
        put = measured.most(
            ROWS_PER_REQUEST_MAX // 4,
            lambda count: m.PutRequest(
                "ranked", count, columns(count, priority=numbers[: 8 * count], policy_version=versions[: 8 * count])
            ),
        )
        measured.most(put.rows // 2, lambda count: m.LeaseRequest("ranked", "t1", rows=count))
        measured.most(
            put.rows,
            lambda count: m.Update("ranked", int64s(count), m.Columns(facts=m.RowFacts(priority=numbers[: 8 * count]))),
        )


def _of_many_tasks(measured: Measured, ask: Ask) -> None:
    fields = [R, Field("y", "float32")]
    ask(
        m.CreateTable("many", fields, [Task(f"t{number}", ["r" if number % 2 else "y"]) for number in range(TASKS_MAX)])
    )
    put = measured.most(ROWS_PER_REQUEST_MAX, lambda count: m.PutRequest("many", count, columns(count)))
    measured.most(
        put.rows,
        lambda count: m.Update("many", int64s(count), m.Columns(inline=[m.Inline("y", bytes(4 * count))])),
    )
    measured.most(put.rows, lambda count: m.Drop("many", int64s(count), "old"))


def _wide(measured: Measured, ask: Ask) -> None:
    fields = [Field(f"f{number}", "float32") for number in range(WIDE)]
    names = [field.name for field in fields]
    ask(m.CreateTable("wide", fields, [Task(f"t{at}", names[at * 4 : at * 4 + 64]) for at in range(TASKS_MAX - 1)]))
    ask(m.AddTask("wide", Task("one", names)))
    ask(m.CreateTable("added", limits=Limits(rows=1 << 16)))
    ask(m.AddFields("added", fields))
    ask(m.PutRequest("wide", 64, m.Columns(fields, inline=[m.Inline(name, bytes(4 * 64)) for name in names])))
    measured.most(
        ROWS_PER_REQUEST_MAX // 2,
        lambda count: m.PutRequest("wide", count, m.Columns(inline=[m.Inline("f0", bytes(4 * count))])),
    )
    measured.most(64, lambda count: m.ReadRequest("wide", int64s(count)))


def run(directory: Path, *, every: int = 1, roles: tuple[Role, ...] = ROLES) -> Measured:
    """Send frames at all bounds, one in `every`, from each role, and after each request an honest one. Returns what was
    measured."""
    measured = Measured(directory)
    number = 0
    for request in examples.REQUESTS:
        for tree in trees(request):
            for role in roles:
                number += 1
                if number % every == 0:
                    reply = measured.send(role, tree, m.tag_of(request))
                    assert not isinstance(reply, m.Failed) or len(reply.text) < 3000, reply
        assert isinstance(measured.send("admin", ["ListTables"], "ListTables"), m.Tables)
        measured.bench.pass_time(2.0)
    assert measured.bench.coordinator.counters.internal_errors == 0
    return measured
