"""A reward function in TRL's form as a term of the reward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from transferqueue.adapters.stages.reward_functions import RewardCall
from transferqueue.workflows.job.data.prompt_data import PROMPT
from transferqueue.workflows.job.reward_terms.reward_rows import Floats, RewardRows

TimeLimit = Callable[[float, Callable[[], str]], AbstractContextManager[None]]
"""What bounds a call: a number of seconds, and the text if it is not enough."""


def no_limit(limit_s: float, described: Callable[[], str]) -> AbstractContextManager[None]:
    """Bound nothing: for callers that bound the call themselves."""
    return nullcontext()


class FunctionTerm:
    """A reward function in TRL's form. Columns of the data that a row lacks are None."""

    def __init__(self, call: RewardCall, *, limit: TimeLimit, timeout_s: float, key: str = "reward") -> None:
        self._call, self._limit = call, limit
        self._timeout_s, self._key = timeout_s, key

    @property
    def name(self) -> str:
        """The function's name."""
        return self._call.name

    def scores(self, rows: RewardRows) -> Floats:
        """Call the function with all rows."""
        columns = self.columns(rows)
        with self._limit(self._timeout_s, lambda: self._hangs(rows)):
            return self._call(columns, rows=len(rows))

    def columns(self, rows: RewardRows) -> dict[str, list[Any]]:
        """Return the arguments of the function for these rows."""
        call = self._call
        given: dict[str, Callable[[], list[Any]]] = {
            "prompts": lambda: rows.prompts,
            "completions": lambda: rows.completions,
            "completion_ids": lambda: [ids.tolist() for ids in rows.response_ids],
        }
        has = rows.data[0].keys() - {PROMPT}
        names = [*call.wants, *(name for name in call.takes if name in has), *(has if call.takes_all else ())]
        columns = {name: [data.get(name) for data in rows.data] for name in dict.fromkeys(names)}
        return columns | {name: make() for name, make in given.items() if call.takes_all or name in call.given}

    def _hangs(self, rows: RewardRows) -> str:
        return (
            f"reward {self.name} did not return within {self._key}.timeout_s={self._timeout_s:g} s for {len(rows)} "
            f"rows, the first being {rows.described(0)}; make it faster, or set a longer limit"
        )
