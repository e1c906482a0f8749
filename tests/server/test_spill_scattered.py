"""Requests whose blocks lie in many extents, of which some are in memory and some on the disk: they get their rows, and
their blocks do not go to and fro until the deadline."""

import random

import numpy as np
import pytest

from tests.scale import sizes
from tests.server.spilling import BODY, SpillBench
from transferqueue.limits import LOAD_STUCK_S, PAGE_BYTES
from transferqueue.policies import Task
from transferqueue.wire import codec
from transferqueue.wire import messages as m

ROOM = 14
"""Pages that the blocks of one request may take."""


class ScatteredBench(SpillBench):
    """Extents that have several blocks of some rows, and rows of a page."""

    def put_extent(self, numbers, blocks=None):
        """Put these rows into one extent, in blocks of so many rows; None: of one each."""
        call = self.producer.post(m.Grant(len(numbers) * PAGE_BYTES, wait_s=50.0, use="rows"))
        self.settle()
        granted = self.producer.take(call)
        assert isinstance(granted, m.Granted), granted
        start = granted.offset
        numbers = list(numbers)
        for rows in blocks or [1] * len(numbers):
            nbytes = rows * PAGE_BYTES
            self.arena._map[start : start + nbytes] = b"".join(
                bytes([numbers.pop(0)]) * PAGE_BYTES for _ in range(rows)
            )
            block = m.WrittenBlock(granted.extent, start, nbytes, rows, ["body"], [0])
            self.producer.ask(m.PutRequest("t", rows, m.Columns(fields=[BODY], blocks=[block])))
            start += nbytes
        self.producer.post(m.ReturnGrant(granted.extent))
        self.settle()

    def read(self, rows, tries=3):
        """These rows as they are in the reply; None if it has not come after so many times `LOAD_STUCK_S`."""
        call = self.worker.post(m.ReadRequest("t", np.array(rows, "<i8").tobytes()))
        self.settle()
        reply = self.worker.take(call)
        for _ in range(tries):
            if reply is None:
                self.pass_time(LOAD_STUCK_S)
                self.settle()
                reply = self.worker.take(call)
        return reply

    def rows_of(self, reply):
        """The number that each row of a reply holds, by its bytes in the arena."""
        (part,), count = reply.content.parts, len(reply.content.rows) // 8
        blocks = codec.decode_constant(part.block_of_row, "<i4", count)
        slots = codec.decode_ascending(part.slot_of_row, "<i4", count)
        offsets = [part.blocks[block].offset + slot * PAGE_BYTES for block, slot in zip(blocks, slots, strict=True)]
        pages = [set(self.arena.view(offset, PAGE_BYTES)) for offset in offsets]
        assert all(len(page) == 1 for page in pages)
        return [page.pop() for page in pages]

    def unpin(self, reply):
        blocks = [at.block for part in reply.content.parts for at in part.blocks]
        self.worker.post(m.Unpin(np.array(blocks, "<i8").tobytes(), np.ones(len(blocks), "<i8").tobytes()))


@pytest.fixture
def bench():
    bench = ScatteredBench()
    yield bench
    bench.close()


def test_half_of_each_extent_is_needed_and_all_halves_fit(bench):
    """Twelve rows of twelve extents: in whole extents they would take 24 pages of 16, by themselves they take
    twelve."""
    for number in range(0, 48, 2):
        bench.put_extent([number, number + 1])
    rows = list(range(0, 24, 2))
    reply = bench.read(rows, tries=0)
    assert isinstance(reply, m.ReadRows), bench.spilling.explain_loads()
    assert bench.rows_of(reply) == rows


def test_blocks_that_cannot_all_come_back_do_not_go_to_and_fro(bench):
    for number in range(0, 48, 2):
        bench.put_extent([number, number + 1])
    held = bench.read([0, 1, 2, 3])
    assert bench.rows_of(held) == [0, 1, 2, 3]
    before = bench.stats().spilled_blocks
    assert bench.read(range(4, 28, 2), tries=6) is None
    assert bench.stats().spilled_blocks - before <= 2 * ROOM
    bench.unpin(held)
    bench.settle()
    assert bench.stats().blocks


@pytest.mark.parametrize("seeds", sizes(4, 100))
def test_whatever_fits_comes_back_wherever_it_lies(bench, seeds):
    for seed in range(seeds):
        chance = random.Random(seed)
        bench.producer.ask(m.DropTable("t"))
        bench.producer.create_table(fields=[BODY], tasks=[Task("train", needs=["body"])])
        blocks = []  # the rows of each
        while (first := sum(map(len, blocks))) < 60:
            cut = [chance.choice((1, 1, 1, 2, 3)) for _ in range(chance.randint(1, 3))]
            bench.put_extent(range(first, first + sum(cut)), cut)
            for rows in cut:
                blocks.append(range(first, first + rows))
                first += rows
        for _ in range(20):
            wanted, pages = list[int](), 0
            for block in chance.sample(blocks, len(blocks)):
                if pages + len(block) <= ROOM and (pages < 8 or chance.random() < 0.5):
                    wanted, pages = [*wanted, chance.choice(block)], pages + len(block)
            reply = bench.read(wanted)
            assert isinstance(reply, m.ReadRows), (seed, wanted, bench.spilling.explain_loads())
            assert bench.rows_of(reply) == wanted
            bench.unpin(reply)
