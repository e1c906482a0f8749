"""Report of a run of the GRPO job: collected from its events; written as JSON, trace and picture."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

from transferqueue.errors import InternalError
from transferqueue.workflows.flow.events import PUBLISH, WAIT, WORK, Event, Figures, TimeSpan
from transferqueue.workflows.flow.loop.full_batches import ABORTED
from transferqueue.workflows.flow.reports.audit import Audit
from transferqueue.workflows.flow.reports.chrome_trace import busy_share, write_chrome_trace
from transferqueue.workflows.flow.reports.loggers import mean_staleness
from transferqueue.workflows.grpo.job import JobSettings
from transferqueue.workflows.grpo.weight_swaps import measure, publish_lag_s

BLUE, GREEN, ORANGE, GREY = "#2b6cb0", "#2f855a", "#c05621", "#a0aec0"
_COLOURS: Final = {"train": BLUE, "rollout": ORANGE, "reward": GREEN, "advantage": GREY}
_SMOOTH_STEPS = 10
_DOTS_PER_INCH = 130


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The result of a run, with the keys of ``summary.json``.

    seconds: the whole run, including start, warm-up and evaluations. samples_per_s: trained rows per second, from the
    trainer's first wait for rows to its last step. trainer_busy, rollout_busy: share of that time in which the
    trainer, or a rollout process on average, had a batch. heldout_reward_*: mean reward at temperature 1 on held-out
    problems; accuracy_*: share of right greedy answers. staleness_histogram: rows by the versions they were
    behind when the trainer leased them. staleness_in_flight: the part of it up to the put, in versions since a row's first
    token; staleness_in_queue: the part after the put. publish_lag_s: median time from a
    publication until a rollout process has loaded it. publish_s: median time of a publication; swaps, swap_s_max, gap_s_max and
    request_s: as `transferqueue.workflows.grpo.weight_swaps` defines them. rows_aborted,
    tokens_kept: responses stopped because their batch was full (a row may count several times), and the tokens that they had.
    """

    mode: str
    steps: int
    seconds: float
    samples_per_s: float
    heldout_reward_before: float
    heldout_reward_after: float
    accuracy_before: float
    accuracy_after: float
    trainer_busy: float
    rollout_busy: float
    staleness_histogram: dict[str, int]
    staleness_in_flight: dict[str, int]
    staleness_in_queue: dict[str, int]
    publish_lag_s: float
    publish_s: float
    swaps: int
    swap_s_max: float
    gap_s_max: float
    request_s: float
    rows_aborted: int
    tokens_kept: int
    rows_put: int
    rows_done: int
    rows_dropped: int

    def write(self, path: Path) -> None:
        """Write as JSON."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    def rows(self) -> list[tuple[str, str]]:
        """Return names and values of a table for people."""
        return [
            ("mode", self.mode),
            ("steps", f"{self.steps}"),
            ("seconds", f"{self.seconds:.1f}"),
            ("samples/s", f"{self.samples_per_s:,.0f}"),
            ("held-out mean reward", _change(self.heldout_reward_before, self.heldout_reward_after)),
            ("greedy accuracy", _change(self.accuracy_before, self.accuracy_after)),
            ("trainer busy", f"{self.trainer_busy:.0%}"),
            ("rollout busy", f"{self.rollout_busy:.0%}"),
            ("rows by staleness", _counts(self.staleness_histogram)),
            ("  of it in flight", _counts(self.staleness_in_flight)),
            ("  of it in the queue", _counts(self.staleness_in_queue)),
            ("published → applied", f"{1000 * self.publish_lag_s:.1f} ms (median)"),
            ("weights published in", f"{1000 * self.publish_s:.1f} ms (median)"),
            ("longest stop of a rollout", self._stop()),
            *self._aborted(),
            ("rows put / done / dropped", f"{self.rows_put:,} / {self.rows_done:,} / {self.rows_dropped:,}"),
        ]

    def _aborted(self) -> list[tuple[str, str]]:
        counts = f"{self.rows_aborted:,} rows, {self.tokens_kept:,} tokens kept"
        return [("stopped at a full batch", counts)] if self.rows_aborted else []

    def _stop(self) -> str:
        if not self.swaps:
            return "not told"
        return (
            f"{1000 * self.swap_s_max:.1f} ms to take weights ({1000 * self.gap_s_max:.1f} with waiting for rows); "
            f"a request takes {1000 * self.request_s:.1f} ms"
        )


def _counts(rows: Mapping[str, int]) -> str:
    return ", ".join(f"{versions}: {count:,}" for versions, count in rows.items()) or "none"


def _change(before: float, after: float) -> str:
    return f"{before:.3f} → {after:.3f}  ({after - before:+.3f})"


@dataclass
class RunLog:
    """All events of the processes of a run, by process."""

    spans: dict[str, list[TimeSpan]] = field(default_factory=dict)
    steps: list[Figures] = field(default_factory=list)
    aborted: Counter[str] = field(default_factory=Counter)
    evaluations: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, label: str, event: Event) -> None:
        """Add an event of process `label`."""
        if isinstance(event, TimeSpan):
            self.spans.setdefault(label, []).append(event)
        elif isinstance(event, Figures) and event.kind == "step":
            self.steps.append(event)
        elif isinstance(event, Figures) and event.kind == ABORTED:
            self.aborted.update(event.values)
        elif isinstance(event, Figures) and event.kind == "evaluation":
            self.evaluations[event.values["when"]] = event.values

    def of_stage(self, name: str) -> list[list[TimeSpan]]:
        """Return the spans of each process of a stage."""
        return [spans for label, spans in self.spans.items() if label.rpartition("-")[0] == name]

    def training_time(self) -> tuple[float, float]:
        """Return the trainer's first wait for rows and the end of its last step, in monotonic seconds."""
        trained = [span for spans in self.of_stage("train") for span in spans if span.name in (WAIT, WORK)]
        return min((span.start for span in trained), default=0.0), max((span.end for span in trained), default=0.0)

    def publish_s(self) -> float:
        """Return the median duration of a publication of weights, in seconds; 0 without any."""
        spans = (span for spans in self.of_stage("train") for span in spans if span.name == PUBLISH)
        seconds = [span.end - span.start for span in spans]
        return median(seconds) if seconds else 0.0

    def staleness(self) -> dict[str, int]:
        """Return the number of rows by versions behind."""
        total: Counter[str] = Counter()
        for step in self.steps:
            total.update(step.values["staleness"])
        return {versions: total[versions] for versions in sorted(total, key=int)}


