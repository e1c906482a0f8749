"""A flow of supervised stages: `Flow` runs them as processes, `run_on_ray` as Ray actors, `run_stage` in the calling
thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transferqueue.lazy import lazy_names

if TYPE_CHECKING:
    from transferqueue.workflows.flow.flow import Flow, StageFailed
    from transferqueue.workflows.flow.loop.runner import StageFailedInProcess, run_source, run_stage
    from transferqueue.workflows.flow.on_ray import run_on_ray
    from transferqueue.workflows.flow.reports.loggers import Logger, logged, logger_named
    from transferqueue.workflows.flow.stage import Context, Stage

__all__ = [
    "Context",
    "Flow",
    "Logger",
    "Stage",
    "StageFailed",
    "StageFailedInProcess",
    "logged",
    "logger_named",
    "run_on_ray",
    "run_source",
    "run_stage",
]

__getattr__ = lazy_names(
    __name__,
    {
        "flow": "Flow StageFailed",
        "stage": "Stage Context",
        "loop.runner": "run_source run_stage StageFailedInProcess",
        "on_ray": "run_on_ray",
        "reports.loggers": "Logger logged logger_named",
    },
)
