"""What a request costs the server's core, without sockets and without Redis: microseconds and function calls of put,
lease and ack.

    python -m bench.requests --in-process [--rows 1 64] [--calls 200] [--rounds 9]

Frames of one client are given to a real coordinator, with a real ledger and arena, as its loop gives them. The time is
that of the processor, and function calls are counted by the interpreter, so both hold on a busy machine; the count is
exact. The loop, the kernel and the client are not in it.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

from transferqueue.ledger.ledger import Ledger
from transferqueue.limits import MIB, Limits
from transferqueue.policies import Task
from transferqueue.schema import Field, align
from transferqueue.server.coordinator import Coordinator
from transferqueue.server.memory.own_memory import OwnShardMemory
from transferqueue.server.shards.part import Shards
from transferqueue.server.state import ServerIdentity
from transferqueue.storage.memory.arena import Arena
from transferqueue.transport import this_host
from transferqueue.transport.control.unix_socket import FrameStream, UnixPeer
from transferqueue.wire import codec
from transferqueue.wire import messages as m

ROW_BYTES: Final = 64
EXTENT_BYTES: Final = 4 * MIB
COUNTED: Final = 10
"""Calls of each verb whose function calls are counted."""


class NoProcess:
    """Watches no process: the client is this one."""

    def watch(self, session: int, pidfd: int) -> None:
        """Nothing to do."""

    def unwatch(self, pidfd: int) -> None:
        """Nothing to do."""


class Core:
    """A coordinator and the frames of its one client."""

    def __init__(self) -> None:
        self._arena = Arena.create(None, 1 << 30)
        identity = ServerIdentity(
            epoch=1, address="ipc:///none", runtime="/none", version="0", pid=os.getpid(), started_at=0.0,
            lock_directory=None
        )  # fmt: skip
        self.coordinator = Coordinator(Ledger(epoch=1), OwnShardMemory(self._arena), identity, watcher=NoProcess())
        coordinator = self.coordinator
        coordinator.attach(
            Shards(coordinator.ledger, coordinator.lending, coordinator.sessions, coordinator.waiting.wake)
        )
        here, self._there = socket.socketpair()
        self.peer = UnixPeer(FrameStream(here), 0.0)
        self._calls = self._session = 0
        self._session = self.ask(m.Hello(client=bytes(16), host=this_host(), pid=os.getpid())).session

    def frame(self, request: m.Request) -> bytes:
        """The next call, whose client has seen all replies before it."""
        self._calls += 1
        return codec.encode_call(m.CallFrame(self._session, self._calls, self._calls - 1, request))

    def take(self) -> list[bytes]:
        """The answers that the loop would send."""
        sent, self.coordinator.answers.outbox = self.coordinator.answers.outbox, []
        return [frame for _, frame in sent]

    def ask(self, request: m.Request) -> Any:
        """The reply to a request."""
        self.coordinator.receive(self.peer, self.frame(request), time.monotonic())
        reply = codec.decode_answer(self.take()[-1]).reply
        if isinstance(reply, m.Failed):
            raise RuntimeError(f"{m.tag_of(request)} was refused: {reply.text}")
        return reply

    def seconds(self, frames: Sequence[bytes]) -> tuple[float, list[bytes]]:
        """Processor time of a call, and the answers."""
        receive, peer, clock, before = self.coordinator.receive, self.peer, time.monotonic, time.process_time()
        for frame in frames:
            receive(peer, frame, clock())
        return (time.process_time() - before) / len(frames), self.take()

    def steps(self, frames: Sequence[bytes]) -> tuple[float, list[bytes]]:
        """Function calls of a call, those of C included, and the answers."""
        count = 0

        def called(frame: Any, event: str, argument: Any) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(called)
        try:
            for frame in frames:
                self.coordinator.receive(self.peer, frame, 0.0)
        finally:
            sys.setprofile(None)
        return (count - 1) / len(frames), self.take()

    def close(self) -> None:
        """End it."""
        self.coordinator.stop()
        self.peer.stream.close()
        self._there.close()
        self._arena.close()


class Verbs:
    """The three requests for batches of so many rows, as a client sends them."""

    def __init__(self, core: Core, rows: int) -> None:
        self._core, self._rows, self._name = core, rows, f"rows_{rows}"
        self._field = Field("x", "uint8", (ROW_BYTES,))
        core.ask(
            m.CreateTable(name=self._name, fields=[], tasks=[Task("train", needs=["x"])], limits=Limits(rows=1 << 20))
        )
        self._extent, self._used = core.ask(m.Grant(nbytes=EXTENT_BYTES)), 0

    def put(self) -> bytes:
        """A put into the granted extent, which is replaced when it is full."""
        nbytes = self._rows * ROW_BYTES
        if self._used + align(nbytes) > self._extent.nbytes:
            self._core.ask(m.ReturnGrant(extent=self._extent.extent))
            self._extent, self._used = self._core.ask(m.Grant(nbytes=EXTENT_BYTES)), 0
        block = m.WrittenBlock(
            extent=self._extent.extent, offset=self._extent.offset + self._used, nbytes=nbytes, rows=self._rows,
            fields=["x"], counts=[0], checksum=0,
        )  # fmt: skip
        self._used += align(nbytes)
        columns = m.Columns([self._field], [block])
        return self._core.frame(m.PutRequest(self._name, self._rows, columns, 0, 30.0))

    def lease(self) -> bytes:
        """A lease of the next rows."""
        return self._core.frame(m.LeaseRequest(self._name, "train", rows=self._rows, wait_s=30.0))

    def ack(self, leased: m.Leased) -> bytes:
        """The ack of a lease."""
        return self._core.frame(m.Ack(self._name, leased.lease, leased.token))

    def round(self, calls: int, cost: Any) -> dict[str, float]:
        """Put, lease and ack so many times; the cost of each, by `Core.seconds` or `Core.steps`."""
        costs: dict[str, float] = {}
        costs["put"], _ = cost([self.put() for _ in range(calls)])
        costs["lease"], answers = cost([self.lease() for _ in range(calls)])
        leases: list[Any] = [codec.decode_answer(answer).reply for answer in answers]
        costs["ack"], _ = cost([self.ack(lease) for lease in leases])
        for notice in m.unpin(
            [block.block for lease in leases for part in lease.content.parts for block in part.blocks]
        ):
            self._core.coordinator.receive(self._core.peer, self._core.frame(notice), time.monotonic())
        return costs


def show(levels: Sequence[int], calls: int, rounds: int) -> None:
    """Print the processor time of each verb, the least of the rounds, and its function calls."""
    core = Core()
    for rows in levels:
        verbs = Verbs(core, rows)
        verbs.round(calls, core.seconds)  # not counted: caches fill
        timed = [verbs.round(calls, core.seconds) for _ in range(rounds)]
        steps = verbs.round(COUNTED, core.steps)
        for verb, count in steps.items():
            microseconds = min(costs[verb] for costs in timed) * 1e6
            print(f"rows_{rows:<4} {verb:6} {microseconds:6.1f} µs {count:6.1f} function calls")
    core.close()
