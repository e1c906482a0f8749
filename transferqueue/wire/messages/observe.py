"""Messages that report on the queue, for people and for metrics."""

from __future__ import annotations

import msgspec

from transferqueue.wire.messages.base import Message, Name, Text
from transferqueue.wire.messages.declarations import request
from transferqueue.wire.roles import CLIENTS


class Observed(Message):
    """Plain values, MessagePack-encoded: the keys are documented in `transferqueue docs observing`."""

    value: msgspec.Raw


@request(reply=Observed, roles=CLIENTS, repeat="again", reads=True, verb="Queue.stats")
class Observe(Message):
    """A snapshot for people and metrics. what: "stats", "audit", "row", "doctor", "sessions"."""

    what: Name
    table: Text = ""
    row: int = -1


ObserveRequests = Observe
ObserveReplies = Observed
