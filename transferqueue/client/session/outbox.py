"""The frames that the I/O thread sends, in order. Those that are due together leave together."""

from __future__ import annotations

from collections import deque
from typing import Final

from transferqueue.client.session.calls import PendingCall, PendingCalls
from transferqueue.errors import Unreachable
from transferqueue.transport import ClientChannel
from transferqueue.wire import messages as m


class Outbox:
    """Frames to one server. `spoke_at` is when the latest one was sent. `backlog` has the frames that the channel does
    not take now, or that wait for `uncork`."""

    def __init__(self, channel: ClientChannel, calls: PendingCalls, now: float) -> None:
        self._channel, self._calls = channel, calls
        self.spoke_at = now
        self.backlog: Final[deque[bytes]] = deque()
        self._corked = False

    def call(self, pending: PendingCall, now: float) -> None:
        """Send a call."""
        self.send(self._calls.send(pending, now), now)

    def notice(self, request: m.Request, now: float) -> None:
        """Send a request that has no answer."""
        self.send(self._calls.notice(request), now)

    def send(self, frame: bytes, now: float) -> None:
        """Send a frame, unless a greeting is unanswered: the calls keep the frame, and send it after the greeting."""
        if self._calls.greeting is None:
            self.say(frame, now)

    def say(self, frame: bytes, now: float) -> None:
        """Send a frame in order. A frame that the channel does not take now is sent first at the next turn (a reply
        came, or a second has passed)."""
        if self._channel.is_lost:
            return  # the calls keep the frame, and send it after the reconnection
        self.backlog.append(frame)
        self.spoke_at = now
        if not self._corked:
            self._flush()

    def cork(self) -> None:
        """More frames follow at once: keep them until `uncork`."""
        self._corked = True

    def uncork(self) -> None:
        """Send the kept frames, with few system calls."""
        self._corked = False
        self._flush()

    def _flush(self) -> None:
        backlog = self.backlog
        while backlog:
            try:
                sent = self._channel.send_some(backlog)
            except Unreachable:
                return
            for _ in range(sent):
                backlog.popleft()