def summarize(
    record: RunLog, settings: JobSettings, audit: Audit, *, table: Mapping[str, Any], seconds: float
) -> Summary:
    """Summarise a finished run; `audit` and `table` (stats) are of its table. Raises `InternalError` if an evaluation is missing."""
    missing = [when for when in ("before", "after") if when not in record.evaluations]
    if missing:
        raise InternalError(
            f"the run ended without an evaluation {' and '.join(missing)}; it told of {len(record.steps)} steps"
        )
    before, after = record.evaluations["before"], record.evaluations["after"]
    start, end = record.training_time()
    rollouts = [busy_share(spans, start, end) for spans in record.of_stage("rollout")]
    trainers = [busy_share(spans, start, end) for spans in record.of_stage("train")]
    swaps = measure(record.of_stage("rollout"))
    return Summary(
        mode=settings.mode,
        steps=len(record.steps),
        seconds=round(seconds, 2),
        samples_per_s=round(sum(step.values["rows"] for step in record.steps) / max(end - start, 1e-9), 1),
        heldout_reward_before=round(before["reward"], 4),
        heldout_reward_after=round(after["reward"], 4),
        accuracy_before=round(before["accuracy"], 4),
        accuracy_after=round(after["accuracy"], 4),
        trainer_busy=round(sum(trainers) / max(1, len(trainers)), 4),
        rollout_busy=round(sum(rollouts) / max(1, len(rollouts)), 4),
        staleness_histogram=record.staleness(),
        staleness_in_flight=table["staleness_in_flight"],
        staleness_in_queue=table["staleness_in_queue"],
        publish_lag_s=publish_lag_s(record.of_stage("rollout"), record.of_stage("train")),
        publish_s=round(record.publish_s(), 4),
        swaps=swaps.count,
        swap_s_max=swaps.swap_s_max,
        gap_s_max=swaps.gap_s_max,
        request_s=swaps.request_s,
        rows_aborted=record.aborted["rows"],
        tokens_kept=record.aborted["tokens"],
        rows_put=audit.put,
        rows_done=audit.done,
        rows_dropped=audit.dropped_rows,
    )


