"""The reward of rows: the weighted sum of functions and models, each a term whose own score is kept.

1. A term gives each row a finite number, or NaN where it does not apply (None of a function). The reward is the sum of
   weight × score over the terms that apply.
2. A function that raises, returns NaN, hangs or ends its process fails for the call's rows. While what failed may pass
   (`RewardFailed.may_pass`) they are tried again together, then each by itself, as `tries` says. A row that fails alone
   is named with its prompt and its completion: ``on_error="stop"`` ends the run, "drop" drops that row. A function that
   returns the wrong number of scores always ends the run.
3. A row to which no term applies counts as a failure of all terms.
4. A score or reward beyond float32 ends the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from transferqueue.adapters.protocols import Ids
from transferqueue.adapters.stages.reward_functions import RewardFailed
from transferqueue.errors import UsageError
from transferqueue.workflows.job.data.tokenizer import TextTokenizer
from transferqueue.workflows.job.reward_terms.function_process import FunctionProcess
from transferqueue.workflows.job.reward_terms.functions import FunctionTerm
from transferqueue.workflows.job.reward_terms.reward_rows import Floats, RewardRows, RewardTerm
from transferqueue.workflows.job.reward_terms.term_names import term_names
from transferqueue.workflows.job.reward_terms.tries import Tries
from transferqueue.workflows.job.settings.job import Job, RewardSettings

DROPPED: Final = "reward_error"
"""Drop reason of rows whose reward failed."""


@dataclass(frozen=True, kw_only=True)
class RowScores:
    """Scores of rows. rewards: float32 ``[rows]``. terms: float32 ``[rows, terms]``, NaN where one does not apply.
    failures: why, by the position of each row that failed.
    """

    rewards: npt.NDArray[np.float32]
    terms: npt.NDArray[np.float32]
    failures: Mapping[int, str]

    @property
    def failed(self) -> npt.NDArray[np.bool_]:
        """Whether a row failed: bool ``[rows]``."""
        return np.isin(np.arange(len(self.rewards)), list(self.failures))


class RewardScorer:
    """The reward of a job, for training and for evaluation. A context manager: leaving it ends the functions'
    processes.

    names: of the terms, each once. Starts the functions and loads the models; raises as `load_reward` and
    `load_classifier` do.
    """

    def __init__(self, job: Job, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._settings = list(job.reward)
        with ExitStack() as opened:
            self._terms = [
                _term(settings, f"reward.{at}", job, tokenizer, opened) for at, settings in enumerate(self._settings)
            ]
            self._opened = opened.pop_all()
        self._weights_F = np.array([settings.weight for settings in self._settings])
        self.names = term_names(job)
        if not self._terms:
            raise UsageError('the job has no reward that scores rows: give reward = [{ function = "module:function" }]')

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._opened.close()

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
        return RowScores(rewards=rewards_B.astype(np.float32), terms=terms_FB.T.astype(np.float32), failures=failures)

    def _scores(self, term: RewardTerm, at: int, rows: RewardRows, failures: dict[int, str]) -> Floats:
        tries, together = Tries(), True
        while together:
            try:
                return term.scores(rows)
            except RewardFailed as failure:
                if failure.of_call:
                    raise _named(failure, rows) from failure
                together = tries.failed(str(failure), may_pass=failure.may_pass) and failure.may_pass
            tries.pause()
        drop, scores_B = self._settings[at].on_error == "drop", np.full(len(rows), np.nan)
        for place in range(len(rows)):
            try:
                scores_B[place] = _score_of_row(term, rows.only(place), copy(tries))
            except RewardFailed as failure:
                if not drop or failure.of_call:
                    raise
                failures.setdefault(place, str(failure))
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


def _score_of_row(term: RewardTerm, row: RewardRows, tries: Tries) -> float:
    """Score a row by itself. tries: those that it had. Raises `RewardFailed`, which names it."""
    while True:
        try:
            return float(term.scores(row)[0])
        except RewardFailed as failure:
            if failure.of_call or not tries.failed(str(failure), may_pass=failure.may_pass):
                raise _named(failure, row) from failure
            tries.pause()


def _term(settings: RewardSettings, key: str, job: Job, tokenizer: TextTokenizer, opened: ExitStack) -> RewardTerm:
    if settings.model:
        from transferqueue.workflows.job.reward_terms.models import ModelTerm  # loads torch

        return ModelTerm(settings, job, tokenizer)
    process = FunctionProcess(settings.function, settings.args, timeout_s=settings.timeout_s, key=key)
    return FunctionTerm(opened.enter_context(process))


def _named(failure: RewardFailed, rows: RewardRows) -> RewardFailed:
    """Return the failure with its row, if it is of one."""
    at = 0 if len(rows) == 1 else failure.at
    text = f"{failure}; {rows.described(at)}" if at >= 0 else str(failure)
    return RewardFailed(text, name=failure.name, at=at, of_call=failure.of_call)
