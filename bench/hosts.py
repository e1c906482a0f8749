"""Scenario: the queue on another host, beside one raw TCP stream from there, by turns in one run.

    python -m bench.hosts --out FILE

The hosts are two network namespaces with a veth pair between them (`bench.namespaces`); the server and the sender of
the stream are on the far one, the client on the near one. No privileges are needed, where the kernel lends user
namespaces.

- `raw/stream`, `transferqueue/get`, `put`, `get_of_stream`, `put_of_stream`: as in `bench.remote`, equal bytes in 1 to
  128 fields. `flat`: the time of each over that with one field.
- All of this with keys, for calls, and with `--plain-bytes`, since the stream is not encrypted either;
  `hosts_encrypted` has the same without it.
- `slow_get`: a get over a link of so many Mbit/s, as a share of what the link could carry. `slow_held`: by how much the
  server's own memory had grown at most meanwhile. Rows are in random order, so that what is on its way was gathered.
- `stalled_held`: the same while readers stand still (SIGSTOP) in the middle of a get, for longer than `STALL_S`;
  `stalled_beside`: a get by another client meanwhile, as a share of the stream. The readers end well once they may go
  on.
"""

from __future__ import annotations

import argparse
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

import transferqueue as tq
from bench.harness import Result, save_results
from bench.namespaces import FAR, START_S, Far, inside, why_not
from bench.remote import moving
from bench.server import Server
from bench.workloads import MIB
from transferqueue.transport.security import keyring
from transferqueue.transport.security.keys import write_token

SCENARIO = "hosts"
OURS = "transferqueue"
WORKLOADS = ("dense_1", "dense_8", "dense_32", "dense_128")
MBIT = 400
"""Of the slow link."""
STALLED = 3
STALL_S = 3.0
LIMIT_S = 600.0


class Keyed(NamedTuple):
    """A server with keys. token: the way in."""

    pid: int
    token: str


class FarStream:
    """A sender on the far host, one connection to it, and a buffer of `size`; `once` receives so many bytes."""

    def __init__(self, far: Far, size: int, opened: ExitStack) -> None:
        self.buffer = memoryview(bytearray(size))
        self.process = opened.enter_context(far.start(sys.executable, "-m", "bench.hosts", "--send", str(size)))
        opened.callback(self.process.stdin.close)  # type: ignore[union-attr]
        port = int(self.process.stdout.readline())  # type: ignore[union-attr]
        self.stream = opened.enter_context(socket.create_connection((FAR, port), timeout=START_S))

    def once(self) -> None:
        self.stream.sendall(b"s")
        at = 0
        while at < len(self.buffer):
            at += self.stream.recv_into(self.buffer[at:])


