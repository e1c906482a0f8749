"""Rows of one scoring pass each, under a budget of tokens. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from transferqueue.adapters.scoring.trees import RowTree
from transferqueue.adapters.trainers.packing import pack
from transferqueue.errors import UsageError

PATHS_MAX: Final = 8
"""Tokens of the rows of a micro-batch, over its budget: attention holds keys and values of a token for each row that
shares it."""


def micro_batches(
    lengths: Sequence[int] | npt.NDArray[np.int64],
    tokens: int = 8192,
    *,
    padded: bool = False,
    tree: RowTree | None = None,
) -> list[list[int]]:
    """Split rows into micro-batches of at most `tokens` tokens. A longer row is alone in its own.

    Args:
        lengths: prompt and response tokens of each row.
        tokens: the most tokens of a micro-batch, at least 1; default 8192.
        padded: count a micro-batch as its longest row times its rows, and keep rows of about one length together;
            default False. For a model that cannot score packed rows (`transferqueue.adapters.scoring.is_packed`).
        tree: which tokens rows share; default None: none. Shared tokens count once, and rows of one tree stay together
            as far as they fit. Not with `padded`.

    Returns:
        Positions of rows; every row is in exactly one micro-batch.

    Raises:
        UsageError: `tokens` below 1.

    Example:
        >>> micro_batches([4, 9, 3, 12, 2], tokens=10)
        [[0, 2, 4], [1], [3]]
        >>> micro_batches([4, 9, 3, 12, 2], tokens=10, padded=True)
        [[3], [1], [0, 2], [4]]
        >>> micro_batches([6, 6, 9], tokens=10, tree=RowTree.of([-1, 0, -1], [0, 4, 0]))
        [[0, 1], [2]]
    """
    if tokens < 1:
        raise UsageError(f"tokens={tokens}: a micro-batch of no tokens; give at least 1")
    if padded:
        return _padded(lengths, tokens)
    runs, sizes = _runs(lengths, tokens, RowTree.apart(len(lengths)) if tree is None else tree)
    long = [run for run, size in zip(runs, sizes, strict=True) if size > tokens]
    short = [at for at, size in enumerate(sizes) if size <= tokens]
    packed = pack([sizes[at] for at in short], tokens)
    return sorted([*long, *(sorted(row for at in places for row in runs[short[at]]) for places in packed)])


def micro_batches_of_ranks(
    lengths: Sequence[int] | npt.NDArray[np.int64],
    tokens: int,
    ranks: int,
    *,
    padded: bool = False,
    tree: RowTree | None = None,
) -> list[list[int]]:
    """Split rows as `micro_batches`, into at least as many as there are ranks, if there are as many rows.

    Ranks take the micro-batches in rounds, and the largest of a round decides its time. A small budget cuts trees, and
    each cut computes shared tokens again. So several budgets up to `tokens` are tried; the one is taken whose rounds
    times its largest micro-batch are the fewest tokens.

    Args:
        lengths: as of `micro_batches`.
        tokens: the most tokens of a micro-batch, at least 1.
        ranks: their number, at least 1.
        padded: as of `micro_batches`; default False.
        tree: as of `micro_batches`; default None.

    Example:
        >>> group = RowTree.of([-1] + [0] * 7, [0] + [100] * 7)
        >>> micro_batches_of_ranks([110] * 8, tokens=8192, ranks=2, tree=group)
        [[0, 1, 2, 3], [4, 5, 6, 7]]
    """
    tree = RowTree.apart(len(lengths)) if tree is None else tree

    def size(rows: Sequence[int]) -> int:
        if padded:
            return max(int(lengths[row]) for row in rows) * len(rows)
        return sum(int(lengths[row]) for row in rows) - int(tree.select(rows).shared.sum())

    def cost(batches: Sequence[Sequence[int]]) -> tuple[bool, int]:
        return len(batches) < min(ranks, len(lengths)), -(-len(batches) // ranks) * max(map(size, batches))

    total = sum(map(int, lengths)) - int(tree.shared.sum())
    budgets = [max(1, -(-total // ranks))]
    while budgets[-1] < min(total, tokens):
        budgets.append(-(-budgets[-1] * 5 // 4))
    splits = [micro_batches(lengths, min(budget, tokens), padded=padded, tree=tree) for budget in budgets]
    return min(splits, key=cost)


def _runs(
    lengths: Sequence[int] | npt.NDArray[np.int64], tokens: int, tree: RowTree
) -> tuple[list[list[int]], list[int]]:
    """Cut the rows, in tree order, where they share nothing, and where a run would have more than `tokens` tokens, or
    in its rows more than `PATHS_MAX` times its own; return the runs and the tokens of each."""
    runs: list[list[int]] = []
    sizes: list[int] = []
    in_rows = 0
    for row, shared in zip(tree.order.tolist(), tree.shared.tolist(), strict=True):
        length = int(lengths[row])
        in_rows += length
        size = sizes[-1] + length - shared if shared else 0
        if shared and size <= tokens and in_rows <= PATHS_MAX * size:
            runs[-1].append(row)
            sizes[-1] = size
        else:
            runs.append([row])
            sizes.append(length)
            in_rows = length
    return runs, sizes


def _padded(lengths: Sequence[int] | npt.NDArray[np.int64], tokens: int) -> list[list[int]]:
    batches: list[list[int]] = []
    width = 0
    for row in sorted(range(len(lengths)), key=lambda row: (-int(lengths[row]), row)):
        if not batches or width * (len(batches[-1]) + 1) > tokens:
            batches.append([])
            width = int(lengths[row])
        batches[-1].append(row)
    return batches
