"""The calls of one session: their ids, replies, resends and deadlines; and the `Deadline` of an operation that makes
several. Pure.

1. Ids ascend from 1 within a session, in the order in which calls are sent. An id is never used twice.
2. A call that is not answered in time is sent again **with its id**, at growing intervals. If the server has already
   carried it out, it repeats its reply.
3. Every frame carries `seen`: all replies up to that id have arrived, so the server may forget them.
4. A call ends once: by its reply, by an error, or by giving up at its deadline.
5. A notice has no answer. It is kept until a call that was sent after it is answered: frames arrive in order, so that
   answer proves that the server has the notice. Until then the notice counts as unanswered for `seen`.
6. After a reconnection, to the same server or the next one, the client sends Hello and nothing else until that is
   answered: the server ignores everything before the Hello. Then it sends all unanswered calls again, in order. Their
   waits keep their deadlines.
7. **No reply is lost.** A call whose caller went away (an interrupt, a cancelled task, a deadline passed) stays here
   until its reply arrives, so that the reply can be undone. If it waits at the server, it is sent again with no wait:
   otherwise it would keep its place there before others who want the same.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Final

import msgspec

from transferqueue.errors import Impossible, TransferQueueError, UsageError, from_wire
from transferqueue.errors.text import shown
from transferqueue.limits import ANSWER_S, LATE_ANSWER_S, RESEND_S, SECONDS_MAX, SMALL_FRAME_BYTES
from transferqueue.wire import messages as m
from transferqueue.wire.codec import unsendable
from transferqueue.wire.messages.declarations import DECLARED
from transferqueue.wire.versions import PROTOCOL

LEAST_S: Final = 1e-3
ENDLESS_S: Final = SECONDS_MAX
"""The wait of a call whose caller set no limit: 31 years."""


def timeout(timeout_s: object) -> float:
    """The `timeout_s` of a wait. None: the wait ends with its result, with the table, or with the server."""
    return ENDLESS_S if timeout_s is None else seconds("timeout_s", timeout_s)


def seconds(name: str, value: object) -> float:
    """A number of seconds that a request may wait or last: 0 to 10^9. `UsageError` for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{name}={shown(value)} is {type(value).__name__}; give a number of seconds (0: do not wait)")
    if not 0 <= value <= SECONDS_MAX:  # also true of NaN
        raise UsageError(f"{name}={shown(value)} is out of range; give 0 (do not wait) to {SECONDS_MAX:g} seconds")
    return float(value)


class Deadline:
    """The deadline of an operation that may need several requests: `wait_s` seconds from now by `clock`.

    The server ends a wait itself, with an error that names its cause. But a server that is stopped or out of reach ends
    nothing. So the caller keeps the deadline too: after it, replies have `late_s` to arrive in all, whatever the server
    does. Time that this process spends on its own work, such as copying columns, does not count as lateness.
    """

    def __init__(self, clock: Callable[[], float], wait_s: float, late_s: float = LATE_ANSWER_S) -> None:
        self.wait_s: Final = wait_s
        self._clock = clock
        self._at = clock() + wait_s
        self._least = min(wait_s, LEAST_S)
        self._late_s = late_s

    def left(self) -> float:
        """Seconds left, for the next request. 0 only if the caller gave 0: the server answers 0 with `Full`, and a wait
        that has passed with `DeadlineExceeded`."""
        return max(self._least, self._at - self._clock())

    @property
    def over(self) -> bool:
        """Whether the time has passed."""
        return self._clock() >= self._at

    def patience(self, now: float | None = None) -> float:
        """Seconds for which the caller waits for the reply to a request that it sends now."""
        return max(0.0, self._at - (self._clock() if now is None else now)) + self._late_s

    def waited(self, since: float) -> None:
        """Count the wait for another process from `since` until now."""
        now = self._clock()
        if now > self._at:
            self._late_s = max(0.0, self._late_s - (now - max(since, self._at)))


LAST_WAIT_S: Final = 0.1
"""Wait of a call whose own wait passed while the connection was lost: it is sent once more, since it may be served at
once."""
_encoder: Final = msgspec.msgpack.Encoder()


