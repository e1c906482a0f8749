"""Base of the generators over asynchronous engines, in this process or behind HTTP: a coroutine for each completion, on
a loop in a background thread."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from transferqueue.adapters.engines.background_loop import BackgroundLoop
from transferqueue.adapters.engines.completion import check_request
from transferqueue.adapters.protocols import GENERATE_S, PAUSE_S, Completion, Completions, Pause, Prompt, Sampling
from transferqueue.errors import DeadlineExceeded

T = TypeVar("T")


class LoopEngine(ABC):
    """A generator (`protocols.Generator`) but for its weights and its end.

    Args:
        name: Of the background thread, and of the generator in error texts.
        version: Of the weights that the engine starts with.
    """

    def __init__(self, name: str, version: int) -> None:
        self._beside = BackgroundLoop(name)
        self._version = version
        self._context_max: int | None = None
        """Context length in tokens; longer requests are refused on this side. None: unknown."""

    @property
    def version(self) -> int:
        """Version of the weights that the next token will be drawn with."""
        return self._version

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, *, timeout_s: float = GENERATE_S) -> Completions:
        """Yield each completion when it is finished (`protocols.Generator.generate`).

        Args:
            prompts: the prompts, at least one.
            sampling: how their tokens are drawn.
            timeout_s: seconds until all completions must be finished, pauses included; default 600.

        Raises:
            DeadlineExceeded: not all completions were finished in time.
            Disconnected: the generator was closed.
            UsageError: a request that the engine cannot carry out.
        """
        self._beside.check()
        check_request(prompts, sampling, self._context_max)
        jobs = [
            partial(self._complete, index, sample, prompt, sampling)
            for index, prompt in enumerate(prompts)
            for sample in range(prompt.samples)
        ]
        return self._beside.as_finished(jobs, timeout_s)

    def pause(self, mode: Pause, *, timeout_s: float = PAUSE_S) -> None:
        """Stop drawing tokens (`protocols.Generator.pause`). A server stops for all its clients.

        Args:
            mode: what happens to completions that are being generated.
            timeout_s: seconds to wait; default 60.

        Raises:
            DeadlineExceeded: it took longer; then the generator is not paused.
        """
        try:
            self._wait(self._pause(mode), timeout_s, f"pause ({mode.value}) was not in force")
        except DeadlineExceeded:
            self.resume()
            raise

    def resume(self) -> None:
        """End the pause."""
        if not self._beside.closed:
            self._wait(self._resume(), PAUSE_S, "resume was not answered")

    def _wait(self, coroutine: Coroutine[Any, Any, T], timeout_s: float, what: str) -> T:
        """See `BackgroundLoop.wait`."""
        return self._beside.wait(coroutine, timeout_s, what)

    @abstractmethod
    async def _complete(self, index: int, sample: int, prompt: Prompt, sampling: Sampling) -> Completion:
        """Generate one completion, as far as it comes before a pause that aborts it."""

    @abstractmethod
    async def _pause(self, mode: Pause) -> None:
        """Return when no more tokens are drawn."""

    @abstractmethod
    async def _resume(self) -> None:
        """Let tokens be drawn again."""
