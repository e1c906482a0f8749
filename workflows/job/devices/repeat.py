"""The same bits from the same inputs: what torch is asked for in a reproducible job."""

from __future__ import annotations

from typing import Final

from transferqueue.workflows.job.settings.job import Job

REPEATING: Final = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Variables of the processes of a reproducible job: cuBLAS reads its workspace when a process begins."""


def repeat_bits(job: Job) -> None:
    """In a reproducible job have torch use algorithms that repeat. An operation that has none raises `RuntimeError`,
    which names it. Call it before a model computes; other jobs are left as they are."""
    if job.reproducible:
        import torch

        torch.use_deterministic_algorithms(mode=True)
