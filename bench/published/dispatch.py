"""Generation of one batch in simulated time: skewness-aware dispatch of StreamRL (arXiv 2504.15930) against random order.

Rules:

1. The production `Ledger` chooses each row: the selector is `LongestFirst` (or `Fifo`), a class is a predicate on
   `tokens`, which holds the predicted length. No policy is copied here; only time is simulated.
2. An instance decodes up to `slots` samples at once. One token of n samples takes PTL(n) seconds (StreamRL section 5).
3. The plan is that of the live dispatcher (`workflows.dispatch.plan`): which class of rows an instance prefers, its slots, and the order.
4. A split is a preference: an instance whose class is empty takes rows of the other class, so none is idle while rows wait.
"""

from __future__ import annotations

import heapq
from pathlib import Path
from typing import Final

import numpy as np

from transferqueue.errors import DeadlineExceeded, UsageError
from transferqueue.ledger import Ledger
from transferqueue.policies import Compare, Fifo, LongestFirst, Predicate, Task
from transferqueue.wire import messages as m
from transferqueue.workflows.dispatch.decode import DecodeCurve
from transferqueue.workflows.dispatch.plan import EngineLane, EngineReport, Plan, plan_batch
from transferqueue.workflows.sim.simulated_job import Lengths, Site

PTL_BATCH: Final = tuple(2**power for power in range(10))
PTL_MS: Final = (8.3, 8.8, 8.9, 9.0, 9.4, 10.2, 11.7, 15.2, 21.8, 36.9)
"""Published time per token of a 7B model, by batch size; interpolated between these sizes."""
SESSION: Final = 1
TABLE: Final = "generation"


RANDOM_FIFO: Final = Plan()
"""Rows in the order in which they came."""


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


def engines_of(site: Site) -> list[EngineReport]:
    """Return the instances of a site as engines whose curve is the published one."""
    curve = DecodeCurve(tuple(map(float, PTL_BATCH)), PTL_MS)
    return [EngineReport(name=str(at), slots=site.slots, curve=curve) for at in range(site.instances)]


def choose(predicted: Lengths, site: Site) -> Plan:
    """Return the plan for rows of the predicted lengths: that of the live dispatcher, which takes the predictions at their word here."""
    return plan_batch(predicted, engines_of(site), np.empty(0))


def generation_s(lengths: Lengths, predicted: Lengths, site: Site, plan: Plan) -> float:
    """Return the simulated seconds until all rows are generated. lengths, predicted: ``[rows]`` positive tokens."""
    if lengths.shape != predicted.shape or lengths.ndim != 1 or not lengths.size or lengths.min() < 1:
        raise UsageError(
            f"lengths {lengths.shape} and predicted {predicted.shape} are not positive tokens of the same rows"
        )
    return _Run(lengths, predicted, site, plan).run()


class _Run:
    def __init__(self, lengths: Lengths, predicted: Lengths, site: Site, plan: Plan) -> None:
        self._ledger, self._calls, self.now = Ledger(), 0, 0.0
        self._lengths, self._site, self._left = lengths, site, lengths.size
        lanes = [plan.lanes.get(str(at), EngineLane("any", site.slots)) for at in range(site.instances)]
        preferred: dict[str, list[Predicate]] = {
            "any": [],
            "tail": [Compare("tokens", ">=", plan.cut)],
            "regular": [Compare("tokens", "<", plan.cut)],
        }
        self._where = [preferred[lane.lane] for lane in lanes]
        self._slots = [lane.slots for lane in lanes]
        self._progress, self._since = [0.0] * site.instances, [0.0] * site.instances
        self._running: list[list[tuple[float, int, m.Leased]]] = [[] for _ in range(site.instances)]
        selector = LongestFirst() if plan.order == "longest" else Fifo()
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
        turns = range(max(self._slots))
        filling = [at for slot in turns for at in range(self._site.instances) if slot < self._slots[at]]
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
