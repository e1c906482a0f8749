"""Adapters by name: those of this package, and those that other packages register.

A package registers its adapter in its ``pyproject.toml``; it is imported only when `load` asks for it::

    [project.entry-points."transferqueue.adapters"]
    mine = "transferqueue_mine:MineGenerator"
"""

from __future__ import annotations

from typing import Any, Final

from transferqueue.errors import NotFound, listing
from transferqueue.lazy import Plugins

ADAPTERS: Final = Plugins(
    "transferqueue.adapters",
    {
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
    },
)


def names() -> list[str]:
    """Return all registered names, sorted."""
    return sorted(ADAPTERS.places)


def load(name: str) -> Any:
    """Import an adapter by its registered name.

    Args:
        name: such as ``"vllm"`` or ``"transformers"``.

    Returns:
        The class or function.

    Raises:
        NotFound: no adapter of this name is registered.
        UsageError: its engine is not installed.

    Example:
        >>> load("rewards").__name__
        'Rewards'
    """
    if name not in ADAPTERS.places:
        raise NotFound(f'no adapter "{name}" is registered; there are {listing(ADAPTERS.places)}')
    return ADAPTERS.load(name)
