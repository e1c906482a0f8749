"""Finds out whether the server lives, while nothing else is sent.

For a server of this machine the kernel says so. A server of another machine is probed if a call waits and no reply has come for long. A
server that keeps a journal is started again: until then each call waits as long as it may.
"""

from __future__ import annotations

import math

from transferqueue.client.session.calls import PendingCall, PendingCalls
from transferqueue.client.session.outbox import Outbox
from transferqueue.errors import Disconnected
from transferqueue.limits import ANSWER_S, SERVER_GONE_S, SESSION_SILENCE_S
from transferqueue.transport import ClientChannel, is_served
from transferqueue.wire import messages as m


class ServerWatch:
    """What one connection knows of its server. durable: whether sessions outlive it."""

    def __init__(self, channel: ClientChannel, address: str, calls: PendingCalls, outbox: Outbox, now: float) -> None:
        self._channel, self._address, self._calls, self._outbox = channel, address, calls, outbox
        self.durable = False
        self.heard_at = now
        """When the latest frame came."""
        self._gone_since: float | None = None
        self._probed_at = -math.inf

    def check(self, now: float) -> Disconnected | None:
        """Why the session is over, if the server is gone; else None. Called at each heartbeat."""
        if self.durable:
            return None
        served = is_served(self._channel.address)
        if served is None:
            return self._probe(now)
        if served:
            self._gone_since = None
        elif self._gone_since is None:
            self._gone_since = now
        elif now - self._gone_since >= SERVER_GONE_S:
            return Disconnected(f"the server at {self._address} is gone; start it, and connect again")
        return None

    def _probe(self, now: float) -> Disconnected | None:
        silent_s = now - self.heard_at
        if not len(self._calls) or silent_s < SESSION_SILENCE_S:
            return None
        if self._probed_at < self.heard_at:
            self._probed_at = now
            self._outbox.call(PendingCall(m.ListTables()), now)
        elif silent_s >= SESSION_SILENCE_S + ANSWER_S:
            return Disconnected(f"the server at {self._address} has been silent for {silent_s:.0f} s; connect again")
        return None
