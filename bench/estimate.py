"""What a whole cluster would ask of one coordinator and its shards, from the unit costs of a record.

    python -m bench.estimate [RECORD] [--life RECORD] [--busy RECORD] [--into bench/estimate.md]

The load is assumed, and said; the unit costs are measured: those of bytes in a run of `bench.run`, that of a row's
whole life in a record of `bench.row_life`, that of a heartbeat in one of `bench.busy`. Nothing else is: an estimate
says what saturates first, not how fast a cluster would be.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bench import row_life
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
    def heartbeats_per_s(self) -> float:
        """To each coordinator, as if no session said anything else."""
        return self.sessions / self.heartbeat_s


@dataclass(frozen=True)
class Costs:
    """Unit costs of a record, in seconds and bytes."""

    put_bytes_per_s: float
    life_s: Mapping[str, float]
    """Of the coordinator's processor for one row, by workload of `bench.row_life`."""
    heartbeat_s: float
    lease_s: float
    stream_bytes_per_s: float
    row_bytes: float


def costs(record: RunRecord, life: RunRecord, busy: RunRecord) -> Costs:
    """Raises ValueError if a record lacks one."""
    lives = {name: life.median(row_life.SCENARIO, OURS, name, "server_cpu") for name in workloads()}
    found = lives | {
        "put": record.median("transfer", OURS, "dense_1", "put"),
        "heartbeat": busy.median("busy", OURS, "tcp_sessions", "heartbeat_server_cpu"),
        "lease": record.median("lease_cost", OURS, "resident_1000000", "lease_64"),
        "get": record.median("remote", OURS, "dense_1", "get"),
        "few": record.median("lease_cost", OURS, "resident_1000", "server_own"),
        "many": record.median("lease_cost", OURS, "resident_1000000", "server_own"),
    }
    missing = [name for name, value in found.items() if not value]
    if missing:
        raise ValueError(
            f"the records lack {', '.join(missing)}; make them with `make bench-quick`, `python -m bench.row_life` and "
            "`python -m bench.busy --tcp`"
        )
    known = {name: value or 0.0 for name, value in found.items()}
    return Costs(
        put_bytes_per_s=DENSE / known["put"],
        life_s={name: known[name] for name in lives},
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
        f"| heartbeat of a session over tcp: processor of the coordinator | {found.heartbeat_s * 1e6:.0f} µs |",
        f"| lease of 64 rows at 10⁶ resident rows, client included | {found.lease_s * 1e6:.0f} µs |",
        f"| ledger, per resident row | {found.row_bytes:.0f} bytes |",
    ]
    return "\n".join(lines)


