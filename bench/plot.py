"""Pictures of a run: bars against peers, curves over size, resident rows and clients; PNG and SVG.

python -m bench.plot [RECORD] [--folder bench/plots]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl

from bench.harness import ROOT
from bench.run_record import RunRecord, Summary, load_run
from bench.table import newest
from bench.workloads import WORKLOADS

mpl.use("agg")
import matplotlib.pyplot as plt

ORDER = ("transferqueue", "ray", "redis", "mp-queue", "incumbent", "incumbent-ray-store")
COLOURS = {
    "transferqueue": "#0b6e4f",
    "ray": "#4059ad",
    "redis": "#c84630",
    "mp-queue": "#8d99ae",
    "incumbent": "#e09f3e",
    "incumbent-ray-store": "#9e6b2f",
    "memcpy": "#222222",
}
BARS = ("dense_1", "dense_8", "dense_32", "dense_128", "ragged_1", "ragged_8", "ragged_32", "ragged_128")
OTHERS = ("ragged_bf16", "tokens", "two_of_32", "random_dense", "random_ragged", "text", "images", "shared_prompt")


def contenders(record: RunRecord, scenario: str) -> list[str]:
    """Those with a result in a scenario, ours first."""
    found = {result.contender for result in record.summaries if result.scenario == scenario}
    return [name for name in ORDER if name in found]


def speed(result: Summary | None) -> float:
    """GB/s of payload."""
    return result.nbytes / result.median / 1e9 if result and result.median else 0.0


def _bars(axes: Any, record: RunRecord, metric: str, workloads: tuple[str, ...]) -> None:
    names = contenders(record, "transfer")
    width = 0.8 / max(1, len(names))
    for at, name in enumerate(names):
        heights = [speed(record.find("transfer", name, workload, metric)) for workload in workloads]
        places = [number + (at - (len(names) - 1) / 2) * width for number in range(len(workloads))]
        axes.bar(places, heights, width, label=name, color=COLOURS[name])
    axes.set_xticks(range(len(workloads)), workloads, rotation=30, ha="right")
    axes.set(yscale="log", ylabel="GB/s of payload", title=metric)
    axes.grid(axis="y", alpha=0.3)


def peers(record: RunRecord, workloads: tuple[str, ...] = BARS) -> Any:
    """Throughput by contender. `get` alone says little where nothing is copied: `get_read` pays for the bytes."""
    figure, panels = plt.subplots(3, 1, figsize=(10, 12), layout="constrained")
    for axes, metric in zip(panels, ("put", "get_read", "through"), strict=True):
        _bars(axes, record, metric, workloads)
    panels[0].legend(ncols=3, fontsize=8)
    return figure


def other_workloads(record: RunRecord) -> Any:
    return peers(record, OTHERS)


def sizes(record: RunRecord) -> Any:
    """Throughput over the size of one dense field."""
    figure, panels = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    known = [workload for workload in WORKLOADS.values() if workload.name.startswith("size_")]
    for axes, metric in zip(panels, ("put", "get_read", "through"), strict=True):
        for name in contenders(record, "transfer"):
            points = [(w.nbytes, speed(record.find("transfer", name, w.name, metric))) for w in known]
            _curve(axes, [point for point in points if point[1]], name)
        copies = [r for r in record.summaries if r.key[:2] == ("limits", "memcpy") and r.metric == "copy"]
        _curve(axes, [(result.nbytes, speed(result)) for result in copies], "memcpy")
        axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="GB/s", title=metric)
    panels[0].legend(fontsize=8)
    return figure


def _curve(axes: Any, points: list[tuple[float, float]], name: str, style: str = "o-") -> None:
    if points:
        axes.plot(*zip(*sorted(points), strict=True), style, label=name, color=COLOURS.get(name), markersize=4)
        axes.grid(alpha=0.3)


def _numbered(record: RunRecord, scenario: str, metric: str, name: str) -> list[tuple[int, Summary]]:
    """Results whose workload ends in a number, such as resident_1000."""
    found = [r for r in record.summaries if (r.scenario, r.contender, r.metric) == (scenario, name, metric)]
    return [(int(result.workload.rpartition("_")[2]), result) for result in found]


def resident(record: RunRecord) -> Any:
    """Time to be given 64 rows, over the rows that are resident."""
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for name in contenders(record, "lease_cost"):
        points = _numbered(record, "lease_cost", "lease_64", name)
        _curve(axes, [(rows, result.median * 1e3) for rows, result in points], name)
    axes.set(xscale="log", yscale="log", xlabel="resident rows", ylabel="ms for 64 rows")
    axes.legend()
    return figure


def latency(record: RunRecord) -> Any:
    """Put to delivered, median and 99th percentile, over producers and consumers."""
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for name in contenders(record, "latency"):
        points = _numbered(record, "latency", "put_to_delivered", name)
        _curve(axes, [(pairs, result.median * 1e3) for pairs, result in points], name)
        slow = [
            (pairs, result.median * 1e3) for pairs, result in _numbered(record, "latency", "put_to_delivered_p99", name)
        ]
        _curve(axes, slow, name, "x:")
    axes.set(xscale="log", yscale="log", xlabel="producers, and as many consumers", ylabel="ms (o p50, x p99)")
    axes.legend(fontsize=8)
    return figure


PICTURES: dict[str, Callable[[RunRecord], Any]] = {
    "peers": peers,
    "other_workloads": other_workloads,
    "sizes": sizes,
    "resident_rows": resident,
    "latency": latency,
}


def draw(record: RunRecord, folder: Path) -> list[Path]:
    """Write every picture; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, picture in PICTURES.items():
        figure = picture(record)
        for ending in ("png", "svg"):
            path = folder / f"{name}.{ending}"
            figure.savefig(path, dpi=120, metadata={"Date": None} if ending == "svg" else None)
            files.append(path)
        plt.close(figure)
    return files


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("record", nargs="?", type=Path)
    parser.add_argument("--folder", type=Path, default=ROOT / "bench" / "plots")
    chosen = parser.parse_args()
    for path in draw(load_run(chosen.record or newest()), chosen.folder):
        print(path)


if __name__ == "__main__":
    main()
