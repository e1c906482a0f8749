"""What a whole cluster would ask of one coordinator and its shards, from the unit costs of a record.

    python -m bench.estimate [RECORD] [--busy RECORD] [--into bench/estimate.md]

The load is assumed, and said; the unit costs are measured: those of bytes in a run of `bench.run`, those of requests in
a record of `bench.busy`. Nothing else is: an estimate says what saturates first, not how fast a cluster would be.
"""

from __future__ import annotations

import argparse
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

from bench.figures import OURS
from bench.run_record import RECORDS, RunRecord, load_run
from bench.table import insert, newest
from bench.workloads import DENSE, KIB, MIB
from transferqueue.client.session.io_thread import HEARTBEAT_PACES, heartbeat_s

GIB = 1 << 30
NODES = (8, 64, 1024)
BUSY_MAX = 0.6
"""The most of its time that a coordinator is planned to be busy: the rest is for bursts."""


@dataclass(frozen=True)
class Load:
    """What one node of eight accelerators gives to the queue and takes from it."""

    tokens_per_s: float = 20_000
    """Generated: 2,500 a second and accelerator."""
    tokens_per_row: float = 4_000
    bytes_per_token: float = 25
    """response_ids int64; rollout, old and reference log-probabilities and advantages float32; loss_mask."""
    requests_per_row: float = 4
    """One put, and one update each of the reward, the reference and the old log-probabilities."""
    tasks: float = 4
    rows_per_lease: float = 64
    requests_per_lease: float = 3
    """Lease, ack and half a renewal; half of what else a session says."""
    sessions: float = 16
    """With each coordinator."""
    heartbeat_s: float = statistics.fmean(map(heartbeat_s, range(HEARTBEAT_PACES)))
    live_s: float = 600
    """From the put of a row to its end: two steps of training."""

    @property
    def rows_per_s(self) -> float:
        return self.tokens_per_s / self.tokens_per_row

    @property
    def bytes_per_row(self) -> float:
        return self.tokens_per_row * self.bytes_per_token

    @property
    def row_requests_per_s(self) -> float:
        """Puts and updates, if each carries one row."""
        return self.rows_per_s * self.requests_per_row

    @property
    def lease_requests_per_s(self) -> float:
        return self.rows_per_s * self.tasks / self.rows_per_lease * self.requests_per_lease

    @property
    def heartbeats_per_s(self) -> float:
        """To each coordinator, as if no session said anything else."""
        return self.sessions / self.heartbeat_s


@dataclass(frozen=True)
class Costs:
    """Unit costs of a record, in seconds and bytes."""

    put_bytes_per_s: float
    request_s: float
    """Of the coordinator's processor, one row a request."""
    batched_s: float
    """The same with `BATCH` rows a request."""
    heartbeat_s: float
    lease_s: float
    stream_bytes_per_s: float
    row_bytes: float


def costs(record: RunRecord, busy: RunRecord) -> Costs:
    """Raises ValueError if a record lacks one."""
    found = {
        "put": record.median("transfer", OURS, "dense_1", "put"),
        "request": busy.median("busy", OURS, f"tcp_rows_1_clients_{CLIENTS}", "server_cpu"),
        "batched": busy.median("busy", OURS, f"tcp_rows_{BATCH}_clients_{CLIENTS}", "server_cpu"),
        "heartbeat": busy.median("busy", OURS, "tcp_sessions", "heartbeat_server_cpu"),
        "lease": record.median("lease_cost", OURS, "resident_1000000", "lease_64"),
        "get": record.median("remote", OURS, "dense_1", "get"),
        "few": record.median("lease_cost", OURS, "resident_1000", "server_own"),
        "many": record.median("lease_cost", OURS, "resident_1000000", "server_own"),
    }
    missing = [name for name, value in found.items() if not value]
    if missing:
        raise ValueError(
            f"the records lack {', '.join(missing)}; make them with `make bench-quick` and `python -m bench.busy`"
        )
    known = {name: value or 0.0 for name, value in found.items()}
    return Costs(
        put_bytes_per_s=DENSE / known["put"],
        request_s=known["request"],
        batched_s=known["batched"],
        heartbeat_s=known["heartbeat"],
        lease_s=known["lease"],
        stream_bytes_per_s=DENSE / known["get"],
        row_bytes=(known["many"] - known["few"]) / (1_000_000 - 1_000),
    )


