"""Measures a generator: the lengths of its responses, the time of a token by rows at once, and the cost of a row that
takes the slot of a finished one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from transferqueue.adapters.protocols import Completion, Generator, Ids, Prompt, Sampling
from transferqueue.adapters.stages.generation import row_seed
from transferqueue.workflows.planner.engine_times import DecodeCurve, LaneEngine, generation_s
from transferqueue.workflows.planner.profile import GenerationProfile

ROWS_MAX: Final = 256
"""Responses whose lengths are observed at most."""
TOKENS_MAX: Final = 64
"""Tokens a row of one measurement of the decoding time at most."""
REPEATS: Final = 3
"""Measurements of one number of rows; the shortest counts, since whatever else runs only lengthens them."""
ROUNDS: Final = 3
"""Rows of the stream that refills slots, as multiples of the slots."""


@dataclass(frozen=True, kw_only=True)
class MeasuredEngine:
    """Costs of one engine, and the responses drawn to measure them."""

    generation: GenerationProfile
    prompts: list[Ids]
    drawn: list[Completion]


def measure_engine(
    engine: Generator,
    sampling: Sampling,
    prompts: Sequence[Ids],
    *,
    slots: int,
    samples: int = 1,
    seed: int = 0,
) -> MeasuredEngine:
    """Draw responses to `prompts`, `samples` each, as the job draws them; time 1, 2, 4, … `slots` rows at once; then a
    stream of rows that keeps the slots full.

    Blocks; nothing else should run. Rows that are timed end after a number of tokens: no stop token ends them.
    `prompt_ms` is the time of the stream beyond its tokens, by row.
    """
    rows = list(prompts)[: max(1, ROWS_MAX // samples)]
    requested = [Prompt(ids=ids, samples=samples, seed=row_seed(seed, at)) for at, ids in enumerate(rows)]
    drawn = [*engine.generate(requested, sampling)]
    lengths = sorted(len(completion.ids) for completion in drawn)
    tokens = max(2, min(sampling.tokens_max, TOKENS_MAX))
    timed = _Timed(engine, replace(sampling, stop_ids=(), seed=seed), rows, tokens)
    counts = _counts(slots)
    once = {count: timed.seconds(count) for count in counts}
    token_ms = [(count, round(_token_ms(whole, first, tokens), 4)) for count, (whole, first) in once.items()]
    return MeasuredEngine(
        generation=GenerationProfile(
            devices=1,
            slots=slots,
            token_ms=token_ms,
            lengths=lengths,
            slots_tried=[count for count in counts if count * 8 >= slots],
            prompt_ms=round(_prompt_ms(timed, slots, tokens, token_ms), 4),
        ),
        prompts=rows,
        drawn=sorted(drawn, key=lambda completion: (completion.prompt, completion.sample)),
    )


class _Timed:
    """Times requests of a number of rows."""

    def __init__(self, engine: Generator, sampling: Sampling, rows: Sequence[Ids], tokens: int) -> None:
        self._engine, self._sampling, self._rows = engine, sampling, rows
        self._tokens = tokens

    def seconds(self, count: int) -> tuple[float, float]:
        """Return the time of `count` rows of all tokens, and of one token. The first try of a number of rows warms up
        and does not count.
        """
        self._once(count, self._tokens)
        whole = min(self._once(count, self._tokens) for _ in range(REPEATS))
        return whole, min(self._once(count, 1) for _ in range(REPEATS))

    def stream_s(self, lengths: Sequence[int], slots: int) -> float:
        """Return the time of rows of these tokens, each a request of its own that takes the slot of a finished one, as
        the job's requests do.
        """
        return min(self._stream(lengths, slots) for _ in range(REPEATS))

    def _stream(self, lengths: Sequence[int], slots: int) -> float:
        def generate(at: int) -> None:
            requested = [Prompt(ids=self._rows[at % len(self._rows)], seed=at)]
            for _ in self._engine.generate(requested, replace(self._sampling, tokens_max=lengths[at])):
                pass

        started = time.monotonic()
        with ThreadPoolExecutor(slots, thread_name_prefix="profile") as threads:
            for _ in threads.map(generate, range(len(lengths))):
                pass
        return time.monotonic() - started

    def _once(self, count: int, tokens: int) -> float:
        requested = [Prompt(ids=self._rows[at % len(self._rows)], seed=at) for at in range(count)]
        started = time.monotonic()
        for _ in self._engine.generate(requested, replace(self._sampling, tokens_max=tokens)):
            pass
        return time.monotonic() - started


def _counts(slots: int) -> list[int]:
    """Powers of two up to `slots`, and `slots`.

    >>> _counts(12)
    [1, 2, 4, 8, 12]
    """
    counts = [1 << power for power in range(slots.bit_length()) if 1 << power < slots]
    return [*counts, slots]


def _token_ms(whole_s: float, first_s: float, tokens: int) -> float:
    """Milliseconds of a token of each row: the time of a request beyond its first token. At least a microsecond."""
    return max(1e-3, 1000 * (whole_s - first_s) / (tokens - 1))


def _prompt_ms(timed: _Timed, slots: int, tokens: int, token_ms: Sequence[tuple[int, float]]) -> float:
    """Milliseconds of a row beside its tokens, where rows of half to all `tokens` follow each other in the slots."""
    lengths = np.random.default_rng(0).integers(-(-tokens // 2), tokens + 1, slots * ROUNDS)
    rows, ms = zip(*token_ms, strict=True)
    curve = DecodeCurve(tuple(map(float, rows)), tuple(np.maximum.accumulate(ms).tolist()))
    alone_s = generation_s(lengths, lengths, [LaneEngine(slots, curve)], longest_first=False)
    return max(0.0, 1000 * (timed.stream_s(lengths.tolist(), slots) - alone_s) / len(lengths))
