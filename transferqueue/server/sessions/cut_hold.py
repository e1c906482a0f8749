"""Holds back what happens at a coordinator, for the moment at which several coordinators take their parts of one cut. No I/O, no clock.

Coordinators do not speak to each other. A client with a session at each has all of them hold, and then has each take its part. So the parts
are one cut: whoever saw an answer of one coordinator and then changed something at another, did so before that one held, and so before any of
them took its part; or after it, when it had taken its part already. The rules (docs/decisions/0050):

1. While one session holds, only its requests about the cut are carried out. All other frames, the ends of processes and connections, and
   what is due by time are kept, in order.
2. A hold ends when its session takes the part or ends it, when that session's connection or process is gone, after the time that it asked for,
   or when too much is kept (`CUT_HELD_EVENTS`, `CUT_HELD_BYTES`). Then everything that was kept happens, in order.
3. A coordinator holds once for a cut, without a break: after the hold its part is refused, and so is another hold for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from transferqueue.errors import DeadlineExceeded, Full
from transferqueue.limits import CUT_HELD_BYTES, CUT_HELD_EVENTS
from transferqueue.server.sessions.sessions import NOWHERE, OpenSession, Peer
from transferqueue.wire import messages as m

Event = Callable[[float], None]
"""Something that happens at the coordinator, at the given time."""
_CUTS_REMEMBERED: Final = 64
"""A frame that comes again does so within a few calls."""
_OF_A_CUT: Final = frozenset({m.HoldRequests, m.EndHold, m.SnapshotPart})


class CutHold:
    """The hold of one coordinator, if there is one."""

    def __init__(self) -> None:
        self.session = 0
        """Who holds; 0: nobody."""
        self.since = self.until = 0.0
        """When the hold began, and when it ends by itself."""
        self.kept: deque[tuple[Event, float]] = deque()
        """What was held back and has not happened yet, in order, and when it came."""
        self._cut = ""
        self._over: deque[str] = deque(maxlen=_CUTS_REMEMBERED)
        """Cuts for which it has held."""
        self._peer: Peer = NOWHERE
        self._nbytes = 0

    def begin(self, session: OpenSession, cut: str, now: float, hold_s: float) -> None:
        """The session holds for this cut for so long, at the most. `Full` if somebody holds for another one."""
        if cut in self._over:
            self.check(session.number, cut)
        if self.session and (self.session, self._cut) != (session.number, cut):
            raise Full("somebody takes another snapshot of all coordinators at this moment; take this one after it")
        if not self.session:
            self.since, self.until = now, now + hold_s
        self.until = min(self.until, now + hold_s)  # a request that comes again lengthens nothing
        self.session, self._cut, self._peer = session.number, cut, session.peer

    def end(self) -> None:
        """Nobody holds any more."""
        if self.session:
            self._over.append(self._cut)
        self.session, self._cut, self._peer = 0, "", NOWHERE

    def is_for(self, session: int, cut: str) -> bool:
        """Whether this session holds, for this cut."""
        return (session, cut) == (self.session, self._cut)

    def check(self, session: int, cut: str) -> None:
        """`DeadlineExceeded` unless this session holds for this cut."""
        if not self.is_for(session, cut):
            raise DeadlineExceeded(
                "part of a cut refused: this coordinator did not wait for it any more, since the others took too long; nothing was "
                "written: take another snapshot"
            )

    def concerns(self, peer: Peer, request: type[m.Request]) -> bool:
        """Whether a request is carried out during the hold."""
        return peer == self._peer and request in _OF_A_CUT

    def is_by(self, peer: Peer) -> bool:
        """Whether the session that holds is at this connection."""
        return peer == self._peer

    def keep(self, event: Event, now: float, nbytes: int = 0) -> None:
        """Hold an event back. If that is too much, the hold ends."""
        self.kept.append((event, now))
        self._nbytes += nbytes
        if len(self.kept) > CUT_HELD_EVENTS or self._nbytes > CUT_HELD_BYTES:
            self.end()

    def take(self) -> list[tuple[Event, float]]:
        """What was held back, with the time at which it came. It happens now, as of that time: an ack that came in time is in time."""
        events = list(self.kept)
        self.kept.clear()
        self._nbytes = 0
        return events
