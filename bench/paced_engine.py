"""An engine that takes given times: it decodes any number of rows at once, a token of each of n rows in ``token_s(n)``
seconds, and draws no real tokens.

Waits until a deadline instead of computing, so that several of them share a core and what a run shows is order and
fill, not cores.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from transferqueue.adapters import protocols


class PacedEngine:
    """A generator (`adapters.protocols.Generator`). length_of: tokens of the answer to a prompt. most: the most rows
    that ran at once."""

    def __init__(self, token_s: Callable[[int], float], length_of: Callable[[protocols.Prompt], int]) -> None:
        self._token_s, self._length_of = token_s, length_of
        self._changed = threading.Condition()
        self._progress, self._since = 0.0, time.monotonic()
        self._running = 0
        self.version = -1
        self.most = 0

    def generate(
        self,
        prompts: Sequence[protocols.Prompt],
        sampling: protocols.Sampling,
        *,
        timeout_s: float = protocols.GENERATE_S,
    ) -> protocols.Completions:
        """Yield each completion when its time has passed; closing early aborts the rest."""
        with self._changed:
            self._change(len(prompts))
            ends = sorted((self._progress + self._length_of(prompt), at) for at, prompt in enumerate(prompts))
        left = len(prompts)
        try:
            for end, at in ends:
                self._wait(end)
                left -= 1
                with self._changed:
                    self._change(-1)
                yield _completion(at, self._length_of(prompts[at]), self.version)
        finally:
            with self._changed:
                self._change(-left)

    def _wait(self, end: float) -> None:
        with self._changed:
            while (tokens := end - self._advance()) > 1e-6:
                self._changed.wait(tokens * self._token_s(self._running))

    def _advance(self) -> float:
        now = time.monotonic()
        if self._running:
            self._progress += (now - self._since) / self._token_s(self._running)
        self._since = now
        return self._progress

    def _change(self, rows: int) -> None:
        self._advance()
        self._running += rows
        self.most = max(self.most, self._running)
        self._changed.notify_all()

    def pause(self, mode: protocols.Pause, *, timeout_s: float = protocols.PAUSE_S) -> None:
        """Weights are numbers here: nothing has to stop."""

    def resume(self) -> None:
        """Nothing was stopped."""

    def update_weights(
        self, source: protocols.WeightSource, version: int, *, timeout_s: float = protocols.PAUSE_S
    ) -> None:
        """Stamp completions with `version` from now on."""
        self.version = version

    def close(self) -> None:
        """Nothing is held."""


def _completion(at: int, length: int, version: int) -> protocols.Completion:
    ids, logprobs = np.ones(length, np.int32), np.zeros(length, np.float32)
    spans = ((version, length),)
    return protocols.Completion(prompt=at, sample=0, ids=ids, logprobs=logprobs, finish_reason="stop", spans=spans)
