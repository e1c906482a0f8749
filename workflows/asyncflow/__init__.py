"""The service interface of AsyncFlow (arXiv 2507.01663, section 5): five calls on one table, sync and async."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transferqueue.lazy import lazy_names

if TYPE_CHECKING:
    from transferqueue.workflows.asyncflow.declaration import Engines, EngineStage, GroupSpec, PacingSpec
    from transferqueue.workflows.asyncflow.service import AsyncFlowService
    from transferqueue.workflows.asyncflow.service_aio import AsyncService

__all__ = ["AsyncFlowService", "AsyncService", "EngineStage", "Engines", "GroupSpec", "PacingSpec"]

__getattr__ = lazy_names(
    __name__,
    {
        "service": "AsyncFlowService",
        "service_aio": "AsyncService",
        "declaration": "Engines EngineStage GroupSpec PacingSpec",
    },
)
