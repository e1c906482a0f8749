"""The stages of the GRPO job that use the problems and need no tensor library: the source of prompts, and rewards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

import transferqueue as tq
from transferqueue.adapters.stages.generation import BEGUN
from transferqueue.workflows.flow.reports.audit import audit
from transferqueue.workflows.flow.stage import Context, Produce, Work
from transferqueue.workflows.grpo.job import JobSettings
from transferqueue.workflows.grpo.learning.problems import Problem, ProblemSet, Split, problem_set
from transferqueue.workflows.grpo.model.tokenizer import decode, encode_prompt

_WHOLE_LIMIT: Final = 2**63


class ProblemSource:
    """The source of prompts: groups of one prompt each, by ordinal, from a stream that the seed determines.

    It puts the known number of groups; or, if groups are replaced, puts until the trainer seals the table. A put holds whole
    groups, so the number of rows put tells a restarted source its next ordinal.
    """

    def __init__(self, settings: JobSettings, problems: ProblemSet, *, rows_put: int) -> None:
        self._settings = settings
        self._problems = problems
        self._ordinal = rows_put // settings.learning.group_size

    def wants(self) -> int:
        """Return the rows of the next put: the groups of one request to a rollout process, fewer at the end."""
        if self._settings.replaces:
            return self._settings.rows_per_put
        left = self._settings.groups_total - self._ordinal
        return min(self._settings.rows_per_put, self._settings.learning.group_size * left)

    def __call__(self, rows: int) -> Mapping[str, Any]:
        """Return the next groups: prompt and problem are stored once a group and shared by its rows."""
        size = self._settings.learning.group_size
        ordinals = range(self._ordinal, self._ordinal + rows // size)
        problems = [self._problem(ordinal) for ordinal in ordinals]
        self._ordinal = ordinals.stop
        counts = [size] * len(problems)
        begun = {
            name: tq.Repeat([np.empty(0, np.float32 if name == "begun_logprobs" else np.int32)] * len(problems), counts)
            for name in BEGUN * self._settings.in_parts
        }
        group_id = np.repeat(np.asarray(ordinals, dtype=np.int64), size)
        return {
            "prompt_ids": tq.Repeat([encode_prompt(problem.prompt) for problem in problems], counts),
            "problem": tq.Repeat([plain(problem) for problem in problems], counts),
            **begun,
            "group_id": group_id,
            "ordinal": group_id,
            "group_size": size,
        }

    def _problem(self, ordinal: int) -> Problem:
        return self._problems.problem(Split.TRAIN, seed=self._settings.learning.seed, ordinal=ordinal)


def plain(problem: Problem) -> dict[str, Any]:
    """Convert a problem to a plain value for a column; `problem_of` reads it.

    What a plain value cannot hold changes its type: tuples become lists, and integers beyond 64 bits become text (a
    problem's index in its data set is one; no scorer reads it).
    """
    return {"prompt": problem.prompt, "answer": problem.answer, "entry": _plain(problem.entry)}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, int) and not -_WHOLE_LIMIT <= value < _WHOLE_LIMIT:
        return str(value)
    return value


def problem_of(value: Mapping[str, Any]) -> Problem:
    """Return the problem that `plain` converted to `value`."""
    return Problem(prompt=value["prompt"], answer=value["answer"], entry=value["entry"])


@contextmanager
def prompts(context: Context) -> Iterator[Produce]:
    """Factory of the source of prompts."""
    settings = context.settings(JobSettings)
    yield ProblemSource(settings, problem_set(settings.learning.dataset), rows_put=audit(context.table).put)


@contextmanager
def reward(context: Context) -> Iterator[Work]:
    """Factory of ``reward``: the data set's own score of each response."""
    problems = problem_set(context.settings(JobSettings).learning.dataset)

    def score(batch: tq.Batch) -> Mapping[str, Any]:
        pairs = zip(batch["problem"].list(), batch["response_ids"], strict=True)
        scores = [problems.score(problem_of(value), decode(ids)) for value, ids in pairs]
        return {"rewards": np.asarray(scores, dtype=np.float32)}

    yield score
