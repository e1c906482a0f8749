"""How many threads each process with a model gets on the CPU. No I/O here.

1. Where generation and training take turns (modes `sync` and `colocated`), the processes of each task have all cores
   while they work: the others wait for their rows.
2. In the other modes all tasks work at once, and their processes divide the cores. The evaluation, which works now and
   then, is not counted.
3. Processes on a GPU and those without a model have what `Flow` gives to any process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from transferqueue.workflows.job import names
from transferqueue.workflows.job.devices.placement import PlacedProcess
from transferqueue.workflows.job.settings.job import IN_TURN, Mode

THREADS: Final = "OMP_NUM_THREADS"
"""Variable with the threads of a process: torch, its libraries and vLLM read it."""


def threads(processes: Iterable[PlacedProcess], mode: Mode, cores: int) -> dict[str, dict[str, str]]:
    """Return the variables of the processes that compute on the CPU, by label.

    Args:
        processes: of the map of the job.
        mode: of the job.
        cores: that the job may use.
    """
    labels = [process.label for process in processes if not process.devices]
    tasks = Counter(label.rpartition("-")[0] for label in labels)
    at_once = sum(count for task, count in tasks.items() if task != names.EVALUATE)

    def share(label: str) -> int:
        others = tasks[label.rpartition("-")[0]] if mode in IN_TURN else max(1, at_once)
        return max(1, cores // others)

    return {label: {THREADS: str(share(label))} for label in labels}
