"""Finds out whether the server lives, while the client sends nothing else.

Clients consider a server with a socket file dead when its lock file is free. Over tcp they consider it dead when its
host refuses connections to its port (docs/decisions/calls.md). A host that does not answer may be cut off: then the
client asks the server if a call waits and no reply has come for long. A server that keeps a journal is started again:
until then each call waits as long as it may.
"""

from __future__ import annotations

import math

from transferqueue.client.session.calls import PendingCall, PendingCalls
from transferqueue.client.session.outbox import Outbox
from transferqueue.errors import Disconnected
from transferqueue.limits import ANSWER_S, SERVER_GONE_S, SESSION_SILENCE_S
from transferqueue.transport import ClientChannel, TcpAddress, is_served, parse_address
from transferqueue.transport.control.port_probe import PortProbe
from transferqueue.wire import messages as m


class ServerLiveness:
    """The facts that one connection knows of its server's life. `durable` says whether sessions outlive the server."""

    def __init__(self, channel: ClientChannel, address: str, calls: PendingCalls, outbox: Outbox, now: float) -> None:
        self._channel, self._address, self._calls, self._outbox = channel, address, calls, outbox
        self.durable = False
        self.package = ""
        """Version of the server's package."""
        self.waits_for_disk = ""
        """What the server said when it ended because its disk was full or failed, until another one answers."""
        self.heard_at = now
        """When the latest frame came."""
        place = parse_address(channel.address)
        self._port = PortProbe(place) if isinstance(place, TcpAddress) else None
        self._gone_since: float | None = None
        self._asked_at = -math.inf

    def check(self, now: float) -> Disconnected | None:
        """Why the session is over, if the server is gone; else None. Called at each heartbeat."""
        if self.durable:
            return None
        served = is_served(self._channel.address)
        if served is None and self._is_refused():
            served = False
        if served is not False:
            self._gone_since = None
            return self._ask(now) if served is None else None
        if self._gone_since is None:
            self._gone_since = now
        if now - self._gone_since < SERVER_GONE_S:
            return None
        return Disconnected(f"the server at {self._address} is gone; start it, and connect again")

    @property
    def why_silent(self) -> str:
        """Why the server does not answer, as far as is known."""
        if self.waits_for_disk:
            return f"it ended, and waits for its disk: {self.waits_for_disk}"
        return "the server may be stopped or out of reach"

    def _is_refused(self) -> bool:
        return self._port is not None and self._channel.is_lost and bool(self._port.is_refused())

    def _ask(self, now: float) -> Disconnected | None:
        silent_s = now - self.heard_at
        if not len(self._calls) or silent_s < SESSION_SILENCE_S:
            return None
        if self._asked_at < self.heard_at:
            self._asked_at = now
            self._outbox.call(PendingCall(m.ListTables()), now)
        elif silent_s >= SESSION_SILENCE_S + ANSWER_S:
            return Disconnected(f"the server at {self._address} has been silent for {silent_s:.0f} s; connect again")
        return None
