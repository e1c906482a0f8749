"""Inference engines as producers; vLLM has a package of its own (`adapters.vllm`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transferqueue.lazy import lazy_names

if TYPE_CHECKING:
    from transferqueue.adapters.engines.background_loop import BackgroundLoop
    from transferqueue.adapters.engines.completion import check_request, completed
    from transferqueue.adapters.engines.openai import OpenAIGenerator
    from transferqueue.adapters.engines.sampling import draw
    from transferqueue.adapters.engines.sglang_server import SglangServer
    from transferqueue.adapters.engines.transformers import TransformersGenerator

__all__ = [
    "BackgroundLoop",
    "OpenAIGenerator",
    "SglangServer",
    "TransformersGenerator",
    "check_request",
    "completed",
    "draw",
]

__getattr__ = lazy_names(
    __name__,
    {
        "openai": "OpenAIGenerator",
        "sglang_server": "SglangServer",
        "transformers": "TransformersGenerator",
        "completion": "check_request completed",
        "sampling": "draw",
        "background_loop": "BackgroundLoop",
    },
)
