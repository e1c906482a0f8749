"""A node with a real ledger and a real arena, driven by hand, in time that the test decides."""

import os
import struct
from importlib.util import find_spec

import numpy as np

from transferqueue.ledger.ledger import Ledger
from transferqueue.limits import MIB
from transferqueue.policies import Task
from transferqueue.schema import Field
from transferqueue.server.coordinator import Coordinator
from transferqueue.server.memory.own_memory import OwnShardMemory
from transferqueue.server.state import ServerIdentity
from transferqueue.storage.memory.arena import Arena
from transferqueue.transport import this_host
from transferqueue.wire import codec
from transferqueue.wire import messages as m

EPOCH = 7


class Watched:
    """Remembers which processes a node watches."""

    def __init__(self):
        self.pidfds = {}

    def watch(self, session, pidfd):
        self.pidfds[session] = pidfd

    def unwatch(self, pidfd):
        self.pidfds = {session: fd for session, fd in self.pidfds.items() if fd != pidfd}


class Bench:
    """The node, its clock, and what it answered to whom."""

    def __init__(self, arena_bytes=MIB, swept=None, door=None, tickets=None):
        self.arena = Arena.create(None, arena_bytes)
        self.descriptors = []
        self.watched = Watched()
        place = ServerIdentity(
            epoch=EPOCH,
            address="ipc:///x",
            runtime="/r",
            version="0",
            pid=os.getpid(),
            started_at=0.0,
            lock_directory=swept,
        )
        self.coordinator = Coordinator(
            Ledger(epoch=EPOCH),
            OwnShardMemory(self.arena),
            place,
            watcher=self.watched,
            authorizer=door,
        )
        self.remote = reach_shards(self.coordinator, tickets)
        self.now = 0.0
        self.clients = 0
        self.answered = {}

    def close(self):
        self.coordinator.stop()
        self.arena.close()
        for descriptor in self.descriptors:
            os.close(descriptor)

    def receive(self, peer, frame):
        self.coordinator.receive(peer, frame, self.now)
        self.deliver()

    def deliver(self):
        for peer, frame in self.coordinator.answers.outbox:
            answer = codec.decode_answer(frame)
            assert answer.epoch == self.coordinator.identity.epoch
            self.answered.setdefault(peer, []).append((answer.id, answer.reply))
        self.coordinator.answers.outbox = []

    def pass_time(self, seconds):
        """Every deadline on the way is kept, as the loop would."""
        until = self.now + seconds
        while (deadline := self.coordinator.next_deadline()) is not None and deadline <= until:
            self.now = max(self.now, deadline)
            self.coordinator.tick(self.now)
        self.now = until
        self.coordinator.tick(self.now)
        self.deliver()

    def client(self, **hello):
        return Client(self, **hello)


def reach_shards(coordinator, tickets=None):
    """Attach the part for shards, if it is there (tests.test_parts)."""
    if find_spec("transferqueue.server.shards") is None:
        return None
    from transferqueue.server.shards.part import Shards

    remote = Shards(coordinator.ledger, coordinator.lending, coordinator.sessions, coordinator.waiting.wake, tickets)
    coordinator.attach(remote)
    return remote


class Client:
    """One client of a bench. Sends calls; knows its answers by call id."""

    def __init__(self, bench, peer=None, **hello):
        bench.clients += 1
        self.bench = bench
        self.peer = peer or b"peer %d" % bench.clients
        self.ids = 1
        self.seen = 0
        self.hello = m.Hello(**{"client": struct.pack("<qq", 0, bench.clients), "host": "elsewhere", **hello})
        bench.receive(self.peer, codec.encode_call(m.CallFrame(0, 1, 0, self.hello)))
        self.welcome = self.take(1)
        self.session = getattr(self.welcome, "session", 0)

    def post(self, request, call=None):
        """Send a request; returns its id."""
        if call is None:
            self.ids += 1
            call = self.ids
        self.bench.receive(self.peer, codec.encode_call(m.CallFrame(self.session, call, self.seen, request)))
        return call

    def take(self, call):
        """The answer to a call, taken out; None if there is none yet."""
        answers = self.bench.answered.get(self.peer, [])
        for at, (found, reply) in enumerate(answers):
            if found == call:
                del answers[at]
                return reply
        return None

    def ask(self, request, call=None):
        """Send a request that is answered at once."""
        reply = self.take(self.post(request, call))
        assert reply is not None, f"{request} waits"
        return reply

    # ------------------------------------------------------------ a table of numbers, all inline

    def create_table(self, **terms):
        task = Task("train", needs=["x"], lease_s=5.0)
        terms = {"fields": [Field("x", "int64")], "tasks": [task], **terms}
        return self.ask(m.CreateTable("t", **terms))

    def put(self, count, **terms):
        return m.PutRequest("t", count, numbers(count), **terms)


def numbers(count):
    return m.Columns(fields=[Field("x", "int64")], inline=[m.Inline("x", np.arange(count, dtype="<i8").tobytes())])


def lease(rows=1, wait_s=0.0, **terms):
    return m.LeaseRequest("t", "train", rows=rows, wait_s=wait_s, **terms)


def local(lock=""):
    """Terms of a Hello from this very process."""
    return {"host": this_host(), "pid": os.getpid(), "lock": str(lock)}


def rows_of(reply):
    assert isinstance(reply, m.Leased), reply
    return np.frombuffer(reply.content.rows, "<i8").tolist()
