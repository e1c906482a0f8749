"""Plain connections of the bulk protocol: messages after each other on a stream, and who is let go."""

import os
import resource
import socket
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest

from transferqueue.errors import AddressInUse, Corruption, Unreachable
from transferqueue.limits import BULK_STALL_S, FRAME_BYTES, KIB
from transferqueue.transport.bulk import listener, protocol
from transferqueue.transport.bulk.client import BulkClient
from transferqueue.transport.bulk.listener import DEAF_S, BulkServer
from transferqueue.transport.bulk.stream import BulkStream
from transferqueue.transport.control.unauthenticated_peers import unauthenticated_peers_max

PATIENCE_S = 60.0
FRAME = np.random.default_rng(0).integers(0, 255, FRAME_BYTES, dtype=np.uint8)


class Desk:
    """Keeps what comes, its bytes in one place."""

    def __init__(self):
        self.heads, self.place, self._at = [], np.zeros(FRAME_BYTES, np.uint8), 0

    def expect(self, head, nbytes):
        self.heads.append(protocol.to_shard(head))
        self._at = 0

    def fill(self, read):
        size = read(self.place[self._at :].data)
        self._at += size
        return size


class Desks:
    """One desk for each peer, and what was said of them."""

    def __init__(self):
        self.all, self.gone, self.bad, self.known = {}, [], [], set()

    def desk(self, peer):
        return self.all.setdefault(peer, Desk())

    def spoiled(self, peer, error):
        self.bad.append(error)

    def heard(self, peer):
        pass

    def knows(self, peer):
        return peer in self.known

    def lost(self, peer):
        self.gone.append(peer)


class House:
    """A port that listens, and its desks."""

    def __init__(self):
        self.port, self.desks = BulkServer(), Desks()
        self.number = self.port.listen_at_all(["127.0.0.1"], 0, 4)

    def dial(self):
        line = BulkClient("127.0.0.1", self.number, epoch=1)
        assert line.open(PATIENCE_S)
        return line

    def until(self, true, now=0.0):
        """Take what comes until something is true; the peers whose messages came."""
        found = []
        while not true():
            self.port.sources[0].poll(PATIENCE_S)
            found += self.port.arrivals(self.desks, now)
        return found


@pytest.fixture
def house():
    found = House()
    yield found
    found.port.close()


@pytest.fixture
def line(house):
    found = house.dial()
    yield found
    found.close()


def data(number=0):
    return protocol.message(protocol.WriteFrame(1, number), [FRAME[:5], FRAME[5:5], FRAME[5:]])


def heads(house):
    return [head for desk in house.desks.all.values() for head in desk.heads]


def test_messages_come_whole_and_in_order_and_their_bytes_where_they_belong(house, line):
    for number in range(3):
        line.send(data(number))
    whole = []
    while len(whole) < 3:
        line._live.flush()
        whole += house.until(lambda: house.port.sources[0].poll(0.01) == [])
    assert heads(house) == [protocol.WriteFrame(1, number) for number in range(3)]
    assert np.array_equal(house.desks.all[whole[0]].place, FRAME)


def test_a_message_that_comes_byte_by_byte_is_the_same(house):
    head, _ = protocol.message(protocol.FlowAck(1, 2), ())
    with socket.create_connection(("127.0.0.1", house.number)) as raw:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(len(head)):
            raw.sendall(head[at : at + 1])
            house.until(lambda: house.port.sources[0].poll(0.002) == [])
        house.until(lambda: heads(house))
    assert heads(house) == [protocol.FlowAck(1, 2)]


@pytest.mark.parametrize(
    "bad",
    [
        bytes(protocol.PRELUDE_BYTES),
        b"GET / HTTP/1.1\r\nHost: somebody\r\n\r\n",
        protocol.message(protocol.FlowAck(1, 2))[0][:-1] + b"\xff",
    ],
)
def test_who_sends_what_is_no_message_is_told_and_not_listened_to(house, bad):
    head, _ = protocol.message(protocol.FlowAck(1, 2), ())
    with socket.create_connection(("127.0.0.1", house.number)) as raw:
        raw.sendall(bad)
        house.until(lambda: house.desks.bad)
        raw.sendall(head)
        house.until(lambda: house.port.sources[0].poll(0.01) == [])
        assert heads(house) == []
        house.port.tick(house.desks, BULK_STALL_S)
        assert len(house.port) == 0
    assert isinstance(house.desks.bad[0], Corruption)


