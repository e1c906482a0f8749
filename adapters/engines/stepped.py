"""Base of the generators whose engine draws tokens in this process, step by step.

- A thread takes steps while there are rows, and ends when there are none. A pause or new weights take effect between
  two steps, at most one step late.
- A request's completions come to its caller through a queue of its own.
"""

from __future__ import annotations

import queue as queues
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

from transferqueue.adapters.engines.completion import check_request
from transferqueue.adapters.engines.images import VisionProcessor
from transferqueue.adapters.protocols import (
    GENERATE_S,
    PAUSE_S,
    Caches,
    Completion,
    Completions,
    Pause,
    Prompt,
    Sampling,
    WeightSource,
)
from transferqueue.errors import DeadlineExceeded, Disconnected


class SteppedBatch(Protocol):
    """Rows that an engine generates together. Not safe for threads: `SteppedGenerator` takes turns."""

    def add(self, rows: Sequence[Any]) -> None:
        """Add the rows of a request."""

    def step(self, version: int) -> Sequence[tuple[Any, Completion]]:
        """Draw tokens with weights of this version. Returns the rows that are finished."""

    def take(self, request: SteppedRequest) -> Sequence[tuple[Any, Completion]]:
        """Remove the unfinished rows of a request. Returns them with their tokens so far, ended by `ABORT`."""

    def cached_tokens(self) -> int:
        """Number of tokens of unfinished rows that the model has read, and need not read again."""


class SteppedRequest:
    """One call of `generate`: its rows, and its completions as they are finished.

    Args:
        row: makes a row, of its request, the index of its prompt, that of its sample, the prompt and the sampling.
        prompts: the prompts.
        sampling: how their tokens are drawn.
    """

    def __init__(
        self,
        row: Callable[[SteppedRequest, int, int, Prompt, Sampling], Any],
        prompts: Sequence[Prompt],
        sampling: Sampling,
    ) -> None:
        self.rows = [row(self, at, sample, p, sampling) for at, p in enumerate(prompts) for sample in range(p.samples)]
        self.samples = self.left = len(self.rows)
        self.finished: queues.SimpleQueue[Completion | BaseException] = queues.SimpleQueue()


