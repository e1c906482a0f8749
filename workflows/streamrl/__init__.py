"""The service of StreamRL (arXiv 2504.15930): `update(weights)`, `generate(prompts)` as a stream of samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transferqueue.lazy import lazy_names, renamed_names

if TYPE_CHECKING:
    from transferqueue.workflows.streamrl.dispatch import LengthRequests
    from transferqueue.workflows.streamrl.generator_process import serve
    from transferqueue.workflows.streamrl.service import CompletionStream, SamplesLost, StreamService, pacing
    from transferqueue.workflows.streamrl.service_aio import AsyncStream, AsyncStreamService

__all__ = [
    "AsyncStream",
    "AsyncStreamService",
    "CompletionStream",
    "LengthRequests",
    "SamplesLost",
    "StreamService",
    "pacing",
    "serve",
]

_lazy = lazy_names(
    __name__,
    {
        "service": "StreamService CompletionStream SamplesLost pacing",
        "service_aio": "AsyncStreamService AsyncStream",
        "generator_process": "serve",
        "dispatch": "LengthRequests",
    },
)
__getattr__ = renamed_names(__name__, {"Stream": "CompletionStream"}, otherwise=_lazy)
