"""A factory for the processes of a job that reports which GPUs its process sees, and ends."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec

import transferqueue as tq
from transferqueue.workflows.flow.processes.stage_process import StageJob
from transferqueue.workflows.flow.stage import Context

TABLE = "t"
SEEN = "seen"


@contextmanager
def record(context: Context) -> Iterator[Callable[[], None]]:
    """Report ``CUDA_VISIBLE_DEVICES`` (None: not set), and the node of an actor."""
    ray = sys.modules.get("ray")
    node = ray.get_runtime_context().get_node_id() if ray else ""
    yield lambda: context.figures(SEEN, gpus=os.environ.get("CUDA_VISIBLE_DEVICES"), node=node)


def recording(processes: Sequence[StageJob]) -> list[StageJob]:
    """The processes of a job, with this factory in place of their work."""
    there = {"factory": f"{__name__}:record", "table": TABLE, "loop": True, "stage": None, "together": ""}
    return [msgspec.structs.replace(process, **there) for process in processes]


def create_table(queue: tq.Queue) -> None:
    """Create what the processes look for."""
    queue.create_table(TABLE, fields=[tq.Field("x", "int64")], tasks=[tq.Task("train", needs=["x"])])
