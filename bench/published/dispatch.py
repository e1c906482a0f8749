"""Generation of one batch in simulated time: skewness-aware dispatch of StreamRL (arXiv 2504.15930) against random order.

Rules:

1. The production `Ledger` chooses each row: the selector is `LongestFirst` (or `Fifo`), a class is a predicate on
   `tokens`, which holds the predicted length. No policy is copied here; only time is simulated.
2. An instance decodes up to `slots` samples at once. One token of n samples takes PTL(n) seconds (StreamRL section 5).
3. The longest fifth of the rows is the *tail*. A split gives the tail `k` instances. All k are tried; the best has the smallest
   maximum of the two predicted times: PTL x P90 for the tail, PTL x P50 for the rest, times the rounds that memory forces.
   (The published objective is the sum of the two; it can lose.)
4. A split is a preference: an instance whose class is empty takes rows of the other class, so none is idle while rows wait.
5. Split, longest-first without a split, and the original order are each simulated on the *predicted* lengths. The fastest is
   used if it is at least `GAIN_MIN` faster than the original order; predictions err too much for smaller gains.
"""

from __future__ import annotations

import heapq
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from transferqueue.errors import DeadlineExceeded, UsageError
from transferqueue.ledger import Ledger
from transferqueue.policies import Compare, Fifo, LongestFirst, Predicate, Task
from transferqueue.wire import messages as m
from transferqueue.workflows.sim.simulated_job import Lengths, Site

PTL_BATCH: Final = tuple(2**power for power in range(10))
PTL_MS: Final = (8.3, 8.8, 8.9, 9.0, 9.4, 10.2, 11.7, 15.2, 21.8, 36.9)
"""Published time per token of a 7B model, by batch size; interpolated between these sizes."""
TAIL_SHARE: Final = 0.2
GAIN_MIN: Final = 0.02
"""Without this bound, a first sweep (seeds 0 to 2) lost up to 0.3 % in the mean where no gain was possible."""
SESSION: Final = 1
TABLE: Final = "generation"


class Dispatch(msgspec.Struct, frozen=True):
    """Order of rows (longest first, or as they came), and how many instances prefer the tail (0: no split)."""

    longest_first: bool
    tail_instances: int = 0


RANDOM_FIFO: Final = Dispatch(longest_first=False)


def ptl_s(batch: int) -> float:
    """Seconds that an instance takes to decode one token of each of `batch` samples."""
    return float(np.interp(batch, PTL_BATCH, PTL_MS)) / 1000


def published_lengths(rows: int, rng: np.random.Generator) -> Lengths:
    """Draw lengths from the histogram digitised from StreamRL's figure 7: ``[rows]``, tokens."""
    path = Path(__file__).parent / "data" / "streamrl_output_lengths.csv"
    low, high, share = np.loadtxt(path, delimiter=",", skiprows=1, unpack=True)
    share = np.maximum(share, 0)
    at = rng.choice(low.size, rows, p=share / share.sum())
    lengths: Lengths = rng.uniform(low[at], high[at]).astype(np.int64)
    return lengths


def ranked(lengths: Lengths, noise: float, rng: np.random.Generator) -> Lengths:
    """Return what a ranker would predict: the true lengths, in the order of log length plus normal noise (0: an oracle)."""
    score = np.log(lengths) + rng.normal(0, 1, lengths.size) * noise
    predicted = np.empty_like(lengths)
    predicted[np.argsort(score, kind="stable")] = np.sort(lengths)
    return predicted


def split(predicted: Lengths, site: Site) -> int:
    """Return the number of instances for the tail by rule 3; 0 if there is only one instance."""
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
    """Return the dispatch that generates rows of the predicted lengths soonest (rule 5)."""
    seconds = {
        dispatch: generation_s(predicted, predicted, site, dispatch) for dispatch in _candidates(predicted, site)
    }
    best = min(seconds, key=lambda dispatch: seconds[dispatch])
    return best if seconds[best] <= (1 - GAIN_MIN) * seconds[RANDOM_FIFO] else RANDOM_FIFO


def _candidates(predicted: Lengths, site: Site) -> list[Dispatch]:
    return [Dispatch(True, split(predicted, site)), Dispatch(True), RANDOM_FIFO]


def generation_s(lengths: Lengths, predicted: Lengths, site: Site, dispatch: Dispatch) -> float:
    """Return the simulated seconds until all rows are generated. lengths, predicted: ``[rows]`` positive tokens."""
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
        except DeadlineExceeded:  # no row is left of this class
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
