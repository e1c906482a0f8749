"""Who may use the channel and the calls of a session: its I/O thread, a caller that drives, or an event loop while it sends or reads.

The role is taken and given back by single calls of C code, which no interrupt divides. A driver that was interrupted anywhere but in its
wait leaves the channel *suspect*: nobody knows what it has read or written then. So whoever takes the role next connects again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Final

from transferqueue.client.session.calls import PendingCall
from transferqueue.transport import ClientChannel, Wakeup
from transferqueue.transport.control.channel import DrivableChannel

ORPHAN_S: Final = 1.0
"""How often the I/O thread, while it waits for a driver to give up the role, looks whether the driver is gone."""


class ChannelRole:
    """The role, and the caller that has it. wakeup: wakes the I/O thread.

    driver: the call that drives, or what stands for an event loop that reads; None: no caller has the role. driver_waits: it is in its wait, where an interrupt does no harm. drivable:
    the channel; None: callers of this kind of channel cannot drive.
    """

    def __init__(self, channel: ClientChannel, wakeup: Wakeup) -> None:
        self.lock: Final = threading.Lock()
        self.drivable: Final = channel if isinstance(channel, DrivableChannel) else None
        self._wakeup = wakeup
        self.driver: PendingCall | None = None
        self.driver_thread = 0
        self.driver_waits = False
        self.release: Callable[[], object] = _nothing
        self.suspect = False

    def take(self, left: Iterable[PendingCall]) -> None:
        """Wait for the role, in the I/O thread. A caller that drives gives it up when it is woken. left: calls whose callers went away."""
        if not self.lock.acquire(blocking=False):
            self._wakeup.set()
            while not self.lock.acquire(timeout=ORPHAN_S):
                driver = self.driver
                if driver is not None and any(call is driver for call in list(left)):
                    self.suspect = True  # a second interrupt came before the first one had given the role back
                    break
        if self.drivable is not None and (
            self.driver is not None or self.suspect
        ):  # what an interrupted driver has left
            self.driver, self.driver_thread = None, 0
            self.drivable.end_driving()
            if self.suspect:
                self.suspect = False
                self.drivable.reset()

    def revoke(self) -> None:
        """Take the role from a driver in this thread, which goes on only after the signal handler that calls this has returned."""
        self.suspect = not self.driver_waits
        self.driver_thread, self.driver = 0, None
        if self.drivable is not None:
            self.drivable.end_driving()
        self.release()
        self._wakeup.set()


def _nothing() -> None:
    pass
