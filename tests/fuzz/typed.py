"""Requests whose every field has the right type: plausible ones, and the same with some fields at the ends of what
their type holds.

A request is made from its type (`msgspec.inspect`), so that a new message or field is fuzzed as soon as it is declared.
Names, ids and bytes that a server knows come from a `World`, so that a request passes the first checks and reaches the
code behind them.
"""

from __future__ import annotations

import os
import random
import struct
import typing
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import msgspec
from msgspec import inspect

from transferqueue.policies import Task
from transferqueue.schema import Field, layout
from transferqueue.transport import this_host
from transferqueue.wire import messages as m
from transferqueue.wire.versions import PROTOCOL

INTEGERS: Final = [0, 1, -1, 2, 7, 255, 256, (1 << 31) - 1, 1 << 31, (1 << 31) + 1, -(1 << 31), -(1 << 31) - 1,
(1 << 32) - 1, 1 << 32,
                   1 << 53, (1 << 53) + 1, (1 << 62) - 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1,
                   -(1 << 63)]  # fmt: skip
FLOATS: Final = [0.0, -0.0, 1.0, -1.0, 0.5, 5e-324, 1e9, 1.0000001e9, 1e308, -1e308, float("nan"), float("inf"),
-float("inf"),
                 2.0**63, 2.0**53, 1e-9]  # fmt: skip
TEXTS: Final = ["", "\x00", "a\x00b", "\x1b[31m\x07", "a" * 128, "a" * 129, "é" * 128, "a" * 4096, "a" * 4097,
"a" * 512, "a" * 513, "../..", "/",
                "t/u", " ", "\n", "\u202e", "😀" * 40, "None", "*", "%s", "{}", "-1", "\uffff", "a.b", "T"]  # fmt: skip
RAW_TEXTS: Final = [
    msgspec.Raw(b"\xa3\xff\xfe\xed"),
    msgspec.Raw(b"\xa3\xed\xa0\x80"),
    msgspec.Raw(b"\xd9\x02\xc3\x28"),
]
"""Texts that are no UTF-8: a broken sequence, half of a surrogate pair, a lone continuation."""
BYTES: Final = [b"", b"\x00", b"\xff", bytes(7), bytes(8), b"\xff" * 8, b"\xff" * 7 + b"\x7f", bytes(7) + b"\x80",
bytes(15), bytes(16), bytes(17),
                bytes(31), bytes(32), bytes(33), bytes(4), b"\xff" * 4, bytes(4096), b"\xff" * 8 * 513,
                struct.pack("<q", 1 << 62),
                struct.pack("<d", float("nan")), struct.pack("<d", float("inf"))]  # fmt: skip
MISFITS: Final[list[Any]] = [None, True, 0, -1, 1.5, "", b"", [], {}, [[]], {"": []}]
RESULT: Final = Field("r", "float64")
FIELDS: Final = [Field("x", "int64", (None,)), Field("y", "float32"), RESULT, Field("s", "str"),
Field("z", "int32", (3,)),
                 Field("b", "bool"), Field("i", "uint64"), Field("w", "float16", (None, None))]  # fmt: skip
TABLES: Final = ["t", "u", "v", "paced"]
TASKS: Final = ["train", "reward", "all"]
CHANNELS: Final = ["weights", "clock"]
RARE: Final = {
    "Goodbye": 0.1,
    "DropTable": 0.05,
    "Restore": 0.15,
    "Snapshot": 0.15,
    "Drain": 0.2,
    "Seal": 0.05,
    "CreateTable": 0.5,
    "Hello": 0.3,
}
"""Requests after which less is left to fuzz, or that start a thread: the share of the others' weight that they get."""
OFTEN: Final = {
    "Put": 5.0,
    "Continue": 2.5,
    "Update": 2.5,
    "Lease": 3.0,
    "Ack": 3.0,
    "Grant": 1.5,
    "Publish": 1.5,
    "Release": 1.5,
}
WORDS: Final = {
    "table": TABLES, "name": [*TABLES, *TABLES, "extra"], "task": TASKS, "channel": CHANNELS,
    "host": [this_host(), "elsewhere"],
    "what": ["stats", "audit", "row", "doctor", "sessions", "tables"], "path": ["kept", ".", "kept/x"],
    "endpoint": ["tcp://127.0.0.1:9"],
    "keys": [f"k{number}" for number in range(40)], "field": [one.name for one in FIELDS],
    "fields": [one.name for one in FIELDS],
    "cut": ["0" * 32, "ab" * 16], "needs": ["x", "y"], "gives": ["r"], "tags": ["a", "b"], "reason": ["bad", "old"],
}  # fmt: skip
_ANY_WORDS: Final = ["", "a", "worker"]
LARGEST_BYTES: Final = 1 << 18
"""Of what a list in a list becomes when both are at their ends: a server hangs up on more than a message may have."""
ITEMS_MAX: Final = 100
"""A list of more is not made longer."""
KEPT: Final = 64
"""Of each kind of id that a server gave, so many are remembered."""