def write_files(directory: Path, record: RunLog, summary: Summary) -> list[Path]:
    """Write ``summary.json``, ``steps.jsonl``, ``timeline.json`` and ``learning.png`` into ``directory``; return their paths."""
    paths = [directory / name for name in ("summary.json", "steps.jsonl", "timeline.json", "learning.png")]
    summary.write(paths[0])
    paths[1].write_text("".join(json.dumps(step.values) + "\n" for step in record.steps), encoding="utf-8")
    write_timeline(paths[2], record)
    draw(paths[3], record, summary)
    return paths


def write_timeline(path: Path, record: RunLog) -> None:
    """Write the spans of all processes as a Chrome trace, with reward and loss of each step as counters."""
    shown = ("reward", "loss")
    counters = [
        Figures(kind=step.kind, at=step.at, values={name: step.values[name] for name in shown if name in step.values})
        for step in record.steps
    ]
    write_chrome_trace(path, record.spans, counters)


def draw(path: Path, record: RunLog, summary: Summary) -> None:
    """Draw the learning curve: reward of each step, held-out reward before and after, staleness, age of queues, throughput."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 8.5), layout="constrained")
    FigureCanvasAgg(figure)
    reward, staleness, age, speed = figure.subplots(4, 1, sharex=True, height_ratios=(3, 1, 1, 1))
    steps = [step.values["step"] for step in record.steps]
    _draw_reward(reward, steps, [step.values["reward"] for step in record.steps], summary)
    staleness.step(
        steps, [mean_staleness(step.values["staleness"]) for step in record.steps], where="mid", color=ORANGE
    )
    staleness.set_ylabel("staleness\n(versions)")
    staleness.set_ylim(bottom=-0.05)
    _draw_ages(age, steps, [step.values.get("queue_age_s", {}) for step in record.steps])
    speed.plot(steps, _rows_per_s(record), color=BLUE, linewidth=1)
    speed.set_ylabel("rows/s")
    speed.set_ylim(bottom=0)
    speed.set_xlabel("trainer step")
    for axes in (reward, staleness, age, speed):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e2e8f0", linewidth=0.7)
    figure.savefig(path, dpi=_DOTS_PER_INCH)


def _draw_reward(axes: Any, steps: list[int], rewards: list[float], summary: Summary) -> None:
    axes.plot(steps, rewards, color=GREY, linewidth=0.8, label="reward of the step's rows")
    axes.plot(steps, _smooth(rewards), color=BLUE, linewidth=2, label=f"mean of {_SMOOTH_STEPS} steps")
    ends = [0, max(steps, default=1)]
    held_out = [summary.heldout_reward_before, summary.heldout_reward_after]
    axes.plot(ends, held_out, "o", color=GREEN, markersize=8, label="held-out reward, temperature 1")
    for step, value in zip(ends, held_out, strict=True):
        axes.annotate(
            f"{value:.3f}", (step, value), textcoords="offset points", xytext=(0, 9), ha="center", color=GREEN
        )
    axes.set_ylabel("mean reward")
    gain = summary.heldout_reward_after - summary.heldout_reward_before
    axes.set_title(f"GRPO, {summary.mode}: held-out reward {gain:+.3f} in {summary.steps} steps", loc="left")
    axes.legend(frameon=False, loc="lower right")


def _draw_ages(axes: Any, steps: list[int], ages: list[Mapping[str, float | None]]) -> None:
    """Draw a line for each task that rows waited for, with gaps where none did. While the trainer warms up, the first rows wait."""
    for task in dict.fromkeys(task for of_step in ages for task, age in of_step.items() if age):
        of_task = [of_step.get(task) or math.nan for of_step in ages]
        axes.plot(steps, of_task, linewidth=1, marker=".", markersize=3, label=task, color=_COLOURS.get(task))
    axes.set_yscale("log")
    if axes.lines:
        axes.legend(frameon=False, loc="upper right", ncols=len(axes.lines))
    axes.set_ylabel("queue age\n(s)")


def _smooth(values: list[float]) -> list[float]:
    windows = (values[max(0, end - _SMOOTH_STEPS) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]


def _rows_per_s(record: RunLog) -> list[float]:
    ends = [record.training_time()[0], *(step.at for step in record.steps)]
    return [step.values["rows"] / max(ends[i + 1] - ends[i], 1e-9) for i, step in enumerate(record.steps)]
