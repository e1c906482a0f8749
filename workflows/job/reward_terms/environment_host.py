"""Environments in processes of their own (`environment_process`), so that no call of one can hold up, crash or end the
process that plays their episodes.

1. The episodes of a host share a process. A call has a time limit there; one that hangs keeps its thread. A process
   with `HUNG_MAX` such threads gets no further episodes, and ends after those that it has.
2. A process that does not even say that a call is late is killed: a call has the interpreter.
3. If a process ends, the episodes whose environments it had have failed, and the next one starts another. An episode
   whose call ran at that moment may be why (`CallFailed.was_running`): its next try should be `alone`, in a process of
   its own, so that it cannot end others twice.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from typing import Any, Final, Self, SupportsFloat

import msgspec

from transferqueue.errors import TransferQueueError
from transferqueue.workflows.job.reward_terms.environment_call import (
    CLOSE,
    DIED,
    MAKE,
    RESET,
    RESTORE,
    STEP,
    TIMEOUT,
    CallFailed,
    EnvironmentCall,
    FactoryLoaded,
    FailureReply,
    ResultReply,
)
from transferqueue.workflows.job.reward_terms.piped_process import LATER_S, PipedProcess, ended
from transferqueue.workflows.job.settings.environment_factories import factory_of
from transferqueue.workflows.job.settings.job import EnvironmentSettings

HUNG_MAX: Final = 8
"""Calls that may hang in one process. Their threads may compute, beside those that work."""
ALONE_MAX: Final = 4
"""Processes with one episode alone."""
CLOSE_S: Final = 10.0
"""Longest wait for calls that close environments when a host is closed."""
_MODULE: Final = "transferqueue.workflows.job.reward_terms.environment_process"
_SHOWN_CHARS: Final = 300


class EnvironmentHost:
    """The environments of one factory. A context manager. `open` may be called from several threads at once.

    Starts the first process, and raises as `PipedProcess.loaded` does.

    Args:
        named: ``module:factory`` or ``file.py:factory``.
        args: of the factory.
        timeout_s: longest call in seconds.
        episode_s: longest episode in seconds.
        key: of its settings, for messages.
        used: the callable that the factory loads, named as it is; default: none.
    """

    def __init__(
        self,
        named: str,
        args: Mapping[str, Any],
        *,
        timeout_s: float,
        episode_s: float,
        key: str = "environment.0",
        used: str = "",
    ) -> None:
        self._words = named, msgspec.json.encode(args).decode(), used
        self.timeout_s, self.episode_s, self.key = timeout_s, episode_s, key
        self._lock = threading.Lock()
        self._alone = threading.BoundedSemaphore(ALONE_MAX)
        self._numbers = count()
        self._processes: set[EnvironmentProcess] = set()
        """Those that live, those that get no further episodes among them."""
        self._current = self._started()

    @classmethod
    def of(cls, settings: EnvironmentSettings, key: str) -> Self:
        """Start that of an environment of a job."""
        factory, args = factory_of(settings)
        used = settings.function or settings.agent
        return cls(factory, args, timeout_s=settings.timeout_s, episode_s=settings.episode_s, key=key, used=used)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes, after the calls that close environments. A second call does nothing."""
        with self._lock:
            processes = list(self._processes)
        deadline = time.monotonic() + CLOSE_S
        for process in processes:
            process.finish()
        for process in processes:
            process.join(deadline)

    @contextmanager
    def open(self, until: float, *, alone: bool = False) -> Iterator[HostedEnvironment]:
        """Make an environment, and close it after the block, without waiting for that.

        until: end of the episode's time, as of `time.monotonic`. alone: in a process of its own. Raises `CallFailed`.
        """
        with ExitStack() as stack:
            if alone:
                stack.enter_context(self._alone)
            try:
                process = self._enter(alone)
            except TransferQueueError as error:
                raise CallFailed(str(error), cause=DIED, may_pass=True) from error
            stack.callback(self._leave, process)
            environment = HostedEnvironment(self, process, next(self._numbers), until)
            stack.callback(environment.close)
            environment.make()
            yield environment

    def _enter(self, alone: bool) -> EnvironmentProcess:
        with self._lock:
            if alone:
                process = self._started()
                process.takes_more = False
            else:
                if not self._current.takes_more:
                    self._current = self._started()
                process = self._current
            process.episodes += 1
            return process

    def _leave(self, process: EnvironmentProcess) -> None:
        with self._lock:
            process.episodes -= 1
            if not process.takes_more and not process.episodes:
                process.finish()

    def _started(self) -> EnvironmentProcess:
        process = EnvironmentProcess(*self._words, gone=self._forget)
        self._processes.add(process)
        return process

    def _forget(self, process: EnvironmentProcess) -> None:
        with self._lock:
            self._processes.discard(process)


