"""Connected clients, and their cached replies, so that a retried request is not executed twice.

A client numbers its calls in ascending order and reports up to which call it has received all replies. The newest
`REPLIES_KEPT_MAX` replies above that are cached; of older ones, only the fact that they were sent. So a retry gets the
cached reply, or an error if the reply is gone. It is never executed a second time.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

from transferqueue.errors import ProtocolError
from transferqueue.limits import REPLIES_KEPT_MAX
from transferqueue.wire.messages import Reply


@dataclass(slots=True, eq=False)
class IntervalSet:
    """A set of integers that are mostly consecutive, stored as ascending disjoint spans."""

    _spans: list[list[int]] = field(default_factory=list)

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._spans, [number, number]) - 1
        near = self._spans[max(0, at) : at + 2]
        return any(first <= number <= last for first, last in near)

    def add(self, number: int) -> None:
        """Add a number."""
        if number in self:
            return
        at = bisect_right(self._spans, [number, number])
        self._spans.insert(at, [number, number])
        self._join(at)
        self._join(at - 1)
        if len(self._spans) > REPLIES_KEPT_MAX:
            # This client leaves ever more gaps. Treat the calls of the oldest gap as answered.
            self._spans[:2] = [[self._spans[0][0], self._spans[1][1]]]

    def _join(self, at: int) -> None:
        if 0 <= at < len(self._spans) - 1 and self._spans[at][1] + 1 == self._spans[at + 1][0]:
            self._spans[at : at + 2] = [[self._spans[at][0], self._spans[at + 1][1]]]

    def forget(self, upto: int) -> None:
        """Remove all numbers up to `upto`, whole spans at a time."""
        while self._spans and self._spans[0][1] <= upto:
            self._spans.pop(0)


@dataclass(slots=True, eq=False)
class ReplyCache:
    """Replies of one session, for its retries.

    Args:
        last: the highest call that was ever answered: a higher one is new.
    """

    _kept: dict[int, Reply] = field(default_factory=dict)
    _given: IntervalSet = field(default_factory=IntervalSet)
    """Answered calls whose reply was evicted."""
    _seen: int = 0
    last: int = 0

    @property
    def kept(self) -> int:
        """How many replies are cached."""
        return len(self._kept)

    def get(self, call: int) -> Reply | None:
        """The cached reply to `call`; None if the call was not answered yet."""
        reply = self._kept.get(call)
        if reply is None and self.was_answered(call):
            raise ProtocolError(
                f"call {call} was already answered and its reply was evicted; use a new id for a new call"
            )
        return reply

    def was_answered(self, call: int) -> bool:
        """Whether there was a reply to `call`, cached or not."""
        return call in self._kept or 0 < call <= self._seen or (bool(self._given._spans) and call in self._given)

    def keep(self, call: int, reply: Reply) -> None:
        """Cache the reply to `call`."""
        if call <= 0:
            return
        self._kept[call] = reply
        if call > self.last:
            self.last = call
        if len(self._kept) > REPLIES_KEPT_MAX:
            oldest = next(iter(self._kept))
            del self._kept[oldest]
            self._given.add(oldest)

    def forget(self, call: int) -> None:
        """Remove replies up to `call`, which the client has received."""
        if call <= self._seen:
            return
        self._seen = call
        if call > self.last:
            self.last = call
        kept = self._kept
        if len(kept) == 1 and call in kept:  # mostly
            del kept[call]
        elif kept:
            for number in [number for number in kept if number <= call]:
                del kept[number]
        if self._given._spans:
            self._given.forget(call)


@dataclass(slots=True, eq=False)
class SessionState:
    """One connected client.

    Args:
        id: its number.
        client: the id of the client.
        label: its name in texts.
        opened: the time.
        origin: opaque bytes from the caller, which identify the client after a restart.
        open: False: the session ended, but a view or a writer may still exist, so its pins and grants stay.
    """

    id: int
    client: bytes
    label: str
    opened: float
    origin: bytes = b""
    replies: ReplyCache = field(default_factory=ReplyCache)
    open: bool = True
