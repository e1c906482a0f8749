"""Messages that report on the queue, for people and for metrics."""

from __future__ import annotations

import msgspec

from transferqueue.wire.messages.base import Count, Message, Name, Text
from transferqueue.wire.messages.declarations import request
from transferqueue.wire.roles import CLIENTS


class Observed(Message):
    """An answer of `transferqueue.wire.answers`, MessagePack-encoded."""

    value: msgspec.Raw


@request(reply=Observed, roles=CLIENTS, repeat="again", reads=True, verb="Queue.stats")
class Observe(Message):
    """Asks for a report: `what` is "stats", "audit", "row", "doctor" or "sessions"."""

    what: Name
    table: Text = ""
    row: int = -1


@request(reply=Observed, roles=CLIENTS, repeat="again", reads=True, verb="Queue.events")
class ListEvents(Message):
    """Asks for the events of a table's rows since an earlier answer.

    Args:
        after: the position that ended that answer; -1: only the present end of the history, without events.
        every: report one row in this many.
    """

    table: Name
    after: int = -1
    every: Count = 1


class WaitExplained(Message):
    """Why the call waits, and who holds the thing it needs. `text`: "" if it does not wait."""

    text: Text


@request(reply=WaitExplained, roles=CLIENTS, repeat="again", reads=True, verb="")
class ExplainWait(Message):
    """Why a call of this session still waits at the server: for the log of the client, once a minute."""

    call: Count


ObserveRequests = Observe | ListEvents | ExplainWait
ObserveReplies = Observed | WaitExplained
