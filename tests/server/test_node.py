"""The node's promises, one by one, with a real ledger and arena and time that the test decides."""

import msgspec
import numpy as np
import pytest

from tests.server.nodes import EPOCH, Bench, lease, local, numbers, rows_of
from tests.wire.test_versions import OLD_HELLO
from transferqueue.limits import (
    CALLS_PARKED_MAX,
    HEARTBEAT_S,
    LOCK_CHECK_S,
    MIB,
    PAGE_BYTES,
    RESULTS_SHARE,
    SESSION_SILENCE_S,
    Limits,
)
from transferqueue.schema import Field
from transferqueue.transport import FileLock
from transferqueue.wire import codec
from transferqueue.wire import messages as m
from transferqueue.wire.answers.sessions import SessionStats
from transferqueue.wire.answers.stats import AuditAnswer, Stats
from transferqueue.wire.versions import PROTOCOL


@pytest.fixture
def bench():
    found = Bench()
    yield found
    found.close()


def failed(reply, error, said=""):
    assert isinstance(reply, m.Failed), reply
    assert reply.error == error, reply
    assert said in reply.text, reply


def audit(client):
    return codec.decode_observed(client.ask(m.Observe("audit")), AuditAnswer)


def stats(client):
    return codec.decode_observed(client.ask(m.Observe("stats")), Stats)


# ---------------------------------------------------------------- garbage and strangers


@pytest.mark.parametrize("frame", [b"", b"junk", b"\xc1", b"\x95\x01\x01\x02\x00" + b"\x91" * 100_000])
def test_garbage_is_answered_counted_and_changes_nothing(bench, frame):
    client = bench.client()
    client.create_table()
    client.ask(client.put(2))
    before = audit(client)
    bench.receive(b"stranger", frame)
    (answer,) = bench.answered[b"stranger"]
    assert answer[0] == 0
    failed(answer[1], "ProtocolError", "not a message")
    assert audit(client) == before
    assert stats(client).server.garbage == 1


def test_a_bad_request_is_answered_under_its_id(bench):
    client = bench.client()
    bench.receive(client.peer, msgspec.msgpack.encode([PROTOCOL, client.session, 77, 0, ["Lease", 1, 2, 3]]))
    failed(client.take(77), "ProtocolError", "Expected `str`")


def test_a_call_of_no_open_session_is_answered_with_disconnected(bench):
    client = bench.client()
    client.session += 1
    failed(client.ask(m.ListTables()), "Disconnected", "is not open here: this server was restarted")
    client.session = 0
    failed(client.ask(m.Heartbeat()), "Disconnected", "connect again")


# ---------------------------------------------------------------- sessions


def test_hello_again_is_the_same_session(bench):
    client = bench.client()
    assert client.welcome.epoch == EPOCH
    again = client.ask(client.hello, call=1)
    assert again == client.welcome
    assert len(bench.coordinator.sessions) == 1


def test_sessions_of_two_lives_of_a_server_have_different_numbers(bench):
    other = Bench()
    other.coordinator.sessions._last += 1 << 20  # as the next epoch would
    assert other.client().session != bench.client().session
    other.close()


def test_a_client_id_of_the_wrong_length_is_refused(bench):
    failed(bench.client(client=b"short").welcome, "UsageError", "client id has 5 bytes; send 16 random ones")
    assert len(bench.coordinator.sessions) == 0


def test_a_lock_that_is_not_held_is_refused(bench, tmp_path):
    (tmp_path / "lock").touch()
    failed(bench.client(**local(tmp_path / "lock")).welcome, "UsageError", "is not locked by any process")
    assert len(bench.coordinator.sessions) == 0


def test_only_who_is_seen_by_the_kernel_is_told_of_the_arena(bench):
    assert bench.client(**local()).welcome.arenas == {0: bench.arena.path}
    assert bench.client().welcome.arenas == {}


