"""A driver on a Ray cluster: deploys a queue, has every node put rows, takes them all, and ends the queue.

Run it where Ray runs: ``python deploy/job.py`` on one machine, ``ray job submit`` or the files beside it on many.
"""

from __future__ import annotations

import ray

import transferqueue as tq

ROWS = 64
"""Rows of each node."""


@ray.remote(num_cpus=0)
def produce(node: int) -> int:
    """Put the rows of one node. `connect` finds the deployment by its name."""
    with tq.connect("ray", label=f"producer {node}") as queue:
        rows = queue.table("rows").put(x=[float(node * ROWS + one) for one in range(ROWS)])
        return len(rows)


def main() -> None:
    """Everything, once."""
    ray.init()
    nodes = [one["NodeID"] for one in ray.nodes() if one["Alive"]]
    with tq.deploy_ray(durability="process"), tq.connect("ray", label="trainer") as queue:
        table = queue.create_table("rows", tasks=[tq.Task("train", needs=["x"])])
        there = [ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
        put = [produce.options(scheduling_strategy=place).remote(number) for number, place in enumerate(there)]
        with table.lease("train", rows=ROWS * len(nodes), timeout_s=300) as batch:
            total = float(batch["x"].numpy().sum())
        print(f"{sum(ray.get(put))} rows from {len(nodes)} nodes, sum {total:g}, {queue.audit().tables['rows']}")


if __name__ == "__main__":
    main()
