"""The service interface of AsyncFlow (arXiv 2507.01663, section 5): five calls on one table, sync and async."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transferqueue.lazy import lazy_names

if TYPE_CHECKING:
    from transferqueue.workflows.asyncflow.declaration import ColumnSpec, Engines, EngineStage, GroupSpec, PacingSpec
    from transferqueue.workflows.asyncflow.experience import AsyncExperienceStream, ExperienceIndex, ExperienceStream
    from transferqueue.workflows.asyncflow.service import AsyncFlowService, notice_of
    from transferqueue.workflows.asyncflow.service_aio import AsyncService
    from transferqueue.workflows.asyncflow.trainer import JobService, JobTrainer, Trainer

__all__ = [
    "AsyncExperienceStream",
    "AsyncFlowService",
    "AsyncService",
    "ColumnSpec",
    "EngineStage",
    "Engines",
    "ExperienceIndex",
    "ExperienceStream",
    "GroupSpec",
    "JobService",
    "JobTrainer",
    "PacingSpec",
    "Trainer",
    "notice_of",
]

__getattr__ = lazy_names(
    __name__,
    {
        "service": "AsyncFlowService notice_of",
        "service_aio": "AsyncService",
        "trainer": "JobService JobTrainer Trainer",
        "experience": "AsyncExperienceStream ExperienceIndex ExperienceStream",
        "declaration": "ColumnSpec Engines EngineStage GroupSpec PacingSpec",
    },
)
