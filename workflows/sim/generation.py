"""Generation of one batch in simulated time: skewness-aware dispatch of StreamRL against random order.

Rules:

1. The production `Ledger` chooses each row: the selector is `LongestFirst` (or `Fifo`), a class is a predicate on
   ``tokens``, which holds the predicted length. Nothing of that is copied here; only time is simulated.
2. An instance decodes up to ``slots`` samples at once; a token of all of them takes PTL(how many) (StreamRL section 5).
3. The longest fifth is *tail*. A split gives it ``k`` instances; k is enumerated, and the larger of the two predicted times
   is minimised: PTL x P90 for the tail, PTL x P50 for the rest, times the rounds that memory forces. (The printed objective
   is the sum; it can lose.)
4. A split is a preference: an instance whose class is empty takes of the other, so none is idle while rows wait.
5. Split, longest-first without a split, and the given order are each tried on the *predicted* lengths. The best is
   dispatched if it is `GAIN_MIN` better than the given order there; predictions are not true enough for less.
"""

from __future__ import annotations

import heapq
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from transferqueue.errors import DeadlineExceeded, UsageError
from transferqueue.ledger import Ledger
from transferqueue.policies import Compare, Fifo, LongestFirst, Predicate, Task
from transferqueue.wire import messages as m

Lengths = NDArray[np.int64]
PTL_BATCH: Final = tuple(2**power for power in range(10))
PTL_MS: Final = (8.3, 8.8, 8.9, 9.0, 9.4, 10.2, 11.7, 15.2, 21.8, 36.9)
"""Published time of one token of a 7B by batch; in between it is interpolated."""
TAIL_SHARE: Final = 0.2
GAIN_MIN: Final = 0.02
"""Without it, a first sweep (seeds 0 to 2) lost up to 0.3 % in the mean where there was nothing to gain."""
SESSION: Final = 1
TABLE: Final = "generation"


class Site(msgspec.Struct, frozen=True):
    """Instances, and how many samples the memory of one holds at once."""

    instances: int
    slots: int

    def __post_init__(self) -> None:
        if self.instances < 1 or self.slots < 1:
            raise UsageError(
                f"{self.instances} instances with {self.slots} slots generate nothing; give at least 1 of each"
            )


class Dispatch(msgspec.Struct, frozen=True):
    """How rows are given out: longest first or as they came, and instances of the tail (0: no split)."""

    longest_first: bool
    tail_instances: int = 0


RANDOM_FIFO: Final = Dispatch(longest_first=False)


def ptl_s(batch: int) -> float:
    """Seconds of one token of each of ``batch`` samples."""
    return float(np.interp(batch, PTL_BATCH, PTL_MS)) / 1000


def published_lengths(rows: int, rng: np.random.Generator) -> Lengths:
    """Lengths drawn from the published histogram: ``[rows]``, tokens."""
    path = Path(__file__).parent / "data" / "streamrl_output_lengths.csv"
    low, high, share = np.loadtxt(path, delimiter=",", skiprows=1, unpack=True)
    share = np.maximum(share, 0)
    at = rng.choice(low.size, rows, p=share / share.sum())
    lengths: Lengths = rng.uniform(low[at], high[at]).astype(np.int64)
    return lengths


def ranked(lengths: Lengths, noise: float, rng: np.random.Generator) -> Lengths:
    """Predicted lengths of a ranker: the true ones in the order of log length plus normal noise (0: an oracle)."""
    score = np.log(lengths) + rng.normal(0, 1, lengths.size) * noise
    predicted = np.empty_like(lengths)
    predicted[np.argsort(score, kind="stable")] = np.sort(lengths)
    return predicted


def recall(lengths: Lengths, predicted: Lengths, share: float) -> float:
    """Share of the truly longest rows that are among the predicted longest."""
    top = max(1, int(lengths.size * share))
    return len(set(np.argsort(-lengths)[:top].tolist()) & set(np.argsort(-predicted)[:top].tolist())) / top


def split(predicted: Lengths, site: Site) -> int:
    """Instances for the tail by rule 3; 0 where there is only one instance."""
    tail = max(1, int(predicted.size * TAIL_SHARE))
    p90, p50 = np.quantile(predicted, [0.9, 0.5])
    return min(
        range(1, site.instances),
        key=lambda k: max(
            _class_s(tail, k, float(p90), site), _class_s(predicted.size - tail, site.instances - k, float(p50), site)
        ),
        default=0,
    )


