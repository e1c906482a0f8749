"""A node on a state directory, driven by hand, that ends as SIGKILL would end it."""

import os
from pathlib import Path

from tests.server.nodes import Bench, Client, Watched, reach_shards
from transferqueue.limits import MIB
from transferqueue.schema import Field, layout
from transferqueue.server.coordinator import Coordinator
from transferqueue.server.durability.state_directory import StateDirectory
from transferqueue.server.memory.own_memory import OwnShardMemory
from transferqueue.server.process.resume import resume_sessions
from transferqueue.server.state import ServerIdentity
from transferqueue.storage.memory.checksum import checksum
from transferqueue.wire import messages as m

BIG = Field("x", "int64", (None,))


class Life(Bench):
    """A node on a state directory, driven by hand. `crash` ends it as SIGKILL would."""

    def __init__(self, path, level, shared, **options):
        options = {"arena_bytes": MIB, **options}
        self.state = StateDirectory(path, level, first_epoch=100, shared=shared, **options)
        self.watched, self.clients, self.answered, self.descriptors = Watched(), 0, {}, []
        ledger = self.state.ledger
        memory = OwnShardMemory(self.state.arena.arena, self.state.allocator, len(ledger.state.core.blocks.extents))
        place = ServerIdentity(
            epoch=ledger.epoch, address="ipc:///x", runtime="/r", version="0", pid=os.getpid(), started_at=0.0
        )
        self.coordinator = Coordinator(ledger, memory, place, watcher=self.watched)
        self.coordinator.attach(self.state)
        self.coordinator.lending.own_first = self.state.keeps_own_copy
        self.remote = reach_shards(self.coordinator)
        self.now = self.state.clock()
        self.lost = resume_sessions(self.coordinator, self.state)
        self.deliver()

    def deliver(self):
        self.coordinator.commit()
        super().deliver()

    def crash(self):
        self.state.close()

    @property
    def file(self):
        return Path(self.state.arena.arena.path)


def again(life, client):
    """The same client, with the next life."""
    found = Client.__new__(Client)
    vars(found).update(vars(client), bench=life, peer=b"reconnected")
    assert found.ask(found.hello).session == client.session
    return found


def write(life, client, rows, fill, table="t", facts=m.RowFacts()):  # noqa: B008
    """A block of `rows` int64 rows of one value each, written into a grant of the client, and put."""
    granted = client.ask(m.Grant(4096))
    values = b"".join(struct_q(fill) for _ in range(rows))
    offsets = b"".join(struct_q(number) for number in range(rows + 1))
    data = offsets.ljust(-(-len(offsets) // 64) * 64, b"\0") + values
    with open(life.file, "r+b") as file:
        file.seek(granted.offset)
        file.write(data)
    total = checksum(data.ljust(_size(rows), b"\0"))
    placed = m.WrittenBlock(granted.extent, granted.offset, _size(rows), rows, ["x"], [rows], checksum=total)
    return client.ask(m.PutRequest(table, rows, m.Columns(fields=[BIG], blocks=[placed], facts=facts)))


def struct_q(value):
    return value.to_bytes(8, "little", signed=True)


def _size(rows):
    return layout([BIG], rows, [rows])[1]
