"""How many threads each process with a model gets on the CPU: those that work at once divide the cores. No I/O here.

1. Where a step begins once all of its rows have come (modes ``sync`` and ``colocated`` without streaming), training and
   what makes its rows take turns: the trainers divide all cores, and so do the engines and scorers.
2. Elsewhere all of them work at once. Threads beyond the cores would make it slower than one thread each: a pass is as
   late as the last of its threads.
3. The evaluation, which works now and then beside the others, is not counted, and gets a share of all.
4. Processes on a GPU and those without a model have what `Flow` gives to any process.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from transferqueue.workflows.job import names
from transferqueue.workflows.job.devices.placement import PlacedProcess
from transferqueue.workflows.job.graph import is_colocated
from transferqueue.workflows.job.settings.job import IN_TURN, Job

THREADS: Final = "OMP_NUM_THREADS"
"""Variable with the threads of a process: torch, its libraries and vLLM read it."""
_TRAINERS: Final = (names.TRAIN, names.TRAIN_CRITIC)


def threads(processes: Iterable[PlacedProcess], job: Job, cores: int) -> dict[str, dict[str, str]]:
    """Return the variables of the processes that compute on the CPU, by label.

    Args:
        processes: of the map of the job.
        job: the resolved job.
        cores: that the job may use.
    """
    labels = [process.label for process in processes if not process.devices]
    counted = [label for label in labels if _task(label) != names.EVALUATE]
    training = [label for label in counted if _task(label) in _TRAINERS]
    others = [label for label in counted if label not in training or is_colocated(job)]
    takes_turns = job.pacing.mode in IN_TURN and job.trainer.stream == "off"
    groups = [training, others] if takes_turns else [counted]

    def share(label: str) -> int:
        at_once = max((len(group) for group in groups if label in group), default=len(counted))
        return max(1, cores // max(1, at_once))

    return {label: {THREADS: str(share(label))} for label in labels}


def _task(label: str) -> str:
    return label.rpartition("-")[0]
