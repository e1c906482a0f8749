"""Who may do what: the table is complete, and a node asks it before anything else sees a request."""

import typing

import pytest

from tests.server.nodes import Bench, Client, lease
from transferqueue.errors import PermissionDenied
from transferqueue.server.sessions.authorization import Authorizer, check_offer, not_allowed
from transferqueue.server.sessions.session_table import NOWHERE
from transferqueue.transport.control.zeromq import KeyedPeer
from transferqueue.transport.security import keyring
from transferqueue.transport.security.keyring import Keyring
from transferqueue.wire import codec
from transferqueue.wire import messages as m
from transferqueue.wire.answers.stats import AuditAnswer
from transferqueue.wire.messages.declarations import DECLARED
from transferqueue.wire.requests import declaration
from transferqueue.wire.roles import ROLES

REQUESTS = typing.get_args(m.Request)
MAY = {kind: declared.roles for kind, declared in DECLARED.items()}


def test_every_request_is_in_the_table():
    assert set(MAY) == set(REQUESTS), "a new request needs its declaration: @request(...) on its class"
    assert all("admin" in may for may in MAY.values())


def test_an_observer_only_looks():
    may = {m.tag_of(kind) for kind in REQUESTS if "observer" in MAY[kind]}
    assert may == {
        "Hello",
        "Heartbeat",
        "Goodbye",
        "Unpin",
        "OpenTable",
        "ListTables",
        "Observe",
        "ListEvents",
        "ExplainWait",
        "Cursor",
    }


def test_the_refusal_names_the_role_and_who_may():
    refused = not_allowed("producer", declaration(m.LeaseRequest("t", "train", rows=1)))
    assert str(refused).startswith(
        "Lease is not for a client whose key has role producer; admin and consumer may send it"
    )


class Ring:
    """A key file with one key for each role."""

    def __init__(self, directory):
        self.directory = directory / "keys"
        self.keys = {role: keyring.add(self.directory, role, role).pair.public for role in ROLES}
        self.ring = Keyring(self.directory)

    def bench(self):
        return Bench(door=Authorizer(self.ring))

    def client(self, bench, role, number=0):
        return Client(bench, peer=KeyedPeer(f"{role}{number}".encode(), self.keys[role]))


@pytest.fixture
def ring(tmp_path):
    return Ring(tmp_path)


def books(bench, client):
    return codec.decode_observed(client.ask(m.Observe("audit")), AuditAnswer)


@pytest.mark.parametrize("role", [role for role in ROLES if role != "admin"])
def test_a_refused_request_changes_nothing(ring, role):
    bench = ring.bench()
    admin, client = ring.client(bench, "admin"), ring.client(bench, role)
    admin.create_table()
    admin.ask(admin.put(2))
    before = books(bench, admin)
    refused = 0
    for request in [
        admin.put(1),
        lease(1, 5.0),
        m.CreateTable("u"),
        m.DropTable("t"),
        m.AdvanceClock("t", 3),
        m.Reserve("t", 1, wait_s=5.0),
        m.ReadRequest("t"),
    ]:
        if role not in MAY[type(request)]:
            reply = client.ask(request)
            assert reply.error == "PermissionDenied", (request, reply)
            refused += 1
    assert refused >= 4
    assert books(bench, admin) == before
    assert len(bench.coordinator.waiting) == 0
    bench.close()


def test_each_role_does_its_work(ring):
    bench = ring.bench()
    admin, producer, consumer = (ring.client(bench, role) for role in ("admin", "producer", "consumer"))
    admin.create_table()
    assert isinstance(producer.ask(producer.put(2)), m.PutRows)
    leased = consumer.ask(lease(2, 1.0))
    assert isinstance(consumer.ask(m.Ack("t", leased.lease, leased.token)), m.DoneReply)
    assert isinstance(ring.client(bench, "observer").ask(m.Observe("audit")), m.Observed)
    bench.close()


