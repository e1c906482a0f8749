"""Blocks that are larger than the part of the arena that is kept for those that come back: however many producers and
workers wait for memory meanwhile, and however full the disk is, every row comes back."""

import random
from itertools import count

import numpy as np
import pytest

from tests.scale import sizes
from tests.server.spilling import BODY
from tests.server.test_spill_scattered import ScatteredBench
from transferqueue.limits import LOAD_STUCK_S, PAGE_BYTES
from transferqueue.policies import Task
from transferqueue.schema import Field
from transferqueue.wire import codec
from transferqueue.wire import messages as m

WAIT_S = 10_000.0
IDLE_S = 60.0
"""For so long nobody may wait in vain, though disks answer at once."""
NUMBERS = 251


class Pipeline:
    """A table on a bench, with producers, and workers for each task; all go on as soon as they may.

    blocks: the rows of each put; a row has a page. results: pages of the result that the first of two tasks gives each
    row; 0: there is one task.
    """

    def __init__(self, bench, chance, blocks, results=0):
        self.bench, self.chance = bench, chance
        self.blocks, self.rows, self.numbers = iter(blocks), sum(blocks), count()
        self.result = Field("result", "int64", (results * PAGE_BYTES // 8,)) if results else None
        self.results = results
        train = Task("train", needs=["body", "result"] if results else ["body"], lease_s=WAIT_S)
        tasks = [Task("score", needs=["body"], gives=["result"], lease_s=WAIT_S), train] if results else [train]
        bench.producer.ask(m.DropTable("t"))
        made = bench.producer.ask(m.CreateTable("t", [BODY, self.result] if results else [BODY], tasks))
        assert not isinstance(made, m.Failed), made
        self.seen = {task.name: [] for task in tasks}
        self.waiting, self.clients = {}, []
        self.disk_fails = 0.0

    def add_producer(self):
        self._begin(self._produce)

    def add_worker(self, task, rows):
        """A worker that leases up to so many rows at a time."""
        self._begin(self._work, task, rows)

    def _begin(self, role, *settings):
        self.clients.append(self.bench.client())
        actor = role(self.clients[-1], *settings)
        self.waiting[actor] = next(actor)

    def run(self, until=lambda: False):
        """Until all rows have been through all tasks."""
        waiting, served_at = self.waiting, self.bench.now
        while waiting and not until():
            actors = list(waiting)
            self.chance.shuffle(actors)
            moved = False
            for actor in actors:
                client, call = waiting[actor]
                if (reply := client.take(call)) is not None:
                    moved, served_at = True, self.bench.now
                    try:
                        waiting[actor] = actor.send(reply)
                    except StopIteration:
                        del waiting[actor]
            for _ in range(self.chance.randint(1, 3)):
                if self.bench.jobs:
                    self.bench.space.fails_writes = "no space" if self.chance.random() < self.disk_fails else ""
                    self.bench.work()
                    moved = True
            if self._is_over():
                break
            if not moved:
                for client in (*self.clients, self.bench.producer, self.bench.worker):
                    client.post(m.Heartbeat())
                self.bench.pass_time(LOAD_STUCK_S)
            assert self.bench.now < served_at + IDLE_S, f"nobody is served any more: {self.explain()}"
        assert until() or all(
            sorted(seen) == sorted(n % NUMBERS for n in range(self.rows)) for seen in self.seen.values()
        )

    def end(self):
        """End all clients."""
        for client in self.clients:
            client.post(m.Goodbye())
        self.bench.settle()
        assert self.bench.used == 0
        cold, backlog = self.bench.spiller.cold, self.bench.spiller.backlog
        assert (cold.growth, cold._pages, backlog.on_disk, backlog.is_held, backlog.is_stuck) == (
            0,
            {},
            0,
            False,
            False,
        )

    def explain(self):
        spiller, waiting = self.bench.spiller, self.bench.coordinator.waiting
        return f"{self.bench.used // PAGE_BYTES} pages used, {spiller.stats()}, {[w.request for w in waiting]}"

    def _is_over(self):
        return all(len(seen) == self.rows for seen in self.seen.values())

    def _produce(self, client):
        for rows in self.blocks:
            granted = yield client, client.post(m.Grant(rows * PAGE_BYTES, wait_s=WAIT_S, use="rows"))
            assert isinstance(granted, m.Granted), granted
            data = b"".join(bytes([next(self.numbers) % NUMBERS]) * PAGE_BYTES for _ in range(rows))
            self.bench.arena._map[granted.offset : granted.offset + len(data)] = data
            block = m.WrittenBlock(granted.extent, granted.offset, len(data), rows, ["body"], [0])
            yield client, client.post(m.PutRequest("t", rows, m.Columns(fields=[BODY], blocks=[block]), wait_s=WAIT_S))
            client.post(m.ReturnGrant(granted.extent))

    def _work(self, client, task, rows):
        seen = self.seen[task]
        while True:
            request = m.LeaseRequest("t", task, rows=rows, at_least=1, wait_s=WAIT_S)
            lease = yield client, client.post(request)
            if isinstance(lease, m.Failed):
                assert (lease.error, rows > 1) == ("Impossible", True), lease
                rows -= 1
                continue
            numbers = self._numbers(lease)
            columns = extent = None
            if self.results and task == "score":
                nbytes = len(numbers) * self.results * PAGE_BYTES
                granted = yield client, client.post(m.Grant(nbytes, wait_s=WAIT_S))
                assert isinstance(granted, m.Granted), granted
                extent = granted.extent
                block = m.WrittenBlock(extent, granted.offset, nbytes, len(numbers), ["result"], [0])
                columns = m.Columns(fields=[self.result], blocks=[block])
            yield client, client.post(m.Ack("t", lease.lease, lease.token, columns=columns))
            seen += numbers
            blocks = np.array([at.block for part in lease.content.parts for at in part.blocks], "<i8")
            client.post(m.Unpin(blocks.tobytes(), np.ones(blocks.size, "<i8").tobytes()))
            if extent:
                client.post(m.ReturnGrant(extent))

    def _numbers(self, lease):
        """The number of each row, by the bytes of its body in memory."""
        rows = len(lease.content.rows) // 8
        (part,) = (part for part in lease.content.parts if "body" in part.fields)
        blocks = codec.decode_constant(part.block_of_row, "<i4", rows)
        slots = codec.decode_ascending(part.slot_of_row, "<i4", rows)
        offsets = [part.blocks[block].offset + slot * PAGE_BYTES for block, slot in zip(blocks, slots, strict=True)]
        pages = [set(self.bench.arena.view(offset, PAGE_BYTES)) for offset in offsets]
        assert all(len(page) == 1 for page in pages)
        return [page.pop() for page in pages]


@pytest.fixture
def bench():
    bench = ScatteredBench()
    yield bench
    bench.close()


def limit_disk(bench, monkeypatch, pages):
    monkeypatch.setattr(bench.spiller.backlog, "disk_bytes", pages * PAGE_BYTES)
    bench.space.pages = pages


def test_every_row_comes_back_though_each_block_is_a_quarter_of_the_arena_and_producers_take_what_they_get(
    bench, monkeypatch
):
    """The disk fills first. Then each row that is leased makes room, for which three producers wait."""
    limit_disk(bench, monkeypatch, 64)
    pipeline = Pipeline(bench, random.Random(0), [4] * 60)
    for _ in range(3):
        pipeline.add_producer()
    pipeline.run(until=lambda: bool(bench.stats().paused) and not bench.jobs)
    pipeline.add_worker("train", 4)
    pipeline.run()


def test_results_take_no_memory_that_blocks_left_for_others_that_come_back(bench, monkeypatch):
    """Who scores is faster than who trains, and results are never refused for being many: they would fill memory and
    disk."""
    limit_disk(bench, monkeypatch, 48)
    pipeline = Pipeline(bench, random.Random(0), [1] * 200, results=2)
    for _ in range(2):
        pipeline.add_producer()
    for _ in range(3):
        pipeline.add_worker("score", 1)
    pipeline.run(until=lambda: bool(bench.stats().paused) and not bench.jobs)
    pipeline.add_worker("train", 2)
    pipeline.run()


def one_course(bench, monkeypatch, chance):
    """Producers and workers on one table, of everything at random, and a disk that fails at times."""
    limit_disk(bench, monkeypatch, chance.choice((8, 16, 20, 24, 32, 33, 40, 48, 64, 96)))
    largest = chance.choice((1, 2, 3, 4, 6, 9, 12))
    results = chance.choice((0, 0, 1, 2))
    sizes_of_blocks = (1, largest, chance.randint(1, largest))
    blocks = [min(chance.choice(sizes_of_blocks), 3 if results else largest) for _ in range(60)]
    pipeline = Pipeline(bench, chance, blocks, results)
    for _ in range(chance.randint(1, 5)):
        pipeline.add_producer()
    if chance.random() < 0.5:
        pipeline.run(until=lambda: (bool(bench.stats().paused) and not bench.jobs) or not pipeline.waiting)
    for task in pipeline.seen:
        for _ in range(chance.randint(1, 2 if results else 4)):
            pipeline.add_worker(task, chance.randint(1, {0: 7, 1: 2, 2: 1}[results]))
    pipeline.disk_fails = chance.choice((0.0, 0.0, 0.1))
    pipeline.run()
    pipeline.end()


@pytest.mark.parametrize("seeds", sizes(12, 400))
def test_every_row_goes_through_all_tasks_whatever_the_sizes_of_blocks_and_disk(bench, monkeypatch, seeds):
    for seed in range(seeds):
        one_course(bench, monkeypatch, random.Random(seed))
