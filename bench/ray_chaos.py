"""Scenario: chaos on a Ray cluster. Nodes come and go, shards and the server are killed; is every row done once, to the
byte?

    python -m bench.ray_chaos --seconds 45 --out FILE            # on four nodes that are processes of this machine
    python -m bench.ray_chaos --seconds 45 --replicas 2 --out FILE

A producer puts rows whose bytes follow from their number; workers, which are Ray tasks all over the cluster, half of
them reading over the network, compare every byte and acknowledge. Every few seconds, right after a burst of rows, one
thing happens, by turns: a shard is killed, a node is removed with the shard and the workers on it, the server is
killed, a node is added and lends memory. Rows that are lost are counted by the queue; their producer finds their
numbers missing, and puts them again.

Judged at the end, `RuntimeError` otherwise: each number has one row, and it is done; no number was acknowledged twice;
rows put are rows done and rows lost, nothing else, as many lost as put again; with two replicas none is lost.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

import transferqueue as tq
from bench.harness import Result
from bench.run_record import ByHand, by_hand_options
from tests.chaos.payload import Payload
from transferqueue.errors import ShardLost
from transferqueue.wire.answers.stats import TableAudit

SCENARIO: Final = "ray_chaos"
CONTENDER: Final = "transferqueue"
WORKERS: Final = 4
NODES: Final = 3
"""Beside the head's, where the server and the producer are."""
WORDS: Final = (1 << 10, 2 << 10)
"""A row has 8 to 16 KiB, so that a put of `PUT_ROWS` has an extent of its own, and puts spread over the shards."""
PUT_ROWS: Final = 32
PUT_EVERY_S: Final = 0.2
BURST_PUTS: Final = 12
FAULT_EVERY_S: Final = 3.0
PATIENCE_S: Final = 90.0
NAME: Final = "chaos"


@contextmanager
def local_cluster() -> Iterator[Any]:
    """A cluster of four nodes, each a few processes of this machine; Ray is joined."""
    import ray
    from ray.cluster_utils import Cluster

    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
        for _ in range(NODES):
            cluster.add_node(num_cpus=2)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


