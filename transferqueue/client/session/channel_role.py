"""The role of a session: permission to use its channel and calls. The I/O thread has it, a caller that drives, or an
event loop while it sends or reads.

The role is taken and given back by single calls of C code, which no interrupt divides. A driver that was interrupted
anywhere but in its wait leaves the channel *suspect*: it may have read or written part of a frame. So the I/O thread,
which takes the role next, connects again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import compress, repeat, starmap
from operator import length_hint
from typing import Final

from transferqueue.client.session.calls import PendingCall
from transferqueue.transport import ClientChannel, Wakeup
from transferqueue.transport.control.channel import DrivableChannel

ORPHAN_S: Final = 1.0
"""How often the I/O thread, while it waits for a driver to give up the role, looks whether the driver is gone."""


class RoleClaim:
    """One attempt of the present thread to take the role without waiting for it.

    An interrupt comes before or after a step of it, never in the middle: each is a single call of C code. `release`
    gives the role back at its first call, and does nothing afterwards.
    """

    __slots__ = ("_acquire", "_claims", "_unreleased", "release", "thread")

    def __init__(self, role: ChannelRole) -> None:
        unreleased = repeat((), 1)
        self.thread: Final = threading.get_ident()
        self.release: Final[Callable[[], object]] = partial(deque, starmap(role.lock.release, unreleased), 0)
        self._unreleased = unreleased
        self._acquire, self._claims = role.lock.acquire, role.claims

    def take(self) -> bool:
        """Take the role if it is free. Returns whether this thread has it now."""
        self._claims.extend(compress((self,), map(self._acquire, (False,))))
        return self.stands

    @property
    def stands(self) -> bool:
        """Whether the role was taken, and has not been given back."""
        claims = self._claims
        return bool(claims) and claims[0] is self and length_hint(self._unreleased) > 0

    def give_up(self) -> None:
        """Give the role back, unless it was not taken, or was given back before."""
        if self.stands:
            self.release()


class ChannelRole:
    """The role, and the caller that has it.

    - `claims`: the last claim that took the role, which may have ended.
    - `driver`: the call that drives, or a stand-in for an event loop that reads; None: no caller has the role.
    - `driver_waits`: the driver is in its wait, where an interrupt does no harm.
    - `drivable`: the channel; None: callers of this kind of channel cannot drive.

    Args:
        channel: of the session.
        wakeup: wakes the I/O thread.
    """

    def __init__(self, channel: ClientChannel, wakeup: Wakeup) -> None:
        self.lock: Final = threading.Lock()
        self.drivable: Final = channel if isinstance(channel, DrivableChannel) else None
        self._wakeup = wakeup
        self.driver: PendingCall | None = None
        self.driver_waits = False
        self.claims: Final[deque[RoleClaim]] = deque(maxlen=1)
        self.suspect = False
        self.ask_loop: Callable[[], object] = _nothing
        """Has the event loop that reads call `revoke_own`."""

    def take(self, left: Iterable[PendingCall]) -> None:
        """Wait for the role, in the I/O thread. A caller that drives gives it up when it is woken.

        Args:
            left: calls whose callers went away.
        """
        if not self.lock.acquire(blocking=False):
            self._wakeup.set()
            while not self.lock.acquire(timeout=ORPHAN_S):
                driver = self.driver
                if driver is not None and any(call is driver for call in list(left)):
                    self.suspect = True  # a second interrupt came before the first one had given the role back
                    self.claims.clear()  # this thread gives it back instead
                    break
                self.ask_loop()
        if self.drivable is not None and (self.driver is not None or self.suspect):  # left by an interrupted driver
            self.driver, self.driver_waits = None, False
            self.drivable.end_driving()
            if self.suspect:
                self.suspect = False
                self.drivable.reset()

    def revoke_own(self) -> None:
        """Take the role from a driver in this thread, if there is one: it was interrupted by the signal handler that
        calls this and goes on after it, or ended by a second interrupt before it had given the role back. A claim that
        was given back is left alone: the I/O thread, or another caller, may use the channel now."""
        claim = self.claims[0] if self.claims else None
        if claim is None or claim.thread != threading.get_ident() or not claim.stands:
            return
        self.suspect = not self.driver_waits
        self.driver, self.driver_waits = None, False
        if self.drivable is not None:
            self.drivable.end_driving()
        claim.release()
        self._wakeup.set()


def _nothing() -> None:
    pass
