"""A caller that gives a request up while the engine draws: the engine is left alone until its step ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from transferqueue.adapters.engines.stepped import SteppedGenerator, SteppedRequest
from transferqueue.adapters.protocols import STOP, Completion, Prompt, Sampling, WeightSource
from transferqueue.adapters.weights import TensorWeights
from transferqueue.errors import Disconnected

torch = pytest.importorskip("torch", exc_type=ImportError)


@dataclass(eq=False)
class Row:
    owner: SteppedRequest
    completion: Completion


class GatedBatch:
    """Its first step finishes one row. The second waits for the gate, and finishes all, or none; later ones finish
    all."""

    def __init__(self, *, finishes: bool) -> None:
        self.waits, self.gate, self.finishes = threading.Event(), threading.Event(), finishes
        self.rows: list[Row] = []
        self.taken: list[SteppedRequest] = []
        self.steps = 0
        self.is_stepping = False

    def add(self, rows: Sequence[Row]) -> None:
        self.rows += rows

    def step(self, version: int) -> list[tuple[Row, Completion]]:
        self.is_stepping, self.steps = True, self.steps + 1
        rows = self.rows[:1] if self.steps == 1 else self.rows[:]
        if self.steps == 2:
            self.waits.set()
            assert self.gate.wait(60)
            rows = rows if self.finishes else []
        self.rows = [row for row in self.rows if row not in rows]
        self.is_stepping = False
        return [(row, row.completion) for row in rows]

    def take(self, request: SteppedRequest) -> list[tuple[Row, Completion]]:
        assert not self.is_stepping
        self.taken.append(request)
        self.rows = [row for row in self.rows if row.owner is not request]
        return []

    def cached_tokens(self) -> int:
        return 0


class GatedGenerator(SteppedGenerator):
    def __init__(self, batch: GatedBatch) -> None:
        super().__init__("gated", 0)
        self.batch = batch

    def _row(self, request: SteppedRequest, index: int, sample: int, prompt: Prompt, sampling: Sampling) -> Row:
        ids, logprobs = np.zeros(1, np.int32), np.zeros(1, np.float32)
        drawn = {"ids": ids, "logprobs": logprobs, "finish_reason": STOP, "spans": ((0, 1),)}
        return Row(request, Completion(prompt=index, sample=sample, **drawn))  # type: ignore[arg-type]

    def _batch(self, request: SteppedRequest) -> GatedBatch:
        return self.batch

    def _check(self, source: WeightSource) -> None: ...

    def _load(self, source: WeightSource, version: int, timeout_s: float) -> None:
        with self._changing_weights():
            for _ in source:
                pass


@pytest.mark.parametrize("finishes", [False, True])
def test_a_caller_that_leaves_during_a_step_waits_for_none(finishes: bool) -> None:
    batch = GatedBatch(finishes=finishes)
    generator = GatedGenerator(batch)

    def generated(samples: int) -> Any:
        prompt = Prompt(ids=np.array([1], np.int32), samples=samples)
        return generator.generate([prompt], Sampling(tokens_max=1), timeout_s=60)

    try:
        completions = generated(samples=2)
        next(completions)
        assert batch.waits.wait(60)
        completions.close()
        assert batch.is_stepping
        batch.gate.set()
        assert len(list(generated(samples=3))) == 3
        assert len(batch.taken) == (0 if finishes else 1)
        assert batch.rows == []
    finally:
        batch.gate.set()
        generator.close()


class GatedUntilControlled(GatedGenerator):
    """The gate opens when another thread asks for the turn after the second step."""

    def _control(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        self.batch.gate.set()
        return super()._control(ready, timeout_s)


class BrokenWeights(TensorWeights):
    """Of which only the first tensor can be read."""

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        yield next(super().__iter__())
        raise RuntimeError("out of memory")


def test_no_token_is_drawn_with_weights_of_two_versions() -> None:
    """A load that fails half way ends the requests that run and refuses others, until one succeeds."""
    batch = GatedBatch(finishes=False)
    generator = GatedUntilControlled(batch)
    prompt, tensors = Prompt(ids=np.array([1], np.int32), samples=2), {"one": torch.ones(1), "other": torch.ones(1)}
    try:
        running = generator.generate([prompt], Sampling(tokens_max=1), timeout_s=60)
        next(running)
        assert batch.waits.wait(60)
        with pytest.raises(RuntimeError, match="out of memory"):
            generator.update_weights(BrokenWeights(tensors), 1)
        for completions in (running, generator.generate([prompt], Sampling(tokens_max=1), timeout_s=60)):
            with pytest.raises(Disconnected, match=r"weights of two versions.*\(out of memory\); update them again"):
                next(completions)
        assert (generator.version, batch.rows) == (0, [])
        generator.update_weights(TensorWeights(tensors), 2)
        assert len(list(generator.generate([prompt], Sampling(tokens_max=1), timeout_s=60))) == 2
        assert generator.version == 2
    finally:
        batch.gate.set()
        generator.close()
