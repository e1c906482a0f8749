"""Worker processes that share one table; one of them is killed in the middle of a batch, and nothing is lost.

    python examples/workers.py [--rows 2000] [--workers 3]

Shows: how a program starts a queue and its workers join it by address, leases that come back at once when a process
dies, results that commit together with the ack, and the account of every row at the end.

Whoever is the first to lease row 120 is killed (SIGKILL: no clean-up runs) when it has computed the results of that
batch but not acked them. The server sees the death of the process, and the batch goes to another worker.
"""

import argparse
import multiprocessing
import os
import signal
from multiprocessing.synchronize import Event

import numpy as np

import transferqueue as tq

BATCH, KILLER = 50, 120


def work(address: str, name: str, somebody_died: Event) -> None:
    """Square numbers until the table is sealed and drained."""
    with tq.connect(address, label=name) as queue:
        for batch in queue.table("numbers").leases("square", rows=BATCH, at_least=1):
            with batch:
                numbers = batch["number"].numpy()
                squares = numbers**2
                if KILLER in numbers and not somebody_died.is_set():
                    somebody_died.set()
                    os.kill(os.getpid(), signal.SIGKILL)
                batch.ack(square=squares, worker=[name] * len(batch))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=3)
    options = parser.parse_args()
    with tq.connect("embedded") as queue:
        table = queue.create_table(
            "numbers",
            tasks=[tq.Task("square", needs=["number"], gives=["square", "worker"])],
            retention=tq.Manual(),  # done rows stay until they are deleted, so that they can be read below
        )
        table.put(number=np.arange(options.rows))
        table.seal()
        spawn = multiprocessing.get_context("spawn")
        somebody_died = spawn.Event()
        workers = [
            spawn.Process(target=work, args=(queue.address, f"worker-{number}", somebody_died), daemon=True)
            for number in range(options.workers)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        rows = table.read()
        right = np.array_equal(rows["square"].numpy(), rows["number"].numpy() ** 2)
        done_by = dict(zip(*np.unique(rows["worker"].list(), return_counts=True), strict=True))
        counts = table.audit()
    print(f"exit codes {[worker.exitcode for worker in workers]}")
    print("rows done by " + ", ".join(f"{name}: {count}" for name, count in done_by.items()))
    print(f"rows put {counts.rows_put}, done {counts.rows_done}, dropped {counts.rows_dropped}, all right: {right}")


if __name__ == "__main__":
    main()
