"""The calls of a session, driven with a clock of our own."""

from __future__ import annotations

import msgspec
import pytest

from transferqueue.client.session.calls import PendingCall, PendingCalls
from transferqueue.errors import Impossible, UsageError
from transferqueue.limits import ANSWER_S, REQUEST_BYTES_MAX, RESEND_S
from transferqueue.policies import Compare
from transferqueue.wire import messages as m
from transferqueue.wire.codec import decode_call


def asked(wait_s: float = 0.0) -> PendingCall:
    return PendingCall(m.OpenTable("t", wait_s), lambda: None)


def answer(call: int) -> m.AnswerFrame:
    return m.AnswerFrame(epoch=1, id=call, reply=m.DoneReply())


def test_ids_ascend_and_frames_are_calls() -> None:
    calls = PendingCalls()
    calls.session = 7
    frames = [decode_call(calls.send(asked(), 0.0)) for _ in range(3)]
    assert frames == [
        m.CallFrame(7, 1, 0, m.OpenTable("t")),
        m.CallFrame(7, 2, 0, m.OpenTable("t")),
        m.CallFrame(7, 3, 0, m.OpenTable("t")),
    ]


def test_seen_is_below_the_first_call_without_an_answer() -> None:
    calls = PendingCalls()
    for _ in range(4):
        calls.send(asked(), 0.0)
    calls.answered(answer(2))
    assert calls.seen == 0
    calls.answered(answer(1))
    assert calls.seen == 2
    calls.answered(answer(3))
    calls.answered(answer(4))
    assert calls.seen == 4
    assert decode_call(calls.send(asked(), 0.0)).seen == 4


def test_a_notice_has_an_id_and_is_never_seen_by_itself() -> None:
    calls = PendingCalls()
    notice = decode_call(calls.notice(m.Heartbeat()))
    assert (notice.id, notice.seen) == (1, 0)
    following = decode_call(calls.send(asked(), 0.0))
    assert (following.id, following.seen) == (2, 1)


def test_an_answer_counts_once() -> None:
    calls = PendingCalls()
    pending = asked()
    calls.send(pending, 0.0)
    assert calls.answered(answer(1)) is pending
    assert calls.answered(answer(1)) is None
    assert calls.answered(answer(9)) is None


def test_a_late_call_is_sent_again_with_its_id_at_growing_intervals() -> None:
    calls = PendingCalls()
    calls.send(asked(), 0.0)
    assert calls.next_overdue() == RESEND_S
    assert calls.overdue(RESEND_S - 0.001) == ([], [])
    intervals, now = [], 0.0
    for _ in range(3):
        due = calls.next_overdue()
        assert due is not None
        (frame,), overdue = calls.overdue(due)
        assert (decode_call(frame).id, overdue) == (1, [])
        intervals.append(due - now)
        now = due
    assert intervals == sorted(intervals)
    assert intervals[-1] > intervals[0]


def test_a_call_that_waits_at_the_server_is_late_only_after_that_wait() -> None:
    calls = PendingCalls()
    calls.send(asked(wait_s=60.0), 0.0)
    assert calls.next_overdue() == 60.0 + RESEND_S


def test_a_caller_is_told_once_when_nobody_answers_and_the_call_stays_for_its_reply() -> None:
    calls = PendingCalls()
    pending = asked()
    calls.send(pending, 0.0)
    told = []
    while (due := calls.next_overdue()) is not None and due < 4 * ANSWER_S:
        told += calls.overdue(due)[1]
    assert told == [pending]
    assert calls.answered(answer(1)) is pending


def test_a_call_with_a_later_deadline_keeps_it_on_every_connection() -> None:
    calls, pending = PendingCalls(), PendingCall(m.Hello(bytes(16)), lambda: None)
    pending.deadline = 90.0
    calls.send(pending, 0.0)
    calls.greet(m.Hello(bytes(16)), 5.0)
    overdue: list[PendingCall] = []
    while (due := calls.next_overdue()) is not None and due < 90.0:
        overdue += calls.overdue(due)[1]
    assert not overdue
    assert calls.overdue(120.0)[1] == [pending]


def test_an_answered_call_is_not_late() -> None:
    calls = PendingCalls()
    calls.send(asked(), 0.0)
    calls.answered(answer(1))
    assert calls.next_overdue() is None
    assert calls.overdue(1e9) == ([], [])


def test_what_a_message_cannot_hold_is_refused_before_it_has_an_id() -> None:
    with pytest.raises(UsageError, match="64 bits"):
        PendingCall(m.ReadRequest("t", where=[Compare("x", "<", 1 << 70)]))
    with pytest.raises(
        Impossible, match=r"Delete takes .* one may have 2,097,088: send at most 262,134 of its 262,144 rows at a time"
    ):
        PendingCall(m.Delete("t", bytes(REQUEST_BYTES_MAX)))
    with pytest.raises(Impossible, match=r"OpenTable takes .* one may have 16,320: send less at a time"):
        PendingCall(m.OpenTable("t" * 20_000))


def test_settling_tells_once() -> None:
    told: list[int] = []
    pending = PendingCall(m.ListTables(), lambda: told.append(1))
    pending.settle(m.DoneReply())
    pending.settle(m.DoneReply())
    assert told == [1]


def test_payloads_are_encoded_once_and_envelopes_each_time() -> None:
    calls = PendingCalls()
    first, second = asked(), asked()
    calls.send(first, 0.0)
    calls.send(second, 0.0)
    calls.answered(answer(1))
    (again,), _ = calls.overdue(RESEND_S)
    assert decode_call(again) == m.CallFrame(0, 2, 1, m.OpenTable("t"))
    assert msgspec.msgpack.decode(second.payload)[0] == "OpenTable"


