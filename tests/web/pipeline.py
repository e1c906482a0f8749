"""A small pipeline that runs while somebody looks: producers, a reward, a trainer that publishes, a generator that is
late."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Final

import numpy as np

import transferqueue as tq

WAIT_S: Final = 60.0
GROUP: Final = 8
TRAINER: Final = "trainer"
ENGINE: Final = "engine-0"


class Pipeline:
    """Its stages are threads, each with a session of its own. `begun` is set when the trainer has had so many
    batches."""

    def __init__(self, address: str, batches: int = 6) -> None:
        self.address, self.batches = address, batches
        self.stopped, self.begun = threading.Event(), threading.Event()
        self.version = 0
        with tq.connect(address) as queue:
            queue.create_table(
                "rollouts",
                tasks=[
                    tq.Task("reward", needs=["response_ids"], gives=["rewards"]),
                    tq.Task("train", needs=["response_ids", "rewards"], groups=tq.Complete()),
                ],
                limits=tq.Limits(rows=4096, bytes="32MiB"),
                pacing=tq.Pacing("train", batch_rows=32, depth=1, max_staleness=2),
            )

    def produce(self, queue: tq.Queue) -> None:
        """Admit a group, then put it."""
        table = queue.table("rollouts")
        group = threading.get_ident() % 1000 * 100_000
        while not self.stopped.is_set():
            version = self.version
            with table.reserve(GROUP, timeout_s=WAIT_S) as reserved:
                self.stopped.wait(0.02)
                rows = [np.arange(200 + 10 * at, dtype=np.int32) for at in range(GROUP)]
                table.put(
                    response_ids=rows, group_id=group, group_size=GROUP, policy_version=version, reservation=reserved
                )
            group += 1

    def score(self, queue: tq.Queue) -> None:
        """Give rewards."""
        for batch in queue.table("rollouts").leases("reward", rows=16, timeout_s=WAIT_S):
            with batch:
                self.stopped.wait(0.05)
                batch.ack(rewards=np.ones(len(batch), np.float32))

    def train(self, queue: tq.Queue) -> None:
        """Take whole groups, then publish what was learned of them."""
        channel, table = queue.weights("policy"), queue.table("rollouts")
        for batch in table.leases("train", rows=32, timeout_s=WAIT_S):
            with batch:
                self.stopped.wait(0.1)
            self.version += 1
            table.advance(self.version)
            channel.publish(self.version, {"w": np.full(1 << 16, self.version, np.float32)})
            if self.version >= self.batches:
                self.begun.set()

    def generate(self, queue: tq.Queue) -> None:
        """Apply each version that is new when the last is in use."""
        channel = queue.weights("policy")
        with channel.subscribe() as versions:
            while not self.stopped.is_set():
                channel.applied(versions.pull(timeout_s=WAIT_S).version)
                self.stopped.wait(0.2)


@contextmanager
def running(address: str, without: Collection[str] = ()) -> Iterator[Pipeline]:
    """A pipeline for a while, without some stages. Then its table is dropped, which ends all waits."""
    pipeline = Pipeline(address)

    def stage(label: str, work: Callable[[tq.Queue], None]) -> threading.Thread:
        def run() -> None:
            with tq.connect(address, label=label) as queue, suppress(tq.NotFound, tq.EndOfTable, tq.LeaseExpired):
                work(queue)

        return threading.Thread(target=run, name=label)

    stages = [
        *(stage(f"rollout-{at}", pipeline.produce) for at in range(2)),
        stage("reward-0", pipeline.score),
        stage(TRAINER, pipeline.train),
        stage(ENGINE, pipeline.generate),
    ]
    stages = [one for one in stages if one.name not in without]
    for one in stages:
        one.start()
    try:
        yield pipeline
    finally:
        pipeline.stopped.set()
        with tq.connect(address) as queue:
            queue.drop_table("rollouts")
            for one in stages[:-1]:
                one.join(WAIT_S)
            queue.weights("policy").publish(
                pipeline.version + 1, {"w": np.zeros(1, np.float32)}
            )  # the generator's last
        stages[-1].join(WAIT_S)