_DTYPES: Final = {"y": "<f", "r": "<d", "b": "<?", "i": "<Q"}


class World:
    """What a server said that it has: the words of plausible requests."""

    def __init__(self) -> None:
        self.rows: deque[int] = deque([0, 1, 2, 3], KEPT)
        self.leases: deque[tuple[str, int, int]] = deque([("t", 1, 1)], KEPT)
        self.grants: deque[m.Granted] = deque(maxlen=KEPT)
        self.reservations: deque[int] = deque([1], KEPT)
        self.blocks: deque[int] = deque([1], KEPT)
        self.works: deque[int] = deque([1], KEPT)
        self.version = 0
        self.lock = ""

    def heard(self, reply: m.Reply, table: str) -> None:
        """Remember what a reply names. table: the one that the request was about."""
        match reply:
            case m.PutRows():
                self.rows.extend(range(reply.first, reply.first + min(reply.rows, 4)))
            case m.Leased():
                self.leases.append((table, reply.lease, reply.token))
                self.blocks.extend(block.block for part in reply.content.parts for block in part.blocks[:2])
            case m.Granted():
                self.grants.append(reply)
            case m.Reserved():
                self.reservations.append(reply.reservation)
            case m.ReadRows():
                self.blocks.extend(block.block for part in reply.content.parts for block in part.blocks[:2])
            case m.JobProgress():
                self.works.append(reply.work)
            case m.WeightsReply():
                self.version = max(self.version, reply.version)
                self.blocks.extend(block.block for block in reply.blocks[:2])
            case m.LatestVersion():
                self.blocks.extend(block.block for block in reply.blocks[:2])
            case _:
                pass


