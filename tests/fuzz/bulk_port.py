"""The bulk port under attack, over both of its carriers, while an honest client puts and reads through it.

The attackers are a session of their own, with tickets of its own: so what they ask is partly true. They send noise,
half heads, lengths that lie, heads that match their checksum and ask for what is not theirs, the same messages again,
and begin reads that they never take.
"""

from __future__ import annotations

import random
import socket
import struct
import time
from collections import Counter
from contextlib import suppress
from typing import Any, Final

import msgspec
import numpy as np

import transferqueue as tq
from tests.fuzz.frames import Fuzzer
from tests.fuzz.memory import resident_bytes
from tests.fuzz.typed import INTEGERS
from transferqueue.client.session.calls import Deadline
from transferqueue.errors import Corruption, Unreachable
from transferqueue.limits import MIB
from transferqueue.schema import Field
from transferqueue.transport.bulk import protocol as b
from transferqueue.transport.bulk.client import BulkClient
from transferqueue.wire import messages as m

HEARD_S: Final = 0.002
ROW: Final = 300_000
"""Numbers of an honest row: its bytes take several frames."""
LINES: Final = 6
SLOW_MAX: Final = 12
"""Connections at once that began something and stand still."""
GROWN_MAX: Final = 24 * MIB
"""What its readers that take nothing hold: a window of frames each, and the pages of the allocator."""
EVERY: Final = 100
"""Attacks between two honest transfers."""


class Report(msgspec.Struct):
    """answers: by kind, of those that were waited for. honest: transfers of the honest client, each compared."""

    attacks: int = 0
    honest: int = 0
    grown_bytes: int = 0
    seconds: float = 0.0
    answers: Counter[str] = msgspec.field(default_factory=Counter)


class Broken(AssertionError):
    """A transfer failed inside the server, or the honest client met an attack."""


class Heard:
    """Takes one message, whatever it is, and drops its bytes."""

    coming = 0

    def __init__(self) -> None:
        self.told: b.ToClient | None = None
        self._place = memoryview(bytearray(64 * 1024))

    def expect(self, head: bytes, nbytes: int) -> None:
        self.told = b.to_client(head)

    def fill(self, read: b.Reader) -> int:
        return read(self._place)


