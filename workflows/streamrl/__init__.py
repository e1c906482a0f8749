"""The service of the StreamRL paper: `update(weights)` and `generate(prompts)`, which gives a stream of samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transferqueue.lazy import lazy_names

if TYPE_CHECKING:
    from transferqueue.workflows.streamrl.service import SamplesLost, Stream, StreamService
    from transferqueue.workflows.streamrl.service_aio import AsyncStream, AsyncStreamService

__all__ = ["AsyncStream", "AsyncStreamService", "SamplesLost", "Stream", "StreamService"]

__getattr__ = lazy_names(
    __name__, {"service": "StreamService Stream SamplesLost", "service_aio": "AsyncStreamService AsyncStream"}
)
