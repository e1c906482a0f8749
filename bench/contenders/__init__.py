"""One file a contender: how to start it, put a batch into it, and get that batch in another process."""

from __future__ import annotations

from importlib import import_module
from typing import Final

from bench.contenders.base import Contender

MODULES: Final = {
    "transferqueue": "bench.contenders.ours",
    "incumbent": "bench.contenders.incumbent",
    "incumbent-ray-store": "bench.contenders.incumbent",
    "ray": "bench.contenders.ray_store",
    "mp-queue": "bench.contenders.mp_queue",
    "redis": "bench.contenders.redis_streams",
}
"""Contender name -> the module that holds it; imported only where it is used, since each has an environment."""


def contender(name: str) -> Contender:
    """The contender of that name."""
    return import_module(MODULES[name]).make(name)
