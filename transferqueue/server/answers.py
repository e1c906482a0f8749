"""The answers of a coordinator, encoded, in the order in which the loop sends them."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from transferqueue.errors import FlowSignal, TransferQueueError, UsageError
from transferqueue.server.sessions.session_table import OpenSession, Peer
from transferqueue.server.state import ServerState
from transferqueue.wire import codec
from transferqueue.wire import messages as m
from transferqueue.wire.messages.declarations import DECLARED
from transferqueue.wire.requests import undo

_NAMES_ROWS: Final = frozenset({m.LeaseRequest, m.ReadRequest})
"""Requests whose replies name many rows. Such a reply may be too large to send."""


def failed(error: TransferQueueError) -> m.Failed:
    """The reply to a request that is refused."""
    return m.Failed(error=type(error).__name__, text=str(error))


class Answers:
    """The answers that are not sent yet: `outbox`."""

    def __init__(self, state: ServerState) -> None:
        self.outbox: list[tuple[Peer, bytes]] = []
        self._state = state
        self._issuing = state.parts.issuing
        self._epoch = state.identity.epoch

    def send(self, peer: Peer, call: int, reply: m.Reply) -> None:
        """Answer a call of a peer; 0: none of its calls."""
        try:
            frame = codec.encode_answer(m.AnswerFrame(self._epoch, call, reply))
        except UsageError as error:  # such as a text of the system that is no Unicode
            frame = codec.encode_answer(m.AnswerFrame(self._epoch, call, failed(error)))
        self.outbox.append((peer, frame))

    def reply(self, session: OpenSession, call: int, request: m.Request, reply: m.Reply) -> None:
        """Answer a call of a session. A reply that is too large to send is undone, and the call refused."""
        if type(reply) is m.Failed and DECLARED[type(request)].repeat != "again":
            session.refuse(call, reply)
        for part in self._issuing:
            reply = part.issue(session, reply)
        try:
            frame = codec.encode_answer(m.AnswerFrame(self._epoch, call, reply))
        except UsageError as error:
            refused = failed(error)
            returns = undo(request, reply, "the reply was too large to send") if type(request) in _NAMES_ROWS else ()
            for undoing in returns:
                with suppress(UsageError, FlowSignal):  # already undone, such as by a lease that expired
                    self._state.ledger.apply(undoing, session=session.number, call=0, now=session.last_message_at)
            session.refuse(call, refused)
            self.send(session.peer, call, refused)
        else:
            self.outbox.append((session.peer, frame))
