"""A channel over ZeroMQ that a caller drives, or an event loop reads. Its descriptor tells of a frame once, and sending
takes that away."""

import select
import threading
import time

import pytest

from transferqueue.errors import Unreachable
from transferqueue.limits import MIB
from transferqueue.transport import dial, parse_address
from transferqueue.transport.control import zeromq
from transferqueue.transport.control.zeromq import ZmqServer

DEADLINE_S = 20


@pytest.fixture
def server():
    found = ZmqServer()
    found.address = found.listen(parse_address("tcp://127.0.0.1:0"))
    yield found
    found.close()


@pytest.fixture
def channel(server, wakeup):
    """Connected, with nothing left to do but to wait."""
    found = dial(server.address)
    until_connected(found, wakeup)
    yield found
    found.close()


@pytest.fixture
def frames():
    with select.epoll() as found:
        yield found


def until_connected(channel, wakeup, connections_made=1):
    deadline = time.monotonic() + DEADLINE_S
    while channel.connections_made < connections_made or channel.is_behind:
        assert time.monotonic() < deadline
        channel.wait(wakeup, DEADLINE_S)
    assert channel.recv_nowait() is None


def peer_of(server, channel, wakeup):
    """The channel's end at the server."""
    channel.send(b"hello")
    assert server.socket.poll(DEADLINE_S * 1000)
    return server.recv_nowait()[0]


def frame_of(channel):
    """The next frame, as a driver gets it: the descriptor becomes readable for commands of ZeroMQ's thread, too."""
    deadline = time.monotonic() + DEADLINE_S
    while channel.peek() is None:
        assert channel.wait_for_frame(deadline - time.monotonic())
    return channel.recv_nowait()


def test_a_frame_that_came_before_a_send_is_found_by_whoever_waits(server, channel, wakeup):
    peer = peer_of(server, channel, wakeup)
    for reply in (b"to the driver", b"to the thread"):
        server.send(peer, reply)
        assert select.select([channel._connection], [], [], DEADLINE_S)[0]
        while select.select([channel._connection], [], [], 0)[0]:
            channel.send(b"more")  # ZeroMQ takes the signal away with some send
        began = time.monotonic()
        while reply == b"to the thread" and channel.peek() is None:
            channel.wait(wakeup, DEADLINE_S)
        assert frame_of(channel) == reply
        assert time.monotonic() - began < DEADLINE_S / 2
        assert channel.recv_nowait() is None


def test_a_driver_waits_alone_and_the_thread_in_sleep_hears_what_it_leaves(server, channel, wakeup):
    peer = peer_of(server, channel, wakeup)
    channel.sleep(wakeup, 0)
    assert channel.begin_driving()
    server.send(peer, b"reply")
    assert channel.wait_for_frame(DEADLINE_S)
    assert channel._sleeper.poll(0) == []
    channel.end_driving()
    channel.wait(wakeup, DEADLINE_S)
    assert channel.recv_nowait() == b"reply"


def test_a_wait_of_a_driver_ends_with_its_time_or_the_wakeup(channel, wakeup):
    channel.sleep(wakeup, 0)
    assert channel.begin_driving()
    assert not channel.wait_for_frame(0.001)
    wakeup.set()
    assert not channel.wait_for_frame(DEADLINE_S)
    channel.end_driving()


@pytest.mark.parametrize("waits", ["driver", "loop"])
def test_a_lost_connection_wakes_the_thread_in_sleep_whoever_waits_for_frames(server, channel, wakeup, frames, waits):
    assert channel.begin_driving()
    if waits == "loop":
        channel.end_driving()
        channel.have_loop_read(frames)
    sleeping = threading.Thread(target=lambda: channel.sleep(wakeup, DEADLINE_S))
    began = time.monotonic()
    sleeping.start()
    server.close()
    sleeping.join()
    assert time.monotonic() - began < DEADLINE_S / 2
    channel.look()
    assert channel.is_lost
    assert channel.is_behind
    channel.end_driving()
    assert not channel.begin_driving()