def unpin() -> m.Unpin:
    return m.Unpin(i64(1), i64(1))


def i64(value: int) -> bytes:
    return value.to_bytes(8, "little")


def test_a_notice_is_unanswered_until_a_call_after_it_is_answered() -> None:
    calls = PendingCalls()
    calls.send(asked(), 0.0)
    calls.notice(unpin())
    calls.send(asked(), 0.0)
    calls.answered(answer(1))
    assert calls.seen == 1
    assert [decode_call(frame).id for frame in calls.unanswered_frames(0.0)] == [2, 3]
    calls.answered(answer(3))
    assert calls.seen == 3
    assert calls.unanswered_frames(0.0) == []


def test_a_greeting_proves_nothing_about_notices_before_it() -> None:
    calls = PendingCalls()
    calls.notice(unpin())
    calls.send(PendingCall(m.Hello(bytes(16)), lambda: None), 0.0)
    calls.answered(m.AnswerFrame(1, 2, m.Welcome(1, 1, "", "", {}, 0)))
    assert [decode_call(frame).request for frame in calls.unanswered_frames(0.0)] == [unpin()]


HELLO = m.Hello(bytes(16))


def welcome(call: int) -> m.AnswerFrame:
    return m.AnswerFrame(1, call, m.Welcome(1, 1, "", "", {}, 0))


def test_nothing_but_the_greeting_is_sent_on_a_new_way_until_it_is_answered() -> None:
    calls = PendingCalls()
    calls.send(asked(), 0.0)
    assert decode_call(calls.greet(HELLO, 0.0)).id == 2
    calls.send(asked(), 0.0)
    assert calls.greeting is not None
    again, _ = calls.overdue(RESEND_S)
    assert [decode_call(frame).request for frame in again] == [HELLO]
    calls.answered(welcome(2))
    assert [decode_call(frame).id for frame in calls.welcomed(RESEND_S)] == [1, 3]
    assert calls.greeting is None


def test_each_way_has_a_greeting_of_its_own() -> None:
    calls = PendingCalls()
    opening = PendingCall(HELLO, lambda: None)
    calls.send(opening, 0.0)
    assert [decode_call(calls.greet(HELLO, 0.0)).id for _ in range(2)] == [2, 3]
    assert calls.answered(welcome(1)) is None
    assert calls.welcomed(0.0) == []
    assert calls.greeting is not None
    assert calls.answered(welcome(3)) is opening
    assert calls.welcomed(0.0) == []
    assert calls.greeting is None


def test_everything_is_sent_again_in_the_order_of_ids() -> None:
    calls = PendingCalls()
    calls.session = 7
    for _ in range(3):
        calls.send(asked(), 0.0)
        calls.notice(unpin())
        calls.notice(m.Heartbeat())
    again = [decode_call(frame) for frame in calls.unanswered_frames(0.0)]
    assert [(call.id, call.session, call.seen) for call in again] == [(n, 7, 0) for n in (1, 2, 4, 5, 7, 8)]


def test_a_wait_is_not_longer_for_having_been_interrupted() -> None:
    calls = PendingCalls()
    calls.send(asked(wait_s=30.0), 100.0)
    calls.send(asked(wait_s=0.05), 100.0)
    calls.send(asked(), 100.0)
    waits = [decode_call(frame).request.wait_s for frame in calls.unanswered_frames(110.0)]  # type: ignore[union-attr]
    assert waits == [pytest.approx(20.0), pytest.approx(0.05), 0.0]
    waits = [decode_call(frame).request.wait_s for frame in calls.unanswered_frames(150.0)]  # type: ignore[union-attr]
    assert waits == [pytest.approx(0.1), pytest.approx(0.05), 0.0]


def test_a_wait_that_nobody_waits_for_is_asked_for_again_without_one() -> None:
    calls = PendingCalls()
    waiting, at_once = asked(wait_s=30.0), asked()
    calls.send(waiting, 100.0)
    calls.send(at_once, 100.0)
    frame = calls.end_wait_frame(waiting, 101.0)
    assert frame is not None
    assert decode_call(frame) == m.CallFrame(0, 1, 0, m.OpenTable("t", 0.0))
    assert decode_call(calls.unanswered_frames(102.0)[0]).request.wait_s == pytest.approx(0.1)  # type: ignore[union-attr]
    assert calls.end_wait_frame(at_once, 101.0) is None
    calls.answered(answer(1))
    assert calls.end_wait_frame(waiting, 101.0) is None


def test_an_answer_of_an_earlier_life_is_late_but_for_the_greeting_of_a_clock_set_back() -> None:
    calls = PendingCalls()
    calls.send(asked(), 0.0)
    calls.answered(m.AnswerFrame(epoch=9, id=1, reply=m.DoneReply()))
    calls.send(asked(), 0.0)
    assert calls.is_late(m.AnswerFrame(epoch=8, id=2, reply=m.DoneReply()))
    calls.greet(m.Hello(b"c" * 16, pid=1, host="h"), 0.0)
    assert calls.is_late(m.AnswerFrame(epoch=8, id=2, reply=m.DoneReply()))
    assert not calls.is_late(m.AnswerFrame(epoch=8, id=3, reply=m.DoneReply()))
    calls.answered(m.AnswerFrame(epoch=8, id=3, reply=m.DoneReply()))
    assert calls.is_late(m.AnswerFrame(epoch=7, id=3, reply=m.DoneReply())), "the greeting was answered"