class PendingCall:
    """One request and, when it is settled, its outcome.

    `gave_up` says that no caller waits any more (rule 7). `told_at` is when it was sent (`sent_at`), or when `WaitLog`
    last asked why it waits.

    Args:
        request: the request.
        on_settled: called once, after `reply` or `error` was set; default None: the request is posted, and no caller
            waits for it.
    """

    __slots__ = (
        "blocks_loop",
        "by_loop",
        "deadline",
        "error",
        "gave_up",
        "id",
        "is_post",
        "next_send",
        "on_settled",
        "payload",
        "reply",
        "request",
        "sent_at",
        "told_at",
        "tries",
    )

    def __init__(self, request: m.Request, on_settled: Callable[[], None] | None = None) -> None:
        self.request: Final = request
        self.payload = encode(request)
        self.on_settled = on_settled
        self.reply: m.Reply | None = None
        self.error: TransferQueueError | None = None
        self.blocks_loop = False
        """Whether it was made by a thread in whose event loop nothing else runs meanwhile."""
        self.by_loop = False
        """Whether an event loop that reads (see `driver`) waits for it."""
        self.id = 0
        self.tries = 0
        self.deadline = self.next_send = self.sent_at = self.told_at = 0.0
        self.gave_up = self.is_post = on_settled is None

    @property
    def is_settled(self) -> bool:
        """Whether the outcome is known."""
        return self.reply is not None or self.error is not None

    def settle(self, reply: m.Reply | TransferQueueError) -> None:
        """Keep the outcome, and wake the caller."""
        if isinstance(reply, TransferQueueError):
            self.error = reply
        else:
            self.reply = reply
        if self.on_settled is None:
            return
        if self.by_loop:  # which may be interrupted between any two steps, and may be told twice
            self.on_settled()
            self.on_settled = None
        else:
            tell, self.on_settled = self.on_settled, None
            tell()


class PendingCalls:
    """The unanswered calls of a session (see the module). Times are seconds of any one clock."""

    def __init__(self) -> None:
        self.session = 0
        self._epoch = 0
        self.last = 0
        """The id given last."""
        self.by_id: Final[dict[int, PendingCall]] = {}
        """The unanswered calls, in order."""
        self._notices: dict[int, bytes] = {}
        self.greeting: int | None = None
        """Id of the greeting that is not answered yet: until then nothing else may be sent (rule 6)."""
        self._agenda: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self.by_id)

    @property
    def seen(self) -> int:
        """Every reply up to this id has arrived."""
        unanswered = next(iter(self.by_id), self.last + 1)
        return (min(unanswered, next(iter(self._notices))) if self._notices else unanswered) - 1

    def send(self, pending: PendingCall, now: float) -> bytes:
        """Give a call its id, and a deadline unless it has a later one. Returns the frame to send."""
        self.last += 1
        pending.id = self.last
        pending.sent_at = pending.told_at = now
        until = now + float(getattr(pending.request, "wait_s", 0.0))
        pending.deadline = max(pending.deadline, until + ANSWER_S)
        pending.next_send = until + RESEND_S
        heapq.heappush(self._agenda, (pending.next_send, pending.id))
        seen = self.seen if self.by_id or self._notices else self.last - 1
        self.by_id[pending.id] = pending
        return _encoder.encode((PROTOCOL, self.session, pending.id, seen, msgspec.Raw(pending.payload)))

    def greet(self, hello: m.Hello, now: float) -> bytes:
        """The frame of a Hello on a new connection; nothing else may be sent until it is answered (rule 6).

        A Hello that is unanswered is sent again as another call: by its id the server knows which Hello came last, and
        on which connection that is given up.
        """
        waiting = [one for one in self.by_id.values() if isinstance(one.request, m.Hello)]
        for one in waiting:
            del self.by_id[one.id]
        frame = self.send(waiting[-1] if waiting else PendingCall(hello), now)
        self.greeting = self.last
        return frame

    def welcomed(self, now: float) -> list[bytes]:
        """A Hello was answered. If it was that of the present connection: the frames that the server may not have, in
        order."""
        if self.greeting is None or self.greeting in self.by_id:
            return []
        self.greeting = None
        return self.unanswered_frames(now)

    def notice(self, request: m.Request) -> bytes:
        """The frame of a request that has no answer. A heartbeat is not kept: the next one says the same."""
        self.last += 1
        payload = encode(request)
        if not isinstance(request, m.Heartbeat):
            self._notices[self.last] = payload
        return self._frame(self.last, payload)

    def withdraw_notices(self, last: int) -> None:
        """Forget the notices after call `last`: none of them was sent."""
        for number in [number for number in self._notices if number > last]:
            del self._notices[number]

    def answered(self, answer: m.AnswerFrame) -> PendingCall | None:
        """The call that this answers, not settled yet; None if it was answered before. Not for an answer of an earlier
        server (`is_late`)."""
        self._epoch = answer.epoch
        pending = self.by_id.pop(answer.id, None)
        if pending is not None and not isinstance(
            pending.request, m.Hello
        ):  # a Hello overtakes calls that are sent again
            while self._notices and (first := next(iter(self._notices))) < answer.id:  # rule 5
                del self._notices[first]
        return pending

    def is_late(self, answer: m.AnswerFrame) -> bool:
        """Whether this answer is from an earlier life of the server."""
        greeted = answer.id == self.greeting and answer.id in self.by_id
        return answer.epoch < self._epoch and not greeted

    def overdue(self, now: float) -> tuple[list[bytes], list[PendingCall]]:
        """Frames to send again, and calls whose deadline has passed.

        Each such call is returned once, and stays here (rule 7).
        """
        again: list[bytes] = []
        overdue: list[PendingCall] = []
        while self._agenda and self._agenda[0][0] <= now:
            _, call = heapq.heappop(self._agenda)
            pending = self.by_id.get(call)
            if pending is None:
                continue
            if now >= pending.deadline and not pending.gave_up:
                pending.gave_up = True
                overdue.append(pending)
            if self.greeting is None or call == self.greeting:
                pending.tries += 1
                again.append(self._frame(pending.id, pending.payload))
            self._schedule(pending, now)
        return again, overdue

    def end_wait_frame(self, pending: PendingCall, now: float) -> bytes | None:
        """The frame that ends the wait of a call at the server; None if it does not wait there."""
        if pending.id not in self.by_id or not wait_of(pending.request):
            return None
        pending.payload = encode(msgspec.structs.replace(pending.request, wait_s=0.0))
        pending.deadline = now + ANSWER_S
        return self._frame(pending.id, pending.payload)

    def next_overdue(self) -> float | None:
        """When `overdue` may have something; None if no call is unanswered."""
        while self._agenda and self._agenda[0][1] not in self.by_id:
            heapq.heappop(self._agenda)
        return self._agenda[0][0] if self._agenda else None

    def unanswered_frames(self, now: float) -> list[bytes]:
        """The frames of all calls and notices that the server may not have, in order (rule 6)."""
        for pending in self.by_id.values():
            if (waits := wait_of(pending.request)) > 0:
                left = 0.0 if pending.gave_up else max(pending.deadline - ANSWER_S - now, min(waits, LAST_WAIT_S))
                pending.payload = encode(msgspec.structs.replace(pending.request, wait_s=left))
        return [
            self._frame(call, self.by_id[call].payload if call in self.by_id else self._notices[call])
            for call in sorted([*self.by_id, *self._notices])
        ]

    def unanswered(self) -> list[PendingCall]:
        """All calls that have no answer yet, in order."""
        return list(self.by_id.values())

    def drain(self) -> list[PendingCall]:
        """Take out all unanswered calls: the session is over."""
        left = list(self.by_id.values())
        self.by_id.clear()
        self._notices.clear()
        self._agenda.clear()
        self.greeting = None
        return left

    def _schedule(self, pending: PendingCall, now: float) -> None:
        pending.next_send = now + RESEND_S * 2 ** min(pending.tries, 4)
        if not pending.gave_up:
            pending.next_send = min(pending.next_send, max(pending.deadline, now + RESEND_S))
        heapq.heappush(self._agenda, (pending.next_send, pending.id))

    def _frame(self, call: int, payload: bytes) -> bytes:
        """The frame of a call (`wire.messages.envelope.CallFrame`) whose request is encoded already."""
        seen = min(self.seen, call - 1)  # a call that is sent again may be older than what has arrived
        return _encoder.encode((PROTOCOL, self.session, call, seen, msgspec.Raw(payload)))


