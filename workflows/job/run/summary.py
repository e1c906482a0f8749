"""The summary of a run: results, speed, and where time went; as JSON and as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any, Final

import msgspec

from transferqueue.wire.answers.stats import TableStats
from transferqueue.workflows.flow.reports.audit import Audit
from transferqueue.workflows.flow.reports.weight_swaps import NO_SWAPS, Swaps, publish_lag_s, swaps_of
from transferqueue.workflows.job import names
from transferqueue.workflows.job.run.elastic import ElasticSummary, elastic_summary
from transferqueue.workflows.job.run.figures import Step, described, numbers
from transferqueue.workflows.job.run.record import RunRecord
from transferqueue.workflows.job.run.run_warnings import RunWarning
from transferqueue.workflows.job.settings.job import Job
from transferqueue.workflows.job.settings.plan_file import Predicted


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run, with the keys of ``summary.json``. Times are of the last start.

    Attributes:
        measure: What the evaluations measured on held-out prompts (`names.MEASURES`).
        before, after: Its mean at the two ends of the run; None: not evaluated.
        stopped: Why it took fewer steps than its job has.
        starts: How often the run was started.
        figures: Mean of each figure of a step (`run.figures`) over the first and over the last tenth of the steps.
        warnings: The rules of thumb that broke, in words.
        seconds: Of the whole start, with its processes' start and evaluations.
        trained_s: Of them from the trainer's first wait to its last step; the next four are over these.
        samples_per_s, tokens_per_s: Rows and tokens of responses a second, those that are trained again too.
        trainer_idle: Share of waiting for rows.
        busy: Share in which the processes of a task worked on rows.
        step_s: Median time from a step to the next.
        predicted: The prediction of the run's plan.
        staleness: Rows by versions behind when the trainer leased them.
        staleness_in_flight: The part of it up to the put, in versions since the row's (`pacing.staleness_of`).
        staleness_in_queue: The part of it after the put.
        token_staleness: Tokens of responses by versions behind then; empty for those whose versions are not known.
        publish_s: Median time of a publication.
        publish_lag_s: Median time from a publication until a generating process has loaded it.
        publications: What those of each trainer or rank (``train-0``, …) cost: their number (versions), bytes that it
            wrote and seconds that it stood still for one (means), and seconds from the update to the version that
            readers see, or to the rank's part of it (median).
        swaps: How long generation stood still for new weights (`flow.reports.weight_swaps`).
        failures: Calls of stages that raised.
        retried: Episodes of environments that failed and were tried again, by cause.
        prefilled_again: Tokens of running rows that engines in their processes read again because weights changed.
        aborted: Of a job that over-samples, how often a row was handed back because its batch was full (``rows``), and
            ``tokens`` that such rows had.
        dispatch: The last figures of the ranker (``recall_20``, ``recall_10``, ``recall_5`` of rows that it had not
            seen, ``skilled``, ``plans_in_order`` of ``plans``, ``why``); empty for rows in the given order.
        ranker: Each refit of the ranker, with the rows that it had learned from and its recall over `judged_rows` rows
            that finished since the refit before.
        elastic: How many generating processes there were; None if their number was fixed.
        uses: Of rows that are trained in several steps: for each use, by its task, the rows that were ``trained`` and
            those ``dropped`` before.
    """

    name: str
    kind: str
    mode: str
    seed: int
    steps: int
    starts: int
    measure: str
    before: float | None
    after: float | None
    seconds: float
    trained_s: float
    samples_per_s: float
    tokens_per_s: float
    trainer_idle: float | None
    busy: dict[str, float]
    publish_s: float | None
    staleness: dict[str, int]
    rows_put: int
    rows_done: int
    rows_dropped: dict[str, int]
    failures: dict[str, int]
    stopped: str = ""
    dispatch: dict[str, Any] = {}
    ranker: list[dict[str, Any]] = []
    publications: dict[str, dict[str, float]] = {}
    figures: dict[str, tuple[float, float]] = {}
    warnings: list[RunWarning] = []
    aborted: dict[str, int] = {}
    retried: dict[str, int] = {}
    prefilled_again: int = 0
    elastic: ElasticSummary | None = None
    uses: dict[str, dict[str, int]] = {}
    step_s: float | None = None
    predicted: Predicted | None = None
    staleness_in_flight: dict[str, int] = {}
    staleness_in_queue: dict[str, int] = {}
    token_staleness: dict[str, int] = {}
    publish_lag_s: float = 0.0
    swaps: Swaps = NO_SWAPS
    rows_unrecorded: int = 0

    def rows(self) -> list[tuple[str, str]]:
        """Return names and values of a table for people."""
        busy = ", ".join(f"{task} {share:.0%}" for task, share in self.busy.items())
        dropped = ", ".join(f"{rows:,} {reason}" for reason, rows in self.rows_dropped.items()) or "0"
        return [
            ("job", f"{self.name}: {self.kind}, {self.mode}, seed {self.seed}"),
            ("steps", _steps(self.steps, self.stopped, self.starts)),
            (f"held-out {self.measure}", _change(self.before, self.after)),
            ("seconds", f"{self.seconds:.1f}, {self.trained_s:.1f} of them training"),
            ("samples/s, tokens/s", f"{self.samples_per_s:,.1f}, {self.tokens_per_s:,.0f}"),
            ("trainer idle", "not reported" if self.trainer_idle is None else f"{self.trainer_idle:.0%}"),
            ("busy", busy or "not reported"),
            ("rows by staleness", _counts(self.staleness)),
            ("  of it in flight", _counts(self.staleness_in_flight)),
            ("  of it in the queue", _counts(self.staleness_in_queue)),
            ("tokens by staleness", _counts(self.token_staleness)),
            ("published → applied", _median(self.publish_lag_s)),
            *([("generation stood still", self.swaps.text())] if self.swaps.count else []),
            ("weights published in", _median(self.publish_s)),
            *([("weights by rank", _by_rank(self.publications))] if len(self.publications) > 1 else []),
            ("rows put / done / dropped", f"{self.rows_put:,} / {self.rows_done:,} / {dropped}"),
            *([("rows trained by use", _by_use(self.uses))] if self.uses else []),
            *([("rows in no file", f"{self.rows_unrecorded:,}; server.log says why")] if self.rows_unrecorded else []),
            *([("episodes tried again", _by_cause(self.retried))] if self.retried else []),
            *([("handed back at full batches", _aborted(self.aborted))] if self.aborted else []),
            *([("read again after updates", self._prefilled())] if self.prefilled_again else []),
            *([("dispatch by length", _dispatched(self.dispatch))] if self.dispatch else []),
            *([("recall by refit", text)] if (text := _recalled(self.ranker)) else []),
            *([("step, predicted", _compared(self.step_s, self.predicted.step_s))] if self.predicted else []),
            *([("generating processes", self.elastic.text())] if self.elastic else []),
            *((name, _ends(name, ends)) for name, ends in self.figures.items() if _is_drawn(name)),
            *(("warning", warning.text_of_all) for warning in self.warnings),
        ]

    def _prefilled(self) -> str:
        share = self.prefilled_again / max(1.0, self.tokens_per_s * self.trained_s)
        return f"{self.prefilled_again:,} tokens of running rows, {share:.0%} of the trained ones"

    def text(self) -> str:
        """Return the table as lines."""
        rows = self.rows()
        width = max(len(name) for name, _ in rows)
        return "".join(f"{name:<{width}}  {value}\n" for name, value in rows)


