"""Collects the events of a run's processes: files that grow while it runs, and the figures of the summary.

A step is completed when it arrives: its mappings become one figure each (``queue_age_s/train``), numbers that are not
finite become null, the speed of generation and the critic's newest figures are added, and rules of thumb are checked
(`run_warnings`).
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Final, Self, TextIO

import msgspec
from msgspec.structs import asdict, replace

from transferqueue.workflows.elastic.scaler import ELASTIC
from transferqueue.workflows.flow.events import PUBLISH, RESTART, WAIT, WORK, Event, Failure, Figures, TimeSpan
from transferqueue.workflows.flow.loop.full_batches import ABORTED
from transferqueue.workflows.flow.reports.chrome_trace import write_chrome_trace
from transferqueue.workflows.flow.reports.loggers import DISPATCH, EVALUATION, RANKER, STEP
from transferqueue.workflows.job import names, run_files
from transferqueue.workflows.job.run.figures import described
from transferqueue.workflows.job.run.run_warnings import RunWarning, RunWarnings
from transferqueue.workflows.job.run_files import EVALUATIONS, STEP_ROWS, STEPS, json_lines
from transferqueue.workflows.job.settings.job import Job
from transferqueue.workflows.job.settings.sizes import records_rows
from transferqueue.workflows.job.stages.failed_rows import FAILED_ROWS, FAILURES, RETRIED

ROWS_OF_STEP: Final = "step_rows"
"""Kind of the event with the rows of a step."""
SAMPLES: Final = "samples"
"""Kind of the event with sample responses."""
CHECKPOINT: Final = "checkpoint"
WARNING: Final = "warning"
"""Kind of the event that tells of trouble in words, of the supervisor."""
PUBLICATION: Final = "publication"
"""Kind of the event with the cost of a publication of weights for a rank of a trainer."""
SPANS_MAX: Final = 200_000
"""Spans that are kept for the timeline; of a longer run the last ones."""
_FILES: Final = {
    STEP: STEPS,
    EVALUATION: EVALUATIONS,
    SAMPLES: run_files.SAMPLES,
    ROWS_OF_STEP: STEP_ROWS,
    DISPATCH: "dispatch.jsonl",
    RANKER: "ranker.jsonl",
    ELASTIC: "elastic.jsonl",
    WARNING: "warnings.jsonl",
    FAILED_ROWS: "failed_rows.jsonl",
    RESTART: "restarts.jsonl",
}
_REMEDIES: Final = {FAILED_ROWS: "the row is dropped", RESTART: "it is started again"}
_OF_CRITIC: Final = ("loss", "value_error", "value_clipped", "gradient_norm", "lr")
_COUNTERS: Final = ("reward", "loss")


class RunRecord:
    """Collects the events of a run in `folder`, and goes on with what earlier starts of the run wrote there. A context
    manager.

    A step that is trained again, after a resume or the death of a trainer, replaces the one of the same number and all
    after it; an evaluation replaces that of the same step. So each is in its file once.
    """

    def __init__(self, folder: Path, job: Job) -> None:
        self._folder = folder
        self._files: dict[str, TextIO] = {}
        self._spans: deque[tuple[str, TimeSpan]] = deque(maxlen=SPANS_MAX)
        self._work_s: dict[str, float] = {}
        self.steps: dict[int, dict[str, Any]] = {int(step["step"]): step for step in self._earlier(STEP)}
        self._lists = {kind: list(self._earlier(kind)) for kind in (EVALUATION, DISPATCH, RANKER, ELASTIC)}
        self.evaluations, self.plans, self.refits, self.elastic = self._lists.values()
        self.checkpoints: list[int] = []
        self.failures: Counter[str] = Counter()
        self.aborted: Counter[str] = Counter()
        """Rows that generators handed back because their batch was full (``rows``), and their ``tokens`` so far, of
        this start."""
        self.retried: Counter[str] = Counter()
        """Episodes that failed and were tried again, by cause, of this start."""
        self.prefilled: Counter[str] = Counter()
        """``tokens`` of running rows that engines read again because weights changed, of this start; empty: no engine
        has reported any."""
        self._counters = {ABORTED: self.aborted, RETRIED: self.retried, names.PREFILLED: self.prefilled}
        self.publish_s: list[float] = []
        self.publications: dict[str, list[dict[str, Any]]] = {}
        self.started_s = self.ended_s = 0.0
        self.new_steps: list[int] = []
        self._job = job
        self.warnings = self._warnings()
        self._critic: dict[str, float] = {}
        """Figures of the critic's newest step."""
        self._retried_before: Counter[str] = Counter()
        """Those before the last step."""
        self._prefilled_before = 0
        """Tokens read again before the last step."""
        self._generated_s: dict[str, float] = {}
        """Seconds that each generating process worked since the last step."""

    def __enter__(self) -> Self:
        for kind, name in _FILES.items():
            if kind == (SAMPLES if records_rows(self._job) else ROWS_OF_STEP):
                continue  # a job has either
            self._files[kind] = _appended(self._folder / name)
        self._rewrite(STEP, self.steps.values())  # without what a killed process left of a line
        self._rewrite(EVALUATION, self.evaluations)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._files:
            self._files.popitem()[1].close()

    def add(self, label: str, event: Event) -> list[Event]:
        """Add an event of process `label`, and write it to its file. Returns it as it is recorded, and the warnings
        that it brings."""
        if isinstance(event, TimeSpan):
            self._span(label, event)
        elif isinstance(event, Failure):
            self.failures[label] += 1
        elif event.kind in (SAMPLES, ROWS_OF_STEP):
            for values in event.values.get("samples", [event.values]):
                self._write(event.kind, values)
        elif event.kind == FAILED_ROWS:
            return [event, *self._incidents(event.kind, event.at, event.values["rows"])]
        elif event.kind == RESTART:
            return [event, *self._incidents(event.kind, event.at, [event.values])]
        elif event.kind == PUBLICATION:
            self.publications.setdefault(label, []).append(event.values)
        elif event.kind in self._counters:
            self._counters[event.kind].update(event.values)
        elif event.kind == CHECKPOINT:
            self.checkpoints.append(int(event.values["step"]))
        elif event.kind == STEP:
            return self._step(event)
        elif event.kind == names.CRITIC_STEP:
            self._critic = critic_figures(event.values)
        elif event.kind == EVALUATION:
            self._evaluation(event.values | {"at": event.at})
        elif event.kind in self._lists:
            self._lists[event.kind].append(event.values | {"at": event.at})
            self._write(event.kind, event.values | {"at": event.at})
        return [event]

    def _step(self, event: Figures) -> list[Event]:
        generating = self._generated_s.values()
        generated_s = sum(generating) / len(generating) if generating else 0.0
        self._generated_s = {}
        added: dict[str, Any] = {"critic": self._critic, "retried": dict(self.retried - self._retried_before)}
        if self.prefilled:
            added["prefilled_again"] = self.prefilled["tokens"] - self._prefilled_before
            self._prefilled_before = self.prefilled["tokens"]
        rates = {"failure_rate": failure_rates({**event.values, **added})}
        values = completed({**event.values, **added, **rates}, generated_s) | {"at": event.at}
        self._retried_before = self.retried.copy()
        step = int(values["step"])
        if step <= max(self.steps, default=0):
            self.steps = {each: figures for each, figures in self.steps.items() if each < step}
            self.new_steps = [each for each in self.new_steps if each < step]
            self._rewrite(STEP, self.steps.values())
            self.warnings = self._warnings()
        self.steps[step] = values
        self.new_steps.append(step)
        self.ended_s = event.at
        self._write(STEP, values)
        return [replace(event, values=values), *self._told(self.warnings.see(values), event.at)]

    def _incidents(self, kind: str, at: float, incidents: Sequence[Mapping[str, Any]]) -> list[Event]:
        told: list[Event] = []
        for values in incidents:
            incident = {"step": self.warnings.newest + 1, **values}
            self._write(kind, incident)
            told += self._told(_noted(self.warnings, kind, incident), at)
        return told

    def _told(self, warnings: Sequence[RunWarning], at: float) -> list[Event]:
        """Write warnings, and return them as events."""
        told: list[Event] = []
        for warning in warnings:
            values = {"step": warning.last, "text": warning.text, **asdict(warning)}
            self._write(WARNING, values)
            told.append(Figures(kind=WARNING, at=at, values=values))
        return told

    def _warnings(self) -> RunWarnings:
        """The rules of thumb and incidents, as the steps and files so far have them."""
        warnings = RunWarnings(self._job)
        for number in sorted(self.steps):
            warnings.see(self.steps[number])
        for kind in _REMEDIES:
            for incident in self._earlier(kind):
                _noted(warnings, kind, incident)
        return warnings

    def _evaluation(self, values: dict[str, Any]) -> None:
        step = int(values["step"])
        if any(each["step"] == step for each in self.evaluations):
            self.evaluations[:] = [each for each in self.evaluations if each["step"] != step]
            self._rewrite(EVALUATION, self.evaluations)
        self.evaluations.append(values)
        self._write(EVALUATION, values)

    def _span(self, label: str, span: TimeSpan) -> None:
        self._spans.append((label, span))
        task = label.rpartition("-")[0]
        if span.name == WORK:
            self._work_s[label] = self._work_s.get(label, 0.0) + span.end - span.start
            if task in (names.ROLLOUT, names.PLAY):
                self._generated_s[label] = self._generated_s.get(label, 0.0) + span.end - span.start
        if task == names.TRAIN:
            if span.name == PUBLISH and label.endswith("-0"):
                self.publish_s.append(span.end - span.start)
            if span.name in (WAIT, WORK) and not self.started_s:
                self.started_s = span.start

    def spans_of(self, *tasks: str) -> list[list[TimeSpan]]:
        """Return the spans of each process of some tasks, in the order in which they ended."""
        found: dict[str, list[TimeSpan]] = {}
        for label, span in self._spans:
            if label.rpartition("-")[0] in tasks:
                found.setdefault(label, []).append(span)
        return list(found.values())

    def trained_s(self) -> float:
        """Seconds from the trainer's first wait for rows to its last step, of this start of the run."""
        first = self.steps[self.new_steps[0]] if self.new_steps else {}
        begin = self.started_s or float(first.get("at", 0.0)) - float(first.get("step_s", 0.0))
        return max(0.0, self.ended_s - begin)

    def busy(self, task: str) -> float:
        """Mean share of `trained_s` in which the processes of `task` worked on rows; 0 where none reported any.

        Calls of one process that overlap, as those of an engine with slots do, are added; a share is 1 at most.
        """
        worked = [seconds for label, seconds in self._work_s.items() if label.rpartition("-")[0] == task]
        trained_s = max(self.trained_s(), 1e-9)
        return sum(min(1.0, seconds / trained_s) for seconds in worked) / len(worked) if worked else 0.0

    def sum_of(self, name: str) -> float:
        """Sum of a figure over the steps of this start."""
        return sum(self.each(name))

    def each(self, name: str) -> Iterator[float]:
        """Yield a figure of each step of this start that has it."""
        for step in dict.fromkeys(self.new_steps):
            value = self.steps[step].get(name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                yield float(value)

    def publication_costs(self) -> dict[str, dict[str, float]]:
        """What publications of weights cost, by trainer or rank, of this start: see `RunSummary.publications`."""
        return {label: _costs(costs) for label, costs in sorted(self.publications.items())}

    def step_s(self) -> float | None:
        """Median seconds from a step of this start to the next; None with fewer than two."""
        ends = [float(self.steps[step]["at"]) for step in dict.fromkeys(self.new_steps)]
        gaps = [after - before for before, after in pairwise(ends)]
        return median(gaps) if gaps else None

    def staleness(self, figure: str = "staleness") -> dict[str, int]:
        """Rows by versions behind, over all steps; with the figure ``token_staleness`` tokens."""
        total: Counter[str] = Counter()
        for step in self.steps.values():
            total.update(step.get(figure, {}))
        return {versions: total[versions] for versions in sorted(total, key=int)}

    def write_timeline(self, path: Path) -> None:
        """Write the spans of all processes as a Chrome trace, with reward and loss as counters."""
        spans: dict[str, list[TimeSpan]] = {}
        for label, span in self._spans:
            spans.setdefault(label, []).append(span)
        counters = [
            Figures(kind=STEP, at=step["at"], values={name: step[name] for name in _COUNTERS if name in step})
            for step in (self.steps[number] for number in dict.fromkeys(self.new_steps))
        ]
        counters += [
            Figures(kind=ELASTIC, at=each["at"], values={"generators": each["generators"] + each["by"]})
            for each in self.elastic
        ]
        write_chrome_trace(path, spans, counters)

    def _earlier(self, kind: str) -> Iterator[dict[str, Any]]:
        """Yield what earlier starts wrote."""
        return json_lines(self._folder / _FILES[kind])

    def _rewrite(self, kind: str, lines: Iterable[Mapping[str, Any]]) -> None:
        """Replace a file that is written."""
        if kind in self._files:
            path = self._folder / _FILES[kind]
            partial = path.with_name(f"{path.name}.partial")
            partial.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
            partial.replace(path)
            self._files.pop(kind).close()
            self._files[kind] = _appended(path)

    def _write(self, kind: str, values: Mapping[str, Any]) -> None:
        if kind in self._files:
            self._files[kind].write(msgspec.json.encode(values).decode() + "\n")  # not finite: null
            self._files[kind].flush()


def _appended(path: Path) -> TextIO:
    """Open a file for further lines, and end one that a killed process left unfinished."""
    with path.open("ab+") as file:
        file.seek(max(0, file.tell() - 1))
        if file.read(1) not in (b"", b"\n"):
            file.write(b"\n")
    return path.open("a", encoding="utf-8")


def _noted(warnings: RunWarnings, kind: str, incident: Mapping[str, Any]) -> list[RunWarning]:
    remedy = incident.get("next", _REMEDIES[kind])
    return warnings.note(kind, incident["step"], incident["text"], remedy, cause=incident.get("cause", ""))


def completed(values: Mapping[str, Any], generated_s: float) -> dict[str, Any]:
    """Return the figures of a step as they are recorded. generated_s: mean time that a generating process worked for
    it; 0: not known.

    >>> completed({"step": 1, "loss": math.nan, "queue_age_s": {"train": 1.5}, "staleness": {"0": 2}}, 0.0)
    {'step': 1, 'loss': None, 'queue_age_s/train': 1.5, 'staleness': {'0': 2}}
    """
    flat: dict[str, Any] = {}
    for name, value in values.items():
        figure = described(name)
        if isinstance(value, Mapping) and not (figure and figure.by_value):
            flat |= {f"{name}/{part}": number for part, number in value.items()}
        else:
            flat[name] = value
    if generated_s > 0 and "length_mean" in flat:
        flat["generation_tokens_per_s"] = flat["length_mean"] * flat["rows"] / generated_s
    return {name: None if _is_not_finite(value) else value for name, value in flat.items()}


def failure_rates(values: Mapping[str, Any]) -> dict[str, float]:
    """Return by cause the share of the tries of a step's rows that failed for their reward or environment.

    >>> failure_rates({"rows": 8, "dropped": {"environment_died": 1, "stale": 3}, "retried": {"environment_died": 1}})
    {'environment_died': 0.2}
    """
    dropped = {cause: rows for cause, rows in values.get("dropped", {}).items() if cause.partition("/")[0] in FAILURES}
    failed = Counter(dropped) + Counter(values.get("retried", {}))
    tries = values.get("rows", 0) + failed.total()
    return {cause: round(count / tries, 6) for cause, count in sorted(failed.items())}


def critic_figures(values: Mapping[str, float]) -> dict[str, float]:
    """Return the figures of a critic's step that stand in the policy's, and the share of the returns' variance that its
    values explain.

    >>> step = {"value": 0.5, "return": 0.5, "return_squared": 0.5, "value_error": 0.0625, "loss": 0.03, "rows": 8}
    >>> critic_figures(step)
    {'loss': 0.03, 'value_error': 0.0625, 'explained_variance': 0.75}
    """
    variance = values["return_squared"] - values["return"] ** 2
    unexplained = values["value_error"] - (values["value"] - values["return"]) ** 2
    explained = {"explained_variance": 1 - unexplained / variance} if variance > 0 else {}
    return {name: values[name] for name in _OF_CRITIC if name in values} | explained


def _is_not_finite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _costs(publications: list[dict[str, Any]]) -> dict[str, float]:
    count = len(publications)
    return {
        "versions": count,
        "bytes": round(sum(each["bytes"] for each in publications) / count),
        "stood_still_s": round(sum(each["stood_still_s"] for each in publications) / count, 6),
        "seconds": round(median(each["seconds"] for each in publications), 6),
    }
