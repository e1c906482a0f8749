"""What only the socket file has: frames behind their lengths, and two threads that write and read it themselves."""

import os
import resource
import socket
import threading
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transferqueue.errors import UsageError
from transferqueue.limits import FRAMES_QUEUED_MAX, MESSAGE_BYTES_MAX, MIB
from transferqueue.transport import Wakeup, dial, parse_address
from transferqueue.transport.local import HungUp, LocalPort, Stream
from transferqueue.transport.sent import Sent


@pytest.fixture
def address(tmp_path):
    return f"ipc://{tmp_path}/local.sock"


@pytest.fixture
def port(address):
    found = LocalPort(parse_address(address))
    yield found
    found.close()


@pytest.fixture
def wakeup():
    found = Wakeup()
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


def answered(port, channel, wakeup):
    """The next frame at the channel, while the port does its part."""
    for _ in range(10_000):
        assert port.recv_nowait() is None
        channel.wait(wakeup, 0.001)
        frame = channel.recv_nowait()
        if frame is not None:
            return frame
    raise AssertionError("nothing came")


def until_lost(channel, wakeup):
    for _ in range(10_000):
        if channel.is_lost:
            return
        channel.wait(wakeup, 0.001)
        channel.recv_nowait()
    raise AssertionError("the loss was not seen")


def until_found(channel, wakeup, ways):
    for _ in range(10_000):
        if channel.ways == ways:
            return
        channel.wait(wakeup, 0.001)
    raise AssertionError(f"{channel.ways} ways, not {ways}")


@given(st.lists(st.binary(max_size=300), max_size=20), st.lists(st.integers(1, 200), min_size=1, max_size=50))
def test_frames_come_whole_however_their_bytes_are_cut(frames, cuts):
    ends = socket.socketpair()
    reader, arrived = Stream(ends[0]), []
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
    with pytest.raises(HungUp):
        reader.read(arrived.append)
    reader.close()


def test_frames_larger_than_the_kernel_takes_go_there_and_back(port, address, wakeup):
    channel = dial(address)
    frames = [os.urandom(size) for size in (3 * MIB, 5, 2 * MIB, 0)]
    for frame in frames:
        channel.send(frame)
    for frame in frames:
        line, came = heard(port, channel, wakeup)
        assert came == frame
    for frame in frames:
        assert port.send(line, frame) is Sent.ON_ITS_WAY
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
    first = LocalPort(parse_address(address))
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
    second = LocalPort(parse_address(address))
    until_found(channel, wakeup, ways=2)
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
    until_found(channel, wakeup, ways=2)
    assert heard(port, channel, wakeup)[1] == b"second"
    channel.close()


def test_a_peer_that_does_not_read_is_hung_up_on(port, address, wakeup):
    channel = dial(address)
    channel.send(b"hello")
    line, _ = heard(port, channel, wakeup)
    for _ in range(2 * FRAMES_QUEUED_MAX):
        if port.send(line, bytes(65536)) is Sent.UNREAD:
            break
    assert port.send(line, b"x") is Sent.GONE
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
    until_found(channel, wakeup, ways=2)
    channel.send(b"in")
    assert heard(port, channel, wakeup)[1] == b"in"
    channel.close()


def test_a_place_that_cannot_be_listened_at_is_refused(tmp_path):
    with pytest.raises(UsageError, match="cannot be listened at: No such file"):
        LocalPort(parse_address(f"ipc://{tmp_path}/none/q.sock"))


def test_a_client_that_may_not_open_the_socket_is_told_so(port, address):
    channel = dial(f"{address}.other")
    assert "transferqueue serve" in channel.doubt
    channel._refused_with = 13  # as root, who runs these tests in places, nothing is refused
    assert "this user may not open" in channel.doubt
    channel.close()