def test_silence_ends_a_session_that_only_silence_can_judge(bench):
    far, near = bench.client(), bench.client(**local())
    near.create_table()
    near.ask(near.put(2))
    assert rows_of(far.ask(lease(2, lease_s=1000.0))) == [0, 1]
    waiting = near.post(lease(2, wait_s=60.0))
    bench.pass_time(SESSION_SILENCE_S - 1)
    far.post(m.Heartbeat())
    bench.pass_time(SESSION_SILENCE_S - 1)
    assert near.take(waiting) is None
    bench.pass_time(2)
    assert rows_of(near.take(waiting)) == [0, 1]
    failed(far.ask(m.ListTables()), "Disconnected")
    assert near.ask(m.ListTables()).names == ["t"]


def test_heartbeats_keep_a_session_and_change_nothing_else(bench):
    far = bench.client()
    far.create_table()
    before = stats(far).tables["t"]
    bench.pass_time(0)
    for _ in range(5):
        bench.pass_time(HEARTBEAT_S)
        far.seen = far.ids
        assert far.take(far.post(m.Heartbeat())) is None
    assert bench.coordinator.sessions.get(far.session).seen == far.seen
    assert stats(far).tables["t"] == before


def test_two_heartbeats_may_be_lost(bench):
    far, other = bench.client(), bench.client(**local())
    bench.pass_time(3 * HEARTBEAT_S)
    assert far.ask(m.ListTables()).names == []
    far.post(m.Heartbeat())
    bench.pass_time(SESSION_SILENCE_S)
    failed(far.ask(m.ListTables()), "Disconnected")
    assert other.ask(m.ListTables()).names == []


def test_a_session_judged_by_its_lock_outlives_silence_and_not_the_lock(bench, tmp_path):
    lock = FileLock(tmp_path / "lock")
    assert lock.take()
    client = bench.client(lock=str(lock.path), host="other process numbers")
    bench.pass_time(5 * SESSION_SILENCE_S)
    assert client.ask(m.ListTables()).names == []
    lock.release()
    bench.pass_time(2 * SESSION_SILENCE_S)
    failed(client.ask(m.ListTables()), "Disconnected")


def test_goodbye_ends_a_session_and_its_waits(bench):
    client, other = bench.client(), bench.client()
    client.create_table()
    client.ask(client.put(1))
    client.ask(lease(1))
    waiting = other.post(lease(1, wait_s=60.0))
    client.post(lease(1, wait_s=60.0))
    assert client.ask(m.Goodbye()) == m.DoneReply()
    assert rows_of(other.take(waiting)) == [0]
    assert len(bench.coordinator.waiting) == 0
    failed(client.ask(m.ListTables()), "Disconnected")


def test_a_dead_process_gives_its_leases_back_at_once(bench):
    client, other = bench.client(**local()), bench.client()
    client.create_table()
    client.ask(client.put(1))
    client.ask(lease(1))
    assert list(bench.watched.pidfds) == [client.session]
    waiting = other.post(lease(1, wait_s=60.0))
    bench.coordinator.process_exited(client.session, bench.now)
    bench.coordinator.process_exited(client.session, bench.now)
    bench.deliver()
    assert rows_of(other.take(waiting)) == [0]
    assert bench.watched.pidfds == {}


def test_memory_of_a_dead_session_stays_while_its_lock_is_held(tmp_path):
    sessions = tmp_path / "sessions"
    sessions.mkdir()
    bench = Bench(swept=sessions)
    lock = FileLock(sessions / "client")
    assert lock.take()
    client, other = bench.client(**local(lock.path)), bench.client()
    client.ask(m.Grant(MIB))
    waiting = other.post(m.Grant(MIB, wait_s=60.0))
    bench.coordinator.process_exited(client.session, bench.now)
    bench.pass_time(3 * LOCK_CHECK_S)
    assert other.take(waiting) is None
    sessions = codec.decode_observed(other.ask(m.Observe("sessions")), dict[str, SessionStats])
    assert [one.state for one in sessions.values()] == ["open", "ended"]
    lock.release(unlink=False)
    other.post(m.Heartbeat())
    bench.pass_time(LOCK_CHECK_S)
    assert isinstance(other.take(waiting), m.Granted)
    assert not lock.path.exists()
    bench.close()