def test_content_that_changed_on_the_way_is_noticed(house):
    head, _ = data()
    with socket.create_connection(("127.0.0.1", house.number)) as raw:
        raw.sendall(head + bytes(FRAME_BYTES))
        house.until(lambda: house.desks.bad)
    assert "content of a bulk message does not match" in str(house.desks.bad[0])


def test_after_damaged_content_any_byte_is_heard(house):
    sent = FRAME[: 400 * KIB]
    head, _ = protocol.message(protocol.WriteFrame(1, 0), [sent])
    with socket.create_connection(("127.0.0.1", house.number)) as raw:
        raw.sendall(head + bytes(1000))
        house.until(lambda: heads(house) and not is_readable(house))
        raw.sendall(bytes(len(sent) - 1000))
        house.until(lambda: house.desks.bad)
        raw.sendall(b"x")
        assert is_readable(house)


def test_who_does_not_read_is_clogged_and_not_listened_to_until_it_reads(house, line):
    line.send(protocol.message(protocol.FlowAck(1, 0)))
    (peer,) = house.until(lambda: heads(house))
    while peer not in house.port.clogged:
        house.port.send(peer, protocol.message(protocol.ReadFrame(1, 0, [], False), [FRAME]))
    line.send(protocol.message(protocol.FlowAck(1, 1)))
    house.until(lambda: house.port.sources[0].poll(0.01) == [])
    assert len(heads(house)) == 1
    reader = threading.Thread(target=lambda: [line.receive(Kept(), PATIENCE_S) for _ in range(3)])
    reader.start()
    house.until(lambda: len(heads(house)) == 2 or not reader.is_alive())
    reader.join()
    house.port.tick(house.desks, BULK_STALL_S - 1)
    assert len(house.port) == 1
    house.port.tick(house.desks, 10 * BULK_STALL_S)


class Kept(Desk):
    def expect(self, head, nbytes):
        self.heads.append(protocol.to_client(head))
        self._at = 0


def acquaint(house, line):
    """Have the port hear a message of `line`, and its desks know who that is."""
    line.send((protocol.message(protocol.FlowAck(1, 2))[0], ()))
    house.until(lambda: house.port._names)
    house.desks.known.update(house.port._names.values())
    house.until(lambda: heads(house))


def test_who_stands_still_in_the_middle_is_let_go_and_who_is_idle_is_not(house, line):
    acquaint(house, line)
    with socket.create_connection(("127.0.0.1", house.number)) as raw:
        raw.sendall(data()[0] + b"some of it")
        house.until(lambda: len(heads(house)) == 2)
        house.until(lambda: house.port.sources[0].poll(0.01) == [])
        assert (len(house.port), house.port.next_deadline()) == (2, BULK_STALL_S)
        house.port.tick(house.desks, BULK_STALL_S - 0.1)
        assert len(house.port) == 2
        house.port.tick(house.desks, BULK_STALL_S)
        assert (len(house.port), len(house.desks.gone), house.port.next_deadline()) == (1, 1, None)
        assert raw.recv(1) == b""


def is_readable(house):
    return house.port.sources[0].poll(0.02) != []


