"""A retried request is executed once; a request that is refused, or waits, changes nothing."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tests.ledger.driver import Driver, World
from transferqueue.errors import DeadlineExceeded, Disconnected, ProtocolError, UsageError
from transferqueue.ledger import Blocked
from transferqueue.ledger.session_state import IntervalSet, ReplyCache
from transferqueue.limits import REPLIES_KEPT_MAX, SESSIONS_MAX
from transferqueue.policies import Manual, Task
from transferqueue.wire import messages as m


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def client(world: World) -> Driver:
    client = world.client(client=b"c" * 16)
    client.create(tasks=[Task("x", lease_s=1000)])
    return client


def test_every_request_sent_again_gets_the_same_reply_and_changes_nothing(world: World, client: Driver) -> None:
    put = m.PutRequest("t", 4, client.columns(4, ["a"]))
    reply = client.apply(put)
    lease = m.LeaseRequest("t", "x", rows=2)
    leased = client.apply(lease)
    at = client.call
    ack = m.Ack("t", leased.lease, leased.token)
    acked = client.apply(ack)
    requests = [(put, at - 1, reply), (lease, at, leased), (ack, at + 1, acked)]
    requests += [(m.Reserve("t", 2), at + 2, client.apply(m.Reserve("t", 2)))]
    requests += [(m.Seal("t"), at + 3, client.apply(m.Seal("t")))]
    before = world.stats()
    for request, call, answer in requests:
        assert client.apply(request, call=call) == answer
    assert world.stats() == before


def test_a_put_is_known_by_its_rows_long_after_its_reply_is_forgotten(world: World, client: Driver) -> None:
    put = m.PutRequest("t", 3, client.columns(3, ["a"]))
    reply, call = client.apply(put), client.call
    world.ledger.forget_replies(client.session, call)
    assert client.apply(put, call=call) == reply
    # The client connects anew, to what may be another life of the coordinator, and still does not know.
    client.close()
    again = world.client(client=b"c" * 16)
    again.call = client.call
    assert again.apply(put, call=call) == reply
    world.ledger.forget_replies(again.session, call)
    again.seal()
    assert again.apply(put, call=call) == reply
    assert world.stats().rows_put == 3
    with pytest.raises(ProtocolError, match='this call put 3 rows into table "t" before, and now 4'):
        again.apply(m.PutRequest("t", 4, m.Columns()), call=call)


def test_puts_are_forgotten_with_their_pages(world: World, client: Driver) -> None:
    table = world.table()
    for _ in range(12):
        rows = client.put(1000)
        world.ledger.forget_replies(client.session, client.call)
        client.drop(rows)
    assert len(table.known_puts) <= 5


def test_a_duplicate_that_arrives_after_its_reply_was_seen_is_refused(world: World, client: Driver) -> None:
    client.put(4)
    lease = m.LeaseRequest("t", "x", rows=1)
    client.apply(lease)
    world.ledger.forget_replies(client.session, client.call)
    with pytest.raises(ProtocolError, match="was already answered and its reply was evicted"):
        client.apply(lease, call=client.call)
    assert world.stats().tasks["x"].leased == 1
    assert client.apply(m.Observe("audit"), call=1)  # what changes nothing is answered anew


def test_a_call_parked_long_ago_is_not_taken_for_a_duplicate(world: World, client: Driver) -> None:
    parked = m.LeaseRequest("t", "x", rows=1, wait_s=600)
    assert isinstance(client.apply(parked), Blocked)
    call = client.call
    rows = []
    for _ in range(REPLIES_KEPT_MAX + 50):
        rows += client.put(1)
    old = call + 1
    with pytest.raises(ProtocolError, match="its reply was evicted"):
        client.apply(m.Drop("t", rows[0].to_bytes(8, "little"), "x"), call=old)
    assert isinstance(client.apply(parked, call=call), m.Leased)


def test_a_refused_call_may_succeed_when_it_is_sent_again(client: Driver) -> None:
    lease = m.LeaseRequest("t", "x", rows=1)
    with pytest.raises(DeadlineExceeded):
        client.apply(lease)
    call = client.call
    client.put(1)
    assert isinstance(client.apply(lease, call=call), m.Leased)


def test_a_grant_is_answered_once(world: World, client: Driver) -> None:
    given = client.grant(100)
    assert world.ledger.replied(client.session, client.call) == given
    assert world.ledger.replied(client.session, client.call + 1) is None
    world.ledger.forget_replies(client.session, client.call)
    with pytest.raises(ProtocolError):
        world.ledger.replied(client.session, client.call)


def test_notices_without_a_number_are_carried_out_each_time(client: Driver) -> None:
    assert client.apply(m.Heartbeat(), call=0) == client.apply(m.Heartbeat(), call=0)
    client.put(2)
    assert client.apply(m.LeaseRequest("t", "x", rows=1), call=0) != client.apply(
        m.LeaseRequest("t", "x", rows=1), call=0
    )


def test_goodbye_returns_everything(world: World, client: Driver) -> None:
    client.put(2, ["a"])
    client.lease("x", 2)
    client.reserve(2)
    client.grant(10)
    client.apply(m.Goodbye())
    with pytest.raises(Disconnected):
        client.put(1)
    stats = world.stats()
    assert (stats.reserved, stats.tasks["x"].ready) == (0, 2)
    assert len(world.taken) == 1
    client.close()  # twice is no error


def test_sessions_are_numbered_once_and_bounded(world: World, client: Driver) -> None:
    with pytest.raises(UsageError, match="session 1 is open already"):
        world.ledger.open_session(1, b"", 0.0)
    for number in range(2, SESSIONS_MAX + 1):
        world.ledger.open_session(number, b"", 0.0)
    with pytest.raises(Exception, match=f"{SESSIONS_MAX} sessions are open, which is the maximum"):
        world.ledger.open_session(SESSIONS_MAX + 1, b"", 0.0)


def test_time_does_not_go_back(world: World, client: Driver) -> None:
    client.put(1)
    world.now = 50.0
    batch = client.lease("x", 1)
    world.now = 10.0
    assert client.renew(batch).lease_s == 1000
    assert world.ledger.next_deadline() == 1050


def test_manual_rows_keep_their_put_known(world: World) -> None:
    client = world.client(client=b"d" * 16)
    client.create("m", tasks=[Task("x")], retention=Manual())
    put = m.PutRequest("m", 1, m.Columns())
    reply, call = client.apply(put), client.call
    client.ack(client.lease("x", 1, table="m"), table="m")
    world.ledger.forget_replies(client.session, client.call)
    assert client.apply(put, call=call) == reply


# ---------------------------------------------------------------- what is kept


@given(st.lists(st.integers(1, 60), max_size=60), st.integers(0, 60))
def test_spans_are_a_set(numbers: list[int], upto: int) -> None:
    spans, wanted = IntervalSet(), set()
    for number in numbers:
        spans.add(number)
        wanted.add(number)
        assert all((one in spans) == (one in wanted) for one in range(62))
    spans.forget(upto)
    assert all(one in spans for one in wanted if one > upto)


def test_gaps_left_for_ever_do_not_grow_what_is_kept() -> None:
    replies = ReplyCache()
    for call in range(1, 10 * REPLIES_KEPT_MAX, 2):
        replies.keep(call, m.DoneReply())
    assert len(replies._given._spans) <= REPLIES_KEPT_MAX
    assert len(replies._kept) == REPLIES_KEPT_MAX
