"""verl on a CPU (`transferqueue.workflows.adopt.trial.of_verl.cpu_platform`), as a plug-in that also records every
process's calls of ``transfer_queue`` in the folder that ``BENCH_STACKS_CALLS`` names."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

import transferqueue.workflows.adopt.trial.of_verl.cpu_platform  # noqa: F401  (registers)
from bench.stacks import calls

CALLS: Final = "BENCH_STACKS_CALLS"
"""Environment variable: the folder for `calls.record`."""

if os.environ.get(CALLS):
    calls.record(sys.modules["transfer_queue"], Path(os.environ[CALLS]))
