"""The reward of rows: the weighted sum of functions and models, each a term whose own score is kept.

1. A term gives each row a finite number, or NaN where it does not apply (None of a function). The reward is the sum of
   weight × score over the terms that apply.
2. A function that raises, or returns NaN, for a row is named with the row, its prompt and its completion.
   ``on_error="stop"`` ends the run; "drop" drops that row alone: the function is called again for each row by itself to
   find it. A function that returns the wrong number of scores always ends the run, and so does one that does not return
   within ``timeout_s``.
3. A row to which no term applies counts as a failure of all terms.
4. A score or reward beyond float32 ends the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from transferqueue.adapters.protocols import Ids
from transferqueue.adapters.stages.reward_functions import RewardFailed, load_reward
from transferqueue.errors import UsageError
from transferqueue.workflows.job.data.tokenizer import TextTokenizer
from transferqueue.workflows.job.reward_terms.functions import FunctionTerm, TimeLimit, no_limit
from transferqueue.workflows.job.reward_terms.reward_rows import Floats, RewardRows, RewardTerm
from transferqueue.workflows.job.reward_terms.term_names import term_names
from transferqueue.workflows.job.settings.job import Job, RewardSettings

DROPPED: Final = "reward_error"
"""Drop reason of rows whose reward failed."""


@dataclass(frozen=True, kw_only=True)
class RowScores:
    """Scores of rows. rewards: float32 ``[rows]``. terms: float32 ``[rows, terms]``, NaN where one does not apply.
    failed: rows to drop.

    failures: why, one text for each row that failed.
    """

    rewards: npt.NDArray[np.float32]
    terms: npt.NDArray[np.float32]
    failed: npt.NDArray[np.bool_]
    failures: tuple[str, ...] = ()


class RewardScorer:
    """The reward of a job, for training and for evaluation.

    names: of the terms, each once. limit: bounds each call of a function. Makes the functions and loads the models;
    raises as `load_reward` and `load_classifier` do.
    """

    def __init__(self, job: Job, tokenizer: TextTokenizer, *, limit: TimeLimit = no_limit) -> None:
        self._tokenizer = tokenizer
        self._settings = [reward for reward in job.reward if not reward.environment]
        self._terms = [
            _term(settings, f"reward.{at}", job, tokenizer, limit) for at, settings in enumerate(self._settings)
        ]
        self._weights_F = np.array([settings.weight for settings in self._settings])
        self.names = term_names(job)
        if not self._terms:
            raise UsageError('the job has no reward that scores rows: give reward = [{ function = "module:function" }]')

    def score(
        self,
        *,
        ids: Sequence[int],
        data: Sequence[Mapping[str, Any]],
        prompt_ids: Sequence[Ids],
        response_ids: Sequence[Ids],
    ) -> RowScores:
        """Return the scores of rows. Raises `RewardFailed` where a term fails and says "stop"; its text names the row
        and the failure."""
        rows = RewardRows(
            ids=ids, data=data, prompt_ids=prompt_ids, response_ids=response_ids, tokenizer=self._tokenizer
        )
        failures: dict[int, str] = {}
        terms_FB = np.stack([self._scores(term, at, rows, failures) for at, term in enumerate(self._terms)])
        self._check_scored(terms_FB, rows, failures)
        rewards_B = np.nansum(self._weights_F[:, None] * terms_FB, axis=0)
        self._check_size(np.maximum(np.abs(np.nan_to_num(terms_FB)).max(axis=0), np.abs(rewards_B)), rows)
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

    def _check_size(self, largest_B: Floats, rows: RewardRows) -> None:
        """Refuse rewards that are infinite as float32: the advantages of their groups, and then all weights, would be
        NaN."""
        for at in np.flatnonzero(largest_B > np.finfo(np.float32).max).tolist():
            raise RewardFailed(
                f"{rows.described(at)} got a reward or score of size {largest_B[at]:g} ({', '.join(self.names)}); "
                "float32 ends at 3.4e+38: scale it down",
                name=self.names[0],
                at=at,
            )


def _term(settings: RewardSettings, key: str, job: Job, tokenizer: TextTokenizer, limit: TimeLimit) -> RewardTerm:
    if settings.model:
        from transferqueue.workflows.job.reward_terms.models import ModelTerm  # loads torch

        return ModelTerm(settings, job, tokenizer)
    call = load_reward(settings.function, settings.args)
    return FunctionTerm(call, limit=limit, timeout_s=settings.timeout_s, key=key)


def _named(failure: RewardFailed, rows: RewardRows) -> RewardFailed:
    """Return the failure with its row, if it is of one."""
    at = 0 if len(rows) == 1 else failure.at
    text = f"{failure}; {rows.described(at)}" if at >= 0 else str(failure)
    return RewardFailed(text, name=failure.name, at=at, of_call=failure.of_call)
