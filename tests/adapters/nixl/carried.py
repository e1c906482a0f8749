"""A backing behind a real bulk endpoint and a real client: what the kit of backings checks then is the way between the
two.

`python -m tests.adapters.nixl.carried CARRIER` is the shard: it obeys one JSON line after another, and answers each.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from transferqueue.adapters.carriers.nixl.client.carrier import OneSidedCarrier
from transferqueue.adapters.carriers.nixl.client.one_sided import OneSidedMemory
from transferqueue.adapters.carriers.nixl.shard.carrier import OneSidedShard
from transferqueue.adapters.protocols import Unsupported
from transferqueue.client.memory import remote
from transferqueue.client.memory.client_transfer import RequestedColumns, RequestedRows
from transferqueue.errors import OutOfMemory
from transferqueue.limits import ALIGNMENT, MIB
from transferqueue.schema import Field, align
from transferqueue.server.shards.bulk_endpoint import BulkEndpoint
from transferqueue.server.shards.tickets import LiveExtents, TicketIssuer
from transferqueue.storage.elements.dtypes import U8
from transferqueue.storage.memory.arena import Arena
from transferqueue.storage.memory.backing import ArenaBacking, IncomingWrite, Range, Reader
from transferqueue.transport.bulk import protocol as b
from transferqueue.transport.bulk.carriers import chosen_carrier
from transferqueue.transport.bulk.client import BulkClient
from transferqueue.wire import messages as m

SESSION, SHARD, KEY = 7, 0, bytes(32)
CAPACITY = 64 * MIB


class ShardEnd:
    """The shard. register: what its clients may read one-sided, and what it reads of them."""

    def __init__(self, register: Callable[[ArenaBacking], OneSidedShard | None]) -> None:
        self.arena = Arena.create(None, CAPACITY)
        self.backing = ArenaBacking(self.arena)
        self.tickets = TicketIssuer(KEY, LiveExtents(), LiveExtents())
        self.carrier = register(self.backing)
        self.endpoint = BulkEndpoint(self.backing, self.tickets, None, self.carrier)
        self.port = self.endpoint.listen(["tcp://127.0.0.1:0"])
        self.endpoint.start()

    def answer(self, order: str, *arguments: Any) -> Any:
        """Do this."""
        answers: dict[str, Callable[..., Any]] = {
            "ensure": self.backing.ensure,
            "punch": self.backing.punch,
            "used": self._used,
            "revoke": self.tickets.revoke,
            "sent": lambda: self.endpoint.sent_bytes,
            "received": lambda: self.endpoint.received_bytes,
        }
        try:
            return answers[order](*arguments)
        except OutOfMemory as error:
            return {"error": str(error)}

    def _used(self) -> int:
        """Once the last words of the clients have been heard."""
        deadline = time.monotonic() + 20
        while self.endpoint.transfers:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return os.stat(self.arena.path).st_blocks * 512

    def close(self) -> None:
        self.endpoint.stop()
        self.arena.close()


class OtherProcess:
    """The shard in a process of its own."""

    def __init__(self, carrier: str) -> None:
        command = [sys.executable, "-m", "tests.adapters.nixl.carried", carrier]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.port = self._line()

    def _line(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def answer(self, *order: Any) -> Any:
        """Have the shard do this; once it is gone, nothing."""
        if self.process.poll() is not None:
            return 0
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return self._line()

    def close(self) -> None:
        if self.process.returncode is None:
            self.process.communicate(timeout=30)


def serve(carrier: str) -> None:
    """Be the shard until standard input ends."""
    chosen = chosen_carrier(carrier)
    shard = ShardEnd(chosen.open_shard if chosen is not None else lambda _: None)
    print(json.dumps(shard.port), flush=True)
    for line in sys.stdin:
        print(json.dumps(shard.answer(*json.loads(line))), flush=True)
    shard.close()


def unused() -> OneSidedMemory:
    """Opens no agent."""
    return OneSidedMemory(lambda: pytest.fail("the stream should carry this"))


class CarriedBacking:
    """The client's end. memory: to read one-sided; None: over the stream. sending: so for writes."""

    path = ""
    capacity = CAPACITY

    def __init__(
        self, shard: ShardEnd | OtherProcess, memory: OneSidedMemory | None, sending: OneSidedMemory | None = None
    ) -> None:
        self.shard = shard
        self._closed = False
        port = shard.port
        self._tickets = TicketIssuer(KEY, LiveExtents(), LiveExtents())
        welcome = m.Welcome(SESSION, 1, "t", "t", {}, 0, bulk_port=port)
        self.carrier = OneSidedCarrier(memory or unused(), sending or unused())
        if memory is None:
            self.carrier.reader._not_before = math.inf
        if sending is None:
            self.carrier.writer._not_before = math.inf
        self.client = remote.RemoteMemory(
            lambda told: BulkClient("127.0.0.1", port, told.epoch),
            welcome,
            lambda _: None,
            lambda: None,
            lambda: None,
            carrier=self.carrier,
        )

    def ensure(self, offset: int, nbytes: int) -> None:
        if (answer := self.shard.answer("ensure", offset, nbytes)) is not None:
            raise OutOfMemory(answer["error"])

    def punch(self, offset: int, nbytes: int) -> None:
        self.shard.answer("punch", offset, nbytes)

    def used_bytes(self) -> int:
        return 0 if self._closed else int(self.shard.answer("used"))

    def begin_write(self, place: Range) -> IncomingWrite:
        return _Sent(self, place)

    def send(self, place: Range, data: bytearray) -> None:
        """Put these bytes."""
        granted = self._tickets.granted(SESSION, m.Granted(place.extent, SHARD, place.offset, place.nbytes))

        def fill(memory: memoryview) -> None:
            memory[:] = data

        self.client._write(granted, place.offset, place.nbytes, fill, _caller(self.client))

    def read(self, ranges: Sequence[Range]) -> list[U8]:
        fields: dict[str, Field] = {}
        asked = [self._asked(number, wanted, fields) for number, wanted in enumerate(ranges)]
        wanted = RequestedColumns(SESSION, SHARD, fields, [rows for rows, _ in asked])
        fetched = self.client._fetch(wanted, _caller(self.client))
        return [
            fetched.landed[number].memory[skipped : skipped + wanted.nbytes]
            for number, (wanted, (_, skipped)) in enumerate(zip(ranges, asked, strict=True))
        ]

    def _asked(self, number: int, wanted: Range, fields: dict[str, Field]) -> tuple[RequestedRows, int]:
        """The range as a block of one row of bytes, which begins where blocks may; and how much of that comes before
        it."""
        skipped = wanted.offset % ALIGNMENT
        nbytes = align(max(wanted.nbytes + skipped, 1))
        name = f"x{number}"
        fields[name] = Field(name, "uint8", (nbytes,))
        at = m.BlockLocation(number, SHARD, wanted.extent, wanted.offset - skipped, nbytes, 1, [name], [0])
        named = self._tickets.block(SESSION, at)
        block = b.BulkBlock(number, at.extent, at.offset, nbytes, 1, 0, [0], named.ticket)
        return RequestedRows(
            b.RowSelection([name], [[name]], [block], b"", bytes(4)), 1, np.zeros(1, np.int32)
        ), skipped

    def forget(self, extent: int) -> None:
        self.shard.answer("revoke", extent)

    def forget_others(self, extents_to: int, extents: Collection[int]) -> None:
        for extent in set(range(1, extents_to)) - set(extents):
            self.forget(extent)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.client.close()
            self.shard.close()


