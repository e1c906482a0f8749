"""Scenario: a thousand clients that do nothing, or ten thousand. What they cost the server, and those who work.

    python -m bench.idle --clients 1000 [--bare] --out FILE

A few processes open the connections, which from then on only say that they live. Measured: seconds of processor time
that the server takes per second, its memory per client, how long a question about all sessions keeps everyone waiting,
and put to delivered between two clients that work.

bare: each process serves its sessions from one thread with a frame at their times, and they name no process and no
lock: so silence alone judges them, as clients on other machines, and ten thousand need no ten thousand threads here.
"""

from __future__ import annotations

import argparse
import heapq
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import psutil

import transferqueue as tq
from bench.busy import session_of
from bench.harness import Result, save_results
from bench.latency import RATE, measure
from bench.server import Server, own_bytes
from transferqueue.client.session.io_thread import heartbeat_s
from transferqueue.transport import Wakeup
from transferqueue.wire import messages as m

SCENARIO: Final = "idle"
CLIENTS_PER_PROCESS: Final = 250
BARE_PER_PROCESS: Final = 2_500
WATCH_S: Final = 10.0


def _idle(control: Connection, address: str, count: int) -> None:
    queues = [tq.connect(address, timeout_s=60) for _ in range(count)]
    control.send(len(queues))
    control.recv()


def _bare(control: Connection, address: str, count: int) -> None:
    sessions, beats = [], list[tuple[float, int]]()
    for number in range(count):
        wakeup = Wakeup()  # the kernel lets few hundred channels wait for the same one
        sessions.append(session_of(address, wakeup, local=False))
        wakeup.close()
        heapq.heappush(beats, (time.monotonic() + heartbeat_s(sessions[-1][1].session), number))
        _beat(sessions, beats)
    control.send(count)
    while not control.poll(max(0.0, beats[0][0] - time.monotonic())):
        _beat(sessions, beats)


def _beat(sessions: list, beats: list[tuple[float, int]]) -> None:
    """Send the heartbeats that are due."""
    while beats[0][0] <= time.monotonic():
        due, number = beats[0]
        channel, calls = sessions[number]
        channel.send(calls.notice(m.Heartbeat()))
        heapq.heapreplace(beats, (due + heartbeat_s(calls.session), number))


def crowd(address: str, clients: int, work: Callable[..., None], each: int) -> list[Connection]:
    """Processes that hold the idle connections; they end when their pipe does."""
    spawn = multiprocessing.get_context("spawn")
    pipes = []
    for start in range(0, clients, each):
        here, there = multiprocessing.Pipe()
        spawn.Process(target=work, args=(there, address, min(each, clients - start)), daemon=True).start()
        there.close()
        pipes.append(here)
    for pipe in pipes:
        pipe.recv()
    return pipes


def busy(pid: int) -> float:
    """Share of one core that the process uses."""
    times = psutil.Process(pid).cpu_times()
    began, before = time.perf_counter(), times.user + times.system
    time.sleep(WATCH_S)
    times = psutil.Process(pid).cpu_times()
    return (times.user + times.system - before) / (time.perf_counter() - began)


def asked(address: str) -> float:
    """Seconds that the server keeps everyone waiting for an answer about all sessions: its longest turn so far."""
    with tq.connect(address) as queue:
        queue.sessions()
        return float(queue.stats().server.turns["request"].longest_s)


def run(clients: int, rows: int, *, bare: bool) -> list[Result]:
    server = Server()
    try:
        alone = measure("transferqueue", server.address, 1, rows, RATE)
        before = own_bytes(server.pid)
        work, each = (_bare, BARE_PER_PROCESS) if bare else (_idle, CLIENTS_PER_PROCESS)
        pipes = crowd(server.address, clients, work, each)
        share = busy(server.pid)
        taken = (own_bytes(server.pid) - before) / clients
        beside = measure("transferqueue", server.address, 1, rows, RATE)
        longest = asked(server.address)
        with tq.connect(server.address) as queue:
            if (left := queue.stats().sessions) != clients + 1:
                raise RuntimeError(f"of {clients} sessions and this one {left} are open")
        for pipe in pipes:
            pipe.send("go")
    finally:
        server.stop()
    name = f"clients_{clients}{'_bare' if bare else ''}"
    return [
        Result(SCENARIO, "transferqueue", "clients_0", "put_to_delivered", "s", alone, 64, checked=True),
        Result(SCENARIO, "transferqueue", name, "put_to_delivered", "s", beside, 64, checked=True),
        Result(SCENARIO, "transferqueue", name, "server_core_share", "ratio", [share]),
        Result(SCENARIO, "transferqueue", name, "server_longest_turn", "s", [longest]),
        Result(SCENARIO, "transferqueue", name, "server_bytes_per_client", "bytes", [taken]),
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--bare", action="store_true", help="sessions without a thread, a process and a lock")
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    results = run(chosen.clients, chosen.rows, bare=chosen.bare)
    for result in results:
        print(f"{result.workload} {result.metric} {sorted(result.raw)[len(result.raw) // 2]:.6g} {result.unit}")
    save_results(chosen.out, results)


if __name__ == "__main__":
    main()
