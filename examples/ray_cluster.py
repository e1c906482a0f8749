"""A queue on a Ray cluster: one actor has it, Ray tasks on any node share it, and its server may die.

    python examples/ray_cluster.py [--rows 400] [--workers 2]

Shows: `deploy_ray` and `connect("ray")`, which finds the deployment from any task or actor of the cluster, workers that
are Ray tasks, and a server that is killed in the middle: Ray starts it again where it was, and clients wait and go on.
Needs ray.

It joins the cluster of `RAY_ADDRESS`, or starts one on this machine. The rows never pass through Ray: processes on the
server's machine map its memory, others receive over the network.
"""

import argparse
import os
import signal

import numpy as np
import ray

import transferqueue as tq

BATCH = 20


@ray.remote(num_cpus=0.5)
def work(name: str) -> int:
    """Double numbers until the table is sealed and drained; how many rows this worker did."""
    done = 0
    with tq.connect("ray", label=name) as queue:
        for batch in queue.table("numbers").leases("double", rows=BATCH, at_least=1):
            with batch:
                batch.ack(doubled=batch["number"].numpy() * 2)
                done += len(batch)
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    ray.init(log_to_driver=False)
    with tq.deploy_ray(durability="process"), tq.connect("ray") as queue:
        table = queue.create_table(
            "numbers",
            tasks=[tq.Task("double", needs=["number"], gives=["doubled"])],
            retention=tq.Manual(),
        )
        workers = [work.remote(f"worker-{number}") for number in range(options.workers)]
        half = options.rows // 2
        table.put(number=np.arange(half))
        os.kill(queue.stats().server.pid, signal.SIGKILL)  # its actor is on the driver's node
        table.put(number=np.arange(half, options.rows))  # waits for the server's next life, as the workers do
        table.seal()
        done = ray.get(workers)
        rows = table.read()
        right = np.array_equal(rows["doubled"].numpy(), rows["number"].numpy() * 2)
        counts = table.audit()
    ray.shutdown()
    print(f"rows put {counts.rows_put}, done {counts.rows_done} by {len(done)} workers, all right: {right}")


if __name__ == "__main__":
    main()
