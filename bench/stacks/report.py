"""What runs did, as lines for people and as results for a record."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

from bench.harness import Result
from bench.stacks.verl_job import Outcome

SCENARIO: Final = "stacks"
WORKLOAD: Final = "verl_sync"
LEARNED: Final = {
    "critic/rewards/mean": "reward",
    "response_length/mean": "response tokens",
    "actor/pg_loss": "policy loss",
    "actor/grad_norm": "gradient norm",
    "training/rollout_probs_diff_max": "greatest difference of log-probs, rollout and trainer",
}
"""verl's metrics of a step that tell whether it trained, and their names here."""
COMPARED: Final = ("critic/rewards/mean", "response_length/mean", "actor/pg_loss", "actor/grad_norm")
"""Metrics that are equal, but for rounding, whatever carries the rows."""
TIMES: Final = ("step", "gen", "old_log_prob", "ref", "adv", "update_actor", "update_weights")


def lines(outcome: Outcome) -> Iterator[str]:
    """The run, for people."""
    packages = Counter(recording.package for recording in outcome.recordings)
    yield f"{outcome.package}: exit code {outcome.exit_code}, {len(outcome.steps)} steps; log: {outcome.log}"
    for package, processes in packages.items():
        yield f"  {processes} processes imported {package} as transfer_queue"
    for number, step in enumerate(outcome.steps, start=1):
        learned = ", ".join(f"{name} {step[key]:.6g}" for key, name in LEARNED.items() if key in step)
        yield f"  step {number}: {learned}"
        times = ", ".join(f"{key} {step[f'timing_s/{key}']:.2f}" for key in TIMES if f"timing_s/{key}" in step)
        yield f"    seconds: {times}"
    for function, seconds in sorted(_seconds(outcome).items()):
        rows = sum(call.rows for each in outcome.recordings for call in each.calls if call.function == function)
        yield (
            f"  {function:18} {len(seconds):5} calls of {rows:6} keys, {sum(seconds):8.3f} s, "
            f"median {statistics.median(seconds) * 1e3:7.2f} ms"
        )


def difference(one: Outcome, other: Outcome) -> float:
    """The greatest relative difference of what two runs of one job learned. 1.0 if one has fewer steps."""
    if len(one.steps) != len(other.steps) or not one.steps:
        return 1.0
    return max(
        abs(a[key] - b[key]) / max(abs(a[key]), abs(b[key]), 1e-6)
        for a, b in zip(one.steps, other.steps, strict=True)
        for key in COMPARED
    )


def results(outcomes: Sequence[Outcome]) -> list[Result]:
    """Seconds by function of ``transfer_queue`` and by part of a step; what was learned; how much it differs."""
    found = [result for outcome in outcomes for result in _results(WORKLOAD, outcome)]
    if len(outcomes) == 2:
        found.append(Result(SCENARIO, "both", WORKLOAD, "difference", "ratio", [difference(*outcomes)]))
    return found


def _results(workload: str, outcome: Outcome) -> Iterator[Result]:
    for function, seconds in sorted(_seconds(outcome).items()):
        yield Result(SCENARIO, outcome.package, workload, function, "s", seconds)
    for key in TIMES:
        raw = [step[f"timing_s/{key}"] for step in outcome.steps if f"timing_s/{key}" in step]
        if raw:
            yield Result(SCENARIO, outcome.package, workload, f"step.{key}", "s", raw)
    for key, name in LEARNED.items():
        raw = [step[key] for step in outcome.steps if key in step]
        if raw:
            yield Result(SCENARIO, outcome.package, workload, name.replace(" ", "_"), "ratio", raw)


def _seconds(outcome: Outcome) -> dict[str, list[float]]:
    found: dict[str, list[float]] = defaultdict(list)
    for recording in outcome.recordings:
        for call in recording.calls:
            found[call.function].append(call.seconds)
    return found