def _class_s(rows: int, instances: int, length: float, site: Site) -> float:
    each = -(-rows // instances)
    return -(-each // site.slots) * ptl_s(min(each, site.slots)) * length


def choose(predicted: Lengths, site: Site) -> Dispatch:
    """The dispatch that generates rows of the predicted lengths soonest (rule 5)."""
    found = {one: generation_s(predicted, predicted, site, one) for one in _candidates(predicted, site)}
    best = min(found, key=lambda one: found[one])
    return best if found[best] <= (1 - GAIN_MIN) * found[RANDOM_FIFO] else RANDOM_FIFO


def _candidates(predicted: Lengths, site: Site) -> list[Dispatch]:
    return [Dispatch(True, split(predicted, site)), Dispatch(True), RANDOM_FIFO]


def generation_s(lengths: Lengths, predicted: Lengths, site: Site, dispatch: Dispatch) -> float:
    """Simulated seconds until all rows are generated. lengths, predicted: ``[rows]`` positive tokens."""
    if lengths.shape != predicted.shape or lengths.ndim != 1 or not lengths.size or lengths.min() < 1:
        raise UsageError(
            f"lengths {lengths.shape} and predicted {predicted.shape} are not positive tokens of the same rows"
        )
    return _Run(lengths, predicted, site, dispatch).run()


class _Run:
    def __init__(self, lengths: Lengths, predicted: Lengths, site: Site, dispatch: Dispatch) -> None:
        self._ledger, self._calls, self.now = Ledger(), 0, 0.0
        self._lengths, self._site, self._left = lengths, site, lengths.size
        cut = int(np.sort(predicted)[-max(1, int(predicted.size * TAIL_SHARE))])
        tail: list[Predicate] = [Compare("tokens", ">=", cut)]
        rest: list[Predicate] = [Compare("tokens", "<", cut)]
        k = dispatch.tail_instances
        self._where = [(tail if at < k else rest) if k else [] for at in range(site.instances)]
        self._progress, self._since = [0.0] * site.instances, [0.0] * site.instances
        self._running: list[list[tuple[float, int, m.Leased]]] = [[] for _ in range(site.instances)]
        selector = LongestFirst() if dispatch.longest_first else Fifo()
        self._ledger.open_session(SESSION, b"generation-simul", 0.0)
        self._apply(m.CreateTable(TABLE, tasks=[Task("generate", selector=selector, lease_s=1e8)]))
        facts = m.RowFacts(tokens=predicted.astype("<i8").tobytes())
        put = self._apply(m.PutRequest(TABLE, predicted.size, m.Columns(facts=facts)))
        self._first = put.first if isinstance(put, m.PutRows) else 0

    def _apply(self, request: m.Request) -> object:
        self._calls += 1
        reply = self._ledger.apply(request, session=SESSION, call=self._calls, now=self.now)
        self._ledger.seen(SESSION, self._calls)
        self._ledger.take_effects()
        return reply

    def run(self) -> float:
        filling = [at for _ in range(self._site.slots) for at in range(self._site.instances)]
        for at in filling:
            if not self._left:
                break
            self._take(at)
        while any(self._running):
            self.now, at = min((self._next(at), at) for at in range(self._site.instances) if self._running[at])
            self._advance(at)
            _, _, done = heapq.heappop(self._running[at])
            self._apply(m.Ack(TABLE, done.lease, done.token))
            if self._left:
                self._take(at)
        return self.now

    def _next(self, at: int) -> float:
        left = self._running[at][0][0] - self._progress[at]
        return self._since[at] + left * ptl_s(len(self._running[at]))

    def _advance(self, at: int) -> None:
        if running := len(self._running[at]):
            self._progress[at] += (self.now - self._since[at]) / ptl_s(running)
        self._since[at] = self.now

    def _lease(self, where: list[Predicate]) -> m.Leased | None:
        try:
            leased = self._apply(m.LeaseRequest(TABLE, "generate", rows=1, where=where))
        except DeadlineExceeded:  # none matches: the class is empty
            return None
        return leased if isinstance(leased, m.Leased) else None

    def _take(self, at: int) -> None:
        for where in (self._where[at], []):
            leased = self._lease(where)
            if leased is not None:
                self._advance(at)
                row = int(np.frombuffer(leased.content.rows, "<i8")[0]) - self._first
                heapq.heappush(self._running[at], (self._progress[at] + float(self._lengths[row]), row, leased))
                self._left -= 1
                return
