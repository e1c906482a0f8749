"""Logs once a minute why calls still wait, in the words of the server. Pure but for the log.

The I/O thread looks at each heartbeat. Of calls that wait for the same (say, several threads that lease from one task),
the first one is asked about.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from transferqueue.client.session.calls import PendingCall, PendingCalls, wait_of
from transferqueue.limits import HEARTBEAT_S, WAIT_TOLD_S
from transferqueue.transport import ClientChannel
from transferqueue.wire import messages as m
from transferqueue.wire.requests import declaration

_log: Final = logging.getLogger("transferqueue.client")

BLOCKED_S: Final = 1.0
"""A call that blocks an event loop for this long is told of: ten times as long as asyncio's debug mode allows a
callback."""
_told_of_loop: Final[list[int]] = []

Subject = tuple[object, ...]


class WaitLog:
    """The log of one connection. `send` sends a call to the server."""

    def __init__(
        self, channel: ClientChannel, address: str, calls: PendingCalls, send: Callable[[PendingCall, float], None]
    ) -> None:
        self._channel, self._address, self._calls, self._send = channel, address, calls, send
        self._looked_at = 0.0
        self._lost_since: float | None = None
        self._lost_told_at = 0.0

    def look(self, now: float) -> None:
        """Log each wait, or ask the server why a call waits, if a minute has passed since the last time."""
        if self._channel.is_lost and self._calls.by_id:
            self._log_lost(now)
        elif now >= self._looked_at + HEARTBEAT_S / 2:
            self._looked_at, self._lost_since = now, None
            for pending in self._due(now):
                self._ask(pending, now)

    def _due(self, now: float) -> list[PendingCall]:
        """The first call of each subject if it has waited for a minute since it was last told of."""
        first: dict[Subject, PendingCall] = {}
        for pending in self._calls.by_id.values():
            if pending.blocks_loop and not _told_of_loop and now >= pending.sent_at + BLOCKED_S:
                _log_blocked(pending, now)
            if not pending.gave_up and wait_of(pending.request) > WAIT_TOLD_S and declaration(pending.request).verb:
                first.setdefault(_subject(pending.request), pending)
        return [pending for pending in first.values() if now >= pending.told_at + WAIT_TOLD_S]

    def _ask(self, pending: PendingCall, now: float) -> None:
        verb, since = declaration(pending.request).verb, pending.sent_at
        pending.told_at = now

        def settled() -> None:
            text = getattr(asked.reply, "text", "") or (
                f"the reason is not known: {asked.error}" if asked.error else ""
            )
            if text and not pending.is_settled:
                _log.warning("%s has waited for %.0f s: %s", verb, now - since, text)

        asked = PendingCall(m.ExplainWait(call=pending.id), settled)
        self._send(asked, now)

    def _log_lost(self, now: float) -> None:
        """There is no connection. Where the server may come back, calls wait for it."""
        if self._lost_since is None:
            self._lost_since = self._lost_told_at = now
        waiting = sum(not pending.gave_up for pending in self._calls.by_id.values())
        if waiting and now >= self._lost_told_at + WAIT_TOLD_S:
            self._lost_told_at = now
            _log.warning(
                "there has been no connection to the server at %s for %.0f s; %d calls go on when it is back: start "
                "it, or interrupt them",
                self._address,
                now - self._lost_since,
                waiting,
            )


def _log_blocked(pending: PendingCall, now: float) -> None:
    """Warn, once in a process: a call waits in an event loop for rows that this loop would have to put."""
    _told_of_loop.append(pending.id)
    _log.warning(
        "%s has waited for %.0f s in a thread with a running event loop, which stands still meanwhile; in a coroutine, "
        "open the queue with tq.aconnect and await its calls",
        declaration(pending.request).verb,
        now - pending.sent_at,
    )


def _subject(request: m.Request) -> Subject:
    """The subject of a request's wait, as far as its text depends on it."""
    names = (getattr(request, name, "") for name in ("table", "task", "channel", "name"))
    return (type(request), *names)