def summarize(
    record: RunRecord,
    job: Job,
    audit: Audit,
    *,
    starts: int,
    seconds: float,
    predicted: Predicted | None = None,
    table: TableStats | None = None,
) -> RunSummary:
    """Summarise a finished run; `audit` and `table` (its statistics) are of its table. predicted: by its plan."""
    generators, trainers = record.spans_of(names.ROLLOUT, names.PLAY), record.spans_of(names.TRAIN)
    trained_s = record.trained_s()
    stopped = 0 < len(record.steps) < job.steps and job.evaluation.patience > 0 and not job.data.epochs
    measure, before, after = evaluated(record.evaluations, stopped=stopped)
    idle = list(record.each("idle_s"))
    return RunSummary(
        name=job.name,
        kind=job.algorithm.kind,
        mode=job.pacing.mode,
        seed=job.seed,
        steps=len(record.steps),
        stopped=f"of {job.steps:,}: evaluation.patience={job.evaluation.patience}" if stopped else "",
        starts=starts,
        measure=measure,
        before=before,
        after=after,
        figures=figure_ends([record.steps[step] for step in sorted(record.steps)]),
        warnings=record.warnings.all,
        seconds=round(seconds, 2),
        trained_s=round(trained_s, 2),
        samples_per_s=round((record.sum_of("rows") + record.sum_of("reused_rows")) / max(trained_s, 1e-9), 2),
        tokens_per_s=round(record.sum_of("tokens") / max(trained_s, 1e-9), 1),
        trainer_idle=round(min(1.0, sum(idle) / max(trained_s, 1e-9)), 4) if idle else None,
        busy={task: round(share, 4) for task in _TASKS if (share := record.busy(task))},
        publish_s=round(median(record.publish_s), 5) if record.publish_s else None,
        staleness=record.staleness(),
        staleness_in_flight=table.staleness_in_flight if table else {},
        staleness_in_queue=table.staleness_in_queue if table else {},
        token_staleness=record.staleness("token_staleness"),
        rows_unrecorded=table.rows_unrecorded + table.rows_to_record if table else 0,
        publish_lag_s=publish_lag_s(generators, trainers),
        swaps=swaps_of(generators),
        rows_put=audit.put,
        rows_done=audit.done,
        rows_dropped=dict(audit.dropped),
        failures=dict(record.failures),
        dispatch=record.plans[-1] if record.plans else {},
        ranker=record.refits,
        publications=record.publication_costs(),
        aborted=dict(record.aborted),
        retried=dict(record.retried),
        prefilled_again=record.prefilled["tokens"],
        elastic=elastic_summary(record.elastic),
        uses=_uses(table, job) if table and job.pacing.uses > 1 else {},
        step_s=_rounded(record.step_s()),
        predicted=predicted,
    )


