"""Reward functions of the job files in this folder, in TRL's form: texts in, one number for each out.

A job file names them as ``rewards:sorted_right``: the folder of a job file is importable while the job runs. A
parameter that is a column of the data (`answer`) gets that column.
"""

from collections.abc import Sequence
from typing import Any


def sorted_right(completions: Sequence[Any], answer: Sequence[str]) -> list[float]:
    """1 for a completion that is the answer, else 0."""
    return [float(text(completion).strip() == right) for completion, right in zip(completions, answer, strict=True)]


def digits_kept(completions: Sequence[Any], answer: Sequence[str]) -> list[float]:
    """Share of the answer's digits that the completion has, in any order: a reward that says more than right or
    wrong."""
    return [overlap(text(completion), right) for completion, right in zip(completions, answer, strict=True)]


def text(completion: Any) -> str:
    """The text of a completion: itself, or its last message."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def overlap(completion: str, right: str) -> float:
    left = list(completion.strip())
    kept = 0
    for digit in right:
        if digit in left:
            left.remove(digit)
            kept += 1
    return kept / max(len(right), len(completion.strip()), 1)
