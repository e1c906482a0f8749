"""A call of an environment as the two processes speak of it, and why one failed."""

from __future__ import annotations

from typing import Any, Final

import msgspec

ERROR: Final = "environment_error"
"""The environment raised, or returned what is no answer."""
TIMEOUT: Final = "environment_timeout"
"""A call, or the whole episode, took too long."""
UNREACHABLE: Final = "environment_unreachable"
"""An error of the network or the system, such as a tool's server that is gone."""
DIED: Final = "environment_died"
"""Its process was killed, crashed or exited."""
OUTPUT: Final = "environment_output"
"""A text that is too long."""
CAUSES: Final = (ERROR, TIMEOUT, UNREACHABLE, DIED, OUTPUT)
TEXT_MAX: Final = 1 << 20
"""Most characters of an observation: more than the context of any model."""

STATE_MAX: Final = 1 << 20
"""Most bytes of an environment's state."""

MAKE, RESET, RESTORE, STEP, CLOSE = "make", "reset", "restore", "step", "close"


class EnvironmentCall(msgspec.Struct, frozen=True):
    """A call of the environment of an episode. Each episode has one at a time. limit_s: its longest time."""

    episode: int
    name: str
    arguments: dict[str, Any]
    limit_s: float


class FactoryLoaded(msgspec.Struct, frozen=True, tag="loaded"):
    """The factory of environments is there."""


class ResultReply(msgspec.Struct, frozen=True, tag="returned"):
    """What a call returned, as plain values: of `MAKE` the role, of `RESET` the observation, of `STEP` observation,
    reward, terminated and truncated. state: of the environment after `RESET` and `STEP`, as MessagePack; None: it gives
    none."""

    episode: int
    value: Any
    state: bytes | None = None


class FailureReply(msgspec.Struct, frozen=True, tag="failed"):
    """A call failed. text: how, after the call's name. cause: one of those above. hangs: it did not return in time.
    place: where it is then."""

    episode: int
    text: str
    cause: str
    may_pass: bool = False
    hangs: bool = False
    place: str = ""


class CallFailed(Exception):
    """A call of an environment failed, and its episode with it.

    Args:
        text: the call with its arguments, and what went wrong.
        cause: the drop reason of a row that fails so for good.
        may_pass: the system or the network failed, or the process of the environment.
        place: where it hangs; default: nothing is known.
        was_running: whether the process died, or was killed, while it made this call.
    """

    def __init__(
        self, text: str, *, cause: str, may_pass: bool = False, place: str = "", was_running: bool = False
    ) -> None:
        super().__init__(text)
        self.cause, self.may_pass = cause, may_pass
        self.place, self.was_running = place, was_running
