"""Micro-batches of ragged rows under a token budget."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from transferqueue.errors import Impossible, UsageError


def pack(lengths: Sequence[int] | npt.NDArray[np.int64], tokens_max: int) -> list[list[int]]:
    """Put rows into micro-batches of at most `tokens_max` tokens, by first-fit decreasing.

    It uses at most 11/9 of the smallest possible number of micro-batches, plus one (Johnson, "Near-optimal bin packing
    algorithms", 1973).

    Args:
        lengths: tokens of each row.
        tokens_max: the most tokens of a micro-batch, at least 1.

    Returns:
        Positions of rows, ascending in each micro-batch; micro-batches are ordered by their first row.

    Raises:
        Impossible: a row is longer than `tokens_max`.
        UsageError: `tokens_max` below 1.

    Example:
        >>> pack([4, 9, 3, 2], tokens_max=10)
        [[0, 2, 3], [1]]
    """
    if tokens_max < 1:
        raise UsageError(f"tokens_max={tokens_max}; give at least 1")
    sizes = [int(length) for length in lengths]
    if sizes and max(sizes) > tokens_max:
        raise Impossible(f"row {int(np.argmax(sizes))} has {max(sizes)} tokens; a micro-batch may have {tokens_max}")
    rows: list[list[int]] = []
    room: list[int] = []
    for row in sorted(range(len(sizes)), key=lambda row: (-sizes[row], row)):
        fit = next((place for place, left in enumerate(room) if left >= sizes[row]), None)
        if fit is None:
            rows.append([row])
            room.append(tokens_max - sizes[row])
        else:
            rows[fit].append(row)
            room[fit] -= sizes[row]
    return sorted(map(sorted, rows))
