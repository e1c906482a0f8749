"""Rows of one scoring pass each, under a budget of tokens. No torch here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from transferqueue.adapters.trainers.packing import pack
from transferqueue.errors import UsageError


def micro_batches(
    lengths: Sequence[int] | npt.NDArray[np.int64], tokens: int = 8192, *, padded: bool = False
) -> list[list[int]]:
    """Split rows into micro-batches of at most `tokens` tokens. A longer row is alone in its own.

    Args:
        lengths: prompt and response tokens of each row.
        tokens: the most tokens of a micro-batch, at least 1; default 8192.
        padded: count a micro-batch as its longest row times its rows, and keep rows of about one length together;
            default False. For a model that cannot score packed rows (`transferqueue.adapters.scoring.is_packed`).

    Returns:
        Positions of rows; every row is in exactly one micro-batch.

    Raises:
        UsageError: `tokens` below 1.

    Example:
        >>> micro_batches([4, 9, 3, 12, 2], tokens=10)
        [[0, 2, 4], [1], [3]]
        >>> micro_batches([4, 9, 3, 12, 2], tokens=10, padded=True)
        [[3], [1], [0, 2], [4]]
    """
    if tokens < 1:
        raise UsageError(f"tokens={tokens}: a micro-batch of no tokens; give at least 1")
    if padded:
        return _padded(lengths, tokens)
    long = [[row] for row, length in enumerate(lengths) if length > tokens]
    short = [row for row, length in enumerate(lengths) if length <= tokens]
    packed = pack([int(lengths[row]) for row in short], tokens)
    return sorted([*long, *([short[at] for at in rows] for rows in packed)])


def _padded(lengths: Sequence[int] | npt.NDArray[np.int64], tokens: int) -> list[list[int]]:
    batches: list[list[int]] = []
    width = 0
    for row in sorted(range(len(lengths)), key=lambda row: (-int(lengths[row]), row)):
        if not batches or width * (len(batches[-1]) + 1) > tokens:
            batches.append([])
            width = int(lengths[row])
        batches[-1].append(row)
    return batches