def test_content_wakes_nobody_for_each_packet_and_the_rest_of_it_does(house):
    sent = FRAME[: 400 * KIB]  # the kernel takes it while nobody reads
    head, _ = protocol.message(protocol.WriteFrame(1, 0), [sent])
    rest = sent.tobytes()
    with socket.create_connection(("127.0.0.1", house.number)) as raw:
        raw.sendall(head + rest[:1000])
        house.until(lambda: heads(house) and not is_readable(house))
        raw.sendall(rest[1000:2000])
        assert not is_readable(house), "too little to be worth a wake-up"
        raw.sendall(rest[2000:-1000])
        house.until(lambda: not is_readable(house))
        raw.sendall(rest[-1000:])
        assert len(house.until(lambda: not is_readable(house))) == 1
        assert np.array_equal(next(iter(house.desks.all.values())).place[: len(sent)], sent)
        raw.sendall(protocol.message(protocol.FlowAck(1, 2))[0])
        house.until(lambda: len(heads(house)) == 2)


def test_who_sends_little_at_a_time_does_not_stand_still(house):
    head, _ = data()
    with socket.create_connection(("127.0.0.1", house.number)) as raw:
        raw.sendall(head + bytes(1000))
        house.until(lambda: heads(house) and not is_readable(house))
        house.desks.known.update(house.desks.all)
        house.port._unauthenticated.clear()
        for stalls in (1, 2):
            raw.sendall(bytes(1000))
            assert not is_readable(house)
            house.port.tick(house.desks, stalls * BULK_STALL_S)
            assert len(house.port) == 1
            house.until(lambda: not is_readable(house), stalls * BULK_STALL_S)
            assert house.port.next_deadline() == (stalls + 1) * BULK_STALL_S
        house.port.tick(house.desks, 3 * BULK_STALL_S)
        house.port.tick(house.desks, 3 * BULK_STALL_S)
        assert len(house.port) == 0


def test_what_has_arrived_is_received_at_the_end_of_a_wait(house):
    head, _ = data()
    with socket.create_server(("127.0.0.1", 0)) as place:
        line, desk = BulkClient("127.0.0.1", place.getsockname()[1], epoch=1), Desk()
        assert line.open(PATIENCE_S)
        far, _ = place.accept()
        far.sendall(head + bytes(1000))
        assert not line.receive(desk, 0.05)
        before = line.moved
        far.sendall(bytes(1000))
        assert not line.receive(desk, 0.05)
        assert line.moved == before + 1000, "else a slow sender would seem to stand still"
        line.interrupt()
        assert not line.receive(desk, PATIENCE_S)
        far.close()
        line.close()


@contextmanager
def receiving():
    """A line, its desk, and its far end."""
    with socket.create_server(("127.0.0.1", 0)) as place:
        line, desk = BulkClient("127.0.0.1", place.getsockname()[1], epoch=1), Desk()
        assert line.open(PATIENCE_S)
        far, _ = place.accept()
        try:
            yield line, desk, far
        finally:
            far.close()
            line.close()


def test_an_interrupt_ends_a_wait_for_a_head():
    with receiving() as (line, desk, far):
        began = time.monotonic()
        line.interrupt()
        assert not line.receive(desk, 5.0)
        assert time.monotonic() - began < 4.0
        far.sendall(protocol.message(protocol.FlowAck(1, 1))[0])
        assert line.receive(desk, PATIENCE_S), "and the connection can be used"


def test_after_a_message_any_byte_is_news():
    head, _ = data()
    with receiving() as (line, desk, far):
        sender = threading.Thread(target=lambda: (far.sendall(head), far.sendall(FRAME)))
        sender.start()
        assert line.receive(desk, PATIENCE_S)
        sender.join()
        assert line.quiet
        far.close()
        assert wait_until(lambda: not line.quiet), "the end of an idle connection is seen before it is used again"


def wait_until(true):
    deadline = time.monotonic() + PATIENCE_S
    while not true() and time.monotonic() < deadline:
        time.sleep(0.001)
    return true()


def test_of_too_many_the_longest_unheard_of_makes_room(house, monkeypatch):
    monkeypatch.setattr(listener, "BULK_CONNECTIONS_MAX", 2)
    first, second = house.dial(), house.dial()
    house.until(lambda: len(house.port) == 2)
    first.send(protocol.message(protocol.FlowAck(1, 0)))
    house.until(lambda: heads(house))
    third = house.dial()
    house.until(lambda: house.desks.gone)
    with pytest.raises(Unreachable, match="its peer closed it"):
        second.receive(Kept(), PATIENCE_S)
    assert (first.quiet, second.quiet, third.quiet) == (True, False, True)
    for one in (first, second, third):
        one.close()


