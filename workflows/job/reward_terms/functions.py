"""A reward function in TRL's form as a term of the reward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transferqueue.adapters.stages.reward_functions import RewardCall
from transferqueue.workflows.job.data.prompt_data import PROMPT
from transferqueue.workflows.job.reward_terms.function_process import FunctionProcess
from transferqueue.workflows.job.reward_terms.reward_rows import Floats, RewardRows


class FunctionTerm:
    """A reward function in TRL's form. Columns of the data that a row lacks are None.

    Starts its process, and raises as `load_reward` does.
    """

    def __init__(self, process: FunctionProcess) -> None:
        self._process, self._call = process, process.parameters()

    @property
    def name(self) -> str:
        """The function's name."""
        return self._process.name

    def scores(self, rows: RewardRows) -> Floats:
        """Call the function with all rows."""
        return self._process.scores(self.columns(rows), len(rows))

    def columns(self, rows: RewardRows) -> dict[str, list[Any]]:
        """Return the arguments of the function for these rows."""
        given: dict[str, Callable[[], list[Any]]] = {
            "prompts": lambda: rows.prompts,
            "completions": lambda: rows.completions,
            "completion_ids": lambda: [ids.tolist() for ids in rows.response_ids],
        }
        return arguments(self._call, rows.data, given)


def arguments(
    call: RewardCall, data: Sequence[Mapping[str, Any]], given: Mapping[str, Callable[[], list[Any]]]
) -> dict[str, list[Any]]:
    """Return the arguments of a function for rows. data: values of column ``data``. given: makes those of `GIVEN`."""
    has = data[0].keys() - {PROMPT}
    names = [*call.wants, *(name for name in call.takes if name in has), *(has if call.takes_all else ())]
    columns = {name: [row.get(name) for row in data] for name in dict.fromkeys(names)}
    return columns | {name: make() for name, make in given.items() if call.takes_all or name in call.given}
