"""The generating processes of a run, added and removed by its settings, and their figures in the summary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from transferqueue.workflows.elastic.controller import ElasticController, ElasticTerms
from transferqueue.workflows.elastic.scaler import Scaler
from transferqueue.workflows.flow.flow import Observe
from transferqueue.workflows.flow.processes.stage_process import StageJob
from transferqueue.workflows.job import names
from transferqueue.workflows.job.settings.job import Job


class ElasticSummary(msgspec.Struct, frozen=True, kw_only=True):
    """How many generating processes there were. generators: mean over the measured steps. changes: each with step, by,
    why, generators (before it), and where a step decided delta_s, bound_s, generation_s, training_s and seconds.
    """

    generators: float
    changes: list[dict[str, Any]]

    def text(self) -> str:
        """Return one line."""
        changes = ", ".join(
            f"{change['generators']} → {change['generators'] + change['by']} at step {change['step']} ({change['why']})"
            for change in self.changes
        )
        return f"{self.generators:.2f} in the mean; {changes or 'no change'}"


def scaler_of(job: Job, processes: list[StageJob], observe: Observe) -> Scaler | None:
    """Return what adds and removes generating processes of a resolved job; None if their number is fixed."""
    elastic = job.elastic
    generating = [process for process in processes if process.name in (names.ROLLOUT, names.PLAY)]
    if not elastic.max or not generating:
        return None
    controller = ElasticController(ElasticTerms(min=elastic.min, max=elastic.max))
    return Scaler(controller, generating[-1], count=len(generating), observe=observe)


def elastic_summary(events: Iterable[Mapping[str, Any]]) -> ElasticSummary | None:
    """Return the summary of the values of a run's `ELASTIC` events; None if there are none.

    >>> changes = [{"step": 3, "by": 0, "generators": 1}]
    >>> changes += [{"step": 3, "by": 1, "why": "generation is slower", "generators": 1}]
    >>> elastic_summary(changes).text()
    '1.00 in the mean; 1 → 2 at step 3 (generation is slower)'
    """
    events = list(events)
    measured = [event["generators"] for event in events if not event["by"]]
    if not events:
        return None
    mean = sum(measured) / len(measured) if measured else float(events[-1]["generators"])
    return ElasticSummary(generators=round(mean, 2), changes=[dict(event) for event in events if event["by"]])
