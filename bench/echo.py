"""What the machine itself adds to `sessions.py`: as many clients, as many rows, over sockets that carry nothing else.

    python -m bench.echo --clients 1000 --rate 500 --seconds 20

A process passes each row, a number, to the client that waits longest; the client answers, and gets an answer. So three
messages a row cross a socket file, as with the queue, and nothing is decided, stored or encoded. How late rows are here
is what a busy machine does to any program of this shape.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import struct
import tempfile
import time
from collections import deque
from multiprocessing.connection import Connection
from pathlib import Path

from bench.crowd import CLIENTS_PER_PROCESS, Crowd, Samples, Windows, offer
from bench.limits import child

NUMBER = struct.Struct("<d")
FEEDER, CLIENT, DONE = -1.0, -2.0, -3.0
"""Numbers that are no times: who a connection is, and the answer to an ack."""


class _Numbers(asyncio.Protocol):
    """A connection that carries numbers."""

    def __init__(self) -> None:
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        data = self._rest + data
        whole = len(data) // NUMBER.size * NUMBER.size
        self._rest = data[whole:]
        for (number,) in NUMBER.iter_unpack(data[:whole]):
            self.arrived(number)

    def send(self, number: float) -> None:
        self._transport.write(NUMBER.pack(number))

    def arrived(self, number: float) -> None:
        raise NotImplementedError


class _Peer(_Numbers):
    """The server's end of a connection. rows, idle: of all."""

    def __init__(self, rows: deque[float], idle: deque[_Peer]) -> None:
        super().__init__()
        self._rows, self._idle = rows, idle

    def arrived(self, number: float) -> None:
        if number >= 0:
            self._rows.append(number)
        elif number == DONE:
            self.send(DONE)
            self._idle.append(self)
        elif number == CLIENT:
            self._idle.append(self)
        while self._rows and self._idle:
            self._idle.popleft().send(self._rows.popleft())


class _Client(_Numbers):
    """Takes a row, ends it, and hears that it ended."""

    def __init__(self, samples: Samples) -> None:
        super().__init__()
        self._samples = samples
        self._put = self._delivered = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.send(CLIENT)

    def arrived(self, number: float) -> None:
        now = time.monotonic()
        if number == DONE:
            self._samples.add(self._put, self._delivered, now)
        else:
            self._put, self._delivered = number, now
            self.send(DONE)


async def _listen(control: Connection, path: str) -> None:
    rows, idle = deque[float](), deque[_Peer]()
    server = await asyncio.get_running_loop().create_unix_server(lambda: _Peer(rows, idle), path, backlog=1024)
    control.send(0)
    await server.serve_forever()


def _server(control: Connection, path: str) -> None:
    asyncio.run(_listen(control, path))


async def _take(control: Connection, path: str, count: int) -> None:
    samples, loop = Samples(control), asyncio.get_running_loop()
    for _ in range(count):
        await loop.create_unix_connection(lambda: _Client(samples), path)
    control.send(count)
    await samples.tell_always()


def _clients(control: Connection, path: str, count: int) -> None:
    asyncio.run(_take(control, path, count))


def run(clients: int, rate: int, seconds: float, window_s: float) -> list[dict[str, float]]:
    """Percentiles of how late rows were, in seconds, for each window."""
    with tempfile.TemporaryDirectory(prefix="bench-echo-") as folder:
        path = str(Path(folder) / "socket")
        with child(_server, path) as control, socket.socket(socket.AF_UNIX) as feeder:
            control.recv()
            feeder.connect(path)
            feeder.sendall(NUMBER.pack(FEEDER))
            crowd = Crowd(_clients, path, clients)
            try:
                windows = Windows("echo ", crowd, window_s)
                put = offer(
                    lambda due: feeder.sendall(NUMBER.pack(time.monotonic()) * due), rate, seconds, [windows.tick]
                )
                until = time.monotonic() + 60
                while len(crowd.measured()) < put and time.monotonic() < until:
                    crowd.hear(0.5)
                if (came := len(crowd.measured())) != put:
                    raise RuntimeError(f"{put} rows were put, and {came} came back")
                return windows.finish(seconds)
            finally:
                crowd.stop()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=4 * CLIENTS_PER_PROCESS)
    parser.add_argument("--rate", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--window-s", type=float, default=20.0)
    chosen = parser.parse_args()
    run(chosen.clients, chosen.rate, chosen.seconds, chosen.window_s)


if __name__ == "__main__":
    main()