def test_without_descriptors_nobody_comes_in_and_nothing_turns_in_circles(house, line):
    house.until(lambda: len(house.port) == 1)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as raw:
        spare = os.dup(raw.fileno())
        os.close(spare)
        resource.setrlimit(resource.RLIMIT_NOFILE, (spare, before[1]))
        try:
            raw.settimeout(PATIENCE_S)
            raw.connect(("127.0.0.1", house.number))
            house.until(lambda: house.port.sources[0].poll(0.01) == [])
            assert raw.recv(1) == b""
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert len(house.port) == 1


def test_a_line_waits_for_who_listens_later_and_can_be_interrupted():
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        line = BulkClient("127.0.0.1", place.getsockname()[1], epoch=1)
        try:
            assert not line.open(0.05), "nobody listens"
            assert line.moved == 0
            with pytest.raises(Unreachable, match="not open yet"):
                line.send(data())
            line.interrupt()
            assert not line.open(PATIENCE_S)
            place.listen()
            assert line.open(PATIENCE_S)
            line.interrupt()
            assert not line.receive(Kept(), PATIENCE_S)
        finally:
            line.close()


def test_what_is_asked_is_no_sign_of_life(house, line):
    before = line.moved
    line.ask(protocol.message(protocol.FlowAck(1, 0)))
    house.until(lambda: heads(house))
    assert line.moved <= before
    line.send(protocol.message(protocol.FlowAck(1, 0)))
    house.until(lambda: len(heads(house)) == 2)
    assert line.moved > before


def test_a_port_that_is_taken_is_told(house):
    other = BulkServer()
    with pytest.raises(AddressInUse, match=f"bulk port {house.number} of 127.0.0.1 is in use"):
        other.listen_at_all(["127.0.0.1"], house.number, 4)
    other.close()


def test_a_stream_that_ends_in_the_middle_is_lost():
    listener = socket.create_server(("127.0.0.1", 0))
    near = socket.create_connection(listener.getsockname())
    far, _ = listener.accept()
    listener.close()
    stream = BulkStream(far)
    near.sendall(data()[0][:30])
    near.close()
    with pytest.raises(Unreachable, match="its peer closed it"):
        receive_all(stream)
    far.close()


def receive_all(stream):
    while not stream.receive(Desk()):
        pass


def test_strangers_make_room_for_each_other_and_not_at_the_cost_of_those_who_showed_a_ticket(house, line):
    acquaint(house, line)
    strangers = []
    for _ in range(unauthenticated_peers_max() + 3):
        strangers.append(socket.create_connection(("127.0.0.1", house.number)))
        house.until(lambda: house.port.sources[0].poll(0) == [])
    house.until(lambda: house.port.turned_away == 3)
    assert len(house.desks.gone) == 3
    assert len(house.port) == unauthenticated_peers_max() + 1
    house.port.tick(house.desks, BULK_STALL_S)
    assert len(house.port) == 1, "they had their time, and whoever is known stays"
    line.send((protocol.message(protocol.FlowAck(1, 2))[0], ()))
    house.until(lambda: len(heads(house)) == 2)
    for one in strangers:
        one.close()


def test_where_no_descriptor_is_left_nobody_listens_for_a_moment(house):
    os.close(house.port._spare)
    house.port._spare = -1
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.create_connection(("127.0.0.1", house.number)), no_descriptors():
        assert list(house.port.arrivals(house.desks, 0.0)) == []
        assert house.port.next_deadline() == DEAF_S
        assert house.port.sources[0].poll(0) == [], "the kernel does not report the knock again and again"
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
    house.port.tick(house.desks, DEAF_S)
    house.until(lambda: len(house.port) == 1)


@contextmanager
def no_descriptors():
    """A process that may open none."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
