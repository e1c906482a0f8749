"""The facts of each request for client and server. The decorator `request` declares them on the request's class.

The server looks up who may send a request, which coordinator carries it out and how a repeated one is answered. The
client looks up which grants an abandoned request leaves behind (see `transferqueue.wire.requests`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple, TypeVar

from transferqueue.limits import SMALL_FRAME_BYTES
from transferqueue.wire.messages.base import Message, tag_of
from transferqueue.wire.roles import Role

Kind = TypeVar("Kind", bound=type[Message])

Repeat = Literal["kept", "again", "by_put"]
"""How the server answers a call that comes again after it was carried out.

- kept: with the first reply, which it keeps until the client has seen it.
- again: by carrying it out again, which changes nothing.
- by_put: from the puts that the table remembers (`KnownPuts`), for as long as it does; else as "kept".
"""

Undo = Callable[[Any, Any, str], list[Any]]
"""(request, reply, reason) -> requests that return the grants of the reply. The reason is for the rows' history."""

ASK_FIRST: Final = "ask for the state before it is done again"


class Home(NamedTuple):
    """How a request names its home coordinator: `attribute` holds the name of a table or channel, the `kind`."""

    kind: str
    attribute: str


TABLE: Final = Home("table", "name")
CHANNEL: Final = Home("weight channel", "channel")


class Declaration(NamedTuple):
    """Facts of one request.

    Args:
        tag: its name.
        reply: class of the reply if the request is not refused; None for a notice, which is answered only if refused.
        roles: who may send it.
        verb: public method that sends it, as the synchronous API calls it; "": sent by the client itself.
        home: tables and channels of another coordinator are refused; None: any coordinator carries it out, and finds
            the table or does not.
        repeat: see `Repeat`.
        undo: for a reply that gives rows, memory or pins.
        reads: it changes nothing.
        unanswered: advice to a caller that does not know whether it was carried out.
        bytes_max: of its frame; a larger one is refused before it is decoded.
    """

    tag: str
    reply: type[Message] | None
    roles: frozenset[Role]
    home: Home | None
    repeat: Repeat
    undo: Undo | None
    reads: bool
    unanswered: str
    verb: str
    bytes_max: int

    @property
    def leaves_nothing(self) -> bool:
        """Whether no change remains once a late reply to the request was undone."""
        return self.reads or self.undo is not None


DECLARED: Final[dict[type[Message], Declaration]] = {}
"""All requests, by class."""
BY_TAG: Final[dict[str, Declaration]] = {}
"""All requests, by tag."""


def request(
    *,
    reply: type[Message] | None,
    roles: frozenset[Role],
    verb: str,
    home: Home | None = None,
    repeat: Repeat = "kept",
    undo: Undo | None = None,
    reads: bool = False,
    unanswered: str = ASK_FIRST,
    bytes_max: int = SMALL_FRAME_BYTES,
) -> Callable[[Kind], Kind]:
    """Declare the decorated message to be a request: see `Declaration`."""

    def declare(kind: Kind) -> Kind:
        DECLARED[kind] = BY_TAG[tag_of(kind)] = Declaration(
            tag_of(kind), reply, roles, home, repeat, undo, reads, unanswered, verb, bytes_max
        )
        return kind

    return declare