class Attacker:
    """Sends what it should not. The same for the same seed and answers."""

    def __init__(self, queue: tq.Queue, port: int, seed: int, report: Report) -> None:
        self._rng, self._fuzzer, self._report = random.Random(seed), Fuzzer(seed), report
        self._port = port
        connection = queue._client.connection
        self._fingerprint = connection.greet_again(
            connection._io.hello, Deadline(connection.clock, 20.0)
        ).bulk_certificate
        self._session = connection._io.calls.session
        reply = connection.call(m.ReadRequest("t", fields=["x"]))
        assert isinstance(reply, m.ReadRows)
        (part,) = reply.content.parts
        self._blocks = [at for at in part.blocks if at.ticket]
        granted = connection.call(m.Grant(MIB))
        assert isinstance(granted, m.Granted)
        self._grant = granted
        self._lines: list[BulkClient] = [self._dial() for _ in range(LINES)]
        self._slow: list[BulkClient] = []
        self._raw: list[socket.socket] = []
        self._sent: list[b.Message] = []
        self._transfer = 0

    def _dial(self) -> BulkClient:
        line = BulkClient("127.0.0.1", self._port, 1, self._fingerprint)
        if not line.open(20.0):
            raise Broken("the bulk port does not listen any more")
        return line

    def attack(self) -> None:
        """One more."""
        self._report.attacks += 1
        match self._rng.randrange(10):
            case 0:
                self._below()
            case 1:
                self._stall()
            case _:
                self._say()

    def _below(self) -> None:
        """Bytes that are no message, some of them over a connection that stays."""
        rng = self._rng
        head = b.message(b.FlowAck(1, 0))[0]
        lie = struct.pack(
            "<II8s", rng.choice([0, 1, 1 << 26, (1 << 32) - 1]), rng.choice([0, 1 << 20, (1 << 32) - 1]), bytes(8)
        )
        said = rng.choice([rng.randbytes(rng.choice([1, 27, 28, 500, 70_000])), head[: rng.randrange(len(head))],
        head[:12] + lie,
                           head[:3] + b"\x09" + head[4:], b"GET / HTTP/1.1\r\n\r\n",
                           b"\xff" + bytes(8) + b"\x7f\x03\x00NULL"])  # fmt: skip
        raw = socket.create_connection(("127.0.0.1", self._port), timeout=20)
        with suppress(OSError):
            raw.sendall(said)
        self._raw.append(raw)
        if len(self._raw) > SLOW_MAX:
            self._raw.pop(rng.randrange(len(self._raw))).close()

    def _stall(self) -> None:
        """Begin to read all there is, and take nothing of it."""
        line = self._dial()
        with suppress(Unreachable):
            line.send(self._read(honest=True))
        self._slow.append(line)
        if len(self._slow) > SLOW_MAX:
            self._slow.pop(0).close()

    def _say(self) -> None:
        rng = self._rng
        at = rng.randrange(len(self._lines))
        message = self._message()
        try:
            self._lines[at].send(message)
            if rng.random() < 0.3:
                self._hear(self._lines[at])
        except (Unreachable, Corruption):  # it was hung up on, as it should be
            self._lines[at].close()
            self._lines[at] = self._dial()

    def _hear(self, line: BulkClient) -> None:
        if not line.receive(heard := Heard(), HEARD_S):
            return
        told = heard.told
        if isinstance(told, b.TransferFailed):
            self._report.answers[told.error] += 1
            if told.error == "InternalError":
                raise Broken(told.text)
        else:
            self._report.answers[m.tag_of(told)] += 1

    def _message(self) -> b.Message:
        rng = self._rng
        kind = rng.random()
        if kind < 0.1 and self._sent:
            return rng.choice(self._sent)
        if kind < 0.3:
            content = rng.choice([(), (b"x",), (bytes(5000),)])
            return b.framed(self._fuzzer.frame()[:100_000], content), content
        message = self._read(honest=False) if kind < 0.65 else self._write()
        self._sent = [*self._sent[-50:], message]
        return message

    def _read(self, *, honest: bool) -> b.Message:
        self._transfer += 1
        located = [
            b.BulkBlock(at.block, at.extent, at.offset, at.nbytes, at.rows, 0, at.counts, at.ticket)
            for at in self._blocks
        ]
        rows = len(located)
        read = b.ReadColumns(self._transfer, self._session, 0, [Field("x", "int64", (None,))], [b.RowSelection(
            ["x"], [["x"]], located, struct.pack(f"<{rows}i", *range(rows)), bytes(4 * rows))])  # fmt: skip
        return b.message(read if honest else self._spoilt(read))

    def _write(self) -> b.Message:
        rng, grant = self._rng, self._grant
        content = rng.choice([b"", bytes(64), bytes(4096), bytes(MIB)])
        self._transfer += rng.choice([0, 1])
        head: Any = b.WriteExtent(
            self._transfer, self._session, 0, grant.extent, grant.offset, grant.nbytes, grant.ticket, grant.offset,
            rng.choice([len(content), 2 * MIB, 0]),
        )  # fmt: skip
        head = rng.choice(
            [
                head,
                head,
                b.WriteFrame(self._transfer, rng.choice([0, 1, 2, 1 << 62])),
                b.FlowAck(self._transfer, rng.choice([0, 1, 1 << 61])),
            ]
        )
        pieces = (content,) if content else ()
        return b.message(self._spoilt(head), pieces)

    def _spoilt(self, head: Any) -> Any:
        """The same with one number, ticket or list changed, half of the time."""
        rng = self._rng
        if rng.random() < 0.3:
            return head
        if isinstance(head, b.ReadColumns) and rng.random() < 0.7:
            (part,) = head.parts
            if part.blocks and rng.random() < 0.6:
                blocks = [self._field(part.blocks[0]), *part.blocks[1:]]
                return msgspec.structs.replace(head, parts=[msgspec.structs.replace(part, blocks=blocks)])
            return msgspec.structs.replace(head, parts=rng.choice([[], [self._field(part)], [part] * 3]))
        return self._field(head)

    def _field(self, struct_: Any) -> Any:
        rng = self._rng
        name = rng.choice(struct_.__struct_fields__)
        value = getattr(struct_, name)
        if isinstance(value, int):
            return msgspec.structs.replace(
                struct_, **{name: rng.choice([number for number in INTEGERS if 0 <= number < 1 << 62])}
            )
        if isinstance(value, bytes):
            return msgspec.structs.replace(
                struct_, **{name: rng.choice([b"", value[:-1], bytes(len(value)), b"\xff" * len(value), value[::-1]])}
            )
        if isinstance(value, dict):  # slices
            numbers = [rng.choice([0, 1, 2, 5, 1 << 40]) for _ in range(3)]
            cut = b.BulkCut(numbers[: rng.randrange(4)], rng.choice([[], [numbers[:2]], [[]] * 8, [numbers[:1]]]))
            return msgspec.structs.replace(struct_, **{name: {rng.choice(["x", "y", ""]): cut}})
        return msgspec.structs.replace(struct_, **{name: rng.choice([[], value * 2, value[:1]])})

    def close(self) -> None:
        """Hang up everywhere."""
        for line in (*self._lines, *self._slow):
            line.close()
        for raw in self._raw:
            raw.close()


def run(honest: tq.Queue, hostile: tq.Queue, pid: int, *, attacks: int, seed: int) -> Report:
    """So many attacks by the session `hostile`, with an honest transfer after each `EVERY`."""
    report, started = Report(), time.perf_counter()
    table = honest.create_table("t", tasks=[tq.Task("train", needs=["x"])])
    for number in range(4):
        table.put(x=[list(range(number, 1000))])
    port = honest.stats().server.bulk_port
    attacker, before = Attacker(hostile, port, seed, report), 0
    try:
        for number in range(attacks):
            attacker.attack()
            if number % EVERY == EVERY - 1:
                _honest(table, number, report)
            if number == attacks // 4:
                before = resident_bytes(pid)
        _honest(table, 0, report)
        report.grown_bytes = resident_bytes(pid) - before
    finally:
        attacker.close()
    report.seconds = time.perf_counter() - started
    return report


def _honest(table: tq.Table, number: int, report: Report) -> None:
    """A row goes there and back, over the bulk port both times."""
    sent = np.full(ROW, number)
    ids = table.put(x=[sent])
    with table.read(ids, fields=["x"]) as rows:
        (came,) = rows["x"].list()
        if not np.array_equal(came, sent):
            raise Broken(f"an honest row came back as {came}")
    table.drop(ids, "seen")
    report.honest += 1