def test_a_peer_that_does_not_read_is_dropped(bench):
    client, other = bench.client(), bench.client()
    client.create_table()
    client.ask(client.put(1))
    client.ask(lease(1))
    waiting = other.post(lease(1, wait_s=60.0))
    bench.coordinator.peer_lost(client.peer, bench.now)
    bench.deliver()
    assert rows_of(other.take(waiting)) == [0]
    assert stats(other).server.sessions_dropped == 1


def test_stopping_tells_every_session_and_every_waiter(bench):
    client, other = bench.client(), bench.client()
    client.create_table()
    waiting = client.post(lease(1, wait_s=60.0))
    bench.coordinator.stop()
    bench.deliver()
    for stopped in (client.take(waiting), client.take(0), other.take(0)):
        failed(stopped, "Disconnected", "the server was stopped")
        assert "ipc:" not in stopped.text, "a client at another address would look for it there"


# ---------------------------------------------------------------- calls that come again


def test_a_call_answered_before_is_answered_the_same_and_not_carried_out_again(bench):
    client = bench.client()
    client.create_table()
    put = client.put(2)
    first = client.ask(put)
    assert client.ask(put, call=client.ids) == first
    assert audit(client).tables["t"].rows_put == 2


def test_a_call_refused_before_is_refused_the_same_and_not_carried_out_later(bench):
    """Its frame came twice: the client heard the refusal and may have made the call anew."""
    client = bench.client()
    client.create_table(limits=Limits(rows=1))
    client.ask(client.put(1))
    put = client.put(1)
    refused = client.ask(put)
    failed(refused, "Full")
    call = client.ids
    leased = client.ask(lease(1))
    client.ask(m.Ack("t", leased.lease, leased.token))
    assert client.ask(put, call=call) == refused
    assert audit(client).tables["t"].rows_put == 1
    assert client.ask(put) == m.PutRows(1, 1), "as a new call"


def test_a_wait_that_ended_without_room_is_not_carried_out_later(bench):
    client = bench.client()
    client.create_table(limits=Limits(rows=1))
    client.ask(client.put(1))
    put = msgspec.structs.replace(client.put(1), wait_s=1.0)
    call = client.post(put)
    bench.pass_time(1)
    refused = client.take(call)
    failed(refused, "DeadlineExceeded")
    leased = client.ask(lease(1))
    client.ask(m.Ack("t", leased.lease, leased.token))
    assert client.ask(put, call=call) == refused
    assert audit(client).tables["t"].rows_put == 1


def test_a_call_answered_before_does_not_wait_behind_others(bench):
    """Its reply was lost with its connection, or with the server: those who wait may wait for the rows that only this
    client can give back."""
    first, second, third = bench.client(), bench.client(), bench.client()
    first.create_table()
    first.ask(first.put(1))
    leased = first.post(lease(wait_s=9.0))
    answered = first.take(leased)
    refused = third.post(lease(wait_s=1.0))
    bench.pass_time(1.1)
    refusal = third.take(refused)
    waits = second.post(lease(wait_s=60.0))
    assert isinstance(answered, m.Leased)
    assert refusal.error == "DeadlineExceeded"
    assert second.take(waits) is None
    assert first.ask(lease(wait_s=9.0), leased) == answered
    assert third.ask(lease(wait_s=1.0), refused) == refusal
    assert second.take(waits) is None


def test_a_put_answered_before_does_not_wait_behind_others(bench):
    """What others wait for may be that its client leases the rows of which it does not know yet."""
    first, second = bench.client(), bench.client()
    first.create_table(limits=Limits(rows=1))
    put = first.post(first.put(1, wait_s=9.0))
    answered = first.take(put)
    waits = second.post(second.put(1, wait_s=9.0))
    assert answered == m.PutRows(0, 1)
    assert second.take(waits) is None
    assert first.ask(first.put(1, wait_s=9.0), put) == answered
    assert audit(first).tables["t"].rows_put == 1


def test_a_call_sent_again_while_it_waits_is_answered_once(bench):
    client, other = bench.client(), bench.client()
    client.create_table()
    waiting = client.post(lease(1, wait_s=60.0))
    assert client.take(client.post(lease(1, wait_s=60.0), call=waiting)) is None
    assert len(bench.coordinator.waiting) == 1
    other.ask(client.put(2))
    assert rows_of(client.take(waiting)) == [0]
    assert client.take(waiting) is None
    assert stats(other).tables["t"].tasks["train"].leased == 1


