"""Our dispatch against random order over settings: `python -m transferqueue.workflows.sim.sweep RECORD.json`."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from transferqueue.workflows.sim.generation import (
    RANDOM_FIFO,
    Site,
    choose,
    generation_s,
    published_lengths,
    ranked,
    recall,
)

INSTANCES: Final = (2, 8)
SLOTS: Final = (8, 32, 128)
ROWS: Final = (128, 512)
NOISE: Final = (0.0, 0.25, 1.0)
"""0 is an oracle; 0.25 has about the published recall (0.87, 0.82, 0.76); 1 is a poor ranker."""
SEEDS: Final = 3
SEED: Final = 100
"""The first seed: others than those that `GAIN_MIN` was chosen with."""


def compare(site: Site, rows: int, noise: float, *, seeds: int = SEEDS) -> dict[str, Any]:
    """Means over ``seeds`` batches of published lengths: ours, random order, their ratio, recall at the top fifth."""
    ours, fifo, found = [], [], []
    for seed in range(SEED, SEED + seeds):
        rng = np.random.default_rng(seed)
        lengths = published_lengths(rows, rng)
        predicted = ranked(lengths, noise, rng)
        ours.append(generation_s(lengths, predicted, site, choose(predicted, site)))
        fifo.append(generation_s(lengths, predicted, site, RANDOM_FIFO))
        found.append(recall(lengths, predicted, 0.2))
    return {
        "instances": site.instances,
        "slots": site.slots,
        "rows": rows,
        "noise": noise,
        "recall": round(float(np.mean(found)), 3),
        "ours_s": round(float(np.mean(ours)), 1),
        "random_fifo_s": round(float(np.mean(fifo)), 1),
        "ratio": round(float(np.mean(ours) / np.mean(fifo)), 4),
        "ratio_worst_seed": round(max(a / b for a, b in zip(ours, fifo, strict=True)), 4),
    }


def sweep() -> list[dict[str, Any]]:
    """Every setting, once."""
    return [
        compare(Site(instances, slots), rows, noise)
        for instances, slots, rows, noise in product(INSTANCES, SLOTS, ROWS, NOISE)
    ]


def main() -> None:
    """Sweep, write the record, and say the range of the ratios."""
    found = sweep()
    Path(sys.argv[1]).write_bytes(
        msgspec.json.format(msgspec.json.encode({"kind": "dispatch-sweep", "settings": found}), indent=1) + b"\n"
    )
    for noise in NOISE:
        ratios = [one["ratio"] for one in found if one["noise"] == noise]
        sys.stdout.write(
            f"noise {noise}: ratio {min(ratios)} to {max(ratios)}, worst seed "
            f"{max(one['ratio_worst_seed'] for one in found if one['noise'] == noise)}\n"
        )


if __name__ == "__main__":
    main()
