"""The process that has the environments of episodes: each in a thread of its own.

``python -m transferqueue.workflows.job.reward_terms.environment_process FACTORY ARGS CALLABLE REQUESTS REPLIES`` makes
calls (`environment_call`) for `environment_host`, each for at most its time. CALLABLE is that which the factory loads,
or empty. Python cannot stop a thread: a call that hangs keeps its thread, and the other end replaces a process that has
several of them. The process ends when its requests do, after the calls that run then.
"""

from __future__ import annotations

import inspect
import math
import os
import select
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, Final

import msgspec
import numpy as np

from transferqueue.adapters.stages.reward_functions import load_callable, may_pass
from transferqueue.errors import NotFound, UsageError, listing
from transferqueue.errors.text import visible
from transferqueue.workflows.job.reward_terms.environment_call import (
    CLOSE,
    ERROR,
    MAKE,
    OUTPUT,
    RESET,
    RESTORE,
    STATE_MAX,
    STEP,
    TEXT_MAX,
    TIMEOUT,
    UNREACHABLE,
    EnvironmentCall,
    FactoryLoaded,
    FailureReply,
    ResultReply,
)
from transferqueue.workflows.job.reward_terms.piped_process import (
    Refused,
    end_with_stdin,
    is_ready,
    read_message,
    write_message,
)

_REWARD_MAX: Final = float(np.finfo(np.float32).max)
_WORDS_MAX: Final = 1000


def main(named: str, args: str, used: str, requests: str, replies: str) -> None:
    """Load the factory and what it uses, and make calls until the other end closes."""
    threading.Thread(target=end_with_stdin, name="lifeline", daemon=True).start()
    reply = partial(write_message, partial(os.write, int(replies)))
    try:
        make = load_callable(named, "environment.factory")
        if used:  # here, since an import may take longer than a call may
            load_callable(used, "environment")
    except UsageError as error:
        reply(Refused(str(error), isinstance(error, NotFound)))
        return
    reply(FactoryLoaded())
    EnvironmentCalls(partial(make, **msgspec.json.decode(args)), reply).serve(int(requests))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a thread that hangs would keep the process


class EnvironmentCalls:
    """Makes the calls. make: an environment. reply: sends an answer."""

    def __init__(self, make: Callable[[], Any], reply: Callable[[msgspec.Struct], None]) -> None:
        self._make, self._reply = make, reply
        self._episodes: dict[int, EpisodeThread] = {}
        self._running: dict[int, tuple[float, EnvironmentCall]] = {}
        """Deadline and call of each episode whose call runs."""
        self._changed = threading.Condition()

    def serve(self, requests: int) -> None:
        """Make the calls that are read from a file descriptor, until it ends and none runs."""
        while True:
            if is_ready(requests, select.POLLIN, self._next_s()):
                try:
                    self._begin(read_message(partial(os.read, requests), EnvironmentCall))
                except EOFError:
                    break
            self._report_late()
        with self._changed:
            while self._running:
                self._changed.wait(self._next_s())
                self._report_late()

    def _next_s(self) -> float:
        """Seconds until a call is late; infinite if none runs."""
        with self._changed:
            first = min((deadline for deadline, _ in self._running.values()), default=math.inf)
        return max(0.0, first - time.monotonic())

    def _begin(self, call: EnvironmentCall) -> None:
        with self._changed:
            if call.episode not in self._episodes:
                self._episodes[call.episode] = EpisodeThread(self._make, self._end)
            self._running[call.episode] = (time.monotonic() + call.limit_s, call)
            self._episodes[call.episode].calls.put(call)

    def _end(self, call: EnvironmentCall, answer: ResultReply | FailureReply) -> bool:
        """Answer a call. Returns whether its episode makes further ones; a call that was late has its answer."""
        with self._changed:
            if call.episode not in self._running:
                return False
            self._reply(answer)
            del self._running[call.episode]
            if call.name == CLOSE:
                del self._episodes[call.episode]
            self._changed.notify_all()
            return call.name != CLOSE

    def _report_late(self) -> None:
        """Answer calls whose time is over, and leave their threads alone."""
        with self._changed:
            now = time.monotonic()
            for deadline, call in list(self._running.values()):
                if deadline <= now:
                    del self._running[call.episode]
                    place = self._episodes.pop(call.episode).place()
                    self._reply(FailureReply(call.episode, "did not return", TIMEOUT, hangs=True, place=place))


