"""The answer to `Observe("sessions")`, typed, and what people call each session."""

from __future__ import annotations

import msgspec

from transferqueue.observe.stats import parse


class SessionStats(msgspec.Struct, frozen=True, kw_only=True):
    """One session: who it is, how long it has been silent, what it holds."""

    session: int
    label: str
    pid: int
    host: str
    opened_s: float
    silent_s: float
    leases: int
    rows_leased: int
    reserved: int
    grants: int
    pins: int
    waits: int
    state: str


def labels(answer: object) -> dict[int, str]:
    """What to call each session in `answer`: its label, else its process. Sessions long gone are not in it."""
    return {one.session: name_of(one) for one in parse("sessions", answer, list[SessionStats])}


def name_of(one: SessionStats) -> str:
    """Its label, else its process, else its number."""
    return one.label or (f"pid {one.pid}" if one.pid else f"session {one.session}")
