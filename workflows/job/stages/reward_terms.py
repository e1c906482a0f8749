"""The reward of rows: the weighted sum of functions and models, each a term whose own score is kept.

Rules:

1. A term gives each row a finite number, or NaN where it does not apply (None of a function). The reward is the sum of weight × score over
   the terms that apply.
2. A function that raises, or returns NaN, for a row is named with the row, its prompt and its completion. ``on_error="stop"`` ends the run;
   "drop" drops that row alone: the function is called again for each row by itself to find it. A function that returns
   the wrong number of scores always ends the run, and so does one that does not return within ``timeout_s``.
3. A row to which no term applies counts as a failure of all terms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from transferqueue.adapters.protocols import Ids
from transferqueue.adapters.stages.reward_functions import RewardCall, RewardFailed, described_row, load_reward
from transferqueue.errors import UsageError
from transferqueue.workflows.job.data.prompt_data import PROMPT
from transferqueue.workflows.job.data.tokenizer import TextTokenizer
from transferqueue.workflows.job.settings.job import Job, RewardSettings

Floats = npt.NDArray[np.float64]
TimeLimit = Callable[[float, Callable[[], str]], AbstractContextManager[None]]
"""What bounds a call: a number of seconds, and the text if it is not enough."""


def no_limit(limit_s: float, described: Callable[[], str]) -> AbstractContextManager[None]:
    """Bound nothing: for callers that bound the call themselves."""
    return nullcontext()


@dataclass(frozen=True, kw_only=True)
class RewardRows:
    """Rows to score. ids: row ids, for messages. data: values of column ``data``. response_ids: int32 ``[T]`` each."""

    ids: Sequence[int]
    data: Sequence[Mapping[str, Any]]
    response_ids: Sequence[Ids]
    tokenizer: TextTokenizer

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.ids)

    @cached_property
    def texts(self) -> list[str]:
        """Texts of the responses, without special tokens."""
        return [self.tokenizer.decode(ids.tolist(), skip_special_tokens=True) for ids in self.response_ids]

    @cached_property
    def prompts(self) -> list[Any]:
        """Prompts as the data has them: texts, or lists of messages."""
        return [data[PROMPT] for data in self.data]

    @cached_property
    def completions(self) -> list[Any]:
        """Responses in the form of the prompt: a text, or a list with one message of the assistant."""
        return [
            [{"role": "assistant", "content": text}] if isinstance(prompt, list) else text
            for prompt, text in zip(self.prompts, self.texts, strict=True)
        ]

    def only(self, at: int) -> RewardRows:
        """Return one row."""
        here = slice(at, at + 1)
        return replace(self, ids=self.ids[here], data=self.data[here], response_ids=self.response_ids[here])

    def described(self, at: int) -> str:
        """Return a row for a message: its id, prompt and completion, shortened."""
        return f"row {self.ids[at]}, {described_row(self.prompts[at], self.completions[at])}"


class RewardTerm(Protocol):
    """One term of a reward."""

    @property
    def name(self) -> str:
        """Name for figures and messages."""

    def scores(self, rows: RewardRows) -> Floats:
        """Return float64 ``[rows]``; NaN where the term does not apply. Raises `RewardFailed`."""


# ---------------------------------------------------------------- functions


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
            f"reward {self.name} did not return within {self._key}.timeout_s={self._timeout_s:g} s for {len(rows)} rows, of which the first "
            f"is {rows.described(0)}; make it faster, or set a longer limit"
        )


# ---------------------------------------------------------------- all terms


@dataclass(frozen=True, kw_only=True)
class RowScores:
    """Scores of rows. rewards: float32 ``[rows]``. terms: float32 ``[rows, terms]``, NaN where one does not apply. failed: rows to drop.

    failures: why, one text for each row that failed.
    """

    rewards: npt.NDArray[np.float32]
    terms: npt.NDArray[np.float32]
    failed: npt.NDArray[np.bool_]
    failures: tuple[str, ...] = ()


class RewardScorer:
    """The reward of a job, for training and for evaluation.

    limit: bounds each call of a function. Makes the functions and loads the models; raises as `load_reward` and `load_classifier` do.
    """

    def __init__(self, job: Job, tokenizer: TextTokenizer, *, limit: TimeLimit = no_limit) -> None:
        self._tokenizer = tokenizer
        self._settings = [reward for reward in job.reward if not reward.environment]
        self._terms = [_term(settings, f"reward.{at}", limit) for at, settings in enumerate(self._settings)]
        self._weights_F = np.array([settings.weight for settings in self._settings])
        if not self._terms:
            raise UsageError('the job has no reward that scores rows: give reward = [{ function = "module:function" }]')

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the terms, each once: a second one of a name gets a number."""
        seen: dict[str, int] = {}
        names = []
        for term in self._terms:
            seen[term.name] = seen.get(term.name, 0) + 1
            names.append(term.name if seen[term.name] == 1 else f"{term.name} {seen[term.name]}")
        return tuple(names)

    def score(self, *, ids: Sequence[int], data: Sequence[Mapping[str, Any]], response_ids: Sequence[Ids]) -> RowScores:
        """Return the scores of rows. Raises `RewardFailed` where a term fails and says "stop"; its text names the row and what it says."""
        rows = RewardRows(ids=ids, data=data, response_ids=response_ids, tokenizer=self._tokenizer)
        failures: dict[int, str] = {}
        terms_FB = np.stack([self._scores(term, at, rows, failures) for at, term in enumerate(self._terms)])
        self._check_scored(terms_FB, rows, failures)
        rewards_B = np.nansum(self._weights_F[:, None] * terms_FB, axis=0)
        failed_B = np.isin(np.arange(len(rows)), list(failures))
        return RowScores(
            rewards=rewards_B.astype(np.float32),
            terms=terms_FB.T.astype(np.float32),
            failed=failed_B,
            failures=tuple(failures.values()),
        )

    def _scores(self, term: RewardTerm, at: int, rows: RewardRows, failures: dict[int, str]) -> Floats:
        try:
            return term.scores(rows)
        except RewardFailed as failure:
            drop = self._settings[at].on_error == "drop"
            if failure.of_call or (not drop and (failure.at >= 0 or len(rows) == 1)):
                raise _named(failure, rows) from failure
            return self._scores_by_row(term, rows, failures, drop=drop)

    def _scores_by_row(self, term: RewardTerm, rows: RewardRows, failures: dict[int, str], *, drop: bool) -> Floats:
        """Score each row by itself. Rows that fail are noted, or the first one ends the run."""
        scores_B = np.full(len(rows), np.nan)
        for at in range(len(rows)):
            try:
                scores_B[at] = term.scores(rows.only(at))[0]
            except RewardFailed as failure:
                named = _named(failure, rows.only(at))
                if not drop or failure.of_call:
                    raise named from failure
                failures.setdefault(at, str(named))
        return scores_B

    def _check_scored(self, terms_FB: Floats, rows: RewardRows, failures: dict[int, str]) -> None:
        for at in np.flatnonzero(np.isnan(terms_FB).all(0)).tolist():
            text = f"{rows.described(at)} got None from every reward ({', '.join(self.names)}); one must give a number"
            if not any(settings.on_error == "drop" for settings in self._settings):
                raise RewardFailed(text, name=self.names[0], at=at)
            failures.setdefault(at, text)


def _term(settings: RewardSettings, key: str, limit: TimeLimit) -> RewardTerm:
    call = load_reward(settings.function, settings.args)
    return FunctionTerm(call, limit=limit, timeout_s=settings.timeout_s, key=key)


def _named(failure: RewardFailed, rows: RewardRows) -> RewardFailed:
    """Return the failure with its row, if it is of one."""
    at = 0 if len(rows) == 1 else failure.at
    text = f"{failure}; {rows.described(at)}" if at >= 0 else str(failure)
    return RewardFailed(text, name=failure.name, at=at, of_call=failure.of_call)


DROPPED: Final = "reward_error"
"""Drop reason of rows whose reward failed."""
