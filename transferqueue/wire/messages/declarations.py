"""What client and server must know of each request. The decorator `request` declares it on the request's class.

The server looks up who may send a request, which coordinator carries it out and what a repeated one does. The client
looks up what an abandoned request leaves behind (see `transferqueue.wire.requests`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple, TypeVar

from transferqueue.limits import SMALL_FRAME_BYTES
from transferqueue.wire.messages.base import Message, tag_of
from transferqueue.wire.roles import Role

Kind = TypeVar("Kind", bound=type[Message])

Repeat = Literal["kept", "again", "by_row"]
"""How the server answers a call that comes again after it was carried out.

kept: with the reply of the first time, which it keeps until the client has seen it. again: by carrying it out again,
which changes nothing. by_row: as "kept", and later still from the rows themselves, for as long as they live.
"""

Undo = Callable[[Any, Any, str], list[Any]]
"""(request, reply, reason) -> requests that return what the reply gave. reason: for the history of the rows."""

ASK_FIRST: Final = "ask for the state before it is done again"


class Home(NamedTuple):
    """How a request names its home coordinator: `attribute` holds the name of a table or channel, the `kind`."""

    kind: str
    attribute: str


TABLE: Final = Home("table", "name")
CHANNEL: Final = Home("weight channel", "channel")


class Declaration(NamedTuple):
    """Facts of one request.

    reply: class of the reply if the request is not refused; None for a notice, which is answered only if it is refused.
    roles: who may send it. home: requests for tables and channels of another coordinator are refused; None: carried out
    by whichever coordinator gets it, which finds the table or does not. repeat: see `Repeat`. undo: for a reply that
    gives rows, memory or pins. bytes_max: of its frame; a larger one is refused before it is decoded. tag: its name.
    reads: it changes nothing. unanswered: advice to a caller who does not know whether it was carried out. verb: public
    method that sends it, as the synchronous API calls it; "": sent by the client itself.
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
        """Whether nothing has changed once a late reply to the request was undone."""
        return self.reads or self.undo is not None


DECLARED: Final[dict[type[Message], Declaration]] = {}
"""All requests."""
BY_TAG: Final[dict[str, Declaration]] = {}
"""The same by tag."""


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
