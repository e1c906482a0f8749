"""Scenario: clients keep one coordinator busy. How many requests a second does it carry, and what does each cost its
processor?

    python -m bench.busy [--clients 1 4 16] [--rows 1 4] [--seconds 3] [--rounds 3] [--pin] [--tcp] [--redis] [--record
    --out FILE]

Each client is a process that puts, leases and acks so many rows of 64 bytes, one call after the other, in one table.
With `--tcp` requests go over tcp, as from other machines; bytes of rows stay in mapped memory. Rounds of all numbers of
clients alternate. The server's processor time is what the kernel counts, so it holds also while the machine is busy;
requests a second do not. pin: the server has a core of its own, and the clients have the others. redis: rounds
alternate with as many clients of a redis-server, over a socket file, whose turn is XADD of one entry with the bytes of
all rows, XREADGROUP, XACK.
"""

from __future__ import annotations

import argparse
import os
import secrets
import time
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Final, NamedTuple

import numpy as np

import transferqueue as tq
from bench.harness import Result, add_peers
from bench.limits import child
from bench.requests import ROW_BYTES, cpu_ns
from bench.run_record import ByHand, by_hand_options
from bench.server import Server
from transferqueue.client.session.calls import PendingCalls
from transferqueue.transport import ClientChannel, Wakeup, dial, this_host
from transferqueue.wire import messages as m
from transferqueue.wire.codec import decode_answer

SCENARIO: Final = "busy"
CONTENDER: Final = "transferqueue"
CALLS: Final = 3
"""Of a turn: put, lease, ack."""
SESSIONS: Final = 64
BEATS: Final = 200
BEAT_S: Final = 0.01
"""Between two rounds of heartbeats, each of one session."""


def _table(queue: tq.Queue) -> tq.Table:
    return queue.create_table(
        "rows", tasks=[tq.Task("train", needs=["x"])], limits=tq.Limits(rows=1 << 20), exist_ok=True
    )


def _client(control: Connection, address: str) -> None:
    """Take turns for as long as the other end asks, with as many rows; answer with how many turns it took."""
    with tq.connect(address) as queue:
        table = _table(queue)
        control.send(0)
        while (wanted := control.recv()) is not None:
            rows, seconds = wanted
            values, turns, until = np.zeros((rows, ROW_BYTES), np.uint8), 0, time.monotonic() + seconds
            while time.monotonic() < until:
                table.put(x=values)
                table.lease("train", rows=rows, timeout_s=30).ack()
                turns += 1
            control.send(turns)


def _redis_client(control: Connection, address: str) -> None:
    """The same of Redis."""
    add_peers()
    from bench.contenders.redis_streams import GROUP, STREAM, RedisStreams

    redis, reader = RedisStreams().join(address).redis, f"reader-{os.getpid()}"
    control.send(0)
    while (wanted := control.recv()) is not None:
        rows, seconds = wanted
        entry, turns, until = {"x": bytes(rows * ROW_BYTES)}, 0, time.monotonic() + seconds
        while time.monotonic() < until:
            redis.xadd(STREAM, entry)
            [(_, [(number, _)])] = redis.xreadgroup(GROUP, reader, {STREAM: ">"}, count=1, block=30_000)
            redis.xack(STREAM, GROUP, number)
            turns += 1
        control.send(turns)
    redis.close()


Taken = dict[tuple[str, int], list[tuple[float, float]]]
"""Contender and number of clients -> what `one_round` measured."""


class Crowd(NamedTuple):
    """A contender with its server and its clients."""

    name: str
    pid: int
    controls: Sequence[Connection]


def one_round(crowd: Crowd, count: int, rows: int, seconds: float) -> tuple[float, float]:
    """Requests a second of so many clients together, and seconds of the server's processor for a request."""
    used, began, controls = cpu_ns(crowd.pid), time.perf_counter(), crowd.controls[:count]
    for control in controls:
        control.send((rows, seconds))
    requests = CALLS * sum(control.recv() for control in controls)
    return requests / (time.perf_counter() - began), (cpu_ns(crowd.pid) - used) / 1e9 / requests


def session_of(address: str, wakeup: Wakeup, *, local: bool = True) -> tuple[ClientChannel, PendingCalls]:
    """A session that is served by nobody but its caller. local: of this process; else of none that the server sees."""
    channel, calls = dial(address), PendingCalls()
    host, pid = (this_host(), os.getpid()) if local else ("elsewhere", 0)
    channel.send(calls.greet(m.Hello(client=secrets.token_bytes(16), host=host, pid=pid), 0.0))
    while (frame := channel.recv_nowait()) is None:
        channel.wait(wakeup, 1.0)
    answer = decode_answer(frame)
    calls.answered(answer)
    if not isinstance(answer.reply, m.Welcome):
        raise RuntimeError(f"a session was answered {answer.reply}")
    calls.session = answer.reply.session
    return channel, calls