def test_a_session_is_not_open_to_another_key(ring):
    bench = ring.bench()
    admin, producer = ring.client(bench, "admin"), ring.client(bench, "producer")
    for session in (admin.session, producer.session + 99):
        bench.receive(producer.peer, codec.encode_call(m.CallFrame(session, 9, 0, m.ListTables())))
        assert bench.answered[producer.peer][-1][1].error == "Disconnected"
    bench.receive(b"same user", codec.encode_call(m.CallFrame(producer.session, 9, 0, m.ListTables())))
    assert bench.answered[b"same user"][-1][1].error == "Disconnected"
    bench.receive(producer.peer, codec.encode_call(m.CallFrame(0, 1, 0, admin.hello)))
    assert bench.answered[producer.peer][-1][1].error == "Disconnected"
    assert isinstance(admin.ask(m.ListTables()), m.Tables)
    bench.close()


def test_a_revoked_key_is_told_once_and_has_no_session_and_no_answer(ring):
    bench = ring.bench()
    admin, consumer = ring.client(bench, "admin"), ring.client(bench, "consumer")
    admin.create_table()
    call = consumer.post(lease(1, 60.0))
    assert len(bench.coordinator.waiting) == 1
    keyring.revoke(ring.directory, "consumer")
    assert ring.ring.refresh()
    bench.coordinator.keys_changed(bench.now)
    assert len(bench.coordinator.waiting) == 0
    assert len(bench.coordinator.sessions) == 1
    admin.ask(admin.put(1))
    consumer.post(m.ListTables())
    bench.receive(consumer.peer, b"\x00")
    assert [answer.error for _, answer in bench.answered[consumer.peer]] == ["Disconnected"]
    assert consumer.take(call) is None
    assert bench.coordinator.counters.unauthenticated_peers == 2
    bench.close()


def test_a_key_holder_names_no_file_but_a_session_file(ring, tmp_path):
    bench = ring.bench()
    (tmp_path / "secret").touch()
    for lock in (tmp_path / "secret", tmp_path / "missing"):
        client = Client(bench, peer=KeyedPeer(b"x", ring.keys["producer"]), lock=str(lock), client=b"c" * 16)
        assert client.welcome.text.startswith(f"session refused: lock '{lock}' is no session file")
    bench.close()


def test_a_key_without_a_key_file_is_nobodys():
    bench = Bench()
    bench.receive(KeyedPeer(b"x", "k" * 40), codec.encode_call(m.CallFrame(0, 1, 0, m.Hello(b"c" * 16))))
    assert not bench.answered
    bench.close()


def test_a_frame_from_before_a_restart_does_not_end_the_session_of_a_key(ring):
    """ZeroMQ keeps what it could not send, and sends it to the next server ahead of the greeting."""
    bench = ring.bench()
    client = ring.client(bench, "admin")
    client.create_table()
    bench.coordinator.sessions.get(client.session).peer = NOWHERE
    client.peer = KeyedPeer(b"another way", ring.keys["admin"])
    assert client.take(client.post(client.put(1))) is None
    assert client.ask(client.hello) == client.welcome
    assert client.ask(client.put(1)) == m.PutRows(0, 1)
    bench.close()


def test_a_shard_takes_orders_and_copies_and_sees_nothing_else():
    may = {m.tag_of(kind) for kind in REQUESTS if "shard" in MAY[kind]}
    assert may == {"Hello", "Heartbeat", "Goodbye", "TakeOrders", "TakeCopies", "ListShards"}


def test_memory_is_offered_with_a_key_for_it_only():
    hello = m.Hello(b"c" * 16, shard=m.ShardOffer("/arena", 4096, "tcp://127.0.0.1:1", "", b"k" * 32))
    for role in ("admin", "shard"):
        check_offer(role, hello)
    with pytest.raises(PermissionDenied, match="may not join with a key of role producer; join with a token of role"):
        check_offer("producer", hello)