def lives(load: Load, found: Costs) -> str:
    """A row's whole life by way and place, and the nodes that it lets one coordinator carry."""
    lines = [
        (
            "| late columns | rows | requests a row | sparse | busy | nodes of one coordinator, or job | coordinators "
            f"of {NODES[-1]:,} nodes |"
        ),
        "|---|---|---|---|---|---|---|",
    ]
    for way, words in WAYS.items():
        for place in row_life.PLACES:
            cells = (
                words,
                place,
                f"{row_life.requests_of(way) / row_life.ROWS:.2f}",
                *(f"{found.life_s[f'{place}_{way}_{pace}'] * 1e6:.0f} µs" for pace in PACES),
                f"{int(BUSY_MAX / busy(load, found, life_s(found, place, way))):,}",
                coordinators(load, found, life_s(found, place, way)),
            )
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def scaling(load: Load, found: Costs) -> str:
    """Bytes, messages and memory by number of nodes."""
    lines = [
        (
            "| nodes | rows/s | coordinators busy, single updates | acks of single rows | of 8 rows | of 64 rows "
            "| bytes/s in all | a shard's share of its put speed | bytes/s into one trainer node of 8 | its share of "
            "one stream | live bytes a node | ledger |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for nodes in NODES:
        rows = load.rows_per_s * nodes
        each = load.rows_per_s * load.bytes_per_row
        trainer = each * 8
        cells = (
            nodes,
            f"{rows:,.0f}",
            *(f"{busy(load, found, life_s(found, 'remote', way)) * nodes:.1%}" for way in WAYS),
            f"{each * nodes / MIB:,.0f} MiB",
            f"{each / found.put_bytes_per_s:.3%}",
            f"{trainer / MIB:,.1f} MiB",
            f"{trainer / found.stream_bytes_per_s:.2%}",
            f"{each * load.live_s / MIB:,.0f} MiB",
            f"{rows * load.live_s * found.row_bytes / MIB:,.0f} MiB",
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def life_s(found: Costs, place: str, way: str) -> float:
    """Processor time of a row's whole life, of the dearer pace."""
    return max(found.life_s[f"{place}_{way}_{pace}"] for pace in PACES)


def busy(load: Load, found: Costs, life_s: float, coordinators: int = 1) -> float:
    """Share of one of so many coordinators that a node takes. Rows divide over the coordinators; heartbeats do not,
    since a queue has a session with each."""
    return load.rows_per_s * life_s / coordinators + load.heartbeats_per_s * found.heartbeat_s


def coordinators(load: Load, found: Costs, life_s: float) -> str:
    """How many coordinators the largest cluster needs, over tables that share nothing."""
    beats = load.heartbeats_per_s * found.heartbeat_s * NODES[-1]
    if beats >= BUSY_MAX:
        return f"no number: heartbeats alone take {beats:.0%} of each"
    count = math.ceil(load.rows_per_s * life_s * NODES[-1] / (BUSY_MAX - beats))
    return f"{count} ({busy(load, found, life_s, count) * NODES[-1]:.0%} each)"


def markdown(record: RunRecord, life_record: RunRecord, busy_record: RunRecord) -> str:
    """The tables, and what they are made of."""
    load, found = Load(), costs(record, life_record, busy_record)
    beats = load.heartbeats_per_s * found.heartbeat_s * NODES[-1]
    return "\n\n".join(
        [
            units(found),
            lives(load, found),
            scaling(load, found),
            (
                f"Coordinators are planned {BUSY_MAX:.0%} busy, at the dearer pace; {beats:.0%} of each are heartbeats "
                f"of {NODES[-1]:,} nodes. {found.row_bytes:.0f} bytes of ledger a row stand beside "
                f"{load.bytes_per_row / KIB:.0f} KiB of values. Records: {_made(record)}; a row's life: "
                f"{_made(life_record)}; heartbeats: {_made(busy_record)}."
            ),
        ]
    )


def _made(record: RunRecord) -> str:
    first = record.first
    return (
        f"commit {first.commit}, {first.start[:10]}, load {first.load['start']:.0f} to {first.load['end']:.0f} on "
        f"{first.machine['cores']} cores"
    )


WAYS = {
    row_life.UPDATES: "an update a row and column",
    row_life.way_of(1): "with acks of single rows",
    row_life.way_of(8): "with acks of 8 rows",
    row_life.way_of(64): "with acks of 64 rows",
}
"""Ways in which late columns come, in words."""
PACES = ("sparse", "busy")


def workloads() -> list[str]:
    """The workloads of `bench.row_life` that the estimate takes."""
    return [f"{place}_{way}_{pace}" for place in row_life.PLACES for way in WAYS for pace in PACES]


def newest_of(kind: str) -> Path:
    """The newest record of a scenario run by hand. Raises FileNotFoundError if there is none."""
    found = sorted(RECORDS.glob(f"{kind}-*.json"))
    if not found:
        raise FileNotFoundError(f"no record {kind}-*.json in {RECORDS}; make one with `python -m bench.{kind}`")
    return found[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description="Estimate a cluster from the unit costs of a record.")
    parser.add_argument("record", nargs="?", type=Path)
    parser.add_argument("--life", type=Path)
    parser.add_argument("--busy", type=Path)
    parser.add_argument("--into", type=Path)
    chosen = parser.parse_args()
    life, busy_record = chosen.life or newest_of("row-life"), chosen.busy or newest_of("busy")
    text = markdown(load_run(chosen.record or newest()), load_run(life), load_run(busy_record))
    if chosen.into:
        chosen.into.write_text(insert(chosen.into.read_text(), text))
    else:
        print(text)


if __name__ == "__main__":
    main()
