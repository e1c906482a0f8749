"""The service interface of the AsyncFlow paper."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transferqueue.lazy import lazy_names

if TYPE_CHECKING:
    from transferqueue.workflows.asyncflow.declaration import Engines, EngineStage, Groups, Pace
    from transferqueue.workflows.asyncflow.service import Service
    from transferqueue.workflows.asyncflow.service_aio import AsyncService

__all__ = ["AsyncService", "EngineStage", "Engines", "Groups", "Pace", "Service"]

__getattr__ = lazy_names(
    __name__, {"service": "Service", "service_aio": "AsyncService", "declaration": "Engines EngineStage Groups Pace"}
)