_TASKS: Final = (
    names.ROLLOUT,
    names.PLAY,
    names.REWARD,
    names.REFERENCE,
    names.PROXIMAL,
    names.VALUE,
    names.TEACHER,
    names.ADVANTAGE,
    names.TRAIN,
    names.TRAIN_CRITIC,
)


def evaluated(evaluations: list[dict[str, Any]], *, stopped: bool = False) -> tuple[str, float | None, float | None]:
    """Return the measures before the run and after it; None for a missing evaluation. stopped: the run ended early, so
    its last evaluation is the one after it.

    >>> before, after = {"when": "before", "reward": 0.25}, {"when": "after", "reward": 0.75}
    >>> evaluated([before, {"when": "during", "reward": 0.5}, after])
    ('reward', 0.25, 0.75)
    """
    at = {evaluation["when"]: evaluation for evaluation in reversed(evaluations) if evaluation.get("when") == "before"}
    at |= {evaluation["when"]: evaluation for evaluation in evaluations if evaluation.get("when") == "after"}
    if stopped and evaluations:
        at["after"] = max(evaluations, key=lambda evaluation: int(evaluation["step"]))
    measured = [name for name in names.MEASURES if any(name in evaluation for evaluation in at.values())]
    measure = next(iter(measured), names.MEASURES[0])
    before, after = (at.get(when, {}).get(measure) for when in ("before", "after"))
    return measure, _rounded(before), _rounded(after)


def figure_ends(steps: Sequence[Step]) -> dict[str, tuple[float, float]]:
    """Return the mean of each figure over the first and over the last tenth of the steps that have it.

    >>> figure_ends([{"step": 1, "reward": 0.25}, {"step": 2, "reward": 0.75}])["reward"]
    (0.25, 0.75)
    """
    by_step = [numbers(step) for step in steps]
    names = dict.fromkeys(name for found in by_step for name in found if name not in ("step", "version"))
    each = {name: [found[name] for found in by_step if name in found] for name in names}
    return {name: (_mean(values[: _tenth(values)]), _mean(values[-_tenth(values) :])) for name, values in each.items()}


