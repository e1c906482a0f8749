"""Scenario: a thousand clients that do nothing. What they cost the server, and those who work.

    python -m bench.idle --clients 1000 --out FILE

A few processes open the connections, which from then on only say that they live. Measured: seconds of processor time that
the server takes per second, its memory per client, and put to delivered between two clients that work.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

import transferqueue as tq
from bench.harness import Result, save_results
from bench.latency import RATE, measure
from bench.server import Server, own_bytes

SCENARIO = "idle"
CLIENTS_PER_PROCESS = 250
WATCH_S = 5.0


def _idle(control: Connection, address: str, count: int) -> None:
    queues = [tq.connect(address, timeout_s=60) for _ in range(count)]
    control.send(len(queues))
    control.recv()


def crowd(address: str, clients: int) -> list[Connection]:
    """Processes that hold the idle connections; they end when their pipe does."""
    spawn = multiprocessing.get_context("spawn")
    pipes = []
    for start in range(0, clients, CLIENTS_PER_PROCESS):
        here, there = multiprocessing.Pipe()
        count = min(CLIENTS_PER_PROCESS, clients - start)
        spawn.Process(target=_idle, args=(there, address, count), daemon=True).start()
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


def run(clients: int, rows: int) -> list[Result]:
    server = Server()
    try:
        alone = measure("transferqueue", server.address, 1, rows, RATE)
        before = own_bytes(server.pid)
        pipes = crowd(server.address, clients)
        share = busy(server.pid)
        each = (own_bytes(server.pid) - before) / clients
        beside = measure("transferqueue", server.address, 1, rows, RATE)
        for pipe in pipes:
            pipe.send("go")
    finally:
        server.stop()
    name = f"clients_{clients}"
    return [
        Result(SCENARIO, "transferqueue", "clients_0", "put_to_delivered", "s", alone, 64, checked=True),
        Result(SCENARIO, "transferqueue", name, "put_to_delivered", "s", beside, 64, checked=True),
        Result(SCENARIO, "transferqueue", name, "server_core_share", "ratio", [share]),
        Result(SCENARIO, "transferqueue", name, "server_bytes_per_client", "bytes", [each]),
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    save_results(chosen.out, run(chosen.clients, chosen.rows))


if __name__ == "__main__":
    main()
