"""The names of a job's environments, and how the process that hosts them makes each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from transferqueue.workflows.job.settings.job import EnvironmentSettings, Job


def environment_name(settings: EnvironmentSettings) -> str:
    """Return the name of an environment. Raises `ValueError` for a `url` that is no address.

    >>> environment_name(EnvironmentSettings(factory="games.py:guess"))
    'guess'
    >>> environment_name(EnvironmentSettings(url="http://127.0.0.1:8000"))
    '127-0-0-1'
    """
    named = settings.factory or settings.function or settings.agent
    host = re.sub(r"\W+", "-", urlsplit(settings.url).hostname or "", flags=re.ASCII).strip("-")
    return settings.name or named.rpartition(":")[2] or host


def environments_of(job: Job) -> dict[str, EnvironmentSettings]:
    """Return the environments of a job by their names, in the order of the file."""
    return {environment_name(each): each for each in job.environment}


def factory_of(settings: EnvironmentSettings) -> tuple[str, Mapping[str, Any]]:
    """Return the factory that makes such an environment, ``module:factory``, and its arguments."""
    if settings.function:
        return "transferqueue.workflows.job.reward_terms.one_turn:OneTurn", {
            "function": settings.function,
            "args": settings.args,
        }
    if settings.agent:
        return "transferqueue.adapters.stages.agent_environment:AgentEnvironment", {
            "agent": settings.agent,
            "args": settings.args,
        }
    if settings.url:
        return "transferqueue.adapters.stages.openenv:OpenEnv", {"url": settings.url, **settings.args}
    return settings.factory, settings.args