def units(found: Costs) -> str:
    """The unit costs as a table."""
    lines = [
        "| unit | measured |",
        "|---|---|",
        f"| put of 32 MiB into the arena, same machine | {found.put_bytes_per_s / GIB:.2f} GiB/s |",
        f"| get of 32 MiB over TCP, checksums included | {found.stream_bytes_per_s / GIB:.2f} GiB/s |",
        (
            f"| put, lease or ack of one row over tcp: processor of a coordinator with {CLIENTS} busy clients | "
            f"{found.request_s * 1e6:.0f} µs |"
        ),
        f"| the same of {BATCH} rows | {found.batched_s * 1e6:.0f} µs |",
        f"| heartbeat of a session, the same processor | {found.heartbeat_s * 1e6:.0f} µs |",
        f"| lease of 64 rows at 10⁶ resident rows, client included | {found.lease_s * 1e6:.0f} µs |",
        f"| ledger, per resident row | {found.row_bytes:.0f} bytes |",
    ]
    return "\n".join(lines)


def scaling(load: Load, found: Costs) -> str:
    """Bytes, messages and memory by number of nodes."""
    lines = [
        (
            "| nodes | rows/s | coordinators busy, 1 row a request | 4 rows a request | bytes/s in all | a shard's "
            "share of its put speed | bytes/s into one trainer node of 8 | its share of one stream | live bytes a node "
            "| ledger |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for nodes in NODES:
        rows = load.rows_per_s * nodes
        each = load.rows_per_s * load.bytes_per_row
        trainer = each * 8
        cells = (
            nodes,
            f"{rows:,.0f}",
            f"{busy(load, found, 1) * nodes:.1%}",
            f"{busy(load, found, BATCH) * nodes:.1%}",
            f"{each * nodes / MIB:,.0f} MiB",
            f"{each / found.put_bytes_per_s:.3%}",
            f"{trainer / MIB:,.1f} MiB",
            f"{trainer / found.stream_bytes_per_s:.2%}",
            f"{each * load.live_s / MIB:,.0f} MiB",
            f"{rows * load.live_s * found.row_bytes / MIB:,.0f} MiB",
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def busy(load: Load, found: Costs, rows: int, coordinators: int = 1) -> float:
    """Share of one of so many coordinators that a node takes, with one or with `BATCH` rows a put or update. Requests
    divide over the coordinators; heartbeats do not, since a queue has a session with each."""
    return requests(load, found, rows) / coordinators + load.heartbeats_per_s * found.heartbeat_s


def requests(load: Load, found: Costs, rows: int) -> float:
    """Share of one coordinator that the requests of a node take."""
    request_s = found.request_s if rows == 1 else found.batched_s
    return load.row_requests_per_s / rows * request_s + load.lease_requests_per_s * found.request_s


def verdict(load: Load, found: Costs, rows: int) -> str:
    """How many nodes one coordinator carries, and how many coordinators the largest cluster needs."""
    most, beats = int(BUSY_MAX / busy(load, found, rows)), load.heartbeats_per_s * found.heartbeat_s * NODES[-1]
    subject = (
        f"at {rows} row{'s' * (rows > 1)} a request one coordinator is {BUSY_MAX:.0%} busy at {most:,} nodes, and "
        f"{NODES[-1]:,} nodes"
    )
    if beats >= BUSY_MAX:
        return f"{subject} fit into no number of coordinators: heartbeats alone take {beats:.0%} of each"
    count = math.ceil(requests(load, found, rows) * NODES[-1] / (BUSY_MAX - beats))
    return (
        f"{subject} need {count} ({busy(load, found, rows, count) * NODES[-1]:.0%} each, {beats:.0%} of it heartbeats)"
    )


def markdown(record: RunRecord, busy_record: RunRecord) -> str:
    """Both tables, and what saturates first."""
    load, found = Load(), costs(record, busy_record)
    return "\n\n".join(
        [
            units(found),
            scaling(load, found),
            (
                f"Over tables that share nothing: {verdict(load, found, 1)}; {verdict(load, found, BATCH)}. "
                f"{found.row_bytes:.0f} bytes of ledger a row stand beside "
                f"{load.bytes_per_row / KIB:.0f} KiB of values. Records: commit {record.first.commit}, "
                f"{record.first.start[:10]}; requests: commit {busy_record.first.commit}, "
                f"{busy_record.first.start[:10]}, load {busy_record.first.load['start']:.0f} to "
                f"{busy_record.first.load['end']:.0f} on 2 cores."
            ),
        ]
    )


BATCH = 4
CLIENTS = 16


def newest_busy() -> Path:
    """The newest record of `bench.busy`. Raises FileNotFoundError if there is none."""
    found = sorted(RECORDS.glob("busy-*.json"))
    if not found:
        raise FileNotFoundError(f"no record in {RECORDS}; make one with `python -m bench.busy`")
    return found[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description="Estimate a cluster from the unit costs of a record.")
    parser.add_argument("record", nargs="?", type=Path)
    parser.add_argument("--busy", type=Path)
    parser.add_argument("--into", type=Path)
    chosen = parser.parse_args()
    text = markdown(load_run(chosen.record or newest()), load_run(chosen.busy or newest_busy()))
    if chosen.into:
        chosen.into.write_text(insert(chosen.into.read_text(), text))
    else:
        print(text)


if __name__ == "__main__":
    main()
