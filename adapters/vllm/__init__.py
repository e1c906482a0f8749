"""vLLM as a producer: in process (`VllmGenerator`), over HTTP (`VllmServer`), and how weights reach it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transferqueue.lazy import lazy_names

if TYPE_CHECKING:
    from transferqueue.adapters.vllm.engine import VllmGenerator
    from transferqueue.adapters.vllm.server import VllmServer

__all__ = ["VllmGenerator", "VllmServer"]

__getattr__ = lazy_names(__name__, {"engine": "VllmGenerator", "server": "VllmServer"})
