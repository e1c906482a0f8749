"""vLLM as a producer: in process (`VllmGenerator`) or over HTTP (`VllmServer`), with weights from a channel of the
queue."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transferqueue.lazy import lazy_names

if TYPE_CHECKING:
    from transferqueue.adapters.vllm.engine import VllmGenerator
    from transferqueue.adapters.vllm.server import VllmServer

__all__ = ["VllmGenerator", "VllmServer"]

__getattr__ = lazy_names(__name__, {"engine": "VllmGenerator", "server": "VllmServer"})
