"""Scenario: columns that a client reads one-sided, beside the same over a plain stream, one raw TCP stream and a copy,
by turns in one run.

    .venv-nixl/bin/python -m bench.one_sided --record --out FILE

`make test-nixl` makes the environment; on a machine without RDMA the carriers are TCP and CMA, between processes of
this host. Each carrier has a process and a server of its own, since UCX reads its transports once; in it, turn by turn:

- `raw/stream`: one process sends the bytes of a workload over TCP, another receives them into a buffer that it reuses.
  `raw/copy`: numpy copies them.
- `stream/get`, `nixl/get`: `table.read` until every column is checked and lies in its array, by a client that maps
  nothing. `put`: the same put, by the same two clients.
- `get_server`, `get_client`: processor time that a get takes of the server's process and of this one, which says most
  on a machine that others use.
- `get_of_stream`, `put_of_stream`: the raw stream's seconds of the same turn over theirs. `one_sided`: the share of the
  bytes that was read one-sided; `pulled`: the share of those that were put that the shard read out of the client's
  memory.

Estimate, before it was run: over CMA one range takes 0.7 of the raw stream's time and the comparison a third more, so
`nixl` is at best equal to `stream`, which needs both processors; over TCP the READ alone takes 2.2 times as long. 32
ragged fields are whole blocks, as one dense field. Random ragged rows below 16 KiB are staged: over CMA the shard's
thread need not send and the client's copies once instead of receiving, 0.7 of the stream's time; over TCP twice its
time. A pulled put is one hash at the client, one READ, one hash and one copy at the shard, where the stream has two
copies by the kernel and two hashes: over CMA about equal, over TCP half the stream's speed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import transferqueue as tq
from bench.harness import Result
from bench.raw_stream import Stream, seconds
from bench.run_record import ByHand, by_hand_options
from bench.server import Server
from bench.workloads import ITEM_BYTES, WORKLOADS, Flat, Workload, columns
from transferqueue.adapters.carriers.nixl.agent import Transports
from transferqueue.transport.bulk.carriers import BYTES_VARIABLE

SCENARIO = "one_sided"
CARRIERS = (Transports.CMA, Transports.TCP)
CHOSEN = ("dense_1", "ragged_32", "random_ragged", "random_long")
TURNS = 9
WARM = 2
LONG = Workload("random_long", "ragged", rows=2048, fields=1, nbytes=64 << 20, pick=1024)
"""Rows of 32 KiB in the mean, half of them in random order."""


def measured(carrier: str, workload: Workload, turns: int) -> list[Result]:
    """All turns of one workload. Runs in a process whose environment names the carrier."""
    expected = columns(workload, 0)
    prepared = {name: _arrow(flat) for name, flat in expected.items()}
    size = workload.bytes_got
    times: dict[str, list[float]] = {}
    with ExitStack() as opened:
        server = Server(tcp=True, words=["--bytes", carrier])
        opened.callback(server.stop)
        tables = {way: _table(opened, server, way, workload) for way in ("stream", carrier)}
        stream = Stream(size, opened)
        source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
        before = {"sent": 0, "received": 0}
        for turn in range(WARM + turns):
            if turn == WARM:
                times, before = {}, _one_sided(tables[carrier][0])
            times.setdefault("raw", []).append(seconds(stream.once)[0])
            times.setdefault("copy", []).append(seconds(lambda: np.copyto(target, source))[0])
            for way, (_, table) in tables.items():
                put_s, rows = seconds(lambda table=table: table.put(**prepared))  # type: ignore[misc]
                order = np.random.default_rng(turn).permutation(len(rows))[: workload.pick] if workload.pick else None
                wanted = rows if order is None else rows[order]
                server_s, client_s = _processor_s(server.pid), time.process_time()
                get_s, found = seconds(lambda table=table, wanted=wanted: _read(table, workload, wanted))  # type: ignore[misc]
                times.setdefault(f"{way} get_server", []).append(_processor_s(server.pid) - server_s)
                times.setdefault(f"{way} get_client", []).append(time.process_time() - client_s)
                _compare(expected, found, order)
                found.release()
                table.drop(rows, "read")
                times.setdefault(f"{way} put", []).append(put_s)
                times.setdefault(f"{way} get", []).append(get_s)
        after = _one_sided(tables[carrier][0])
    put_bytes = turns * sum(flat.values.nbytes for flat in expected.values())
    read = (after["sent"] - before["sent"]) / (turns * size)
    pulled = (after["received"] - before["received"]) / put_bytes
    return _results(carrier, workload.name, size, times, {"one_sided": read, "pulled": pulled})


def _table(opened: ExitStack, server: Server, way: str, workload: Workload) -> tuple[tq.Queue, tq.Table]:
    os.environ[BYTES_VARIABLE] = way
    queue = opened.enter_context(tq.connect(server.tcp_address, data="remote"))
    name = f"by_{way.replace(':', '_')}"
    return queue, queue.create_table(name, tasks=[tq.Task("train", needs=workload.names)])


def _processor_s(pid: int) -> float:
    """Seconds that the threads of a process ran so far."""
    ran = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # it has just ended
            ran += int((task / "schedstat").read_text().split()[0])
    return ran / 1e9


def _one_sided(queue: tq.Queue) -> dict[str, int]:
    """Bytes that were read out of the server's memory so far, and those that it read out of its clients'."""
    server = queue.stats().server
    return {"sent": server.bulk_sent_bytes["one_sided"], "received": server.bulk_received_bytes["one_sided"]}


def _arrow(flat: Flat) -> Any:
    item = ITEM_BYTES[flat.dtype]
    values = flat.values.view(flat.dtype)
    if flat.kind == "dense":
        return values.reshape(-1, *flat.shape)
    return pa.LargeListArray.from_arrays(pa.array(flat.offsets // item), pa.array(values))


def _read(table: tq.Table, workload: Workload, rows: Any) -> tq.Rows:
    found = table.read(rows, fields=workload.wanted)
    for name in workload.wanted:
        found[name].load()
    return found


def _compare(expected: dict[str, Flat], found: tq.Rows, order: Any) -> None:
    for name, flat in expected.items():
        wanted = (flat if order is None else flat.pick(order)).values
        got = found[name].numpy() if flat.kind == "dense" else found[name].ragged()[0]
        if not np.array_equal(np.ascontiguousarray(got).reshape(-1).view(np.uint8), wanted):
            raise ValueError(f"{name} did not come back as it was put")


def _results(
    carrier: str, name: str, size: int, times: dict[str, list[float]], shares: dict[str, float]
) -> list[Result]:
    """Contenders are named after the carrier beside which they were measured: ``cma raw``, ``cma stream``,
    ``cma nixl``."""
    beside = carrier.partition(":")[2]
    results = [Result(SCENARIO, f"{beside} raw", name, "stream", "s", times["raw"], size)]
    results.append(Result(SCENARIO, f"{beside} raw", name, "copy", "s", times["copy"], size))
    for way, contender in (("stream", f"{beside} stream"), (carrier, f"{beside} nixl")):
        for metric in ("get", "put", "get_server", "get_client"):
            taken = times[f"{way} {metric}"]
            results.append(Result(SCENARIO, contender, name, metric, "s", taken, size, checked=True))
            if metric == "get" or (metric == "put" and not WORKLOADS.get(name, LONG).pick):
                ratios = [raw / ours for raw, ours in zip(times["raw"], taken, strict=True)]
                results.append(
                    Result(SCENARIO, contender, name, f"{metric}_of_stream", "ratio", ratios, size, checked=True)
                )
    crossed = [
        Result(SCENARIO, f"{beside} nixl", name, metric, "ratio", [share], size) for metric, share in shares.items()
    ]
    return results + crossed


def _elsewhere(carrier: Transports, name: str, turns: int) -> list[Result]:
    command = [sys.executable, "-m", "bench.one_sided", "--turns", str(turns), "--only", name, str(carrier)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, env=os.environ | {BYTES_VARIABLE: str(carrier)}, check=True)
    return [Result(**each) for each in json.loads(ended.stdout.splitlines()[-1])]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workloads", nargs="*", default=CHOSEN)
    parser.add_argument("--carriers", nargs="*", type=Transports, default=CARRIERS)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--only", nargs=2, help=argparse.SUPPRESS)
    by_hand_options(parser)
    chosen = parser.parse_args()
    if chosen.only:
        name, carrier = chosen.only
        print(json.dumps([asdict(one) for one in measured(carrier, WORKLOADS.get(name, LONG), chosen.turns)]))
        return
    run_by_hand = ByHand(SCENARIO)
    results = [
        one
        for carrier in chosen.carriers
        for name in chosen.workloads
        for one in _elsewhere(carrier, name, chosen.turns)
    ]
    run_by_hand.tell(results, chosen.out, whole=chosen.record)


if __name__ == "__main__":
    main()
