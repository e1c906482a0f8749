"""An environment of one turn, whose reward a function in TRL's form gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transferqueue.adapters.stages.reward_functions import load_reward
from transferqueue.errors import UsageError
from transferqueue.workflows.job.data.prompt_data import PROMPT
from transferqueue.workflows.job.reward_terms.functions import arguments
from transferqueue.workflows.job.reward_terms.reward_rows import completion


class OneTurn:
    """Ends after the first turn. A function that does not apply (None) is an error: the row would have no reward.

    Args:
        function: ``module:function`` or ``file.py:function``.
        args: of it.
    """

    def __init__(self, function: str, args: Mapping[str, Any]) -> None:
        self._call = load_reward(function, args)
        if "completion_ids" in self._call.given and not self._call.takes_all:
            raise UsageError(f"environment function {function} takes completion_ids; of a turn it gets the text alone")
        self._data: Mapping[str, Any] = {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[None, dict[str, Any]]:
        """Take the row's data."""
        self._data = options or {}
        return None, {}

    def step(self, action: str) -> tuple[None, float, bool, bool, dict[str, Any]]:
        """Score the response."""
        prompt = self._data.get(PROMPT)
        given = {"prompts": lambda: [prompt], "completions": lambda: [completion(prompt, action)]}
        return None, float(self._call(arguments(self._call, [self._data], given), rows=1)[0]), True, False, {}

    def close(self) -> None:
        """Nothing."""
