"""An environment of one turn, whose reward a function in TRL's form gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transferqueue.adapters.stages.reward_functions import load_reward
from transferqueue.errors import UsageError
from transferqueue.workflows.job.data.prompt_data import PROMPT


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
        call, prompt = self._call, self._data.get(PROMPT)
        completion = [{"role": "assistant", "content": action}] if isinstance(prompt, list) else action
        has = self._data.keys() - {PROMPT}
        named = [*call.wants, *(name for name in call.takes if name in has), *(has if call.takes_all else ())]
        columns: dict[str, list[Any]] = {name: [self._data.get(name)] for name in dict.fromkeys(named)}
        given: dict[str, list[Any]] = {"prompts": [prompt], "completions": [completion]}
        columns |= {name: value for name, value in given.items() if call.takes_all or name in call.given}
        return None, float(call(columns, rows=1)[0]), True, False, {}

    def close(self) -> None:
        """Nothing."""