def test_what_overtakes_the_greeting_on_a_new_way_is_not_heard(bench):
    client = bench.client()
    client.create_table()
    client.peer = b"reconnected"
    early = client.post(client.put(1))
    assert client.take(early) is None
    client.ask(client.hello)
    assert client.take(early) is None
    client.post(client.put(1), early)
    assert client.take(early) == m.PutRows(0, 1)


def test_a_hello_of_a_way_that_was_given_up_is_read_late_and_changes_nothing(bench):
    client = bench.client()
    client.create_table()
    client.peer = b"reconnected"
    client.ask(client.hello)
    client.peer = b"peer 1"
    assert client.take(client.post(client.hello, call=1)) is None
    client.peer = b"reconnected"
    assert client.ask(client.put(1)) == m.PutRows(0, 1)


def test_an_answer_goes_where_the_last_hello_came_from(bench):
    client, other = bench.client(), bench.client()
    client.create_table()
    waiting = client.post(lease(1, wait_s=60.0))
    client.peer = b"reconnected"
    assert client.ask(client.hello) == client.welcome
    other.ask(other.put(1))
    assert rows_of(client.take(waiting)) == [0]


def test_a_late_copy_of_a_call_whose_answer_was_seen_is_ignored(bench):
    client = bench.client()
    client.create_table()
    client.ask(client.put(2))
    client.seen = put = client.ids
    client.post(m.Heartbeat())
    assert client.take(client.post(client.put(2), call=put)) is None
    assert audit(client).tables["t"].rows_put == 2


# ---------------------------------------------------------------- waiting


def test_a_lease_waits_until_rows_come(bench):
    client, other = bench.client(), bench.client()
    client.create_table()
    waiting = client.post(lease(2, wait_s=60.0))
    other.ask(client.put(1))
    assert client.take(waiting) is None
    other.ask(client.put(1))
    assert rows_of(client.take(waiting)) == [0, 1]


def test_a_few_waiters_are_served_at_once_and_the_rest_by_going_on(bench):
    bench.coordinator.waiters_at_once = 2
    client, others = bench.client(), [bench.client() for _ in range(5)]
    client.create_table()
    waiting = [other.post(lease(wait_s=60.0)) for other in others]
    assert not isinstance(client.ask(client.put(5)), m.Failed)
    served = []
    while bench.coordinator.unfinished:
        served.append(
            [rows_of(reply) for each in zip(others, waiting, strict=True) if (reply := each[0].take(each[1]))]
        )
        bench.coordinator.go_on(bench.now)
        bench.deliver()
    served.append([rows_of(reply) for each in zip(others, waiting, strict=True) if (reply := each[0].take(each[1]))])
    assert served == [[[0], [1]], [[2], [3]], [[4]]]
    assert audit(client).balanced


def test_waiters_that_are_due_are_served_before_any_of_them_expires(bench):
    bench.coordinator.waiters_at_once = 1
    client, others = bench.client(), [bench.client() for _ in range(3)]
    client.create_table()
    waiting = [other.post(lease(wait_s=1.0)) for other in others]
    client.post(client.put(3))
    assert bench.coordinator.unfinished
    bench.now = 2.0
    bench.coordinator.tick(bench.now)
    bench.deliver()
    assert [rows_of(other.take(call)) for other, call in zip(others, waiting, strict=True)] == [[0], [1], [2]]
    assert not bench.coordinator.unfinished


def test_a_wait_ends_at_its_deadline_and_says_why(bench):
    client = bench.client()
    client.create_table()
    waiting = client.post(lease(2, wait_s=3.0))
    bench.pass_time(2.9)
    assert client.take(waiting) is None
    bench.pass_time(0.2)
    failed(client.take(waiting), "DeadlineExceeded", "Lease waited 3 s: ")


