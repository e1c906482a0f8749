"""The same promises for every kind of channel; then what only one kind has."""

import os
import select
import socket
import threading

import pytest

from transferqueue.errors import AddressInUse, Disconnected, Unreachable
from transferqueue.limits import FRAMES_QUEUED_MAX
from transferqueue.transport import Wakeup, dial, is_served, parse_address
from transferqueue.transport.control.inproc import InprocServer
from transferqueue.transport.control.send_result import SendResult
from transferqueue.transport.control.unix_socket import UnixServer
from transferqueue.transport.control.zeromq import ZmqServer


class Echo:
    """A server that is told what to do."""

    def __init__(self, kind, tmp_path):
        self.wakeup = Wakeup()
        if kind == "inproc":
            self.server = InprocServer(self.wakeup)
            self.address = self.server.address
        elif kind == "ipc":
            self.address = f"ipc://{tmp_path}/echo.sock"
            self.server = UnixServer(parse_address(self.address))
        else:
            self.server = ZmqServer()
            self.address = self.server.listen(parse_address("tcp://127.0.0.1:0"))

    def next(self, timeout_s=10):
        """The next frame that arrives."""
        while (found := self.server.recv_nowait()) is None:
            if isinstance(self.server, ZmqServer):
                assert self.server.socket.poll(timeout_s * 1000)
                continue
            awaited = self.wakeup if isinstance(self.server, InprocServer) else self.server
            assert wait_readable(awaited.fileno(), timeout_s)
            self.wakeup.clear()
        if isinstance(self.server, UnixServer):
            self.server.admit(found[0])  # it may send larger frames from now on
        return found

    def close(self):
        self.server.close()
        self.wakeup.close()


def wait_readable(fd, timeout_s):
    return select.select([fd], [], [], timeout_s)[0]


@pytest.fixture(params=["inproc", "ipc", "tcp"])
def echo(request, tmp_path):
    found = Echo(request.param, tmp_path)
    yield found
    found.close()


def receive(channel, wakeup):
    while (frame := channel.recv_nowait()) is None:
        channel.wait(wakeup, 10)
    return frame


def test_frames_go_there_and_back_in_order(echo, wakeup):
    channel = dial(echo.address)
    frames = [os.urandom(size) for size in (1, 0, 100, 1 << 16)]
    for sent in (frames[:1], frames[1:]):
        for frame in sent:
            channel.send(frame)
        for frame in sent:
            peer, found = echo.next()
            assert found == frame
            echo.server.send(peer, found)
    assert [receive(channel, wakeup) for _ in frames] == frames
    assert channel.recv_nowait() is None
    channel.close()


def test_two_clients_get_their_own_answers(echo, wakeup):
    first, second = dial(echo.address), dial(echo.address)
    first.send(b"first")
    second.send(b"second")
    for _ in range(2):
        peer, frame = echo.next()
        echo.server.send(peer, frame)
    assert receive(second, wakeup) == b"second"
    assert receive(first, wakeup) == b"first"
    first.close()
    second.close()


def test_a_wakeup_from_another_thread_ends_the_wait(echo, wakeup):
    channel = dial(echo.address)
    thread = threading.Thread(target=wakeup.set)
    thread.start()
    channel.wait(wakeup, None)  # may end early, when the connection is made
    thread.join()
    while select.select([wakeup], [], [], 0)[0]:
        channel.wait(wakeup, None)
    assert not wakeup.clear()
    channel.close()


def test_a_wait_ends_with_its_time(echo, wakeup):
    channel = dial(echo.address)
    channel.wait(wakeup, 0.001)
    assert channel.recv_nowait() is None
    channel.close()


def test_a_closed_channel_says_so(echo):
    channel = dial(echo.address)
    channel.close()
    channel.close()
    with pytest.raises(Disconnected):
        channel.send(b"late")
    with pytest.raises(Disconnected):
        channel.recv_nowait()


def test_a_peer_that_never_reads_is_found_out(echo):
    channel = dial(echo.address)
    channel.send(b"hello")
    peer, _ = echo.next()
    big = b"x" * 65536  # larger than what kernel buffers hide for long
    for _ in range(4 * FRAMES_QUEUED_MAX):
        if echo.server.send(peer, big) not in (True, SendResult.ON_ITS_WAY):
            break
    else:
        pytest.fail("frames for a peer that does not read were taken without end")
    channel.close()


def test_a_server_that_never_reads_is_found_out(echo):
    channel = dial(echo.address)

    def fill():
        for _ in range(8 * FRAMES_QUEUED_MAX):
            channel.send(b"x" * 65536)

    with pytest.raises(Unreachable, match=r"takes no more|has taken none"):
        fill()
    channel.close()


def test_a_gone_peer_is_no_error(echo):
    channel = dial(echo.address)
    channel.send(b"hello")
    peer, _ = echo.next()
    channel.close()
    nobody = {bytes: b"nobody", int: 999}.get(type(peer), peer)
    while echo.server.send(nobody, b"x") not in (False, SendResult.GONE):
        echo.server.recv_nowait()


