"""What a whole cluster would ask of one coordinator and its shards, from the unit costs of a record.

    python -m bench.estimate [RECORD] [--into bench/estimate.md]

The load is assumed, and said; the unit costs are measured. Nothing else is: an estimate says what saturates first, not how fast a
cluster would be.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from bench.figures import OURS
from bench.run_record import RunRecord, load_run
from bench.table import insert, newest
from bench.workloads import DENSE, KIB, MIB

GIB = 1 << 30
NODES = (8, 64, 1024)


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
    heartbeat_s: float = 1.0
    live_s: float = 600
    """From the put of a row to its end: two steps of training."""

    @property
    def rows_per_s(self) -> float:
        return self.tokens_per_s / self.tokens_per_row

    @property
    def bytes_per_row(self) -> float:
        return self.tokens_per_row * self.bytes_per_token

    @property
    def requests_per_s(self) -> float:
        leases = self.rows_per_s * self.tasks / self.rows_per_lease * self.requests_per_lease
        return self.rows_per_s * self.requests_per_row + leases + self.sessions / self.heartbeat_s


@dataclass(frozen=True)
class Costs:
    """Unit costs of a record, in seconds and bytes."""

    put_bytes_per_s: float
    request_s: float
    lease_s: float
    stream_bytes_per_s: float
    row_bytes: float


def costs(record: RunRecord) -> Costs:
    """Raises ValueError if the record lacks one."""
    found = {
        "put": record.median("transfer", OURS, "dense_1", "put"),
        "request": record.median("remote", OURS, "one_row", "small_put_local"),
        "lease": record.median("lease_cost", OURS, "resident_1000000", "lease_64"),
        "get": record.median("remote", OURS, "dense_1", "get"),
        "few": record.median("lease_cost", OURS, "resident_1000", "server_own"),
        "many": record.median("lease_cost", OURS, "resident_1000000", "server_own"),
    }
    missing = [name for name, value in found.items() if not value]
    if missing:
        raise ValueError(f"the record lacks {', '.join(missing)}; make one with `make bench-quick`")
    known = {name: value or 0.0 for name, value in found.items()}
    return Costs(
        put_bytes_per_s=DENSE / known["put"],
        request_s=known["request"],
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
        f"| a request and its answer: what one takes of the coordinator at most | {found.request_s * 1e6:.0f} µs |",
        f"| lease of 64 rows at 10⁶ resident rows, client included | {found.lease_s * 1e6:.0f} µs |",
        f"| ledger, per resident row | {found.row_bytes:.0f} bytes |",
    ]
    return "\n".join(lines)


def scaling(load: Load, found: Costs) -> str:
    """Bytes, messages and memory by number of nodes."""
    lines = [
        (
            "| nodes | rows/s | requests/s | coordinator busy | bytes/s in all | a shard's share of its put speed | "
            "bytes/s into one trainer node of 8 | its share of one stream | live bytes a node | ledger |"
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
            f"{load.requests_per_s * nodes:,.0f}",
            f"{load.requests_per_s * nodes * found.request_s:.1%}",
            f"{each * nodes / MIB:,.0f} MiB",
            f"{each / found.put_bytes_per_s:.3%}",
            f"{trainer / MIB:,.1f} MiB",
            f"{trainer / found.stream_bytes_per_s:.2%}",
            f"{each * load.live_s / MIB:,.0f} MiB",
            f"{rows * load.live_s * found.row_bytes / MIB:,.0f} MiB",
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def nodes_of_one_coordinator(load: Load, found: Costs, share: float = 0.5) -> int:
    """Nodes whose requests take `share` of a coordinator's time."""
    return int(share / (load.requests_per_s * found.request_s))


def markdown(record: RunRecord) -> str:
    """Both tables, and what saturates first."""
    load, found = Load(), costs(record)
    return "\n\n".join(
        [
            units(found),
            scaling(load, found),
            (
                f"One coordinator is half busy at {nodes_of_one_coordinator(load, found):,} nodes with one request for each row, and at "
                f"{nodes_of_one_coordinator(batched(load), found):,} where requests carry {BATCH} rows each. "
                f"{found.row_bytes:.0f} bytes of ledger a row stand beside "
                f"{load.bytes_per_row / KIB:.0f} KiB of values. Record: commit {record.first.commit}, {record.first.start[:10]}."
            ),
        ]
    )


BATCH = 16


def batched(load: Load) -> Load:
    """The same load where producers put, and stages update, some rows at a time."""
    return Load(requests_per_row=load.requests_per_row / BATCH)


def main() -> None:
    parser = argparse.ArgumentParser(description="Estimate a cluster from the unit costs of a record.")
    parser.add_argument("record", nargs="?", type=Path)
    parser.add_argument("--into", type=Path)
    chosen = parser.parse_args()
    text = markdown(load_run(chosen.record or newest()))
    if chosen.into:
        chosen.into.write_text(insert(chosen.into.read_text(), text))
    else:
        print(text)


if __name__ == "__main__":
    main()