class EpisodeThread:
    """A thread with the environment of one episode. end: gets each call with its answer, and returns whether there are
    further ones."""

    def __init__(
        self, make: Callable[[], Any], end: Callable[[EnvironmentCall, ResultReply | FailureReply], bool]
    ) -> None:
        self._make, self._end = make, end
        self._environment: Any = None
        self._takes_key = False
        self.calls: SimpleQueue[EnvironmentCall] = SimpleQueue()
        self._thread = threading.Thread(target=self._play, name="environment", daemon=True)
        self._thread.start()

    def place(self) -> str:
        """Where the thread is."""
        waits_at = getattr(self._environment, "waits_at", None)  # of an agent, whose thread is in its event loop
        frame = (waits_at() if waits_at else None) or sys._current_frames().get(self._thread.ident or 0)
        if frame is None:
            return ""
        last = traceback.extract_stack(frame)[-1]
        return visible(f"in {last.name}, line {last.lineno} of {last.filename}")

    def _play(self) -> None:
        while True:
            call = self.calls.get()
            if not self._end(call, self._answer(call)):
                if call.name != CLOSE:  # it was late, and its episode has failed
                    self._close()
                return

    def _answer(self, call: EnvironmentCall) -> ResultReply | FailureReply:
        try:
            value = self._called(call)
            return ResultReply(call.episode, value, self._state() if call.name in (RESET, STEP) else None)
        except BadAnswer as bad:
            return FailureReply(call.episode, visible(str(bad)), bad.cause)
        except (Exception, SystemExit) as error:  # noqa: BLE001  (sys.exit() would end the thread without a word)
            return _raised(call, error)

    def _called(self, call: EnvironmentCall) -> Any:
        """Make a call, and return its answer as plain values. Raises `BadAnswer`, and what the environment raises."""
        if call.name == MAKE:
            self._environment = self._make()
            self._takes_key = _takes_key(getattr(self._environment, STEP, None))
            return _role(self._environment)
        if call.name == CLOSE:
            return self._close()
        if call.name == RESTORE:
            self._environment.restore(msgspec.msgpack.decode(call.arguments["state"]))
            return None
        arguments = dict(call.arguments)
        if call.name == STEP and not self._takes_key:
            del arguments["key"]
        returned = getattr(self._environment, call.name)(**arguments)
        if call.name == RESET:
            return _observation(_parts(returned, "observation, info")[0])
        observation, reward, ended, cut, _ = _parts(returned, "observation, reward, terminated, truncated, info")
        return [_observation(observation), _reward(reward), bool(ended), bool(cut)]

    def _state(self) -> bytes | None:
        """Return the state of an environment that has methods `state` and `restore`. An attribute of that name, as
        many games have, is none."""
        state = getattr(self._environment, "state", None)
        if not callable(state) or not callable(getattr(self._environment, RESTORE, None)):
            return None
        given = state()
        try:
            encoded = msgspec.msgpack.encode(given)
        except (TypeError, OverflowError, UnicodeEncodeError) as error:
            raise BadAnswer(f"and then state() gave what cannot be sent: {_said(error)}; give plain values") from error
        if (sent := msgspec.msgpack.decode(encoded)) != given:
            raise BadAnswer(
                f"and then state() gave {_cut(repr(given))}, which restore() would get as {_cut(repr(sent))}; give "
                "plain values: lists for tuples and sets"
            )
        if len(encoded) > STATE_MAX:
            raise BadAnswer(f"and then state() gave {len(encoded):,} bytes; give at most {STATE_MAX:,}", OUTPUT)
        return encoded

    def _close(self) -> None:
        """Close the environment. Its episode has ended, so what it raises is in the log of the stage alone."""
        try:
            if self._environment is not None:
                self._environment.close()
        except Exception:  # noqa: BLE001
            traceback.print_exc()