class HostedEnvironment:
    """An environment of another process, as `adapters.stages.environments.Environment`. Its calls raise `CallFailed`.
    One thread uses it."""

    def __init__(self, host: EnvironmentHost, process: EnvironmentProcess, episode: int, until: float) -> None:
        self._host, self._process, self._episode, self._until = host, process, episode, until
        self._is_usable = True
        self.role = "user"
        self.state: bytes | None = None
        """Of the environment after its last turn; None: it gives none."""
        self.key = uuid.uuid4().hex
        """Of the next turn: the same if a turn is made again."""

    def make(self) -> None:
        """Make the environment."""
        self.role = self._call(MAKE, "the factory()")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Mapping[str, Any]]:
        """Start an episode."""
        shown = _shown(f"reset(seed={seed}, options={options})")
        return self._call(RESET, shown, seed=seed, options=options), {}

    def restore(self, state: bytes, turns: int) -> None:
        """Instead of `reset`: let the environment be as it was after so many turns."""
        self._call(RESTORE, f"restore() after turn {turns}", state=state)
        self.state = state

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, Mapping[str, Any]]:
        """Act."""
        shown = _shown(f"step({action!r})")
        observation, reward, is_ended, is_cut = self._call(STEP, shown, action=action, key=self.key)
        return observation, reward, is_ended, is_cut, {}

    def close(self) -> None:
        """Free its resources, without waiting for that; nothing after a call that hangs."""
        if self._is_usable:
            self._is_usable = False
            self._process.close_environment(self._episode, self._host.timeout_s)

    def _call(self, name: str, shown: str, **arguments: Any) -> Any:
        left_s = self._until - time.monotonic()
        limit_s = min(left_s, self._host.timeout_s)
        if limit_s <= 0:
            raise CallFailed(f"{shown} was not made: {self._too_long()}", cause=TIMEOUT)
        try:
            answer = self._process.call(EnvironmentCall(self._episode, name, arguments, limit_s))
        except ProcessDied as death:
            self._is_usable = False
            doing = f"{shown} failed: " if death.was_running else f"{shown} was not made: "
            raise CallFailed(doing + str(death), cause=DIED, may_pass=True, was_running=death.was_running) from death
        if isinstance(answer, ResultReply):
            self.state = answer.state if name in (RESET, STEP) else self.state
            return answer.value
        if answer.hangs:
            self._is_usable = False
            limit = self._too_long() if limit_s == left_s else f"{self._host.key}.timeout_s={self._host.timeout_s:g} s"
            text = f"{shown} {answer.text} within {limit}; set a longer limit, or one in the environment"
            raise CallFailed(text, cause=TIMEOUT, place=answer.place, was_running=not answer.place)
        raise CallFailed(f"{shown} {answer.text}", cause=answer.cause, may_pass=answer.may_pass)

    def _too_long(self) -> str:
        return f"the {self._host.key}.episode_s={self._host.episode_s:g} s of its episode"


def _shown(call: str) -> str:
    return call if len(call) <= _SHOWN_CHARS else f"{call[:_SHOWN_CHARS]}…)"


class ProcessDied(Exception):
    """The process has ended. was_running: while it made the call."""

    def __init__(self, text: str, *, was_running: bool) -> None:
        super().__init__(text)
        self.was_running = was_running


class EnvironmentProcess:
    """One process, and the calls that it makes. gone: is called when it has ended.

    `takes_more` and `episodes` belong to the host.
    """

    def __init__(self, named: str, args: str, used: str, *, gone: Callable[[EnvironmentProcess], None]) -> None:
        self._process = PipedProcess(_MODULE, named, args, used)
        self._process.loaded(FactoryLoaded, f"environment {used or named}")
        self._gone = gone
        self.takes_more, self.episodes = True, 0
        self._hung = 0
        self._lock, self._sending = threading.Lock(), threading.Lock()
        self._answers: dict[int, Future[ResultReply | FailureReply]] = {}
        self._end = ""
        """How it ended, in words."""
        self._reader = threading.Thread(target=self._read, name="environments", daemon=True)
        self._reader.start()

    def call(self, call: EnvironmentCall) -> ResultReply | FailureReply:
        """Make a call, and wait for its answer. Raises `ProcessDied`."""
        answer: Future[ResultReply | FailureReply] = Future()
        with self._lock:
            if self._end:
                raise ProcessDied(self._end, was_running=False)
            self._answers[call.episode] = answer
        deadline = time.monotonic() + call.limit_s + LATER_S
        with suppress(TimeoutError):
            self._send(call, deadline)
        if wait_for([answer], max(0.0, deadline - time.monotonic())).not_done:
            self._kill(call.episode)
        return answer.result()

    def close_environment(self, episode: int, limit_s: float) -> None:
        """Close an environment. Returns at once."""
        try:
            self._send(EnvironmentCall(episode, CLOSE, {}, limit_s), time.monotonic() + LATER_S)
        except TimeoutError:
            self._process.kill()  # it does not read

    def finish(self) -> None:
        """It gets no further calls, and ends after those that it makes."""
        with self._sending:
            self.takes_more = False
            self._process.finish()

    def join(self, deadline: float) -> None:
        """Wait for its end until a deadline, and kill it then."""
        self._reader.join(max(0.0, deadline - time.monotonic()))
        if self._reader.is_alive():
            self._process.kill()
            self._reader.join(LATER_S)

    def _send(self, call: EnvironmentCall, deadline: float) -> None:
        with self._sending:
            self._process.send(call, deadline)

    def _kill(self, episode: int) -> None:
        """Kill the process since it does not say that a call is late; the call gets that as its answer."""
        with self._lock:
            answer = self._answers.pop(episode, None)
            self.takes_more = False
        if answer is not None:
            answer.set_result(FailureReply(episode, "kept the interpreter, and did not return", TIMEOUT, hangs=True))
            self._process.kill()

    def _read(self) -> None:
        """Pass answers on until the process ends, in a thread of its own."""
        with suppress(EOFError):
            while True:
                self._answered(self._process.receive(ResultReply | FailureReply))
        with self._sending:
            code = self._process.end()
        with self._lock:
            self._end = f"the process of the environments {ended(code)}"
            self.takes_more = False
            answers, self._answers = self._answers, {}
        for answer in answers.values():
            answer.set_exception(ProcessDied(self._end, was_running=True))
        self._gone(self)

    def _answered(self, said: ResultReply | FailureReply) -> None:
        with self._lock:
            answer = self._answers.pop(said.episode, None)  # none: nothing waits for the end of `close`
            self._hung += isinstance(said, FailureReply) and said.hangs
            self.takes_more = self.takes_more and self._hung < HUNG_MAX
        if answer is not None:
            answer.set_result(said)
