"""Sessions: the connected clients, and what each holds."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Annotated, Any

from transferqueue.wire.answers.answer import Answer, readable


class HeldLease(Answer, frozen=True, kw_only=True):
    """One lease of a session, and the rows still in it."""

    lease: Annotated[int, "Its number."]
    table: Annotated[str, "Of the rows."]
    task: Annotated[str, "That they were leased for."]
    rows: Annotated[int, "Rows still in it."]


class SessionStats(Answer, frozen=True, kw_only=True):
    """One session: its process, how long it has been silent, and what it holds."""

    session: Annotated[int, "Its number."]
    label: Annotated[str, "As it said of itself."] = ""
    pid: Annotated[int, "As it said of itself."] = 0
    host: Annotated[str, "As it said of itself."] = ""
    client: Annotated[
        str, "The first four bytes of its id, in hexadecimal: a peer that knew all of it could take its session over."
    ] = ""
    state: Annotated[
        str, '"open", or "ended": it is gone, but its memory may still be seen by a process that it left.'
    ] = "open"
    opened_s: Annotated[float, "Since it was opened."] = 0.0
    silent_s: Annotated[float, "Since its last message."] = 0.0
    remote: Annotated[bool, "Whether its bytes go over the bulk endpoint."] = False
    leases: Annotated[list[HeldLease], "Its open leases."] = []
    rows_leased: Annotated[int, "Rows of its leases."] = 0
    reserved: Annotated[int, "Rows of its reservations that were not put yet."] = 0
    grants: Annotated[int, "Extents that it may write."] = 0
    pins: Annotated[int, "Blocks that it views."] = 0
    waits: Annotated[int, "Requests of it that wait, at most 1,024."] = 0
    replies: Annotated[
        int, "Replies kept until it says that it has them, so that a repeated call gets the same; at most 1,024."
    ] = 0
    unsent_bytes: Annotated[
        int,
        "Of answers that its socket file connection has not taken; above 1 GiB the session ends. Over TCP: 0, and at "
        "most 2,048 answers wait.",
    ] = 0

    @property
    def name(self) -> str:
        """Its label, else its process, else its number."""
        return self.label or (f"pid {self.pid}" if self.pid else f"session {self.session}")


class Sessions(dict[str, SessionStats]):
    """Sessions by number as text; of several coordinators by address and number, and of each alone in
    `coordinators`."""

    def __init__(self, sessions: Mapping[str, SessionStats], coordinators: Mapping[str, Any] | None = None) -> None:
        super().__init__(sessions)
        self.coordinators: dict[str, Any] = dict(coordinators or {})

    def plain(self) -> dict[str, Any]:
        """All figures as dicts, lists and scalars."""
        return {number: session.plain() for number, session in self.items()}

    def __missing__(self, key: str) -> Any:
        if key == "coordinators" and self.coordinators:
            warnings.warn("use Sessions.coordinators; the key ends with the next release", DeprecationWarning, 2)
            return self.coordinators
        raise KeyError(key)

    def __repr__(self) -> str:
        return f"Sessions({readable(dict(self))})"


def labels(sessions: Mapping[str, SessionStats]) -> dict[int, str]:
    """The name of each session, by number. Sessions long gone are missing."""
    return {session.session: session.name for session in sessions.values()}
