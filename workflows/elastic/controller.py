"""The number of generators of a job: StreamRL's dynamic adjustment (arXiv 2504.15930, section 4.2). Pure: no clock, no
process.

A step takes S seconds with a constant number n of generators. The trainer waits I seconds for rows; a generator is
without a row for W seconds (mean over generators). So training takes T_train = S − I, generation T_gen = S − W, and δ =
T_gen − T_train = I − W, whether the two overlap or alternate.

1. One more generator saves T_gen/(n+1) if rows are shared evenly. Add when δ ≥ θ·T_gen/(n+1) (θ is `threshold`; with 1
   it is StreamRL's δ′).
2. One fewer costs T_gen/(n−1). Remove when −δ ≥ (1 + θ/2)·T_gen/(n−1): generation then remains the faster side.
3. Either must hold in `patience` consecutive steps with the same number of generators. The first step after a change is
   ignored: it had both numbers.
4. Under a constant load a change is never reversed: after an addition −δ ≤ (1−θ)·T_gen'/n of n+1 generators, below rule
   2's bound; after a removal δ < 0.
5. Under any load, a change that reverses the last one doubles `patience`, up to `PATIENCE_MAX`; `CALM` times as many
   steps without a reversal halve it. So N steps have at most log2(PATIENCE_MAX) + 1 + N/`CALM` reversals.
6. The last generator is removed only if `min` is 0 and no row was to be generated for `idle_s` (longer as `patience`
   grows). The first one starts as soon as there is a row, since nothing else would generate it.
7. A number outside `min` to `max` is corrected first, by one a call, without patience.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from transferqueue.errors import Impossible, UsageError

PATIENCE_MAX: Final = 64
CALM: Final = 16


class ElasticTerms(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds and sensitivity. min, max: generators. threshold: θ. patience: steps. idle_s: rule 6. Raises `UsageError`
    or `Impossible` for values outside the rules.

    >>> ElasticTerms(max=2)
    ElasticTerms(min=1, max=2, threshold=1.0, patience=2, idle_s=60.0)
    """

    min: int = 1
    max: int
    threshold: float = 1.0
    patience: int = 2
    idle_s: float = 60.0

    def __post_init__(self) -> None:
        if not 0 <= self.min <= self.max or self.max < 1:
            raise Impossible(f"min={self.min}, max={self.max}: give 0 or more, and at least 1 and min as max")
        if not 0 < self.threshold <= 4:
            raise UsageError(
                f"threshold={self.threshold:g}: give more than 0 (at 0 noise decides) and at most 4 (nothing is added)"
            )
        if not 1 <= self.patience <= PATIENCE_MAX or not 0 <= self.idle_s < math.inf:
            raise UsageError(
                f"patience={self.patience}, idle_s={self.idle_s:g}: give 1 to {PATIENCE_MAX} steps, and finite seconds"
            )


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The times of one trainer step, in seconds. trainer_wait_s: for rows. generator_wait_s: without a row, mean over
    `generators`, whose number was constant.

    >>> times = StepTimes(seconds=10.0, trainer_wait_s=6.0, generator_wait_s=1.0, generators=2)
    >>> times.generation_s, times.training_s, times.delta_s
    (9.0, 4.0, 5.0)
    """

    seconds: float
    trainer_wait_s: float
    generator_wait_s: float
    generators: int

    @property
    def generation_s(self) -> float:
        """T_gen."""
        return max(0.0, self.seconds - self.generator_wait_s)

    @property
    def training_s(self) -> float:
        """T_train."""
        return max(0.0, self.seconds - self.trainer_wait_s)

    @property
    def delta_s(self) -> float:
        """δ; positive: generation is the slower side."""
        return self.generation_s - self.training_s


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A decision. by: generators to add (1) or remove (−1). delta_s, bound_s: δ of the last step and the bound that it
    passed; NaN where no step decided.
    """

    by: int
    why: str
    delta_s: float = math.nan
    bound_s: float = math.nan


class ElasticController:
    """Decides; the caller adds and removes, and says how many generators there are.

    >>> controller = ElasticController(ElasticTerms(max=2))
    >>> slow = StepTimes(seconds=10.0, trainer_wait_s=6.0, generator_wait_s=0.0, generators=1)
    >>> [controller.step(slow) for _ in range(3)][-1]
    Change(by=1, why='generation is slower', delta_s=6.0, bound_s=5.0)
    """

    def __init__(self, terms: ElasticTerms) -> None:
        self.terms = terms
        self.patience = terms.patience
        self._last_change = 0
        self._run = 0
        """Steps running in which rule 1 (positive) or rule 2 (negative) held."""
        self._calm = 0
        self._generators = -1
        self._no_rows_since: float | None = None

    def bounds(self, generation_s: float, generators: int) -> tuple[float, float]:
        """Return δ from which a generator is added, and −δ from which one is removed."""
        theta = self.terms.threshold
        fewer = (1 + theta / 2) * generation_s / (generators - 1) if generators > 1 else math.inf
        return theta * generation_s / (generators + 1), fewer

    def step(self, times: StepTimes) -> Change | None:
        """A step has ended. Returns the change to make now, or None."""
        self._calmed()
        if times.generators != self._generators:
            self._generators, self._run = times.generators, 0
            return None
        add_s, remove_s = self.bounds(times.generation_s, times.generators)
        is_longer = times.delta_s >= add_s and times.generators < self.terms.max and times.delta_s > 0
        is_shorter = -times.delta_s >= remove_s and times.generators > max(1, self.terms.min)
        self._run = _counted(self._run, is_longer - is_shorter)
        if abs(self._run) < self.patience:
            return None
        if self._run > 0:
            return self._decided(1, "generation is slower", times.delta_s, add_s)
        return self._decided(-1, "training is slower", times.delta_s, remove_s)

    def look(self, now: float, *, rows: int, generators: int) -> Change | None:
        """Look at rows that are ready for generation or being generated (rules 6 and 7). now: seconds of any clock."""
        self._no_rows_since = None if rows else now if self._no_rows_since is None else self._no_rows_since
        if generators > self.terms.max:
            return Change(by=-1, why="over max")
        if generators < self.terms.min:
            return Change(by=1, why="below min")
        if not generators and rows:
            return self._decided(1, "rows wait")
        is_idle = self._no_rows_since is not None and now - self._no_rows_since >= self._idle_s
        if generators == 1 and self.terms.min == 0 and is_idle:
            return self._decided(-1, "no rows")
        return None

    @property
    def _idle_s(self) -> float:
        return self.terms.idle_s * self.patience / self.terms.patience

    def _decided(self, by: int, why: str, delta_s: float = math.nan, bound_s: float = math.nan) -> Change:
        if by == -self._last_change:
            self.patience = min(2 * self.patience, PATIENCE_MAX)
            self._calm = 0
        self._last_change, self._run, self._generators = by, 0, -1
        return Change(by=by, why=why, delta_s=delta_s, bound_s=bound_s)

    def _calmed(self) -> None:
        self._calm += 1
        if self._calm >= CALM * self.patience:
            self._calm = 0
            self.patience = max(self.patience // 2, self.terms.patience)


def _counted(run: int, vote: int) -> int:
    """Count votes of one sign running; another vote begins anew, and none ends the run."""
    return run + vote if run * vote > 0 else vote