def send(size: int) -> None:
    """What runs there: tell a port, and send so many bytes for each one received, until the connection ends."""
    data = memoryview(np.random.default_rng(1).integers(0, 255, size, dtype=np.uint8))
    with socket.create_server((FAR, 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        stream, _ = listener.accept()
        with stream:
            while stream.recv(1):
                stream.sendall(data)


# ---------------------------------------------------------------- flat


def flat(results: list[Result], names: Sequence[str]) -> list[Result]:
    """The time of each number of fields over that of one field, turn by turn."""
    found = []
    for metric in ("get", "put"):
        raw = {one.workload: one.raw for one in results if one.metric == metric}
        for name in names[1:]:
            ratio = statistics.median(raw[name]) / statistics.median(raw[names[0]])
            found.append(Result(SCENARIO, OURS, name, f"{metric}_flat", "ratio", [ratio], checked=True))
    return found


# ---------------------------------------------------------------- slow links, readers that stall


def resident(pid: int) -> int:
    """Bytes of memory that a process has for itself: without the arena, which is shared."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) << 10


@contextmanager
def watched(pid: int, every_s: float = 0.02) -> Iterator[Callable[[], int]]:
    """Tells by how much the memory of a process has grown at most since the beginning."""
    before, most, over = resident(pid), [0], threading.Event()

    def watch() -> None:
        while not over.wait(every_s):
            most[0] = max(most[0], resident(pid) - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield lambda: most[0]
    finally:
        over.set()
        thread.join()


def _rows(queue: tq.Queue, name: str, mib: int) -> tuple[tq.Table, npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    table = queue.create_table(name, tasks=[tq.Task("train", needs=["x"])])
    values = np.random.default_rng(2).integers(0, 255, (mib * 16, MIB // 16), dtype=np.uint8)
    order = np.random.default_rng(3).permutation(len(values))
    return table, table.put(x=values)[order], values[order]


def _get(table: tq.Table, rows: npt.NDArray[np.int64], expected: npt.NDArray[np.uint8]) -> float:
    began = time.perf_counter()
    with table.read(rows) as found:
        got = found["x"].numpy()
        seconds = time.perf_counter() - began
        if not np.array_equal(got, expected):
            raise ValueError("rows did not come back as they were put")
    return seconds


def slow(far: Far, server: Keyed, mib: int) -> list[Result]:
    with tq.connect(server.token, data="remote") as queue:
        table, rows, expected = _rows(queue, "slow", mib)
        _get(table, rows, expected)
        far.slow(MBIT)
        try:
            with watched(server.pid) as grown:
                seconds = _get(table, rows, expected)
                held = grown()
        finally:
            far.fast()
        table.drop(rows, "read")
    share = mib * MIB * 8 / (MBIT * 1e6) / seconds
    return [
        Result(SCENARIO, OURS, f"{MBIT}mbit", "slow_get", "ratio", [share], mib * MIB, checked=True),
        Result(SCENARIO, OURS, f"{MBIT}mbit", "slow_held", "bytes", [float(held)], mib * MIB),
    ]


_READER = """
import sys, numpy as np, transferqueue as tq
with tq.connect(sys.argv[1], data="remote") as queue:
    table = queue.table("stalled")
    rows = table.read(limit=10**6).rows
    rows = rows[np.random.default_rng(4).permutation(len(rows))]
    print("reading", flush=True)
    while True:
        with table.read(rows) as found:
            print(int(found["x"].numpy().sum(dtype=np.int64)), flush=True)
"""


def stalled(server: Keyed, mib: int) -> list[Result]:
    with ExitStack() as opened:
        queue = opened.enter_context(tq.connect(server.token, data="remote"))
        table, rows, expected = _rows(queue, "stalled", mib)
        total = str(int(expected.sum(dtype=np.int64)))
        alone = min(_get(table, rows, expected) for _ in range(3))
        grown = opened.enter_context(watched(server.pid))
        readers = [opened.enter_context(_reader(server.token)) for _ in range(STALLED)]
        for reader in readers:
            _expect(reader, "reading")
            _expect(reader, total)
            reader.send_signal(signal.SIGSTOP)
        began, beside = time.monotonic(), []
        while time.monotonic() - began < STALL_S:
            beside.append(_get(table, rows, expected))
        held = grown()
        for reader in readers:
            reader.send_signal(signal.SIGCONT)
        for reader in readers:
            _expect(reader, total)
    return [
        Result(SCENARIO, OURS, f"{STALLED}_readers", "stalled_held", "bytes", [float(held)], mib * MIB, checked=True),
        Result(SCENARIO, OURS, f"{STALLED}_readers", "stalled_beside", "ratio", [alone / one for one in beside]),
    ]


@contextmanager
def _reader(address: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", _READER, address], stdout=subprocess.PIPE, text=True)
    with process:
        try:
            yield process
        finally:
            process.kill()


def _expect(reader: subprocess.Popen[str], line: str) -> None:
    told = reader.stdout.readline() if reader.stdout else ""
    if told.strip() != line:
        raise ValueError(f"a reader said {told!r} where it should say {line!r}")


# ---------------------------------------------------------------- the run


def run(turns: int, mib: int, names: Sequence[str], encrypted: bool) -> list[Result]:
    with Far() as far:
        with serving(far, "--plain-bytes") as server:
            results = moved(far, server, SCENARIO, names, turns)
            results += [*flat(results, names), *slow(far, server, mib), *stalled(server, mib)]
        if encrypted:
            with serving(far) as server:
                results += moved(far, server, f"{SCENARIO}_encrypted", (names[0], names[-1]), turns)
        return results


@contextmanager
def serving(far: Far, *words: str) -> Iterator[Keyed]:
    """A server with keys on the far host."""
    with tempfile.TemporaryDirectory(prefix="bench-keys-") as folder:
        keyring.add(Path(folder), "bench", "admin")
        server = Server(tcp=FAR, before=far.command, words=("--keys", folder, *words))
        try:
            yield Keyed(server.pid, write_token(keyring.token_of(Path(folder), "bench", server.tcp_address)))
        finally:
            server.stop()


def moved(far: Far, server: Keyed, scenario: str, names: Iterable[str], turns: int) -> list[Result]:
    """Puts and gets by turns with a stream from the same host."""

    def stream(size: int, opened: ExitStack) -> FarStream:
        return FarStream(far, size, opened)

    return [one for name in names for one in moving(server.token, name, scenario, stream, turns)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=11)
    parser.add_argument("--mib", type=int, default=96, help="read over the slow link, and by readers that stall")
    parser.add_argument("--workloads", nargs="*", default=WORKLOADS)
    parser.add_argument("--no-encrypted", action="store_true", help="leave out what CURVE makes of it")
    parser.add_argument("--out", type=Path, default=Path("hosts.json"))
    parser.add_argument("--send", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.send is not None:
        send(chosen.send)
    elif chosen.inside:
        save_results(chosen.out, run(chosen.turns, chosen.mib, chosen.workloads, not chosen.no_encrypted))
    elif reason := why_not():
        raise SystemExit(f"no network namespaces here: {reason}")
    else:
        inside("bench.hosts", "--inside", *sys.argv[1:], timeout_s=LIMIT_S)


if __name__ == "__main__":
    main()
