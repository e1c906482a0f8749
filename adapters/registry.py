"""Adapters by name: those of this package, and those that other packages register.

A package registers its adapter in its ``pyproject.toml``; it is imported only when `load` asks for it::

    [project.entry-points."transferqueue.adapters"]
    mine = "transferqueue_mine:MineGenerator"
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any, Final

from transferqueue.errors import NotFound, UsageError, listing

GROUP: Final = "transferqueue.adapters"
OURS: Final[Mapping[str, str]] = {
    "vllm": "transferqueue.adapters.vllm.engine:VllmGenerator",
    "vllm-server": "transferqueue.adapters.vllm.server:VllmServer",
    "sglang-server": "transferqueue.adapters.engines.sglang_server:SglangServer",
    "openai": "transferqueue.adapters.engines.openai:OpenAIGenerator",
    "transformers": "transferqueue.adapters.engines.transformers:TransformersGenerator",
    "torch": "transferqueue.adapters.trainers.learners:TorchLearner",
    "rewards": "transferqueue.adapters.stages.callables:Rewards",
    "agents": "transferqueue.adapters.stages.callables:Agents",
    "episodes": "transferqueue.adapters.stages.environments:Episodes",
    "nemo-rl": "transferqueue.adapters.trainers.nemo_rl:QueueDataPlaneClient",
}


def names() -> list[str]:
    """All registered names, sorted."""
    return sorted(_places())


def load(name: str) -> Any:
    """Import the class or function that is registered as `name`.

    Raises `NotFound` for an unknown name, and `UsageError` if the import fails because its engine is not installed.
    """
    places = _places()
    if name not in places:
        raise NotFound(f'no adapter "{name}" is registered; there are {listing(places)}')
    module, _, attribute = places[name].partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f'adapter "{name}" ({places[name]}) cannot be imported: {error}; install what it needs'
        ) from error


def _places() -> dict[str, str]:
    """Names of this package win over those of others, so that a name means the same everywhere."""
    return {point.name: point.value for point in entry_points(group=GROUP)} | dict(OURS)
