"""Stages around an engine: prompts, generation, rewards, agents and environments."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transferqueue.lazy import lazy_names

if TYPE_CHECKING:
    from transferqueue.adapters.stages.callables import Agents, Rewards
    from transferqueue.adapters.stages.environments import Episodes
    from transferqueue.adapters.stages.generation import Generate
    from transferqueue.adapters.stages.prompts import PromptSource
    from transferqueue.adapters.stages.recording_proxy import RecordingProxy
    from transferqueue.adapters.stages.trajectory import Trajectory

__all__ = ["Agents", "Episodes", "Generate", "PromptSource", "RecordingProxy", "Rewards", "Trajectory"]

__getattr__ = lazy_names(
    __name__,
    {
        "generation": "Generate",
        "callables": "Agents Rewards",
        "environments": "Episodes",
        "prompts": "PromptSource",
        "recording_proxy": "RecordingProxy",
        "trajectory": "Trajectory",
    },
)
