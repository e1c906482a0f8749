"""A peer that asks and never reads: the server drops it, keeps a bounded number of answers for it, and serves the
others."""

import os
import socket
from contextlib import suppress

import pytest
import zmq

import transferqueue as tq
from tests.client.deployments import served
from tests.fuzz.memory import resident_bytes
from transferqueue.limits import FRAMES_QUEUED_MAX, MIB
from transferqueue.wire import codec
from transferqueue.wire import messages as m

ANSWER_BYTES = 8 * 1024
BURST = FRAMES_QUEUED_MAX // 4
UNREAD_MAX = 2 * FRAMES_QUEUED_MAX * ANSWER_BYTES + 16 * MIB
"""Both ends of a pipe keep their mark of frames, and the kernel its buffers."""


class TcpWay:
    """ZeroMQ that takes as little as it can."""

    def __init__(self, server):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, 1)
        self.socket.setsockopt(zmq.RCVBUF, 4096)
        self.socket.connect(server.tcp)
        self.send = self.socket.send

    def first(self):
        assert self.socket.poll(30_000)
        return self.socket.recv()

    def close(self):
        self.context.destroy(linger=0)


class IpcWay:
    """The socket file, and no buffer but the kernel's."""

    def __init__(self, server):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(30)
        self.socket.connect(server.ipc.removeprefix("ipc://"))

    def send(self, frame):
        with suppress(BrokenPipeError, ConnectionResetError):  # it hung up: what it should do
            self.socket.sendall(len(frame).to_bytes(4, "little") + frame)

    def first(self):
        size = int.from_bytes(self.socket.recv(4, socket.MSG_WAITALL), "little")
        return self.socket.recv(size, socket.MSG_WAITALL)

    def close(self):
        self.socket.close()


class Deaf:
    """Opens a session, and then only asks."""

    def __init__(self, way):
        self.way = way
        way.send(codec.encode_call(m.CallFrame(0, 1, 0, m.Hello(os.urandom(16), label="deaf"))))
        self.session = codec.decode_answer(way.first()).reply.session
        self.asked = 1

    def ask(self, count):
        question = m.Find("t", [""] * (ANSWER_BYTES // 8))
        for _ in range(count):
            self.asked += 1
            self.way.send(codec.encode_call(m.CallFrame(self.session, self.asked, 0, question)))


def labels(queue):
    return [one.label for one in queue.sessions().values()]


@pytest.mark.slow
@pytest.mark.parametrize("way", [IpcWay, TcpWay])
def test_a_peer_that_never_reads_is_dropped(tmp_path, way):
    with served(tmp_path / "run") as server, tq.connect(server.ipc, label="other") as other:
        other.create_table("t", tasks=[tq.Task("train", needs=["x"])])
        deaf = Deaf(way(server))
        before = most = resident_bytes(server.process.pid)
        while "deaf" in labels(other):
            assert deaf.asked < 100 * FRAMES_QUEUED_MAX
            deaf.ask(BURST)
            most = max(most, resident_bytes(server.process.pid))
        assert most - before < UNREAD_MAX
        assert labels(other) == ["other"]
        other.table("t").put(x=[1])
        deaf.way.close()
