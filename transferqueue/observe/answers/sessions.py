"""The answer to `Observe("sessions")`, typed, and the labels of sessions."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from transferqueue.observe.answers.stats import parse


class HeldLease(msgspec.Struct, frozen=True, kw_only=True):
    """One lease of a session, and the rows still in it."""

    lease: int
    table: str
    task: str
    rows: int


class SessionStats(msgspec.Struct, frozen=True, kw_only=True):
    """One session: its process, how long it has been silent, and the rows that it holds."""

    session: int
    label: str
    pid: int
    host: str
    opened_s: float
    silent_s: float
    leases: list[HeldLease]
    rows_leased: int
    reserved: int
    grants: int
    pins: int
    waits: int
    state: str
    replies: int = 0
    unsent_bytes: int = 0

    @property
    def name(self) -> str:
        """Its label, else its process, else its number."""
        return self.label or (f"pid {self.pid}" if self.pid else f"session {self.session}")


def parse_sessions(answer: object) -> dict[int, SessionStats]:
    """What a server answered to `sessions`, typed; `ProtocolError` if it cannot be read."""
    return {session.session: session for session in parse("sessions", answer, dict[str, SessionStats]).values()}


def labels(sessions: Mapping[int, SessionStats]) -> dict[int, str]:
    """What to call each session. Sessions long gone are not in it."""
    return {number: session.name for number, session in sessions.items()}
