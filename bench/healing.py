"""Scenario: a shard of a table with two copies is killed under load. How soon does each row have two copies again, and
what does work lose?

    python -m bench.healing --mib 512 --shards 3 --out FILE

Rows of 256 KiB fill the table twice over the shards and the coordinator. A producer and a consumer put, lease, compare
and ack rows of another table of two copies all the while. Then one shard is killed. Measured: seconds from the kill
until no row has one copy left, as `stats` says; the bytes that were copied in that time; rows that the producer and
consumer did in a second before the kill and during the copies; rows lost at the end, which is zero or the run fails.

Estimate: of the bytes put, two copies over four places are half in each pair that has the dead shard: a shard of three
plus the coordinator had 2 / 4 of the rows. They cross once over loopback at about 1 GB/s, and a shard pauses as long as
it copies while clients' transfers are under way: 256 MiB take under a second.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection

import numpy as np

import transferqueue as tq
from bench.harness import Result
from bench.limits import child
from bench.run_record import ByHand, by_hand_options
from bench.server import Server
from bench.shards import shard
from transferqueue.limits import KIB, MIB
from transferqueue.wire.answers.stats import BytesStats

SCENARIO = "healing"
CONTENDER = "transferqueue"
ROW_BYTES = 256 * KIB
BATCH = 16
PATIENCE_S = 120.0
BEFORE_S = 3.0


def _work(control: Connection, address: str) -> None:
    """Put and consume rows until told to stop; send the times at which each was done."""
    done: list[float] = []
    with tq.connect(address) as queue:
        table = queue.create_table("busy", tasks=[tq.Task("train", needs=["x"])], replicas=2)
        control.send(True)
        while not control.poll():
            table.put(x=[np.full(ROW_BYTES // 8, len(done))], timeout_s=PATIENCE_S)
            try:
                with table.lease("train", rows=1, timeout_s=PATIENCE_S) as batch:
                    if int(batch["x"].list()[0][-1]) != len(done):
                        raise RuntimeError("a row came back with other values than it was put with")
            except tq.ShardLost:
                with table.lease("train", rows=1, timeout_s=PATIENCE_S):
                    pass
            done.append(time.monotonic())
    control.send(done)


def _fill(table: tq.Table, nbytes: int) -> int:
    rows = 0
    while rows * ROW_BYTES < nbytes:
        values = np.arange(rows, rows + BATCH)[:, None] + np.zeros(ROW_BYTES // 8, np.int64)
        table.put(x=list(values), ordinal=np.arange(rows, rows + BATCH), timeout_s=PATIENCE_S)
        rows += BATCH
    return rows


def _state(queue: tq.Queue) -> tuple[int, BytesStats]:
    stats = queue.stats()
    return sum(table.rows_one_copy for table in stats.tables.values()), stats.bytes


def _check(table: tq.Table, rows: int) -> None:
    with table.read(fields=["x"]) as read:
        if len(read) != rows:
            raise RuntimeError(f"{rows} rows were put, and {len(read)} are there")
        for ordinal, row in zip(read.ordinal.tolist(), read["x"], strict=True):
            if not (row == ordinal).all():
                raise RuntimeError(f"row {ordinal} has other values than it was put with")


def run(mib: int, shards: int, size: str) -> list[Result]:
    with ExitStack() as opened:
        server = Server(arena_bytes=size, tcp=True)
        opened.callback(server.stop)
        processes = [opened.enter_context(shard(server.tcp_address, size)) for _ in range(shards)]
        queue = opened.enter_context(tq.connect(server.address))
        table = queue.create_table("rows", tasks=[tq.Task("train", needs=["x"])], replicas=2)
        rows = _fill(table, mib * MIB)
        worker = opened.enter_context(child(_work, server.tcp_address))
        worker.recv()
        time.sleep(BEFORE_S)
        killed = time.monotonic()
        processes[0].kill()
        most_rows = most_bytes = 0
        while True:
            left, nbytes = _state(queue)
            most_rows, most_bytes = max(most_rows, left), max(most_bytes, nbytes.to_copy + nbytes.being_copied)
            if most_rows and not left:
                break
            if time.monotonic() > killed + PATIENCE_S:
                raise RuntimeError(f"{left} rows still have one copy")
            time.sleep(0.01)
        healed = time.monotonic()
        worker.send(True)
        done = np.array(worker.recv())
        lost = sum(audit.rows_lost for audit in queue.audit().tables.values())
        _check(table, rows)
    if lost:
        raise RuntimeError(f"{lost} rows were lost")
    name = f"mib_{mib}_shards_{shards}"
    before = float(((done > killed - BEFORE_S) & (done < killed)).sum()) / BEFORE_S
    during = float(((done > killed) & (done < healed)).sum()) / (healed - killed)
    return [
        Result(
            SCENARIO, CONTENDER, name, "until_two_copies_s", "s", [healed - killed], nbytes=most_bytes, checked=True
        ),
        Result(SCENARIO, CONTENDER, name, "rows_with_one_copy_most", "count", [float(most_rows)]),
        Result(SCENARIO, CONTENDER, name, "bytes_copied", "bytes", [float(most_bytes)]),
        Result(SCENARIO, CONTENDER, name, "work_before_rows_per_s", "1/s", [before]),
        Result(SCENARIO, CONTENDER, name, "work_during_rows_per_s", "1/s", [during]),
        Result(SCENARIO, CONTENDER, name, "rows_lost", "count", [float(lost)]),
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=512, help="bytes put, each of which lies in two shards")
    parser.add_argument("--shards", type=int, default=3)
    parser.add_argument("--arena-bytes", default="2GiB", help="of the coordinator and of each shard")
    by_hand_options(parser)
    chosen = parser.parse_args()
    run_by_hand = ByHand(SCENARIO)
    run_by_hand.tell(run(chosen.mib, chosen.shards, chosen.arena_bytes), chosen.out, whole=chosen.record)


if __name__ == "__main__":
    main()
