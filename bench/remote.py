"""Scenario: the queue from another machine, beside one raw TCP stream, by turns in one run, over loopback.

    python -m bench.remote --out FILE
    python -m bench.remote --moving-only --workloads ragged_32 random_ragged --out FILE

- `raw/stream`: one process sends the bytes of a workload, another receives them into a buffer that it reuses.
- `transferqueue/get`, `put`: `table.read` and `table.put` by a client that maps nothing (`data="remote"`), checksums
  included; `get_of_stream`, `put_of_stream`: the raw stream's seconds of the same turn over theirs.
- `transferqueue/arrays`: the part of a get after which every column is checked and lies in its array (`Column.load`);
  `arrays_of_stream` as above. `tensors`: the rest of the get, which makes torch tensors of the arrays: torch's jagged
  constructor takes 110-140 µs a field.
- `transferqueue/wire_get`, `wire_put`: what passes both connections, per byte of the values.
- `transferqueue/lease_alone`, `lease_beside`: lease and ack of one row by a local client, alone and while a client of
  another process reads 32 MiB again and again.
- `transferqueue/small_put`, `small_put_local`: a put of one row of 1 KiB.

A get moves each byte over loopback once, as the stream does, from the arena to where it belongs; beyond it: a checksum
at either end (in the cache), two round trips before the first byte, and for rows of many puts the gathering. Estimate:
the sender is the slower side, 1 / (1/3.4 + 1/25) = 3.0 GB/s, 0.88 of the stream; a millisecond for the round trips of
33.5 MB makes 0.8 of it. A put copies once at the sender before anything leaves: 1 / (1/0.88 + 3.4/8) = 0.64 where that
is cold.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

import transferqueue as tq
from bench.contenders.tensors import flat_bytes, tensor
from bench.harness import Result, save_results
from bench.limits import child
from bench.raw_stream import Raw, Stream, seconds
from bench.server import Server
from bench.wire import Relay
from bench.workloads import WORKLOADS, Workload, columns, same

SCENARIO = "remote"
OURS = "transferqueue"
GETS = ("dense_1", "dense_32", "dense_128", "ragged_1", "ragged_32", "random_dense", "random_ragged")
TURNS = 11
WARM = 3
LEASES = 1500
SMALL_PUTS = 500


# ---------------------------------------------------------------- moving


def _read(table: tq.Table, workload: Workload, rows: Any) -> tq.Rows:
    found = table.read(rows, fields=workload.wanted)
    for name in workload.wanted:
        found[name].load()
    return found


def _tensors(found: tq.Rows, workload: Workload) -> dict[str, Any]:
    kind = workload.kind
    return {name: found[name].nested() if kind == "ragged" else found[name].torch() for name in workload.wanted}


def moving(
    address: str,
    name: str,
    scenario: str = SCENARIO,
    open_stream: Callable[[int, ExitStack], Raw] = Stream,
    turns: int = TURNS,
) -> list[Result]:
    """Puts and gets of one workload by turns with the stream. Each get is compared with what was put."""
    workload = WORKLOADS[name]
    expected = columns(workload, 0)
    prepared = {field: tensor(flat) for field, flat in expected.items()}
    times: dict[str, list[float]] = {"stream": [], "put": [], "arrays": [], "tensors": [], "get": []}
    with ExitStack() as opened:
        queue = opened.enter_context(tq.connect(address, data="remote"))
        table = queue.create_table(name, tasks=[tq.Task("train", needs=workload.names)])
        stream = open_stream(workload.bytes_got, opened)
        for turn in range(WARM + turns):
            raw_s, _ = seconds(stream.once)
            put_s, rows = seconds(lambda: table.put(**prepared))
            order = np.random.default_rng(turn).permutation(len(rows))[: workload.pick] if workload.pick else None
            wanted = rows if order is None else rows[order]
            arrays_s, found = seconds(lambda wanted=wanted: _read(table, workload, wanted))  # type: ignore[misc]
            tensors_s, got = seconds(lambda found=found: _tensors(found, workload))  # type: ignore[misc]
            _compare(expected, got, order)
            got.clear()
            found.release()
            table.drop(rows, "read")
            if turn >= WARM:
                turn_s = (raw_s, put_s, arrays_s, tensors_s, arrays_s + tensors_s)
                for taken, one_s in zip(times.values(), turn_s, strict=True):
                    taken.append(one_s)
    return _moved(scenario, workload, times)


def _compare(expected: dict[str, Any], got: dict[str, Any], order: Any) -> None:
    for field, column in got.items():
        flat = expected[field] if order is None else expected[field].pick(order)
        if not same(flat, *flat_bytes(column)):
            raise ValueError(f"{field} did not come back as it was put")


def _moved(scenario: str, workload: Workload, times: dict[str, list[float]]) -> list[Result]:
    size, name = workload.bytes_got, workload.name
    found = [Result(scenario, "raw", name, "stream", "s", times["stream"], size)]
    found.append(Result(scenario, OURS, name, "tensors", "s", times["tensors"], size, checked=True))
    for metric in ("get", "arrays", "put"):
        if metric == "put" and workload.pick:
            continue  # it moves other bytes than the stream
        found.append(Result(scenario, OURS, name, metric, "s", times[metric], size, checked=True))
        ratios = [raw / ours for raw, ours in zip(times["stream"], times[metric], strict=True)]
        found.append(Result(scenario, OURS, name, f"{metric}_of_stream", "ratio", ratios, size, checked=True))
    return found


# ---------------------------------------------------------------- wire bytes


def wire(server: Server, name: str) -> list[Result]:
    workload = WORKLOADS[name]
    expected = columns(workload, 0)
    values = sum(flat.values.nbytes for flat in expected.values())
    prepared = {field: tensor(flat) for field, flat in expected.items()}
    with tq.connect(server.tcp_address) as local:
        bulk_port = local.stats().server.bulk_port
    relays = (
        Relay(server.tcp_address, ("127.0.0.2", 0)),
        Relay(f"tcp://127.0.0.1:{bulk_port}", ("127.0.0.2", bulk_port)),
    )
    try:
        with tq.connect(relays[0].address, data="remote") as queue:
            table = queue.create_table(f"wire_{name}", tasks=[tq.Task("train", needs=workload.names)])
            before = _passed(relays)
            table.put(**prepared)
            put, before = _passed(relays) - before, _passed(relays)
            with table.lease("train", rows=workload.rows) as batch:
                get = _passed(relays) - before
                _compare(expected, {field: batch[field].nested() for field in expected}, None)
    finally:
        for relay in relays:
            relay.close()
    return [
        Result(SCENARIO, OURS, name, f"wire_{way}", "ratio", [passed / values], values, checked=True)
        for way, passed in (("put", put), ("get", get))
    ]


def _passed(relays: tuple[Relay, ...]) -> int:
    return sum(relay.up + relay.down for relay in relays)


# ---------------------------------------------------------------- beside


def _read_for_ever(control: Connection, address: str, name: str) -> None:
    with tq.connect(address, data="remote") as queue:
        table = queue.create_table(f"big_{name}", tasks=[tq.Task("train", needs=["x"])])
        rows = table.put(x=np.random.default_rng(0).random((1024, 1 << 13), np.float32))
        reads = 0
        control.send("reading")
        while not control.poll():
            with table.read(rows) as found:
                found["x"].numpy()
            reads += 1
        control.send(reads)


def leases(server: Server) -> list[Result]:
    """Lease and ack of one row by a local client: alone, then beside a reader."""
    with tq.connect(server.address) as queue:
        table = queue.create_table("small", tasks=[tq.Task("train", needs=["r"])], limits=tq.Limits(rows=8192))
        alone = _lease(table)
        with child(_read_for_ever, server.tcp_address, "beside") as control:
            control.recv()
            beside = _lease(table)
            control.send("stop")
            reads = control.recv()
    note = f"{reads} reads of 32 MiB meanwhile"
    return [
        Result(SCENARIO, OURS, "one_row", "lease_alone", "s", alone),
        Result(SCENARIO, OURS, "one_row", "lease_beside", "s", beside, note=note),
    ]


def _lease(table: tq.Table) -> list[float]:
    def once() -> None:
        with table.lease("train", rows=1):
            pass

    found = []
    for _ in range(LEASES):
        table.put(r=[1.0])
        found.append(seconds(once)[0])
    return found


def small_puts(server: Server) -> list[Result]:
    found = []
    for metric, how in (("small_put_local", {}), ("small_put", {"data": "remote"})):
        with tq.connect(server.tcp_address, **how) as queue:  # type: ignore[arg-type]
            table = queue.create_table(metric, tasks=[tq.Task("train", needs=["x"])], limits=tq.Limits(rows=8192))
            row = np.ones((1, 256), np.float32)
            raw = [seconds(lambda: table.put(x=row))[0] for _ in range(SMALL_PUTS)]  # noqa: B023
        found.append(Result(SCENARIO, OURS, "one_row", metric, "s", raw, row.nbytes))
    return found


def show(results: list[Result]) -> None:
    """Print the ratios, and the milliseconds of the tensors: median, and the 10th and 90th percentiles."""
    for one in results:
        if one.unit == "ratio" or one.metric == "tensors":
            low, middle, high = np.percentile(np.array(one.raw) * (1 if one.unit == "ratio" else 1e3), [10, 50, 90])
            print(f"{one.workload:14} {one.metric:17} {middle:6.2f}  [{low:.2f} to {high:.2f}]")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workloads", nargs="*", default=GETS)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--moving-only", action="store_true", help="puts and gets beside the stream, and nothing else")
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    server = Server(tcp=True)
    try:
        results = [one for name in chosen.workloads for one in moving(server.tcp_address, name, turns=chosen.turns)]
        if not chosen.moving_only:
            results += [*wire(server, "ragged_32"), *leases(server), *small_puts(server)]
    finally:
        server.stop()
    show(results)
    save_results(chosen.out, results)


if __name__ == "__main__":
    main()
