"""Scenario: what the machine can do at best: copying memory, one TCP stream, one ZeroMQ round trip.

    python -m bench.limits --out FILE

- `memcpy/copy`: one thread copies warm memory to warm memory, back to back; `memcpy/copy_cold`: after a pause, and
  neither end is in a cache; `memcpy/read`: one thread reads warm memory once.
- `tcp/stream`: one process sends, another receives into a buffer it reuses, over loopback.
- `zmq/round_trip`: a 64-byte message to another process and back, over ipc, blocking on both sides, back to back.
- `zmq/round_trip_paced`: the same, 250 a second, as `latency.py` offers rows: between two of them processes sleep and
  caches cool, which makes the very same exchange several times slower.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import Result, save_results, timed
from bench.workloads import DENSE, KIB, MIB, Bytes

SCENARIO = "limits"
SIZES = (256 * KIB, MIB, 4 * MIB, 16 * MIB, DENSE, 64 * MIB, 256 * MIB, 1024 * MIB)
ROUND_TRIPS = 2000
MESSAGE_BYTES = 64
PAUSE_S = 0.05
"""Before a cold copy: about what passes between two puts of `transfer.py`."""
PACE = 250.0
"""Exchanges a second, when they are paced: as many as rows in `latency.py`."""


def size_name(size: int) -> str:
    return f"{size // KIB}KiB"


@contextmanager
def child(work: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """Another process that runs `work(connection, *arguments)`; it is ended with the block."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=work, args=(there, *arguments), daemon=True)
    process.start()
    try:
        yield here
    finally:
        process.terminate()
        process.join(10)


# ---------------------------------------------------------------- memory


def memcpy(sizes: tuple[int, ...]) -> list[Result]:
    results = []
    for size in sizes:
        source = np.random.default_rng(0).integers(0, 255, size, dtype=np.uint8)
        target = np.ones(size, np.uint8)
        raw = timed(lambda a=target, b=source: np.copyto(a, b), repetitions=15, budget_s=2)  # type: ignore[misc]
        if not np.array_equal(source, target):
            raise ValueError(f"memcpy of {size} bytes did not copy them")
        if size == DENSE:
            results.append(_cold(size))
        words = source.view("<u8")
        read = timed(lambda a=words: a.max(), repetitions=15, budget_s=2)  # type: ignore[misc]
        results.append(Result(SCENARIO, "memcpy", size_name(size), "copy", "s", raw, size, checked=True))
        results.append(Result(SCENARIO, "memcpy", size_name(size), "read", "s", read, size))
    return results


def _cold(size: int) -> Result:
    """The same as a queue meets it: after a pause, other bytes to another place each time, and neither end in a
    cache."""
    sources = [np.full(size, value, np.uint8) for value in range(2)]
    targets, raw = np.ones((4, size), np.uint8), []
    for turn in range(15):
        time.sleep(PAUSE_S)
        began = time.perf_counter()
        np.copyto(targets[turn % 4], sources[turn % 2])
        raw.append(time.perf_counter() - began)
    return Result(SCENARIO, "memcpy", size_name(size), "copy_cold", "s", raw, size)


# ---------------------------------------------------------------- one TCP stream


def payload(size: int) -> Bytes:
    return np.random.default_rng(1).integers(0, 255, size, dtype=np.uint8)


def _send(control: Connection, port: int, size: int) -> None:
    data = memoryview(payload(size))
    with socket.create_connection(("127.0.0.1", port)) as stream:
        while control.recv() == "send":
            stream.sendall(data)


def _receive(stream: socket.socket, into: memoryview) -> None:
    at = 0
    while at < len(into):
        got = stream.recv_into(into[at:])
        if not got:
            raise ConnectionError("the sender closed the stream early")
        at += got


def tcp(size: int) -> list[Result]:
    buffer = memoryview(bytearray(size))
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, child(_send, listener.getsockname()[1], size) as control:
        stream, _ = listener.accept()

        def once() -> None:
            control.send("send")
            _receive(stream, buffer)

        with stream:
            raw = timed(once, repetitions=9)
        control.send("stop")
    checked = bool(np.array_equal(np.frombuffer(buffer, np.uint8), payload(size)))
    if not checked:
        raise ValueError("the TCP stream did not deliver what was sent")
    return [Result(SCENARIO, "tcp", size_name(size), "stream", "s", raw, size, checked=True)]


# ---------------------------------------------------------------- one ZeroMQ round trip


def _echo(control: Connection, address: str) -> None:
    import zmq

    with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
        server.bind(address)
        control.send("bound")
        while True:
            server.send_multipart(server.recv_multipart())


def zmq_round_trip(count: int) -> list[Result]:
    import zmq

    with tempfile.TemporaryDirectory(prefix="bench-zmq-") as folder:
        address = f"ipc://{folder}/echo"
        with child(_echo, address) as control, zmq.Context() as context, context.socket(zmq.DEALER) as client:
            control.recv()
            client.connect(address)
            client.linger = 0
            message = os.urandom(MESSAGE_BYTES)
            for _ in range(200):
                _round_trip(client, message)
            hot = [_round_trip(client, message) for _ in range(count)]
            paced = [_round_trip(client, message, 1 / PACE) for _ in range(count // 4)]
    return [
        Result(SCENARIO, "zmq", "64B", "round_trip", "s", hot, MESSAGE_BYTES, checked=True),
        Result(SCENARIO, "zmq", "64B", "round_trip_paced", "s", paced, MESSAGE_BYTES, checked=True),
    ]


def _round_trip(client: Any, message: bytes, pause_s: float = 0.0) -> float:
    time.sleep(pause_s)
    began = time.perf_counter()
    client.send(message)
    if client.recv() != message:
        raise ValueError("ZeroMQ echoed something else")
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--largest", type=int, default=DENSE, help="largest copy, in bytes")
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    results = memcpy(tuple(size for size in SIZES if size <= chosen.largest))
    save_results(chosen.out, [*results, *tcp(DENSE), *zmq_round_trip(ROUND_TRIPS)])


if __name__ == "__main__":
    main()