def test_new_rows_leave_room_for_results(bench):
    producer, worker = bench.client(), bench.client()
    room = MIB - MIB // RESULTS_SHARE
    failed(producer.ask(m.Grant(room + 1, use="rows")), "Impossible", "917,504, the rest is for results")
    granted = producer.ask(m.Grant(room, use="rows"))
    failed(producer.ask(m.Grant(PAGE_BYTES, use="rows")), "Full", "One byte in 8 is reserved for results")
    waiting = producer.post(m.Grant(PAGE_BYTES, wait_s=60.0, use="rows"))
    assert isinstance(worker.ask(m.Grant(MIB // RESULTS_SHARE)), m.Granted)
    assert producer.take(waiting) is None
    producer.ask(m.ReturnGrant(granted.extent))
    assert isinstance(producer.take(waiting), m.Granted)


def test_a_wait_ends_when_the_call_comes_again_without_one(bench):
    client, other = bench.client(), bench.client()
    client.create_table()
    client.ask(client.put(1))
    gone, behind = client.post(lease(4, wait_s=60.0)), other.post(lease(1, wait_s=60.0))
    client.post(lease(4, wait_s=90.0), call=gone)
    assert other.take(behind) is None
    client.post(lease(4), call=gone)
    bench.pass_time(0)
    failed(client.take(gone), "DeadlineExceeded", "Lease waited 0 s: ")
    assert rows_of(other.take(behind)) == [0]


def test_a_large_request_is_not_starved_by_small_ones(bench):
    large, small, producer = bench.client(), bench.client(), bench.client()
    producer.create_table()
    first = large.post(lease(4, wait_s=60.0))
    second = small.post(lease(1, wait_s=60.0))
    failed(small.ask(lease(1)), "DeadlineExceeded", "2 earlier requests wait for the same")
    for _ in range(3):
        producer.ask(producer.put(1))
    assert small.take(second) is None
    producer.ask(producer.put(1))
    assert rows_of(large.take(first)) == [0, 1, 2, 3]
    producer.ask(producer.put(1))
    assert rows_of(small.take(second)) == [4]


def test_when_the_first_gives_up_the_next_is_served(bench):
    large, small, producer = bench.client(), bench.client(), bench.client()
    producer.create_table()
    first = large.post(lease(4, wait_s=1.0))
    second = small.post(lease(1, wait_s=5.0))
    producer.ask(producer.put(1))
    bench.pass_time(1.0)
    failed(large.take(first), "DeadlineExceeded")
    assert rows_of(small.take(second)) == [0]


def test_puts_wait_for_room_in_their_order(bench):
    client, consumer = bench.client(), bench.client()
    client.create_table(limits=Limits(rows=2))
    client.ask(client.put(2))
    first, second = client.post(client.put(2, wait_s=60.0)), client.post(client.put(1, wait_s=60.0))
    given = consumer.ask(lease(1))
    consumer.ask(m.Ack("t", given.lease, given.token))
    assert client.take(first) is None
    assert client.take(second) is None
    given = consumer.ask(lease(1))
    consumer.ask(m.Ack("t", given.lease, given.token))
    assert client.take(first) == m.PutRows(2, 2)
    assert client.take(second) is None


def test_dropping_a_table_tells_who_waits_for_it(bench):
    client, other = bench.client(), bench.client()
    client.create_table()
    waits = [client.post(lease(1, wait_s=60.0)), client.post(lease(1, wait_s=60.0))]
    other.ask(m.DropTable("t"))
    for call in waits:
        failed(client.take(call), "NotFound", "t")


def test_a_table_is_waited_for(bench):
    client, other = bench.client(), bench.client()
    waiting = client.post(m.OpenTable("t", wait_s=60.0))
    other.create_table()
    assert client.take(waiting).name == "t"


def test_one_session_may_not_wait_without_bound(bench):
    client = bench.client()
    client.create_table()
    for _ in range(CALLS_PARKED_MAX):
        assert client.take(client.post(lease(1, wait_s=60.0))) is None
    failed(client.ask(lease(1, wait_s=60.0)), "Full", "which is the most")


def test_who_waits_is_seen_with_the_reason(bench):
    client, other = bench.client(label="trainer"), bench.client()
    client.create_table()
    client.post(lease(2, wait_s=60.0))
    bench.pass_time(2)
    (found,) = stats(other).waiting
    assert (found.label, found.request, found.table, found.task) == ("trainer", "Lease", "t", "train")
    assert (found.waited_s, found.left_s) == (2.0, 58.0)
    assert found.why


# ---------------------------------------------------------------- memory


def test_the_same_grant_again_is_the_same_extent(bench):
    client = bench.client()
    first = client.ask(m.Grant(5000))
    assert first.nbytes == 2 * PAGE_BYTES
    assert client.ask(m.Grant(5000), call=client.ids) == first
    assert bench.coordinator.memory.used == 2 * PAGE_BYTES


def test_a_grant_waits_until_memory_is_free(bench):
    client, other = bench.client(), bench.client()
    first = client.ask(m.Grant(MIB))
    waiting = other.post(m.Grant(PAGE_BYTES, wait_s=60.0))
    assert other.take(waiting) is None
    client.ask(m.ReturnGrant(first.extent))
    assert other.take(waiting).nbytes == PAGE_BYTES


def test_a_small_grant_passes_a_large_one_that_waits(bench):
    client, other = bench.client(), bench.client()
    half = client.ask(m.Grant(MIB // 2))
    client.ask(m.Grant(MIB // 2))
    large, small = other.post(m.Grant(MIB, wait_s=60.0)), other.post(m.Grant(PAGE_BYTES, wait_s=60.0))
    client.ask(m.ReturnGrant(half.extent))
    assert other.take(large) is None
    assert isinstance(other.take(small), m.Granted)


def test_a_grant_without_room_says_who_has_it(bench):
    client, other = bench.client(label="hoarder"), bench.client()
    client.create_table(fields=[Field("big", "uint8", (None,))], tasks=[])
    extent = client.ask(m.Grant(MIB))
    block = m.WrittenBlock(extent.extent, extent.offset, 4096 + 64, 1, ["big"], [4096])
    client.ask(m.PutRequest("t", 1, m.Columns(fields=[Field("big", "uint8", (None,))], blocks=[block])))
    failed(other.ask(m.Grant(PAGE_BYTES)), "Full", 'table "t" (4,160 bytes)')
    failed(other.ask(m.Grant(PAGE_BYTES)), "Full", "hoarder (1 grants")
    waiting = other.post(m.Grant(PAGE_BYTES, wait_s=1.0))
    bench.pass_time(1)
    failed(other.take(waiting), "DeadlineExceeded", "start the server with a larger --arena-bytes")


def test_a_grant_that_could_never_be_is_refused_at_once(bench):
    client = bench.client()
    failed(client.ask(m.Grant(MIB + 1, wait_s=60.0)), "Impossible", "the arena has 1,048,576 in all")


# ---------------------------------------------------------------- replies too large to travel


def test_a_reply_too_large_to_send_gives_its_rows_back(bench, monkeypatch):
    client, other = bench.client(), bench.client()
    client.create_table()
    client.ask(client.put(1000))
    monkeypatch.setattr(codec, "MESSAGE_BYTES_MAX", 8192)
    refused = client.ask(lease(1000))
    failed(refused, "UsageError", "use fewer rows or fields at a time")
    assert client.ask(lease(1000), call=client.ids) == refused
    assert len(rows_of(other.ask(lease(10)))) == 10


def test_a_table_of_numbers_comes_back(bench):
    client = bench.client()
    client.create_table()
    client.ask(client.put(3))
    reply = client.ask(lease(3))
    (inline,) = reply.content.inline
    assert inline == numbers(3).inline[0]
    assert np.frombuffer(inline.data, "<i8").tolist() == [0, 1, 2]


def test_a_client_of_another_protocol_is_answered_once_and_changes_nothing(bench):
    bench.coordinator.receive(b"old", OLD_HELLO, bench.now)
    ((peer, answer),) = bench.coordinator.answers.outbox
    bench.coordinator.answers.outbox = []
    assert peer == b"old"
    assert msgspec.msgpack.decode(answer)[2][:2] == ["Failed", "ProtocolError"]
    assert len(bench.coordinator.sessions) == 0
    assert bench.coordinator.counters.garbage == 1
