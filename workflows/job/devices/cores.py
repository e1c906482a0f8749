"""How many threads each process with a model gets on the CPU. No I/O here.

1. The trainers divide all cores: whether they wait for rows or the engines wait for them, the cores of those that wait
   are theirs.
2. Where a step begins once all of its rows have come (modes ``sync`` and ``colocated`` without streaming), so do the
   engines and scorers. Elsewhere these have their share of all that work at once: a token is a short pass, as late as
   the last of its threads, and gains little from a second one.
3. Where a trainer has threads beside others, they sleep while they wait for each other: waiting ones would take the
   engines' cores.
4. The evaluation, which works now and then beside the others, is not counted, and gets a share of all.
5. Processes on a GPU and those without a model have what `Flow` gives to any process.
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
WAIT_POLICY: Final = "OMP_WAIT_POLICY"
"""Variable that says how the threads of a process wait for each other."""
_SLEEPING: Final = {WAIT_POLICY: "PASSIVE"}


def threads(processes: Iterable[PlacedProcess], job: Job, cores: int) -> dict[str, dict[str, str]]:
    """Return the variables of the processes that compute on the CPU, by label.

    Args:
        processes: of the map of the job.
        job: the resolved job.
        cores: that the job may use.
    """
    labels = [process.label for process in processes if not process.devices]
    counted = [label for label in labels if _task(label) != names.EVALUATE]
    training = [label for label in counted if _task(label) in names.TRAINERS]
    others = [label for label in counted if label not in training or is_colocated(job)]
    takes_turns = job.pacing.mode in IN_TURN and job.trainer.stream == "off"
    groups = [others, training] if is_colocated(job) else [training, others if takes_turns else counted]

    def share(label: str) -> int:
        at_once = next((len(group) for group in groups if label in group), len(counted))
        return max(1, cores // max(1, at_once))

    waits = _SLEEPING if others and not takes_turns else {}
    return {label: {THREADS: str(share(label)), **(waits if label in training else {})} for label in labels}


def _task(label: str) -> str:
    return label.rpartition("-")[0]