def _tenth(values: Sequence[float]) -> int:
    return max(1, len(values) // 10)


def _is_drawn(name: str) -> bool:
    figure = described(name)
    return figure is not None and figure.curve


def _ends(name: str, ends: tuple[float, float]) -> str:
    figure = described(name)
    return f"{ends[0]:.4g} → {ends[1]:.4g}" + (f" {figure.unit}" if figure and figure.unit else "")


def _steps(steps: int, stopped: str, starts: int) -> str:
    return f"{steps:,} {stopped}".rstrip() + (f", in {starts} starts" if starts > 1 else "")


def _dispatched(figures: Mapping[str, Any]) -> str:
    """A ranker's recall and how often its order was used, in words."""
    recalled = [figures[name] for name in ("recall_20", "recall_10", "recall_5") if name in figures]
    recall = " / ".join(f"{share:.2f}" for share in recalled) or "not reported"
    return (
        f"recall {recall} at 20 / 10 / 5 % of {figures['judged_rows']:,} rows; {figures['plans_in_order']} of "
        f"{figures['plans']} batches in order of length; last: {figures['why']}"
    )


def _recalled(refits: Sequence[Mapping[str, Any]]) -> str:
    """Recall over time: of the first and of the last quarter of the refits that were judged, weighted by rows; empty
    without any."""
    judged = [refit for refit in refits if "recall_20" in refit]
    quarter = max(1, len(judged) // 4)
    if not judged:
        return ""
    first, last = (
        " / ".join(f"{_share(part, name):.2f}" for name in ("recall_20", "recall_10", "recall_5"))
        for part in (judged[:quarter], judged[-quarter:])
    )
    return (
        f"{first} → {last} at 20 / 10 / 5 %, first and last {quarter} of {len(judged)} refits, on rows not seen before"
    )


def _share(refits: Sequence[Mapping[str, Any]], name: str) -> float:
    rows = sum(int(refit["judged_rows"]) for refit in refits)
    return sum(float(refit[name]) * int(refit["judged_rows"]) for refit in refits) / rows


def _uses(table: TableStats, job: Job) -> dict[str, dict[str, int]]:
    tasks = (names.TRAIN, *names.further_uses(job.pacing.uses))
    return {task: {"trained": table.tasks[task].done, "dropped": table.tasks[task].dropped} for task in tasks}


def _by_use(uses: Mapping[str, Mapping[str, int]]) -> str:
    return ", ".join(f"{of['trained']:,} ({of['dropped']:,} dropped before)" for of in uses.values())


def _by_cause(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {cause}" for cause, count in sorted(counts.items()))


def _aborted(counts: Mapping[str, int]) -> str:
    return f"{counts['rows']:,} rows with {counts['tokens']:,} tokens, which others went on with"


def _by_rank(publications: Mapping[str, Mapping[str, float]]) -> str:
    return ", ".join(
        f"{label} {cost['bytes'] / 1e6:,.2f} MB, stood still {cost['stood_still_s'] * 1000:.1f} ms"
        for label, cost in publications.items()
    )


def _mean(values: Sequence[float]) -> float:
    return float(f"{fmean(values):.4g}")


def _rounded(value: object) -> float | None:
    return round(float(value), 4) if isinstance(value, int | float) else None


def _change(before: float | None, after: float | None) -> str:
    if before is None or after is None:
        return "not evaluated" if before is None and after is None else f"{before} → {after}"
    return f"{before:.3f} → {after:.3f}  ({after - before:+.3f})"


def _compared(measured: float | None, predicted: float) -> str:
    if measured is None:
        return f"not measured, {predicted:.3g} s"
    return f"{measured:.3g} s, {predicted:.3g} s  ({predicted / measured - 1:+.0%})"


def _counts(rows: Mapping[str, int]) -> str:
    return ", ".join(f"{versions}: {count:,}" for versions, count in rows.items()) or "none"


def _median(seconds: float | None) -> str:
    return "not reported" if seconds is None else f"{1000 * seconds:.1f} ms (median)"
