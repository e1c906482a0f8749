"""Encrypted connections of the bulk protocol: as plain ones, to the holder of the named certificate alone."""

import contextlib
import socket
import threading

import numpy as np
import pytest

from tests.transport.test_streams import FRAME, PATIENCE_S, Desks, Kept, data
from transferqueue.errors import Unreachable
from transferqueue.limits import BULK_STALL_S
from transferqueue.transport.bulk import protocol
from transferqueue.transport.bulk.client import BulkClient
from transferqueue.transport.bulk.listener import BulkServer
from transferqueue.transport.bulk.tls import ServerCertificate


class Port:
    """A port with a certificate, served in a thread, that answers each message with a frame of the same number."""

    def __init__(self):
        self.certificate, self.desks = ServerCertificate(), Desks()
        self.server = BulkServer(self.certificate)
        self.number = self.server.listen_at_all(["127.0.0.1"], 0, 4)
        self.turned_away_at = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        while not self._ended.is_set():
            if self.server.next_deadline() != 0:
                self.server.sources[0].poll(0.01)
            if self.turned_away_at is not None:
                self.server.tick(self.desks, self.turned_away_at)
            for name in self.server.arrivals(self.desks, 0.0):
                number = self.desks.desk(name).heads[-1].number
                self.server.send(name, protocol.message(protocol.ReadFrame(1, number, [], False), [FRAME]))

    def close(self):
        self._ended.set()
        self._thread.join()
        self.server.close()


@pytest.fixture
def port():
    found = Port()
    yield found
    found.close()


@contextlib.contextmanager
def dialled(port, fingerprint=None):
    line = BulkClient("127.0.0.1", port.number, 1, fingerprint or port.certificate.fingerprint)
    try:
        yield line
    finally:
        line.close()


def wait_for_the_end(raw):
    """Read until the peer has closed the connection; TLS may say before why."""
    with contextlib.suppress(ConnectionResetError):
        while raw.recv(1 << 16):
            pass


def test_messages_and_their_bytes_come_whole_and_in_order_both_ways(port):
    with dialled(port) as line:
        assert line.open(PATIENCE_S)
        desk = Kept()
        for number in range(4):
            line.send(data(number))
        for _ in range(4):
            assert line.receive(desk, PATIENCE_S)
            assert np.array_equal(desk.place, FRAME)
            desk.place[:] = 0
        assert [head.number for head in desk.heads] == [0, 1, 2, 3]
        (asked,) = port.desks.all.values()
        assert asked.heads == [protocol.WriteFrame(1, number) for number in range(4)]
        assert np.array_equal(asked.place, FRAME)
        assert line.quiet


def test_messages_that_share_a_record_are_each_heard(port):
    heads = [protocol.message(protocol.WriteFrame(1, number))[0] for number in range(5)]
    with dialled(port) as line:
        assert line.open(PATIENCE_S)
        line.send((heads[0], heads[1:]))
        desk = Kept()
        for _ in heads:
            assert line.receive(desk, PATIENCE_S)
        assert [head.number for head in desk.heads] == [0, 1, 2, 3, 4]


def test_a_certificate_that_was_not_named_is_refused_before_anything_is_said(port):
    named = pytest.raises(Unreachable, match="a certificate that its server did not name")
    with dialled(port, ServerCertificate().fingerprint) as line, named:
        line.open(PATIENCE_S)
    assert not any(desk.heads for desk in port.desks.all.values())


@pytest.mark.parametrize(
    "said", [bytes(1000), b"GET / HTTP/1.1\r\n\r\n", protocol.message(protocol.WriteFrame(1, 0))[0]]
)
def test_bytes_that_are_not_encrypted_end_their_connection_alone(port, said):
    with socket.create_connection(("127.0.0.1", port.number), timeout=PATIENCE_S) as raw, dialled(port) as line:
        raw.sendall(said)
        wait_for_the_end(raw)
        assert line.open(PATIENCE_S)
        line.send(data(7))
        assert line.receive(desk := Kept(), PATIENCE_S)
    assert desk.heads[0].number == 7


def test_a_handshake_that_stands_still_is_let_go(port):
    with socket.create_connection(("127.0.0.1", port.number), timeout=PATIENCE_S) as raw:
        raw.sendall(b"\x16\x03\x01")  # the first bytes of one
        port.turned_away_at = BULK_STALL_S
        wait_for_the_end(raw)


def test_a_port_that_says_nothing_is_waited_for_and_can_be_interrupted():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        line = BulkClient("127.0.0.1", silent.getsockname()[1], 1, ServerCertificate().fingerprint)
        try:
            assert not line.open(0.05)
            line.interrupt()
            assert not line.open(PATIENCE_S)
        finally:
            line.close()


def test_a_plain_peer_at_the_other_end_is_told():
    with socket.create_server(("127.0.0.1", 0)) as plain:
        line = BulkClient("127.0.0.1", plain.getsockname()[1], 1, ServerCertificate().fingerprint)
        assert not line.open(0.05)
        far, _ = plain.accept()
        far.sendall(b"hello, I do not speak TLS")
        with pytest.raises(Unreachable, match="no encrypted connection came about"):
            line.open(PATIENCE_S)
        line.close()
        far.close()