class BadAnswer(Exception):
    """An environment returned what is no answer."""

    def __init__(self, text: str, cause: str = ERROR) -> None:
        super().__init__(text)
        self.cause = cause


def _takes_key(step: Any) -> bool:
    """Whether `step` has a parameter ``key`` that it needs: one with a default is its own."""
    try:
        key = inspect.signature(step).parameters.get("key")
    except (TypeError, ValueError):  # of a function that does not say
        return False
    return key is not None and key.default is key.empty and key.kind in (key.KEYWORD_ONLY, key.POSITIONAL_OR_KEYWORD)


def _role(environment: Any) -> str:
    role = getattr(environment, "role", "user")
    if not isinstance(role, str):
        raise BadAnswer(f"gave an environment whose role is {type(role).__name__}; give a text")
    return _whole(role)


def _parts(returned: Any, wanted: str) -> tuple[Any, ...]:
    if not isinstance(returned, tuple) or len(returned) != wanted.count(",") + 1:
        raise BadAnswer(f"returned {_cut(repr(returned))}; give the tuple ({wanted})")
    return returned


def _observation(given: Any) -> str | list[dict[str, str]] | None:
    texts = [_content(message) for message in given] if isinstance(given, list) else ["" if given is None else given]
    if not all(isinstance(text, str) for text in texts):
        raise BadAnswer(
            f"gave an observation of {type(given).__name__}; give a text, a list of messages with role and content, or "
            "None if there is nothing to read"
        )
    if (characters := sum(map(len, texts))) > TEXT_MAX:
        raise BadAnswer(f"gave a text of {characters:,} characters; give at most {TEXT_MAX:,}", OUTPUT)
    whole = [_whole(text) for text in texts]
    if isinstance(given, list):
        return [
            _sent({**each, "role": _whole(each["role"]), "content": text})
            for each, text in zip(given, whole, strict=True)
        ]
    return None if given is None else whole[0]


def _content(message: Any) -> Any:
    """Return the text of a message; None if it is none."""
    return message.get("content") if isinstance(message, dict) and isinstance(message.get("role"), str) else None


def _sent(message: dict[str, Any]) -> dict[str, Any]:
    """The message, if its further keys can be sent."""
    try:
        msgspec.msgpack.encode(message)
    except Exception as error:
        raise BadAnswer(
            f"gave a message with {listing(message)} that cannot be sent: {type(error).__name__}: {_said(error)}; give "
            "role, content, and keys with plain values"
        ) from error
    return message


def _whole(text: str) -> str:
    """The text, if it can be sent. A subclass of `str` such as NumPy's comes as the plain one."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadAnswer(
            f"gave a text with half a character, {text[error.start]!a} at {error.start}; decode bytes with "
            'errors="replace"'
        ) from error
    return str(text)


def _reward(reward: Any) -> float:
    number = float(reward)
    if not abs(number) <= _REWARD_MAX:
        raise BadAnswer(f"gave the reward {number}; give a finite number of float32")
    return number


def _raised(call: EnvironmentCall, error: BaseException) -> FailureReply:
    frames = traceback.extract_tb(error.__traceback__)
    place = f", in {frames[-1].name}, line {frames[-1].lineno} of {frames[-1].filename}" if len(frames) > 1 else ""
    text = visible(f"raised {type(error).__name__}: {_said(error)}{place}")
    if isinstance(error, TimeoutError):
        return FailureReply(call.episode, text, TIMEOUT, may_pass=True)
    return FailureReply(call.episode, text, UNREACHABLE if may_pass(error) else ERROR, may_pass=may_pass(error))


def _said(error: BaseException) -> str:
    try:
        return _cut(str(error))
    except Exception as failure:  # noqa: BLE001  (of the environment's own kind of error)
        return f"an error whose text raised {type(failure).__name__}"


def _cut(text: str) -> str:
    return text if len(text) <= _WORDS_MAX else f"{text[:_WORDS_MAX]}…"


if __name__ == "__main__":
    main(*sys.argv[1:])
