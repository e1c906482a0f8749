"""Names of the reward terms of a job."""

from __future__ import annotations

from pathlib import Path

from transferqueue.workflows.job.settings.environment_factories import environments_of
from transferqueue.workflows.job.settings.job import Job


def term_names(job: Job) -> tuple[str, ...]:
    """Return the names of the terms that score rows, in the order of the column ``reward_terms``: a function's as the
    job has it, a model's by the last part of its path. A second one of a name gets a number. Those of several
    environments are their names."""
    if job.environment:
        return tuple(environments_of(job)) if len(job.environment) > 1 else ()
    seen: dict[str, int] = {}
    found = []
    for reward in job.reward:
        name = reward.function or Path(reward.model).name
        seen[name] = seen.get(name, 0) + 1
        found.append(name if seen[name] == 1 else f"{name} {seen[name]}")
    return tuple(found)
