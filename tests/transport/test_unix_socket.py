"""What only the socket file has: frames behind their lengths, and two threads that write and read it themselves."""

import errno
import os
import resource
import select
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transferqueue.errors import Unreachable, UsageError
from transferqueue.limits import (
    FRAMES_QUEUED_MAX,
    KIB,
    MESSAGE_BYTES_MAX,
    MIB,
    PUBLISH_BYTES_MAX,
    SMALL_FRAME_BYTES,
    UNAUTHENTICATED_S,
)
from transferqueue.transport import dial, parse_address
from transferqueue.transport.control import frame_stream, unix_socket
from transferqueue.transport.control.frame_stream import FrameStream, PeerClosed
from transferqueue.transport.control.send_result import SendResult
from transferqueue.transport.control.unauthenticated_peers import unauthenticated_peers_max
from transferqueue.transport.control.unix_socket import UnixServer


@pytest.fixture
def address(tmp_path):
    return f"ipc://{tmp_path}/local.sock"


@pytest.fixture
def port(address):
    found = UnixServer(parse_address(address))
    yield found
    found.close()


def heard(port, channel, wakeup):
    """The next frame at the port, while the channel does its part."""
    for _ in range(10_000):
        found = port.recv_nowait()
        if found is not None:
            return found
        channel.wait(wakeup, 0.001)
    raise AssertionError("nothing came")


def admitted(port, address, wakeup):
    """A channel that has greeted, and its line."""
    channel = dial(address)
    channel.send(b"hello")
    line, _ = heard(port, channel, wakeup)
    port.admit(line)
    return channel, line


@pytest.mark.parametrize("is_admitted", [False, True])
@pytest.mark.parametrize("over", [0, 1])
def test_a_frame_is_not_buffered_beyond_what_its_sender_may_send(port, address, wakeup, is_admitted, over):
    channel, _ = admitted(port, address, wakeup)
    if not is_admitted:
        channel.close()
        channel = dial(address)
    frame = bytes((PUBLISH_BYTES_MAX if is_admitted else SMALL_FRAME_BYTES) + over)
    channel.send(frame)
    if over:
        until_lost(channel, wakeup, port)
    else:
        assert heard(port, channel, wakeup)[1] == frame
    channel.close()


def answered(port, channel, wakeup):
    """The next frame at the channel, while the port does its part."""
    for _ in range(10_000):
        assert port.recv_nowait() is None
        channel.wait(wakeup, 0.001)
        frame = channel.recv_nowait()
        if frame is not None:
            return frame
    raise AssertionError("nothing came")


def until_lost(channel, wakeup, port=None):
    for _ in range(10_000):
        if channel.is_lost:
            return
        assert port is None or port.recv_nowait() is None
        channel.wait(wakeup, 0.001)
        channel.recv_nowait()
    raise AssertionError("the loss was not seen")


def until_found(channel, wakeup, connections_made):
    for _ in range(10_000):
        if channel.connections_made == connections_made:
            return
        channel.wait(wakeup, 0.001)
    raise AssertionError(f"{channel.connections_made} connections, not {connections_made}")


@given(st.lists(st.binary(max_size=300), max_size=20), st.lists(st.integers(1, 200), min_size=1, max_size=50))
def test_frames_come_whole_however_their_bytes_are_cut(frames, cuts):
    ends = socket.socketpair()
    reader, arrived = FrameStream(ends[0]), []
    content = b"".join(len(frame).to_bytes(4, "little") + frame for frame in frames)
    at = 0
    while at < len(content):
        for cut in cuts:
            ends[1].send(content[at : at + cut] or b"")
            at += cut
            if at - cut < len(content):
                reader.read(arrived.append)
    assert arrived == frames
    assert not reader.read(arrived.append)
    ends[1].close()
    with pytest.raises(PeerClosed):
        reader.read(arrived.append)
    reader.close()