def _caller(memory: remote.RemoteMemory) -> remote.Caller:
    return remote.Caller(memory._interrupt)


class _Sent:
    """Keeps what arrives, and sends it once it is whole."""

    def __init__(self, backing: CarriedBacking, place: Range) -> None:
        self._backing, self._place = backing, place
        self._kept, self._filled = bytearray(place.nbytes), 0

    def fill(self, read: Reader) -> int:
        size = read(memoryview(self._kept)[self._filled :])
        self._filled += size
        return size

    def commit(self, *, last: bool) -> None:
        if last:
            self._backing.send(self._place, self._kept)


class OverCarrier:
    """A subject of the kit of backings. shard: starts one."""

    def __init__(
        self,
        shard: Callable[[], ShardEnd | OtherProcess],
        memory: OneSidedMemory | None,
        sending: OneSidedMemory | None = None,
    ) -> None:
        self._shard, self._memory, self._sending = shard, memory, sending

    @contextmanager
    def open(self) -> Iterator[CarriedBacking]:
        backing = CarriedBacking(self._shard(), self._memory, self._sending)
        try:
            yield backing
        finally:
            backing.close()

    def used_bytes(self, backing: CarriedBacking) -> int:
        return backing.used_bytes()

    def lose(self, backing: CarriedBacking) -> None:
        if isinstance(backing.shard, ShardEnd):
            raise Unsupported("the shard is in this process")
        backing.shard.process.kill()
        backing.shard.close()


if __name__ == "__main__":
    serve(sys.argv[1])