class Chaos:
    """One run on a cluster: its rows, its workers, and what was done to it. faults: how often, by kind."""

    def __init__(self, cluster: Any, service: tq.Deployment, queue: tq.Queue, *, seed: int, replicas: int) -> None:
        self.faults: Counter[str] = Counter()
        self.put = 0
        self.again = 0
        self._cluster = cluster
        self._service = service
        self._queue = queue
        self._random = random.Random(seed)
        self._payload = Payload(seed, WORDS)
        self._seed = seed
        self._lent = 0
        self._late: list[Any] = []
        self._workers: list[Any] = []
        self._table = queue.create_table(
            "rows",
            fields=[tq.Field("number", "int64"), tq.Field("x", "int64", (None,)), tq.Field("echo", "int64")],
            tasks=[tq.Task("work", needs=["number", "x"], gives=["echo"], lease_s=20.0)],
            retention=tq.Manual(),
            replicas=replicas,
        )

    def run(self, seconds: float, done: Path) -> None:
        """Load and faults for so long, then until all is done. done: a folder where workers write what they
        acknowledged."""
        import ray

        work = ray.remote(worker(self._service.address, self._seed, done))
        options = {"num_cpus": 0.1, "max_retries": -1, "scheduling_strategy": "SPREAD"}
        self._workers = [work.options(**options).remote(number % 2 == 1) for number in range(WORKERS)]
        began = time.monotonic()
        for kind in self._kinds():
            if time.monotonic() - began >= seconds:
                break
            self._calm()
            self._burst()
            getattr(self, f"_{kind}")()
            self.faults[kind] += 1
            self._put_again()
            print(f"{time.monotonic() - began:6.1f} s  {kind:12} {self.counts()}", flush=True)
        self._drain()
        ray.get(self._workers, timeout=PATIENCE_S)

    def _kinds(self) -> Iterator[str]:
        """Every kind in each round, in a new order; a node is added after one was removed."""
        while True:
            kinds = ["kill_shard", "kill_server", "remove_node"]
            self._random.shuffle(kinds)
            for kind in kinds:
                yield kind
                if kind == "remove_node":
                    yield "add_node"

    # ------------------------------------------------------------ load

    def _calm(self) -> None:
        self._check_workers()
        until = time.monotonic() + FAULT_EVERY_S
        while time.monotonic() < until:
            self._put(range(self.put, self.put + PUT_ROWS))
            time.sleep(PUT_EVERY_S)

    def _burst(self) -> None:
        for _ in range(BURST_PUTS):
            self._put(range(self.put, self.put + PUT_ROWS))

    def _put(self, numbers: range | list[int]) -> None:
        values = [self._payload.of(number) for number in numbers]
        self._table.put(number=np.array(numbers), x=values, timeout_s=PATIENCE_S)
        self.put = max(self.put, numbers[-1] + 1)

    def _put_again(self) -> bool:
        """The producer's rows that are no more: none of them was done, since those stay. Whether there were any."""
        lost = sorted(set(range(self.put)) - set(self._table.read(fields=["number"])["number"].list()))
        for at in range(0, len(lost), PUT_ROWS):
            self._put(lost[at : at + PUT_ROWS])
        self.again += len(lost)
        return bool(lost)

    def _drain(self) -> None:
        """Until every number is done."""
        deadline = time.monotonic() + PATIENCE_S
        while self._put_again() or self.counts().rows_done < self.put:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.put} rows were put, and these are their fates: {self.counts()}")
            self._check_workers()
            time.sleep(PUT_EVERY_S)
        self._table.seal()

    def _check_workers(self) -> None:
        """Raise what one of them failed with: none ends before the table does."""
        import ray

        ended, _ = ray.wait(self._workers, timeout=0)
        ray.get(ended)

    def counts(self) -> TableAudit:
        """The queue's own account of the rows."""
        return self._table.audit()

    # ------------------------------------------------------------ faults

    def _kill_server(self) -> None:
        os.kill(self._queue.stats().server.pid, signal.SIGKILL)

    def _kill_shard(self) -> None:
        """The fullest: Ray starts its actor again, which is another shard then."""
        labels = {one.label: one.used_bytes for one in self._queue.stats().server.shards}
        fullest = max(labels, key=lambda label: labels[label])
        os.kill(next(one.pid for one in self._queue.sessions().values() if one.label == fullest), signal.SIGKILL)

    def _remove_node(self) -> None:
        self._cluster.remove_node(self._random.choice(sorted(self._cluster.worker_nodes, key=lambda one: one.node_id)))

    def _add_node(self) -> None:
        self._late.append(lend(self._cluster.add_node(num_cpus=2), f"{NAME}.late-{self._lent}"))
        self._lent += 1

    def close(self) -> None:
        """End the shards that were added."""
        from transferqueue.cluster.on_ray.shard_actors import stop_shards

        stop_shards(self._late)

    # ------------------------------------------------------------ judgement

    def judge(self, done: Path) -> TableAudit:
        """The account, if it is in order; `RuntimeError` with what is not."""
        counts = self.counts()
        told = Counter(int(line) for path in done.iterdir() for line in path.read_text().split())
        rows = self._table.read(fields=["number", "echo"])
        numbers = rows["number"].list()
        checks: dict[str, bool] = {
            "each number has one row, which is done": counts.rows_done == self.put
            and sorted(numbers) == list(range(self.put)),
            "each row was answered with its number": numbers == rows["echo"].list(),
            "none was acknowledged twice": max(told.values()) == 1,
            "put is done and lost": counts.balanced and counts.rows_put == self.put + counts.rows_lost,
            "lost is put again": counts.rows_lost == counts.rows_dropped == self.again,
        }
        if wrong := [name for name, holds in checks.items() if not holds]:
            raise RuntimeError(f"not true: {', '.join(wrong)}; put {self.put}, again {self.again}, {counts}")
        return counts