def test_a_client_that_sleeps_writes_on_as_soon_as_the_server_reads(port, address, wakeup):
    channel = dial(address)
    channel.send(bytes(MIB))  # more than the kernel takes
    for _ in range(MIB // (64 * KIB)):
        port.poll(0)
    began = time.monotonic()
    channel.sleep(wakeup, 20)
    slept_s = time.monotonic() - began
    channel.close()
    assert slept_s < 10


def test_frames_larger_than_the_kernel_takes_go_there_and_back(port, address, wakeup):
    channel, line = admitted(port, address, wakeup)
    frames = [os.urandom(size) for size in (PUBLISH_BYTES_MAX, 5, MIB, 0)]
    for frame in frames:
        channel.send(frame)
    for frame in frames:
        assert heard(port, channel, wakeup) == (line, frame)
    frames.append(bytes(3 * PUBLISH_BYTES_MAX))  # answers may be larger
    for frame in frames:
        assert port.send(line, frame) is SendResult.ON_ITS_WAY
    assert [answered(port, channel, wakeup) for _ in frames] == frames
    channel.close()


@pytest.mark.parametrize("content", [b"\xff" * 64, (MESSAGE_BYTES_MAX + 1).to_bytes(4, "little"), b"\x00\x00"])
def test_lengths_that_cannot_be_end_only_their_own_connection(port, address, wakeup, content):
    channel = dial(address)
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(address.removeprefix("ipc://"))
        raw.sendall(content)
        channel.send(b"fine")
        assert heard(port, channel, wakeup)[1] == b"fine"
        if content[0]:
            raw.settimeout(10)
            assert raw.recv(1) == b""
    channel.send(b"still")
    assert heard(port, channel, wakeup)[1] == b"still"
    channel.close()


def test_a_server_that_took_the_place_of_the_first_is_found(address, wakeup):
    first = UnixServer(parse_address(address))
    channel = dial(address)
    channel.send(b"one")
    line, _ = heard(first, channel, wakeup)
    first.send(line, b"last words")
    first.close(farewell_s=1.0)
    assert not os.path.exists(address.removeprefix("ipc://"))
    for _ in range(10_000):
        channel.wait(wakeup, 0.001)
        if (frame := channel.recv_nowait()) is not None:
            break
    assert frame == b"last words"
    until_lost(channel, wakeup)
    second = UnixServer(parse_address(address))
    until_found(channel, wakeup, connections_made=2)
    assert not channel.is_lost
    channel.send(b"two")
    assert heard(second, channel, wakeup)[1] == b"two"
    channel.close()
    second.close()


def test_what_was_kept_for_a_connection_is_lost_with_it(port, address, wakeup):
    """Who sends over a channel is told of each new way, and says again what has to be heard."""
    channel = dial(address)
    channel.send(b"first")
    line, _ = heard(port, channel, wakeup)
    for _ in range(8):
        channel.send(os.urandom(MIB))
    port._drop(line)
    until_lost(channel, wakeup)
    channel.send(b"second")
    until_found(channel, wakeup, connections_made=2)
    assert heard(port, channel, wakeup)[1] == b"second"
    channel.close()


def test_last_words_are_heard_by_one_who_speaks_first(address, wakeup):
    port = UnixServer(parse_address(address))
    channel = dial(address)
    channel.send(b"hello")
    line, _ = heard(port, channel, wakeup)
    port.send(line, b"last words")
    port.close(farewell_s=1.0)
    for _ in range(3):
        channel.send(bytes(MIB))
    channel.wait(wakeup, 1)
    assert channel.recv_nowait() == b"last words"
    until_lost(channel, wakeup)
    channel.close()
    channel.wait(wakeup, 0)  # and does not dial again
    assert channel.connections_made == 1


def test_what_a_client_said_before_it_left_is_heard_though_it_cannot_be_answered(port, address, wakeup):
    channel, line = admitted(port, address, wakeup)
    frames = [os.urandom(50_000) for _ in range(4)]
    for frame in frames[:2]:
        channel.send(frame)
    _, came = heard(port, channel, wakeup)
    channel.send(frames[2])
    channel.close()
    found = [came]
    while len(found) < 3:
        assert port.send(line, b"answer") is SendResult.ON_ITS_WAY
        arrived = port.recv_nowait()
        found += [arrived[1]] if arrived else []
    assert found == frames[:3]
    assert port.recv_nowait() is None
    assert port.send(line, b"answer") is SendResult.GONE


def test_one_who_sends_thousands_of_frames_at_once_is_heard_and_hears(address, wakeup):
    """It looks at what has come only between two of its sends; the server must not take it for one that does not
    read."""
    port, stop, count = UnixServer(parse_address(address)), threading.Event(), 4 * FRAMES_QUEUED_MAX

    def echo():
        while not stop.is_set():
            select.select([port], [], [], 0.01)
            while (arrived := port.recv_nowait()) is not None:
                port.send(*arrived)

    thread = threading.Thread(target=echo)
    thread.start()
    channel = dial(address)
    try:
        sent, came = 0, []
        while len(came) < count:
            with suppress(Unreachable):  # the kernel takes no more now
                while sent < count:
                    channel.send(sent.to_bytes(200, "little"))
                    sent += 1
            channel.wait(wakeup, 1)
            while (frame := channel.recv_nowait()) is not None:
                came.append(int.from_bytes(frame, "little"))
        assert came == list(range(count))
        assert channel.connections_made == 1
    finally:
        stop.set()
        thread.join()
        channel.close()
        port.close()


def test_writing_to_one_who_left_kills_no_process(tmp_path):
    """Programs may let SIGPIPE do what it does by default."""
    program = f"""
import signal, socket
from transferqueue.transport import dial, parse_address
from transferqueue.transport.control.unix_socket import UnixServer
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
port = UnixServer(parse_address("ipc://{tmp_path}/pipe.sock"))
channel = dial("ipc://{tmp_path}/pipe.sock")
channel.send(b"hello")
while (arrived := port.recv_nowait()) is None:
    pass
channel.close()
port.send(arrived[0], b"answer")
other = dial("ipc://{tmp_path}/pipe.sock")
port.close()
other.send(b"hello")
print("alive")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


def test_a_spare_descriptor_that_somebody_else_took_is_no_end(port, address, wakeup, monkeypatch):
    def none_left():
        raise OSError(24, "Too many open files")

    first = dial(address)
    with monkeypatch.context() as patched:
        patched.setattr(unix_socket, "_spare", none_left)
        assert port._turn_away()
        assert not port._turn_away()
    assert not port._turn_away()  # nobody knocks; and there is a spare one again
    assert not port._spare.closed
    until_lost(first, wakeup)
    until_found(first, wakeup, connections_made=2)
    first.close()


def test_one_who_was_not_let_in_yet_is_hung_up_on_though_a_forked_child_listens(address, wakeup):
    port = UnixServer(parse_address(address))
    channel = dial(address)
    child = os.fork()
    if child == 0:
        threading.Event().wait()
    try:
        port.close()
        until_lost(channel, wakeup)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        channel.close()


def test_one_deaf_peer_does_not_take_the_farewell_from_the_others(address, wakeup):
    port = UnixServer(parse_address(address))
    channels = [dial(address) for _ in range(3)]
    for channel in channels:
        channel.send(b"hello")
        line, _ = heard(port, channel, wakeup)
        for _ in range(64):
            port.send(line, bytes(65536))
    closing = threading.Thread(target=port.close, args=(2.0,))
    closing.start()
    for channel in channels[1:]:
        came = 0
        while not channel.is_lost:
            channel.wait(wakeup, 1)
            while channel.recv_nowait() is not None:
                came += 1
            if came == 64:
                break
        assert came == 64
    closing.join()
    for channel in channels:
        channel.close()


def test_a_peer_that_does_not_read_is_hung_up_on(port, address, wakeup):
    channel = dial(address)
    channel.send(b"hello")
    line, _ = heard(port, channel, wakeup)
    for _ in range(2 * FRAMES_QUEUED_MAX):
        if port.send(line, bytes(65536)) is SendResult.UNREAD:
            break
    assert port.send(line, b"x") is SendResult.GONE
    while not channel.is_lost:
        channel.wait(wakeup, 1)
        while channel.recv_nowait() is not None:
            pass
    channel.close()


def test_a_hang_up_is_seen_though_a_forked_child_has_the_socket(port, address, wakeup):
    channel = dial(address)
    channel.send(b"hello")
    line, _ = heard(port, channel, wakeup)
    child = os.fork()
    if child == 0:
        threading.Event().wait()
    try:
        port._drop(line)
        until_lost(channel, wakeup)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        channel.close()


def use_up(taken):
    """Take descriptors until there is none."""
    with suppress(OSError):
        while True:
            taken.append(os.dup(0))


def test_who_knocks_when_no_descriptor_is_left_is_turned_away_and_comes_in_later(port, address, wakeup):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    channel = dial(address)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, before[1]))
    taken = []
    try:
        use_up(taken)
        assert port.recv_nowait() is None
        until_lost(channel, wakeup)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for one in taken:
            os.close(one)
    until_found(channel, wakeup, connections_made=2)
    channel.send(b"in")
    assert heard(port, channel, wakeup)[1] == b"in"
    channel.close()


def test_a_place_that_cannot_be_listened_at_is_refused(tmp_path):
    with pytest.raises(UsageError, match="cannot be listened at: No such file"):
        UnixServer(parse_address(f"ipc://{tmp_path}/none/q.sock"))


def test_a_client_that_may_not_open_the_socket_is_told_so(port, address):
    channel = dial(f"{address}.other")
    assert "transferqueue serve" in channel.doubt
    channel._refused_with = 13  # as root, who runs these tests in places, nothing is refused
    assert "this user may not open" in channel.doubt
    channel.close()


class Time:
    """A clock that stands still until it is set."""

    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def timed(address):
    clock = Time()
    port = UnixServer(parse_address(address), clock)
    yield port, clock
    port.close()


def stranger(address):
    raw = socket.socket(socket.AF_UNIX)
    raw.connect(address.removeprefix("ipc://"))
    raw.setblocking(False)
    return raw


def is_hung_up(raw):
    try:
        return raw.recv(1) == b""
    except BlockingIOError:
        return False


def test_the_oldest_stranger_that_says_nothing_makes_room(timed, address, wakeup):
    port, _ = timed
    client = dial(address)
    client.send(b"hello")
    line, _ = heard(port, client, wakeup)
    port.admit(line)
    asks = stranger(address)
    asks.sendall(b"\x02\0\0\0hi")
    strangers = [stranger(address) for _ in range(unauthenticated_peers_max() + 2)]
    assert port.recv_nowait()[1] == b"hi"
    assert port.recv_nowait() is None
    assert port.turned_away == 3
    assert [is_hung_up(one) for one in strangers[:4]] == [True, True, True, False]
    client.send(b"again")
    assert heard(port, client, wakeup) == (line, b"again"), "whoever was admitted stays"
    for one in (asks, *strangers, client):
        one.close()


def test_a_stranger_has_its_time_and_no_more(timed, address, wakeup):
    port, clock = timed
    client, silent = dial(address), stranger(address)
    client.send(b"hello")
    line, _ = heard(port, client, wakeup)
    assert port.patience_s() == UNAUTHENTICATED_S
    port.admit(line)
    clock.now = UNAUTHENTICATED_S - 1
    port.tick()
    assert port.patience_s() == 1
    assert not is_hung_up(silent)
    clock.now = UNAUTHENTICATED_S
    port.tick()
    assert is_hung_up(silent)
    assert port.patience_s() is None
    assert not line.is_gone
    silent.close()
    client.close()


def test_bytes_that_a_peer_does_not_read_are_counted_and_bounded(monkeypatch):
    monkeypatch.setattr(frame_stream, "BYTES_QUEUED_MAX", 8 * MIB)
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    stream, frames = FrameStream(near), 0
    while not stream.is_full:
        stream.send(bytes(MIB - 1) if frames % 2 else bytes(KIB))
        frames += 1
    assert frames < 30
    assert stream.unsent_bytes == sum(map(len, stream.unsent)) >= 8 * MIB
    reader, came = FrameStream(far), list[int]()
    while len(came) < frames:
        reader.read(lambda frame: came.append(len(frame)))
        stream.flush()
        assert stream.unsent_bytes == sum(map(len, stream.unsent))
    assert came == [MIB - 1 if number % 2 else KIB for number in range(frames)]
    assert stream.unsent_bytes == 0
    assert not stream.is_full
    stream.close()
    reader.close()


class ShortOfMemory(socket.socket):
    """A socket whose first writes the kernel refuses, as it does while memory is short."""

    refusals = 2

    def _refuse(self) -> None:
        if self.refusals:
            self.refusals -= 1
            raise OSError(errno.ENOBUFS, "No buffer space available")

    def send(self, *arguments):
        self._refuse()
        return super().send(*arguments)

    def sendmsg(self, *arguments):
        self._refuse()
        return super().sendmsg(*arguments)


@pytest.mark.parametrize("size", [10, 100_000])
def test_a_frame_waits_while_the_kernel_has_no_memory(size):
    near, far = socket.socketpair()
    with ShortOfMemory(fileno=near.detach()) as short, far:
        stream, arrived = FrameStream(short), []
        stream.send(b"x" * size)
        assert stream.is_behind
        stream.flush()
        assert stream.is_behind
        other = FrameStream(far)
        while not arrived:
            stream.flush()
            with suppress(BlockingIOError):
                other.read(arrived.append)
        assert arrived == [b"x" * size]
        assert not stream.is_behind
