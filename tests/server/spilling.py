"""A node with an arena that spills, and a disk that answers when the test says so."""

import numpy as np

from tests.server.nodes import Bench, lease
from transferqueue.limits import MIB, PAGE_BYTES
from transferqueue.policies import Task
from transferqueue.schema import Field
from transferqueue.server.spill.spill_jobs import BlocksLoaded, BlocksWritten, SpillAnswers, SpilledBlock
from transferqueue.server.spill.spilling import Spilling
from transferqueue.storage.memory.checksum import checksum
from transferqueue.wire import messages as m

ARENA = 16 * PAGE_BYTES
BODY = Field("body", "int64", (PAGE_BYTES // 8,))


def sorted_answers(answers):
    return SpillAnswers(*([one for one in answers if isinstance(one, kind)] for kind in (BlocksWritten, BlocksLoaded)))


class Space:
    """A disk that answers when the test says so."""

    def __init__(self, arena):
        self.arena, self.files, self.jobs, self.ready = arena, {}, [], []
        self.fails_writes, self.fails_loads, self.damages = "", 0, False
        self.pages = 0
        """The most that blocks may take, in whole pages; 0: any number."""

    def write(self, job, blocks):
        self.jobs.append(lambda: self._write(job, blocks))

    def load(self, job, blocks):
        self.jobs.append(lambda: self._load(job, blocks))

    def free(self, places):
        kept = list(places)
        if kept:
            self.jobs.append(lambda: [self.files.pop(place.block, None) for place in kept] and None)

    def answers(self):
        ready, self.ready = self.ready, []
        return sorted_answers(ready)

    def read(self, place):
        return np.frombuffer(self.files[place.block], np.uint8)

    def stop(self):
        pass

    def _write(self, job, blocks):
        if self.fails_writes:
            return BlocksWritten(job, [], self.fails_writes)
        if self.pages and _pages(map(len, self.files.values())) + _pages(block.nbytes for block in blocks) > self.pages:
            return BlocksWritten(job, [], "the file is full")
        for block in blocks:
            self.files[block.block] = bytes(self.arena.view(block.offset, block.nbytes))
        return BlocksWritten(
            job,
            [SpilledBlock(block.block, 0, block.nbytes, checksum(self.files[block.block])) for block in blocks],
            "",
        )

    def _load(self, job, blocks):
        numbers = [block.place.block for block in blocks]
        if self.fails_loads:
            self.fails_loads -= 1
            return BlocksLoaded(job, [], dict.fromkeys(numbers, "no such sector"), [])
        if self.damages:
            return BlocksLoaded(job, [], {}, numbers)
        for block in blocks:
            self.arena._map[block.offset : block.offset + block.place.nbytes] = self.files[block.place.block]
        return BlocksLoaded(job, numbers, {}, [])


def _pages(sizes):
    return sum(-(-max(nbytes, 1) // PAGE_BYTES) for nbytes in sizes)


class SpillBench(Bench):
    """A node with 16 pages of memory, of which new rows may have 12, and those that come back 14, and a table whose
    rows have a page each."""

    def __init__(self):
        super().__init__(ARENA)
        self.space = Space(self.arena)
        node = self.coordinator
        self.spilling = Spilling(node.ledger, node.memory, self.space, 64 * MIB, node.waiting.wake)
        node.attach(self.spilling)
        self.spiller = self.spilling.spiller
        self.producer, self.worker = self.client(), self.client()
        self.producer.create_table(fields=[BODY], tasks=[Task("train", needs=["body"], lease_s=100.0)])
        self.waits = []

    @property
    def used(self):
        """Bytes of the arena that are granted."""
        return self.coordinator.memory.used

    @property
    def jobs(self):
        """What the disk has yet to do."""
        return self.space.jobs

    def put(self, number):
        """Put one row that has a page of this number. Waits for memory until the disk has answered."""
        call = self.producer.post(m.Grant(PAGE_BYTES, wait_s=50.0, use="rows"))
        self.settle()
        granted = self.producer.take(call)
        assert isinstance(granted, m.Granted), granted
        self.write(granted, number)

    def write(self, granted, number):
        self.arena._map[granted.offset : granted.offset + PAGE_BYTES] = bytes([number]) * PAGE_BYTES
        block = m.WrittenBlock(granted.extent, granted.offset, PAGE_BYTES, 1, ["body"], [0])
        self.producer.ask(m.PutRequest("t", 1, m.Columns(fields=[BODY], blocks=[block])))

    def settle(self):
        """The disk does all its jobs, and the node hears of each."""
        while self.jobs:
            self.work()

    def work(self):
        """The disk does one job, and the node hears of it."""
        answer = self.jobs.pop(0)()
        if answer is not None:
            self.hear(answer)

    def hear(self, answer):
        """The node hears of what the disk has done."""
        self.space.ready.append(answer)
        self.coordinator.tick(self.now)
        self.deliver()

    def bytes_of(self, reply):
        """The number that each row of a reply holds, by its bytes in the arena."""
        (part,) = reply.content.parts
        seen = []
        for at in part.blocks:
            values = set(self.arena.view(at.offset, at.nbytes))
            assert len(values) == 1
            seen.append(values.pop())
        return seen

    def lease(self, rows=1, wait_s=20.0):
        call = self.worker.post(lease(rows, wait_s))
        self.settle()
        return self.worker.take(call)

    def finish(self, reply):
        """Unpin and ack a lease."""
        blocks = [at.block for part in reply.content.parts for at in part.blocks]
        self.worker.post(m.Unpin(np.array(blocks, "<i8").tobytes(), np.ones(len(blocks), "<i8").tobytes()))
        self.worker.ask(m.Ack("t", reply.lease, reply.token))

    def stats(self):
        return self.spiller.stats()