def heartbeat_s(server: Server, address: str) -> float:
    """Seconds of the server's processor for a heartbeat, where many sessions send theirs at about one time."""
    wakeup = Wakeup()
    sessions = [session_of(address, wakeup) for _ in range(SESSIONS)]
    used = cpu_ns(server.pid)
    for _ in range(BEATS):
        for channel, calls in sessions:
            channel.send(calls.notice(m.Heartbeat()))
        time.sleep(BEAT_S)
    cost = (cpu_ns(server.pid) - used) / 1e9 / (SESSIONS * BEATS)
    for channel, _ in sessions:
        channel.close()
    wakeup.close()
    return cost


def pin(pids: Sequence[int]) -> None:
    """Give the servers a core of their own, and this process and its children the others."""
    first, *others = sorted(os.sched_getaffinity(0))
    for pid in pids:
        os.sched_setaffinity(pid, {first})
    os.sched_setaffinity(0, others or {first})


def _crowd(stack: ExitStack, name: str, pid: int, address: str, clients: int) -> Crowd:
    client = {CONTENDER: _client, "redis": _redis_client}[name]
    controls = [stack.enter_context(child(client, address)) for _ in range(clients)]
    for control in controls:
        control.recv()
    return Crowd(name, pid, controls)


def _redis(stack: ExitStack) -> tuple[int, str]:
    """A redis-server that ends with the stack: its process and its socket."""
    add_peers()
    from bench.contenders.redis_streams import RedisStreams

    peer = RedisStreams()
    address = peer.start()
    stack.callback(peer.stop)
    return peer.server.pid, address


def _results(crowds: Sequence[Crowd], prefix: str, clients: Sequence[int], rows: int, taken: Taken) -> list[Result]:
    results: list[Result] = []
    for crowd in crowds:
        for count in clients:
            name, rounds = f"{prefix}_rows_{rows}_clients_{count}", taken[crowd.name, count]
            results.append(Result(SCENARIO, crowd.name, name, "requests", "1/s", [rate for rate, _ in rounds]))
            results.append(Result(SCENARIO, crowd.name, name, "server_cpu", "s", [cost for _, cost in rounds]))
    return results


def run(
    clients: Sequence[int],
    levels: Sequence[int],
    seconds: float,
    rounds: int,
    *,
    pinned: bool,
    tcp: bool,
    redis: bool = False,
) -> list[Result]:
    results: list[Result] = []
    server = Server(arena_bytes="1GiB", tcp=tcp)
    address, transport = (server.tcp_address, "tcp") if tcp else (server.address, "ipc")
    try:
        with tq.connect(address) as queue, ExitStack() as stack:
            peer = _redis(stack) if redis else None
            if pinned:
                pin([server.pid, *([peer[0]] if peer else [])])
            _table(queue)
            crowds = [_crowd(stack, CONTENDER, server.pid, address, max(clients))]
            crowds += [_crowd(stack, "redis", *peer, max(clients))] if peer else []
            for rows in levels:
                taken: Taken = {(crowd.name, count): [] for crowd in crowds for count in clients}
                for _ in range(rounds):
                    for count in clients:
                        for crowd in crowds:
                            taken[crowd.name, count].append(one_round(crowd, count, rows, seconds))
                results += _results(crowds, transport, clients, rows, taken)
            beats = [heartbeat_s(server, address) for _ in range(rounds)]
            results.append(Result(SCENARIO, CONTENDER, f"{transport}_sessions", "heartbeat_server_cpu", "s", beats))
            for crowd in crowds:
                for control in crowd.controls:
                    control.send(None)
    finally:
        server.stop()
    return results


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pin", action="store_true", help="give the server a core of its own")
    parser.add_argument("--tcp", action="store_true", help="measure over tcp, too")
    parser.add_argument("--redis", action="store_true", help="and as many clients of a redis-server, by turns")
    by_hand_options(parser)
    chosen = parser.parse_args()
    hand = ByHand(SCENARIO)
    results = [
        result
        for tcp in (False, True)[: 1 + chosen.tcp]
        for result in run(
            chosen.clients,
            chosen.rows,
            chosen.seconds,
            chosen.rounds,
            pinned=chosen.pin,
            tcp=tcp,
            redis=chosen.redis and not tcp,
        )
    ]
    hand.tell(results, chosen.out, whole=chosen.record)


if __name__ == "__main__":
    main()