class Typed:
    """Requests without end, as plain trees; the same for the same seed and world."""

    def __init__(self, rng: random.Random, world: World) -> None:
        self._rng, self._world = rng, world
        self._kinds = {kind: inspect.type_info(kind) for kind in typing.get_args(m.Request)}
        self._names = list(self._kinds)
        self._weights = [RARE.get(m.tag_of(kind), OFTEN.get(m.tag_of(kind), 1.0)) for kind in self._names]
        self._count = 1
        self._words = self._numbers()
        self._clients = [rng.randbytes(16) for _ in range(12)]

    def request(self, kind: type | None = None) -> Any:
        """The tree of the next one: a third of them plausible throughout, the others with one extreme field or more."""
        rng = self._rng
        kind = kind or rng.choices(self._names, self._weights)[0]
        info = self._kinds[kind]
        self._count = rng.choice([1, 1, 2, 3, 8])
        plausible = tree = self._sample(info, m.tag_of(kind))
        for _ in range(rng.choice([0, 0, 1, 1, 1, 2, 4])):
            tree = self._spoil(info, tree, m.tag_of(kind))
        return tree if len(msgspec.msgpack.encode(tree)) <= LARGEST_BYTES else plausible

    def call(self, session: int, call: int, seen: int, tree: Any) -> bytes:
        """The frame of a request."""
        return msgspec.msgpack.encode([PROTOCOL, session, call, seen, tree])

    # ------------------------------------------------------------ plausible values

    def _sample(self, kind: inspect.Type, name: str) -> Any:
        rng = self._rng
        match kind:
            case inspect.StructType():
                return self._struct(kind)
            case inspect.IntType():
                return self._integer(kind, name)
            case inspect.FloatType():
                return rng.choice([0.0, 0.001, 0.02]) if name == "wait_s" else rng.choice([0.0, 0.5, 1.0, 30.0])
            case inspect.StrType():
                return self._text(name)
            case inspect.BytesType():
                return self._bytes(name)
            case inspect.BoolType():
                return rng.random() < 0.5
            case inspect.ListType() | inspect.VarTupleType():
                return self._list(kind, name)
            case inspect.TupleType():
                return [self._sample(one, name) for one in kind.item_types]
            case inspect.DictType():
                return {
                    self._sample(kind.key_type, name): self._sample(kind.value_type, name)
                    for _ in range(rng.randint(0, 2))
                }
            case inspect.LiteralType():
                return rng.choice(kind.values)
            case inspect.UnionType():
                return self._sample(rng.choice(kind.types), name)
            case _:
                return None

    def _struct(self, kind: inspect.StructType) -> Any:
        if kind.cls is m.Columns:
            return self._columns()
        if kind.cls is Field:
            return _tree(self._rng.choice(FIELDS))
        values = {field.name: self._value(kind, field) for field in kind.fields}
        self._agree(kind.cls, values)
        if not kind.array_like:
            return {field.encode_name: values[field.name] for field in kind.fields}
        return ([kind.tag] if kind.tag is not None else []) + list(values.values())

    def _value(self, kind: inspect.StructType, field: inspect.Field) -> Any:
        """The default of a field as often as not, since few combinations of settings make sense."""
        if field.default is not msgspec.NODEFAULT and self._rng.random() < 0.6:
            return _tree(field.default) if isinstance(field.default, msgspec.Struct) else field.default
        if (
            field.default_factory is not msgspec.NODEFAULT
            and field.name not in ("columns", "blocks")
            and self._rng.random() < 0.6
        ):
            return _tree(field.default_factory())
        return (
            self._rng.choice(TASKS)
            if kind.cls is Task and field.name == "name"
            else self._sample(field.type, field.name)
        )

    def _agree(self, kind: type, values: dict[str, Any]) -> None:
        """Fields that must fit each other."""
        rng, world = self._rng, self._world
        if "lease" in values and "token" in values:
            values["table"], values["lease"], values["token"] = rng.choice(world.leases)
            if rng.random() < 0.5 and "rows" in values:
                values["rows"] = None
        if kind in (m.PutRequest, m.Reserve):
            values["rows"] = self._count
        if kind is m.LeaseRequest:
            amount = rng.choice(["rows", "rows", "tokens", "groups"])
            values |= {"rows": 0, "tokens": 0, "groups": 0, "rank": 0, "replica": 0} | {
                amount: rng.choice([1, 1, 2, 4])
            }
            values["at_least"] = min(values["at_least"], values[amount])
            values["awaited"] = rng.choice([b"", b"", struct.pack("<4q", 0, 1, 4, 4), values["awaited"]])
        if kind is m.Publish and world.grants:
            fields = [FIELDS[0], FIELDS[4]]
            values |= {
                "fields": [_tree(one) for one in fields],
                "blocks": [self._placed(fields, 1)],
                "version": world.version + 1,
            }
            values |= {"base": -1, "kept": []} if rng.random() < 0.8 else {}
            values |= {"pending": 0, "part": 0, "ranges": []} if rng.random() < 0.8 else {}

    def _numbers(self) -> dict[str, Callable[[], int]]:
        rng, world = self._rng, self._world
        return {
            "pid": os.getpid,
            "reservation": lambda: rng.choice([0, rng.choice(world.reservations)]),
            "extent": lambda: rng.choice(world.grants).extent if world.grants else 1,
            "row": lambda: rng.choice(world.rows),
            "work": lambda: rng.choice(world.works),
            "kept": lambda: rng.choice(world.blocks),
            "rows": lambda: rng.choice([self._count, 1, 4]),
            "nbytes": lambda: rng.choice([64, 4096, 1 << 16]),
            "version": lambda: world.version + rng.choice([0, 1]),
            "step": lambda: rng.choice([-1, -1, 0, 3]),
            "policy_version": lambda: rng.choice([-1, world.version]),
            "base": lambda: rng.choice([-1, world.version]),
            "capacity": lambda: 1 << 22,
            "world": lambda: rng.choice([1, 2]),
            "replicas": lambda: rng.choice([1, 1, 1, 2]),
            "batch_rows": lambda: 4,
            "shard": lambda: rng.choice([0, 1]),
        }

    def _integer(self, kind: inspect.IntType, name: str) -> int:
        word = self._words.get(name)
        value = word() if word else self._rng.choice([0, 1, 2, 3])
        return max(value, kind.ge) if kind.ge is not None else value

    def _text(self, name: str) -> str:
        if name == "lock":
            return self._rng.choice(["", self._world.lock])
        return self._rng.choice(WORDS.get(name, _ANY_WORDS))

    def _bytes(self, name: str) -> bytes:
        rng, world = self._rng, self._world
        match name:
            case "client":
                return rng.choice(self._clients)
            case "rows":
                rows = list(dict.fromkeys(rng.choice(world.rows) for _ in range(self._count)))
                self._count = len(rows)
                return struct.pack(f"<{len(rows)}q", *rows)
            case "blocks":
                return struct.pack("<q", rng.choice(world.blocks))
            case "counts":
                return struct.pack("<q", 1)
            case "secret":
                return bytes(32)
            case "priority":
                return struct.pack(f"<{self._count}d", *(rng.choice([0.0, 1.5, *FLOATS]) for _ in range(self._count)))
            case "group_size":
                return struct.pack(f"<{self._count}i", *[rng.choice([1, 2, 4])] * self._count)
            case "slots":
                return struct.pack(f"<{self._count}i", *range(self._count))
            case _:
                return struct.pack(f"<{self._count}q", *[rng.choice([0, 1, 2, 5])] * self._count)

    def _list(self, kind: inspect.ListType | inspect.VarTupleType, name: str) -> list[Any]:
        rng = self._rng
        if name in ("keys", "tags"):
            size = self._count
        else:
            size = rng.choice([0, 1, 1, 2])
        items = [self._sample(kind.item_type, name) for _ in range(size)]
        return (
            list(dict.fromkeys(items))
            if name in ("fields", "keys", "needs", "gives") and all(isinstance(one, str) for one in items)
            else items
        )

    def _columns(self) -> Any:
        """Columns of one block that fits its grant, or of scalars that travel in the message."""
        rng, rows = self._rng, self._count
        fields = rng.sample(FIELDS, rng.choice([1, 1, 2, 3]))
        placed, inline = [], []
        for field in fields:
            if field.inline:
                item = _DTYPES.get(field.name, "<q")
                zero: Any = rng.choice([0, 1]) if item in ("<?", "<Q") else rng.choice([0.0, *FLOATS[:5], float("nan")])
                inline.append(["Inline", field.name, struct.pack(item, zero) * rows])
            else:
                placed.append(field)
        blocks = [self._placed(placed, rows)] if placed and self._world.grants else []
        if len(placed) == 1 and blocks and rng.random() < 0.5:
            blocks = self._interned(placed[0], rows)
        facts = self._struct(_FACTS) if rng.random() < 0.5 else _tree(m.RowFacts())
        return ["Columns", [_tree(field) for field in fields], blocks, inline, facts]

    def _placed(self, fields: list[Field], rows: int) -> Any:
        grant = self._rng.choice(self._world.grants)
        counts = [0 if field.dense else rows * 2 for field in fields]
        _, nbytes = layout(fields, rows, counts)
        at = grant.offset + 64 * self._rng.randrange(max(1, (grant.nbytes - nbytes) // 64 + 1))
        return ["Placed", grant.extent, at, nbytes, rows, [field.name for field in fields], counts, None, 0, []]

    def _interned(self, field: Field, rows: int) -> Any:
        """Blocks of one value each that share out the rows: written, or named by their contents."""
        rng = self._rng
        places = rng.sample(range(rows), rows)
        cut = rng.randrange(1, rows) if rows > 1 and rng.random() < 0.5 else rows
        blocks = []
        for members in filter(None, (places[:cut], places[cut:])):
            block = self._placed([field], 1)
            if rng.random() < 0.5:
                block[1:3] = 0, 0
            slots, of = (struct.pack(f"<{rows}i", *[0] * rows), None) if cut == rows else (None, members)
            block[7] = slots
            blocks.append([*block, bytes([rng.choice([1, 2, 3])]) * 16, of and struct.pack(f"<{len(of)}i", *of)])
        return blocks

    # ------------------------------------------------------------ extremes

    def _spoil(self, kind: inspect.Type, tree: Any, name: str) -> Any:
        """A copy in which one field, somewhere below, is at an end of its type."""
        rng = self._rng
        match kind:
            case inspect.StructType() if kind.array_like and isinstance(tree, list) and kind.fields:
                first = int(kind.tag is not None)
                copy, at = list(tree), rng.randrange(len(kind.fields))
                if first + at < len(copy):
                    field = kind.fields[at]
                    copy[first + at] = self._spoil(field.type, copy[first + at], field.name)
                return copy
            case inspect.ListType() | inspect.VarTupleType() if isinstance(tree, list):
                if not tree or rng.random() < 0.3:
                    return self._odd_list(tree or [self._sample(kind.item_type, name)])
                copy, at = list(tree), rng.randrange(len(tree))
                copy[at] = self._spoil(kind.item_type, copy[at], name)
                return copy
            case inspect.DictType():
                return self._odd_dict(kind, name)
            case inspect.UnionType():
                fitting = [
                    one
                    for one in kind.types
                    if isinstance(one, inspect.StructType) and isinstance(tree, list) and tree and tree[0] == one.tag
                ]
                return self._spoil(rng.choice(fitting or list(kind.types)), tree, name)
            case inspect.IntType():
                ends = [end for end in (kind.ge, kind.lt, kind.le) if end is not None]
                return rng.choice(INTEGERS + [end + by for end in ends for by in (-1, 0, 1)])
            case inspect.FloatType():
                return rng.choice(FLOATS + INTEGERS)
            case inspect.StrType():
                return rng.choice(TEXTS + RAW_TEXTS + [self._text(name)])
            case inspect.BytesType():
                return self._odd_bytes(tree)
            case inspect.BoolType():
                return not tree
            case inspect.LiteralType():
                return rng.choice([*kind.values, "", "\x00"])
            case _:
                return rng.choice(MISFITS)

    def _odd_list(self, items: list[Any]) -> Any:
        """Empty, many times itself, or a header that lies. One that is long already becomes no longer."""
        times = self._rng.choice([0, 2, 65, 257, 1025, -1, -2])
        if times < 0:
            return msgspec.Raw(b"\xdd\x00\x10\x00\x01" if times == -1 else b"\xdd\xff\xff\xff\xff")
        return items * times if len(items) < ITEMS_MAX else []

    def _odd_dict(self, kind: inspect.DictType, name: str) -> Any:
        rng = self._rng
        key = rng.choice(TEXTS) if isinstance(kind.key_type, inspect.StrType) else rng.choice(INTEGERS)
        value = rng.choice([self._sample(kind.value_type, name), *INTEGERS[:8], *FLOATS, *TEXTS])
        many = {f"a{number}": number for number in range(rng.choice([64, 65, 129]))}
        return rng.choice([{}, {key: value}, many])

    def _odd_bytes(self, given: Any) -> bytes:
        """Another length, or numbers at the ends of their types where plausible ones were."""
        rng = self._rng
        given = given if isinstance(given, bytes) else bytes(8)
        items = max(1, len(given) // 8)
        numbers = struct.pack(f"<{items}Q", *(rng.choice(INTEGERS) & 0xFFFFFFFFFFFFFFFF for _ in range(items)))
        floats = struct.pack(f"<{items}d", *(rng.choice(FLOATS) for _ in range(items)))
        return rng.choice([*BYTES, given[:-1], given + b"\x00", given * 2, numbers, numbers[: len(given)], floats])


_FACTS: Final = typing.cast("inspect.StructType", inspect.type_info(m.RowFacts))


def _tree(value: Any) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value))