def worker(address: str, seed: int, done: Path) -> Callable[[bool], int]:
    """A task that checks and acknowledges rows until there are no more; returns how many. Ray carries it to its
    node."""

    def work(remote: bool) -> int:
        payload, rows = Payload(seed, WORDS), 0
        with (
            tq.connect(address, timeout_s=PATIENCE_S, data="remote" if remote else "auto") as queue,
            (done / f"{os.getpid()}").open("a") as told,
        ):
            table = queue.table("rows", timeout_s=PATIENCE_S)
            while True:
                try:
                    with table.lease("work", rows=16, at_least=1, timeout_s=PATIENCE_S) as batch:
                        numbers = batch["number"].list()
                        for number, value in zip(numbers, batch["x"], strict=True):
                            if not payload.matches(number, value):
                                raise RuntimeError(f"row {number} has other bytes than were put")
                        batch.ack(echo=np.array(numbers))
                except tq.EndOfTable:
                    return rows
                except (tq.LeaseExpired, ShardLost):  # others have the rows, or they are lost
                    continue
                told.write("".join(f"{number}\n" for number in numbers))
                told.flush()
                rows += len(numbers)

    return work


def lend(node: Any, label: str) -> Any:
    """An actor on this node that lends its memory to the deployment; returns when it has joined."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from transferqueue.cluster.on_ray.messages import NAMESPACE, DeploymentName, ShardSpec, write
    from transferqueue.cluster.on_ray.shard_actor import ShardActor

    there = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
    actor = ray.remote(ShardActor).options(num_cpus=0, max_restarts=-1, scheduling_strategy=there)
    made = actor.remote(write(ShardSpec(DeploymentName(NAMESPACE, NAME), 1 << 28, label)))
    ray.get(made.joined.remote(), timeout=PATIENCE_S)
    return made


def first_lease() -> float:
    """Seconds from `deploy_ray` to the first lease."""
    began = time.perf_counter()
    with tq.deploy_ray("first") as service, tq.connect(service.address) as queue:
        table = queue.create_table("rows", tasks=[tq.Task("work", needs=["x"])])
        table.put(x=[1.0])
        with table.lease("work", rows=1, timeout_s=PATIENCE_S):
            return time.perf_counter() - began


def run(cluster: Any, seconds: float, *, seed: int = 0, replicas: int = 1) -> list[Result]:
    """One run on this cluster, judged."""
    name = f"nodes_{NODES + 1}_replicas_{replicas}_seed_{seed}"
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as folder,
        tq.deploy_ray(NAME, shards="per-node", shard_bytes="256MiB", max_restarts=-1) as service,
        tq.connect(service.address, timeout_s=PATIENCE_S, label="producer") as queue,
    ):
        chaos = Chaos(cluster, service, queue, seed=seed, replicas=replicas)
        try:
            chaos.run(seconds, Path(folder))
            counts = chaos.judge(Path(folder))
        finally:
            chaos.close()
    if replicas > 1 and counts.rows_lost:
        raise RuntimeError(f"with replicas={replicas} rows were lost: {counts}")
    told = {"seconds": time.monotonic() - began, "rows_done": counts.rows_done, "rows_lost": counts.rows_lost}
    return [
        Result(SCENARIO, CONTENDER, name, metric, "s" if metric == "seconds" else "count", [float(value)], checked=True)
        for metric, value in (told | {f"faults_{kind}": count for kind, count in chaos.faults.items()}).items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=45.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replicas", type=int, default=1)
    by_hand_options(parser, required=True)
    chosen = parser.parse_args()
    run_by_hand = ByHand(SCENARIO)
    with local_cluster() as cluster:
        lease = Result(SCENARIO, CONTENDER, "local_ray", "deploy_to_first_lease", "s", [first_lease()])
        results = [lease, *run(cluster, chosen.seconds, seed=chosen.seed, replicas=chosen.replicas)]
    run_by_hand.tell(results, chosen.out, whole=chosen.record)


if __name__ == "__main__":
    main()