def test_closing_a_hub_ends_its_channels_after_what_was_sent(wakeup):
    server_wakeup = Wakeup()
    hub = InprocServer(server_wakeup)
    channel = dial(hub.address)
    assert is_served(hub.address)
    channel.send(b"a")
    peer, frame = hub.recv_nowait()
    hub.send(peer, frame)
    hub.close()
    channel.wait(wakeup, None)
    assert channel.recv_nowait() == b"a"
    with pytest.raises(Disconnected, match="is closed"):
        channel.recv_nowait()
    assert not is_served(hub.address)
    with pytest.raises(Unreachable, match="no embedded server"):
        dial(hub.address)
    channel.close()
    server_wakeup.close()


def test_a_tcp_port_in_use_is_refused():
    port = ZmqServer()
    address = port.listen(parse_address("tcp://127.0.0.1:0"))
    other = ZmqServer()
    with pytest.raises(AddressInUse, match="in use by another server"):
        other.listen(parse_address(address))
    other.close()
    port.close()


def test_a_client_may_come_before_its_server(tmp_path, wakeup):
    address = f"ipc://{tmp_path}/late.sock"
    assert is_served(address) is False
    channel = dial(address)
    channel.send(b"early")
    assert channel.connections_made == 0
    port = UnixServer(parse_address(address))
    while (found := port.recv_nowait()) is None:
        channel.wait(wakeup, 0.01)
    assert found[1] == b"early"
    assert (channel.connections_made, channel.is_lost) == (1, False)
    port.close()
    channel.close()


def test_bytes_that_are_not_even_frames_change_nothing(wakeup):
    port = ZmqServer()
    address = port.listen(parse_address("tcp://127.0.0.1:0"))
    with socket.create_connection(("127.0.0.1", int(address.rsplit(":", 1)[1]))) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n" + os.urandom(4096))
        channel = dial(address)
        channel.send(b"fine")
        found = b""  # ZeroMQ may read messages of its first version into such bytes: those are not ours either
        while found != b"fine":
            assert port.socket.poll(10_000)
            found = (port.recv_nowait() or (b"", found))[1]
    channel.close()
    port.close()


def test_a_message_of_many_parts_is_an_empty_frame():
    import zmq

    port = ZmqServer()
    address = port.listen(parse_address("tcp://127.0.0.1:0"))
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.connect(address)
        stranger.send_multipart([b"part"] * 100)
        stranger.send(b"whole")
        found = []
        while len(found) < 2:
            assert port.socket.poll(10_000)
            found.append(port.recv_nowait()[1])
    assert found == [b"", b"whole"]
    port.close()


def test_a_client_whose_connection_came_after_the_last_look_is_no_stranger_once_it_is_admitted():
    """The loop looks at new connections before it receives. One that is made and greets in between must not be told to
    go later."""
    port = ZmqServer()
    channel = dial(port.listen(parse_address("tcp://127.0.0.1:0")))
    try:
        port.decide()
        channel.send(b"hello")
        assert port.socket.poll(10_000)
        peer, _ = port.recv_nowait()
        port.admit(peer)
        port.decide()
        assert port.patience_s() is None
    finally:
        channel.close()
        port.close()


class Wire:
    """A proxy before a tcp server that can put bytes of its own into what a client hears."""

    def __init__(self, address):
        self.there = int(address.rpartition(":")[2])
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self.listening.getsockname()[1]}"
        self.ends = []
        self.threads = [threading.Thread(target=self.accept)]
        self.threads[0].start()

    def accept(self):
        while True:
            try:
                here, _ = self.listening.accept()
            except OSError:
                return
            there = socket.create_connection(("127.0.0.1", self.there))
            self.ends += [here, there]
            for ends in ((here, there), (there, here)):
                self.threads.append(threading.Thread(target=self.carry, args=ends))
                self.threads[-1].start()

    @staticmethod
    def carry(source, to):
        try:
            while content := source.recv(1 << 16):
                to.sendall(content)
            to.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def garble(self):
        self.ends[-2].sendall(b"\xff" * 64)

    def close(self):
        self.listening.shutdown(socket.SHUT_RDWR)
        for end in (self.listening, *self.ends):
            end.close()
        for thread in self.threads:
            thread.join(10)


def are_made(channel, wakeup, connections_made):
    for _ in range(200):
        if channel.connections_made == connections_made:
            return True
        channel.wait(wakeup, 0.1)
    return False


def test_a_client_that_heard_bytes_which_are_no_frame_opens_its_connection_anew(wakeup, tmp_path):
    """ZeroMQ itself gives such a connection up for ever: the client would hear nothing any more."""
    echo = Echo("tcp", tmp_path)
    wire = Wire(echo.address)
    channel = dial(wire.address)
    try:
        for connections_made in (1, 2, 3):
            assert are_made(channel, wakeup, connections_made)
            assert not channel.is_lost
            channel.send(b"heard")
            peer, frame = echo.next()
            echo.server.send(peer, frame)
            assert receive(channel, wakeup) == b"heard"
            wire.garble()
    finally:
        channel.close()
        wire.close()
        echo.close()