def encode(request: m.Request) -> bytes:
    """MessagePack of a request; `UsageError` if it holds what a message cannot."""
    try:
        payload = _encoder.encode(request)
    except (OverflowError, TypeError, UnicodeEncodeError, msgspec.MsgspecError) as error:
        raise unsendable(m.tag_of(request), error) from error
    if len(payload) > _SMALL_PAYLOAD_BYTES:
        _check_size(request, len(payload))
    return payload


_ENVELOPE_BYTES: Final = 64
"""Of a frame beside its request, at most."""
_SMALL_PAYLOAD_BYTES: Final = SMALL_FRAME_BYTES - _ENVELOPE_BYTES


def _check_size(request: m.Request, nbytes: int) -> None:
    """`Impossible` if the server would refuse the frame of a request for its size."""
    most = DECLARED[type(request)].bytes_max - _ENVELOPE_BYTES
    if nbytes <= most:
        return
    given = getattr(request, "rows", None)
    rows = len(given) // 8 if isinstance(given, bytes) else given
    remedy = f"send at most {rows * most // nbytes:,} of its {rows:,} rows at a time" if rows else "send less at a time"
    raise Impossible(f"{m.tag_of(request)} takes {nbytes:,} bytes; one may have {most:,}: {remedy}")


def outcome(reply: m.Reply) -> m.Reply | TransferQueueError:
    """A reply as it is, a `Failed` as the error it reports."""
    return from_wire(reply.error, reply.text) if isinstance(reply, m.Failed) else reply


def wait_of(request: m.Request) -> float:
    """Seconds for which the server may hold a request back."""
    return float(getattr(request, "wait_s", 0.0))