class SteppedGenerator(ABC):
    """A generator (`protocols.Generator`) but for its rows and its weights.

    Args:
        name: of the thread, and of the generator in error texts.
        version: of the weights that the engine starts with.
    """

    kv = Caches.RECOMPUTE
    """What becomes of the caches of running completions when weights change. It may be set at any time."""
    _images: VisionProcessor | None = None
    prefilled_again = 0
    """Tokens of running completions that the model read again because weights changed."""

    def __init__(self, name: str, version: int) -> None:
        self._name = name
        self._version = version
        self._context_max: int | None = None
        """Context length in tokens; longer requests are refused. None: unknown."""
        self._turn = threading.Condition(threading.Lock())
        self._thread: threading.Thread | None = None
        self._stepping = False
        self._stepped = False
        """Whether tokens were drawn since the last change of weights."""
        self._controls = 0
        self._paused: Pause | None = None
        self._running: dict[SteppedRequest, SteppedBatch] = {}
        self._left: list[SteppedRequest] = []
        """Requests whose callers have gone while the drawing thread had its turn."""
        self._closed = False
        self._half_loaded: BaseException | None = None
        """The error of a load that left some weights of two versions; None: they are whole."""

    # ------------------------------------------------------------ of the engine

    @abstractmethod
    def _row(self, request: SteppedRequest, index: int, sample: int, prompt: Prompt, sampling: Sampling) -> Any:
        """A row: an object whose `owner` is the request."""

    @abstractmethod
    def _batch(self, request: SteppedRequest) -> SteppedBatch:
        """The batch that the rows of a request join."""

    @abstractmethod
    def _check(self, source: WeightSource) -> None:
        """Raise `SchemaError` unless the weights fit."""

    @abstractmethod
    def _load(self, source: WeightSource, version: int, timeout_s: float) -> None:
        """Take weights that fit. Called between two steps. What changes them stands in `_changing_weights`."""

    def _still(self, mode: Pause) -> None:  # noqa: B027  (not every engine has more to do)
        """A pause is in force. Called between two steps."""

    def _going(self) -> None:  # noqa: B027  (the same)
        """The pause ends. Called between two steps."""

    # ------------------------------------------------------------ the protocol

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
            Disconnected: the generator was closed, or an update left weights of two versions.
            UsageError: a request that the engine cannot carry out.
        """
        check_request(prompts, sampling, self._context_max, self._images)
        return self._generate(SteppedRequest(self._row, prompts, sampling), time.monotonic() + timeout_s, timeout_s)

    def _generate(self, request: SteppedRequest, deadline: float, timeout_s: float) -> Completions:
        self._enter(request, deadline, timeout_s)
        try:
            for _ in range(request.samples):
                yield self._next(request, deadline, timeout_s)
        finally:
            self._leave(request)

    def pause(self, mode: Pause, *, timeout_s: float = PAUSE_S) -> None:
        """Stop drawing tokens (`protocols.Generator.pause`).

        Args:
            mode: what happens to completions that are being generated.
            timeout_s: seconds to wait; default 60.

        Raises:
            DeadlineExceeded: it took longer; then the generator is not paused.
        """
        with self._turn:
            before, self._paused = self._paused, mode
            if not self._control(self._is_still, timeout_s):
                self._paused = before
                self._turn.notify_all()
                raise DeadlineExceeded(f"pause ({mode.value}) was not in force after {timeout_s:g} s: {self._busy()}")
            if mode is Pause.ABORT:
                self._abort_all()
            self._still(mode)

    def resume(self) -> None:
        """End the pause."""
        with self._turn:
            if self._paused is not None and not self._closed:
                self._going()
            self._paused = None
            self._turn.notify_all()

    def update_weights(self, source: WeightSource, version: int, *, timeout_s: float = PAUSE_S) -> None:
        """Load new weights between two tokens (`protocols.Generator.update_weights`).

        Args:
            source: the tensors.
            version: of the weights.
            timeout_s: seconds to wait; default 60.

        Raises:
            DeadlineExceeded: it took longer; the old weights stay.
            SchemaError: a tensor does not fit the model; the old weights stay.

        After an error while the weights change, requests raise `Disconnected`, those that run and those that come,
        until a later call has loaded a version.
        """
        deadline = time.monotonic() + timeout_s
        self._check(source)
        with self._turn:
            if not self._control(lambda: not self._stepping, timeout_s):
                raise DeadlineExceeded(
                    f"weights of version {version} were not taken after {timeout_s:g} s: {self._busy()}"
                )
            cached = sum(batch.cached_tokens() for batch in self._batches()) if self._stepped else 0
            self._load(source, version, max(0.0, deadline - time.monotonic()))
            self._version, self._stepped = version, False
            self.prefilled_again += cached if self.kv is Caches.RECOMPUTE else 0

    @contextmanager
    def _changing_weights(self) -> Iterator[None]:
        """The weights change in this block. An error in it ends all requests until another block has ended well."""
        try:
            yield
        except BaseException as failure:
            self._half_loaded = failure
            self._end_all(self._half())
            raise
        self._half_loaded = None

    def _half(self) -> Disconnected:
        return Disconnected(
            f"the {self._name} has weights of two versions, since an update failed ({self._half_loaded}); update them "
            "again, or open it anew"
        )

    def close(self) -> None:
        """Abort the running requests; they raise `Disconnected`. Waits for the token that is being drawn."""
        with self._turn:
            self._closed = True
            for request in self._running:
                request.finished.put(Disconnected(f"the {self._name} was closed"))
            self._turn.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(PAUSE_S)

    # ------------------------------------------------------------ requests

    def _enter(self, request: SteppedRequest, deadline: float, timeout_s: float) -> None:
        with self._turn:
            left_s = deadline - time.monotonic()
            in_time = left_s > 0 and self._turn.wait_for(lambda: self._closed or self._paused is None, left_s)
            if self._closed:
                raise Disconnected(f"the {self._name} was closed")
            if not in_time:
                raise self._late(timeout_s)
            if self._half_loaded is not None:
                raise self._half() from self._half_loaded
            batch = self._batch(request)
            batch.add(request.rows)
            self._running[request] = batch
            if self._thread is None:
                self._thread = threading.Thread(target=self._draw, name=self._name, daemon=True)
                self._thread.start()

    def _next(self, request: SteppedRequest, deadline: float, timeout_s: float) -> Completion:
        try:
            result = request.finished.get(timeout=max(0.0, deadline - time.monotonic()))
        except queues.Empty:
            with self._turn:
                raise self._late(timeout_s) from None
        if isinstance(result, BaseException):
            raise result
        return result if request.finished.empty() else replace(result, more=True)

    def _leave(self, request: SteppedRequest) -> None:
        """Forget the request; its unfinished rows leave the batch between two tokens: now, or after the turn that the
        drawing thread has."""
        with self._turn:
            self._left.append(request)
            if not self._stepping:
                self._take_left()
                self._turn.notify_all()

    def _take_left(self) -> None:
        for request in self._left:
            if (batch := self._running.pop(request, None)) is not None:
                batch.take(request)
        self._left.clear()

    def _late(self, timeout_s: float) -> DeadlineExceeded:
        paused = f"it is paused ({self._paused.value})" if self._paused else self._busy()
        return DeadlineExceeded(f"the request was not finished after {timeout_s:g} s: {paused}")

    def _abort_all(self) -> None:
        for request, batch in list(self._running.items()):
            self._finish(batch.take(request))

    def _finish(self, finished: Sequence[tuple[Any, Completion]]) -> None:
        for row, completion in finished:
            request: SteppedRequest = row.owner
            request.left -= 1
            request.finished.put(completion)
            if not request.left:
                self._running.pop(request, None)
        if finished:
            self._turn.notify_all()

    # ------------------------------------------------------------ whose turn it is

    def _control(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until `ready`, before the drawing thread takes another turn; return whether it came. The caller holds
        the lock."""
        self._controls += 1
        try:
            return self._turn.wait_for(ready, timeout_s)
        finally:
            self._controls -= 1
            self._turn.notify_all()

    def _is_still(self) -> bool:
        return not self._running if self._paused is Pause.WAIT else not self._stepping

    def _may_draw(self) -> bool:
        waits = self._paused in (Pause.KEEP, Pause.ABORT) or (self._controls and self._paused is not Pause.WAIT)
        return self._closed or not self._running or not waits

    def _draw(self) -> None:
        """The thread: step every batch in turn, until no row is left."""
        while self._my_turn():
            try:
                finished = [completion for batch in self._batches() for completion in batch.step(self._version)]
            except BaseException as failure:  # noqa: BLE001  (raised where the completions are awaited)
                self._fail(failure)
                continue
            with self._ended_turn():
                self._finish(finished)

    def _my_turn(self) -> bool:
        with self._turn:
            self._turn.wait_for(self._may_draw)
            if self._closed or not self._running:
                self._thread = None
                return False
            self._stepping = self._stepped = True
            return True

    def _batches(self) -> list[SteppedBatch]:
        return list({id(batch): batch for batch in list(self._running.values())}.values())

    @contextmanager
    def _ended_turn(self) -> Iterator[None]:
        with self._turn:
            self._stepping = False
            yield
            self._take_left()
            self._turn.notify_all()

    def _fail(self, failure: BaseException) -> None:
        """The engine failed: every request gets the error."""
        with self._ended_turn():
            self._end_all(failure)

    def _end_all(self, failure: BaseException) -> None:
        for request, batch in list(self._running.items()):
            batch.take(request)
            request.finished.put(failure)
        self._running.clear()

    def _busy(self) -> str:
        rows = sum(request.left for request in self._running)
        return f"{len(self._running)} requests with {rows} unfinished completions are being generated"
