"""The state of dispatch by length: a ranker, its accuracy, and the plan of the next batch. Without I/O.

1. `expect` gives rows their expected tokens, before they are generated; `learn` gets the same rows when they are
   finished. Recall, skill and the ratios of actual to expected lengths are over the last `window` finished rows that
   had a prediction.
2. `refit` is due after `refit_rows` rows; it may run in its own thread (`LengthRanker`, rule 3). Each refit reports the
   recall over the rows that finished since the previous one, predicted by earlier fits. So recalls of different refits
   are over different rows.
3. A plan is made for each batch. While the ranker has no skill, the plan is the given order; predictions continue, to
   measure skill.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from transferqueue.errors import UsageError
from transferqueue.workflows.dispatch.ranker import LengthRanker
from transferqueue.workflows.dispatch.ranker_accuracy import SHARES, RankerAccuracy, accuracy_of
from transferqueue.workflows.planner.batch_plan import EngineReport, Plan, plan_batch
from transferqueue.workflows.planner.engine_times import Lengths

WINDOW_MIN: Final = 256
"""Rows of the window at least; two batches if that is more."""
REFIT_ROWS_MIN: Final = 32
"""Rows between two refits at least; those of a batch if that is more. A refit takes some 40 ms of a core."""
REFITS_KEPT: Final = 64
"""The latest refits, whose recall is kept."""


class Expected(msgspec.Struct, frozen=True):
    """Expected tokens of rows, int64 ``[rows]`` (0: none), and the version of the ranker that predicted them (0:
    untrained).
    """

    tokens: Lengths
    version: int


class Refit(msgspec.Struct, frozen=True, kw_only=True):
    """A refit: its version, the rows that the ranker has learned from, and the recall at 20, 10 and 5 % over
    `judged_rows` rows that finished since the refit before (empty: none had a prediction).
    """

    version: int
    rows: int
    judged_rows: int
    recall: tuple[float, ...]

    def figures(self) -> dict[str, Any]:
        """Return the refit under the names of figures."""
        return {
            "ranker_version": self.version,
            "rows": self.rows,
            "judged_rows": self.judged_rows,
            **_recalls(self.recall),
        }


class LengthDispatcher:
    """Ranks rows, learns from finished ones, and plans batches. batch_rows: rows of a batch. overlapping: the next
    batch may start before one has ended (`plan`, rule 5).

    >>> dispatcher = LengthDispatcher(batch_rows=64)
    >>> dispatcher.expect([[1, 2, 3]])
    Expected(tokens=array([0]), version=0)
    >>> dispatcher.plan(np.zeros(1, np.int64), []).why
    'given order: 0 of 20 prompts seen'
    """

    def __init__(self, *, batch_rows: int, overlapping: bool = False, ranker: LengthRanker | None = None) -> None:
        if batch_rows < 1:
            raise UsageError(f"batch_rows={batch_rows} is not a positive number of rows")
        self.ranker = ranker or LengthRanker()
        self.overlapping = overlapping
        self._window = max(WINDOW_MIN, 2 * batch_rows)
        self._refit_rows = max(REFIT_ROWS_MIN, batch_rows)
        self._since_refit = 0
        self._finished = np.empty((0, 3), np.int64)
        self._judged = np.empty((0, 3), np.int64)
        self.refits: deque[Refit] = deque(maxlen=REFITS_KEPT)
        self.plans = 0
        self.batches_in_order = 0
        self.last = Plan(why="no batch yet")

    def expect(self, prompts: Sequence[Any]) -> Expected:
        """Return the lengths that the ranker predicts for prompts (token ids)."""
        version = self.ranker.version
        if not version:
            return Expected(np.zeros(len(prompts), np.int64), 0)
        return Expected(self.ranker.predict(prompts), version)

    def learn(self, prompts: Sequence[Any], groups: Sequence[int], expected: Lengths, lengths: Lengths) -> None:
        """Take finished rows: prompts, the number of each prompt, their predicted lengths (0: none), and the tokens of
        their answers.

        Rows without tokens teach nothing. Raises `UsageError` for columns of different lengths.
        """
        columns = [np.asarray(column, np.int64) for column in (groups, expected, lengths)]
        if {len(prompts)} != {column.size for column in columns}:
            raise UsageError(
                f"{len(prompts)} prompts with {[column.size for column in columns]} values: give one a row"
            )
        kept = np.flatnonzero(columns[2] > 0)
        if not kept.size:
            return
        self.ranker.observe([prompts[at] for at in kept.tolist()], columns[2][kept])
        self._since_refit += kept.size
        rows = np.stack(columns, axis=1)[kept]
        judged = rows[rows[:, 1] > 0]
        self._finished = np.concatenate([self._finished, judged])[-self._window :]
        self._judged = np.concatenate([self._judged, judged])[-self._window :]

    @property
    def refit_due(self) -> bool:
        """Whether enough rows were learned since the last refit."""
        return self._since_refit >= self._refit_rows

    def refit(self) -> Refit:
        """Refit the ranker, and return how well earlier fits ranked the rows that finished meanwhile. Blocks for tens
        of milliseconds.
        """
        self._since_refit = 0
        self.ranker.refit()
        judged, self._judged = self._judged, self._judged[:0]
        accuracy = accuracy_of(*judged.T)
        refit = Refit(
            version=self.ranker.version, rows=self.ranker.rows, judged_rows=accuracy.rows, recall=accuracy.recall
        )
        self.refits.append(refit)
        return refit

    def accuracy(self) -> RankerAccuracy:
        """Return how well the ranker ranked the last finished rows."""
        groups, expected, actual = self._finished.T
        return accuracy_of(groups, expected, actual)

    def plan(self, expected: Lengths, engines: Sequence[EngineReport]) -> Plan:
        """Return the plan for a batch of `expected` tokens ``[rows]``, and keep it as `last`. Rows of 0 have no
        expectation: then the order stays as given.
        """
        self.plans += 1
        accuracy = self.accuracy()
        if not accuracy.skilled or not expected.size or expected.min() < 1:
            plan = Plan(why=f"given order: {accuracy.why()}")
        else:
            plan = plan_batch(expected, engines, self._ratios(), seed=self.plans, overlapping=self.overlapping)
        self.batches_in_order += plan.order == "longest"
        self.last = plan
        return plan

    def figures(self) -> dict[str, Any]:
        """Return figures of now: rows seen, version, recall at 20, 10 and 5 %, the test, and the last plan."""
        accuracy, plan = self.accuracy(), self.last
        return {
            "rows": self.ranker.rows,
            "ranker_version": self.ranker.version,
            "judged_rows": accuracy.rows,
            **_recalls(accuracy.recall),
            "skill_z": accuracy.z,
            "skilled": accuracy.skilled,
            "plans": self.plans,
            "plans_in_order": self.batches_in_order,
            "order": plan.order,
            "predicted_s": plan.predicted_s,
            "given_s": plan.given_s,
            "why": plan.why,
        }

    def _ratios(self) -> NDArray[np.float64]:
        _, expected, actual = self._finished.T
        return actual / np.maximum(1, expected)


def _recalls(recall: Sequence[float]) -> dict[str, float]:
    return {f"recall_{share:.0%}".rstrip("%"): value for share, value in zip(SHARES, recall, strict=False)}


def priorities(steps: NDArray[np.int64], expected: Lengths, plan: Plan) -> NDArray[np.float64]:
    """Return the fact `priority` of rows: earlier steps first; within a step the longest first, or the order given.

    >>> priorities(np.array([0, 0, 1]), np.array([5, 9, 99]), Plan(order="longest")).tolist()
    [5.0, 9.0, -1048477.0]
    """
    within = np.minimum(expected, _STEP - 1) if plan.order == "longest" else np.zeros(expected.size)
    return within - steps.astype(np.float64) * _STEP


_STEP: Final = 1 << 20
"""More than any expected length. A float64 counts 2**33 such steps exactly."""
