"""Measures how long an engine takes for a token, by how many rows it decodes at once.

1. While n rows are decoded, a token of each takes PTL(n) (StreamRL, section 5). An engine reports only finished
   completions, so each completion is one observation: its time divided by its tokens, at the mean number of rows that
   ran beside it. Time in which the engine was paused does not count. The first token's prefill is included.
2. Observations fall into bins, about one for each power of two of rows, weighted by tokens; a bin keeps about the
   latest `BIN_TOKENS` tokens, so that it follows the machine.
3. Between two rows a slot is empty: the last row is committed, the next one leased and begun. An engine does this for
   one row after another, so rows that end together wait for each other. `refill_ms` is the median time from a row's end
   to the next begin, each begin counted from the latest end that has none yet: where ends queue up, that is the time of
   one of them. Waiting without rows is no refill.
4. A curve never falls: a larger batch is not faster for each row (bins that say otherwise are pooled).
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import Final

from transferqueue.adapters.protocols import (
    GENERATE_S,
    PAUSE_S,
    Completion,
    Completions,
    Generator,
    Pause,
    Prompt,
    Sampling,
    WeightSource,
)
from transferqueue.workflows.planner.engine_times import DecodeCurve

BIN_TOKENS: Final = 20_000.0
"""Tokens that a bin remembers: some minutes of one row, seconds of a full batch."""
REPORT_EVERY: Final = 32
"""Completions after which a metered engine tells its curve again."""
REFILLS: Final = 64
"""Latest refills, whose median counts."""


class _Bin:
    """Tokens, their rows and their milliseconds, as weighted sums."""

    def __init__(self) -> None:
        self.tokens = self.rows = self.ms = 0.0

    def add(self, tokens: float, rows: float, ms: float) -> None:
        kept = min(1.0, max(0.0, BIN_TOKENS - tokens) / self.tokens) if self.tokens else 1.0
        self.tokens, self.rows, self.ms = (
            self.tokens * kept + tokens,
            self.rows * kept + rows * tokens,
            self.ms * kept + ms,
        )


class DecodeMeter:
    """Learns the curve of one engine. Pure: the caller says what happened, and when (seconds of any clock).

    >>> meter = DecodeMeter()
    >>> meter.began("a", 0.0), meter.began("b", 0.0), meter.ended("a", 100, 2.0), meter.ended("b", 100, 2.0)
    (None, None, None, None)
    >>> meter.curve()
    DecodeCurve(rows=(2.0,), ms=(20.0,), refill_ms=0.0)
    """

    def __init__(self) -> None:
        self._bins: dict[int, _Bin] = {}
        self._begun: dict[object, tuple[float, float]] = {}
        self._now = self._active_s = self._row_s = 0.0
        self._stops = 0
        self._ends_s: deque[float] = deque(maxlen=REFILLS)
        self._refills_s: deque[float] = deque(maxlen=REFILLS)
        self.completions = 0

    def began(self, key: object, now: float) -> None:
        """The engine has begun a completion."""
        self._advance(now)
        if not self._begun:
            self._ends_s.clear()
        if self._ends_s:
            self._refills_s.append(self._active_s - self._ends_s.pop())
        self._begun[key] = (self._active_s, self._row_s)

    def ended(self, key: object, tokens: int, now: float) -> None:
        """A completion is finished, with as many tokens more than it began with."""
        self._advance(now)
        active_s, row_s = (
            end - start for end, start in zip((self._active_s, self._row_s), self._begun.pop(key), strict=True)
        )
        if tokens > 0 and active_s > 0:
            rows = row_s / active_s
            self._ends_s.append(self._active_s)
            self._bins.setdefault(round(math.log2(rows)), _Bin()).add(tokens, rows, 1000 * active_s)
            self.completions += 1

    def gave_up(self, key: object, now: float) -> None:
        """A completion was aborted: it says nothing. An unknown one is passed over."""
        self._advance(now)
        self._begun.pop(key, None)

    def stopped(self, now: float) -> None:
        """The engine stands still, until as many calls of `went_on`."""
        self._advance(now)
        self._stops += 1

    def went_on(self, now: float) -> None:
        """The engine decodes again."""
        self._advance(now)
        self._stops = max(0, self._stops - 1)

    def curve(self) -> DecodeCurve:
        """Return the measurements."""
        pooled: list[tuple[float, float, float]] = []
        for _, each in sorted(self._bins.items()):
            pooled.append((each.tokens, each.rows, each.ms))
            while len(pooled) > 1 and pooled[-2][2] / pooled[-2][0] > pooled[-1][2] / pooled[-1][0]:
                pooled[-2:] = [_sum(pooled[-2], pooled[-1])]
        return DecodeCurve(
            tuple(round(rows / tokens, 3) for tokens, rows, _ in pooled),
            tuple(round(ms / tokens, 4) for tokens, _, ms in pooled),
            round(1000 * median(self._refills_s), 3) if self._refills_s else 0.0,
        )

    def _advance(self, now: float) -> None:
        passed_s, self._now = max(0.0, now - self._now), max(now, self._now)
        if self._begun and not self._stops:
            self._active_s += passed_s
            self._row_s += passed_s * len(self._begun)


def _sum(one: tuple[float, float, float], other: tuple[float, float, float]) -> tuple[float, float, float]:
    return (one[0] + other[0], one[1] + other[1], one[2] + other[2])


class MeteredGenerator:
    """A generator that measures the one it passes every call to. report: gets the curve after every `REPORT_EVERY`
    completions, on the thread that took the last of them.
    """

    def __init__(
        self, engine: Generator, report: Callable[[DecodeCurve], object], *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine, self._report, self._now = engine, report, now
        self._meter, self._lock = DecodeMeter(), threading.Lock()

    @property
    def version(self) -> int:
        """Version of the engine's weights."""
        return self._engine.version

    @property
    def prefilled_again(self) -> int:
        """Tokens that the engine read again because weights changed; 0 for one that does not count them."""
        return getattr(self._engine, "prefilled_again", 0)

    @property
    def reads_channel(self) -> bool:
        """Whether the engine reads weights of a channel itself."""
        return getattr(self._engine, "reads_channel", False)

    def curve(self) -> DecodeCurve:
        """Return the measurements so far."""
        with self._lock:
            return self._meter.curve()

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, *, timeout_s: float = GENERATE_S) -> Completions:
        """Yield each completion when it is finished (`protocols.Generator.generate`)."""
        return self._watched(self._engine.generate(prompts, sampling, timeout_s=timeout_s), prompts)

    def _watched(self, completions: Completions, prompts: Sequence[Prompt]) -> Completions:
        request = object()
        running = {(request, at, sample) for at, prompt in enumerate(prompts) for sample in range(prompt.samples)}
        with self._lock:
            for key in running:
                self._meter.began(key, self._now())
        try:
            for completion in completions:
                key = (request, completion.prompt, completion.sample)
                running.discard(key)
                self._ended(key, completion, prompts[completion.prompt])
                yield completion
        finally:
            completions.close()
            with self._lock:
                for key in running:
                    self._meter.gave_up(key, self._now())

    def _ended(self, key: object, completion: Completion, prompt: Prompt) -> None:
        begun = 0 if prompt.begun is None else len(prompt.begun.ids)
        with self._lock:
            before = self._meter.completions
            self._meter.ended(key, len(completion.ids) - begun, self._now())
            after = self._meter.completions
            curve = self._meter.curve() if after > before and after % REPORT_EVERY == 0 else None
        if curve is not None:
            self._report(curve)

    def pause(self, mode: Pause, *, timeout_s: float = PAUSE_S) -> None:
        """Stop drawing tokens (`protocols.Generator.pause`). Until `resume`, time does not count."""
        self._engine.pause(mode, timeout_s=timeout_s)
        with self._lock:
            self._meter.stopped(self._now())

    def resume(self) -> None:
        """Go on (`protocols.Generator.resume`)."""
        self._engine.resume()
        with self._lock:
            self._meter.went_on(self._now())

    def update_weights(self, source: WeightSource, version: int, *, timeout_s: float = PAUSE_S) -> None:
        """Replace the weights (`protocols.Generator.update_weights`). The time of the call does not count."""
        with self._lock:
            self._meter.stopped(self._now())
        try:
            self._engine.update_weights(source, version, timeout_s=timeout_s)
        finally:
            with self._lock:
                self._meter.went_on(self._now())

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()