def test_an_event_loop_is_woken_by_what_it_has_to_read_and_by_nothing_else(server, channel, wakeup, frames):
    peer = peer_of(server, channel, wakeup)
    channel.sleep(wakeup, 0)
    assert not channel.leave_to_loop()
    channel.have_loop_read(frames)
    assert frames.poll(0) == []
    server.send(peer, b"first")
    assert frames.poll(DEADLINE_S)
    assert channel._sleeper.poll(0) == []
    channel.hear()
    assert channel.peek() == b"first"
    assert frames.poll(0) == [], "it was read"
    assert channel.recv_nowait() == b"first"
    server.send(peer, b"second")
    assert select.select([channel._connection], [], [], DEADLINE_S)[0]
    channel.send(b"more")
    assert frames.poll(0) == []
    assert channel.leave_to_loop()
    assert frames.poll(0)
    channel.hear()
    assert frames.poll(0) == []
    assert channel.recv_nowait() == b"second"
    channel.have_loop_read(None)
    server.send(peer, b"third")
    channel.wait(wakeup, DEADLINE_S)
    assert channel.recv_nowait() == b"third"
    assert frames.poll(0) == []


def test_a_reset_connects_anew_and_keeps_what_was_read(server, channel, wakeup):
    peer = peer_of(server, channel, wakeup)
    server.send(peer, b"read")
    while channel.peek() is None:
        assert channel.wait_for_frame(DEADLINE_S)
    server.send(peer, b"on its way")
    channel.reset()
    assert channel.is_lost
    assert not channel.begin_driving()
    assert channel.recv_nowait() == b"read"
    until_connected(channel, wakeup, connections_made=2)
    later = peer_of(server, channel, wakeup)
    assert later != peer
    server.send(later, b"reply")
    assert frame_of(channel) == b"reply"


def test_a_driver_waits_on_where_the_descriptor_tells_of_no_frame(server, channel, wakeup):
    """ZeroMQ signals the end of the old connection after a reset has read, perhaps even after the new one is made."""
    peer_of(server, channel, wakeup)
    deadline = time.monotonic() + DEADLINE_S
    channel.reset()
    while channel.peek() is not None or not channel.wait_for_frame(0.1):
        assert time.monotonic() < deadline
        channel.reset()
    assert channel.peek() is None
    until_connected(channel, wakeup, connections_made=2)
    server.send(peer_of(server, channel, wakeup), b"reply")
    assert frame_of(channel) == b"reply"


def test_a_reset_without_a_server_connects_when_there_is_one(server, channel, wakeup):
    server.close()
    while not channel.is_lost:
        channel.wait(wakeup, DEADLINE_S)
    channel.reset()
    channel.reset()
    again = ZmqServer()
    try:
        again.listen(parse_address(server.address))
        until_connected(channel, wakeup, connections_made=2)
        peer_of(again, channel, wakeup)
    finally:
        again.close()


def test_room_in_a_queue_that_was_full_wakes_the_thread_in_sleep(wakeup, monkeypatch):
    """Also where the look that follows a send took the signal away: what was not sent would wait for the next
    second."""
    monkeypatch.setattr(zeromq, "FRAMES_QUEUED_MAX", 4)
    server = ZmqServer()
    channel = dial(server.listen(parse_address("tcp://127.0.0.1:0")))
    try:
        until_connected(channel, wakeup)
        frames = [bytes(MIB)] * 1000
        sent = 0
        while not sent or sent % 1000:  # until nothing more leaves for a moment
            try:
                sent += channel.send_some(frames)
            except Unreachable:
                if channel._takes_more:  # the send took the signal of all the room there is: no further one would come
                    continue
                channel.sleep(wakeup, 0.02)
                if not select.select([channel._connection], [], [], 0)[0]:
                    break
                channel._hear()
        for _ in range(sent):
            assert server.socket.poll(DEADLINE_S * 1000)
            assert server.recv_nowait()
        assert select.select([channel._connection], [], [], DEADLINE_S)[0]
        channel._hear()
        began = time.monotonic()
        channel.sleep(wakeup, DEADLINE_S)
        channel.look()
        assert time.monotonic() - began < DEADLINE_S / 2
        assert channel.send_some(frames[:1]) == 1
        channel.sleep(wakeup, 0.02)
        channel.look()
        began = time.monotonic()
        channel.sleep(wakeup, 0.02)
        assert time.monotonic() - began >= 0.02, "once"
    finally:
        channel.close()
        server.close()


def test_a_channel_that_has_nothing_to_do_does_not_wake(channel, wakeup, frames):
    for reads in (None, frames, None):
        channel.have_loop_read(reads)
        began = time.monotonic()
        channel.sleep(wakeup, 0.02)
        assert time.monotonic() - began >= 0.02
        channel.look()
        assert channel.recv_nowait() is None


def test_a_closed_channel_may_be_asked_for_anything(channel):
    channel.close()
    channel.end_driving()
    channel.have_loop_read(None)
    channel.hear()
    channel.look()
    assert channel.peek() is None
    assert not channel.leave_to_loop()
