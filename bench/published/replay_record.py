"""Record and picture of a replay: its figures beside those computed from the digitised trace, and beside the paper's
own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bench.published import asyncflow_trace as trace
from bench.published.replay import Replayed
from transferqueue.observe.measurement_record import MeasuredResult, single

COMPUTED_S: Final = {"serial": 1743.0, "streaming": 872.0, "async": 776.0}
"""Seconds of an iteration of the 32B run on 512 NPUs, computed from service times that were digitised from figure 11.
The paper prints none of these numbers."""
PAPER_ABLATION: Final = {"streaming": 2.01, "async": 2.74}
"""Throughput over serial that the paper's own ablation states, of a 7B on 512 NPUs: with TransferQueue, and
asynchronous as well. Its service times are not published, so it cannot be replayed; the trace is of another model."""
ASSUMED: Final = (
    "simulated engines wait out the digitised service time; they compute nothing",
    "a quarter of the published instances and micro-batches; a row is a micro-batch of 8 samples, also in train",
    (
        "of the free instances of a stage, the one that has worked least takes the next row; each stage leases one row "
        "ahead"
    ),
    "a rollout instance finishes its rows evenly over its time",
    f"a row is seen {trace.LAG_S:.0f} s after it is finished, in every mode (first train start of the trace)",
    "reward and advantage need no accelerator: in serial mode they run beside rollout and reference",
    "a row carries 512 token ids: the replay measures order and waiting, not bytes",
)


def speedups(runs: Sequence[Replayed]) -> dict[str, dict[str, float]]:
    """Return the time of serial over that of each other mode: ours, computed from the digitised trace, and the paper's
    ablation.

    Empty without a serial run.
    """
    ours = {run.mode: run.iteration_s for run in runs}
    if "serial" not in ours:
        return {}
    return {
        mode: {
            "ours": round(ours["serial"] / took, 3),
            "computed": round(COMPUTED_S["serial"] / COMPUTED_S[mode], 3),
            "ablation": PAPER_ABLATION[mode],
        }
        for mode, took in ours.items()
        if mode != "serial"
    }


def results(runs: Sequence[Replayed]) -> list[MeasuredResult]:
    """Return the figures of each mode, and the speed-up over serial. Seconds are those of the trace."""
    measured = []
    for run in runs:
        measured += [
            single(f"{run.mode}/iteration", "s", run.iteration_s),
            single(f"{run.mode}/ideal_iteration", "s", run.ideal_iteration_s),
            single(f"{run.mode}/over_ideal", "ratio", run.overhead),
            single(f"{run.mode}/rows", "count", run.rows),
            *(single(f"{run.mode}/busy_spread/{stage}", "ratio", spread) for stage, spread in run.spread.items()),
        ]
    return measured + [
        single(f"{mode}/serial_over_this", "ratio", ratio["ours"]) for mode, ratio in speedups(runs).items()
    ]


def details(runs: Sequence[Replayed]) -> dict[str, Any]:
    """Return what the figures are compared with, and the assumptions of the replay."""
    return {
        "speed": runs[0].speed,
        "instances": trace.INSTANCES,
        "rows_per_iteration": trace.BATCH_ROWS,
        "computed_from_digitised_service_times_s": COMPUTED_S,
        "paper_ablation_7b_512_npus_over_serial": PAPER_ABLATION,
        "assumed": list(ASSUMED),
    }


def draw(path: Path, runs: Sequence[Replayed]) -> None:
    """Draw the services of every instance, one panel a mode, and the ratios as bars; needs matplotlib."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(runs) + 1, 1, figsize=(11, 2.6 * (len(runs) + 1)), layout="constrained")
    for panel, run in zip(axes, runs, strict=False):
        _timeline(panel, run)
    _bars(axes[-1], runs)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _timeline(panel: Any, run: Replayed) -> None:
    base = 0
    for number, (stage, services) in enumerate(run.timeline.items()):
        for instance in range(trace.INSTANCES[stage]):
            spans = [(start, end - start) for at, start, end in services if at == instance]
            panel.broken_barh(spans, (base + instance, 0.9), color=f"C{number}", label=stage if not instance else None)
        base += trace.INSTANCES[stage]
    panel.set(title=f"{run.mode}: {run.iteration_s:,.0f} s an iteration", xlabel="seconds of the trace", yticks=[])
    panel.legend(loc="upper right", fontsize=7)


def _bars(panel: Any, runs: Sequence[Replayed]) -> None:
    for at, run in enumerate(runs):
        panel.barh(
            at + 0.2,
            COMPUTED_S[run.mode],
            0.36,
            color="#8d99ae",
            label=None if at else "computed from the digitised trace",
        )
        panel.barh(at - 0.2, run.iteration_s, 0.36, color="#0b6e4f", label=None if at else "replayed")
    panel.set_yticks(range(len(runs)), [run.mode for run in runs])
    panel.set(xlabel="seconds an iteration")
    panel.legend(fontsize=7)
