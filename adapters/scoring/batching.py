"""Rows of one scoring pass each, under a budget of tokens. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
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
    return _packed(lengths, tokens, PATHS_MAX * tokens, RowTree.apart(len(lengths)) if tree is None else tree)


def micro_batches_of_ranks(
    lengths: Sequence[int] | npt.NDArray[np.int64],
    tokens: int,
    ranks: int,
    *,
    padded: bool = False,
    tree: RowTree | None = None,
) -> list[list[int]]:
    """Split rows as `micro_batches`, into at least as many as there are ranks, if there are as many rows.

    Ranks take the micro-batches in rounds, the largest ones first, and the largest of a round decides its time. A small
    budget cuts trees, and each cut computes shared tokens again. So several budgets up to `tokens` are tried, and the
    largest micro-batches are halved to fill the last round. The split is taken whose rounds take the fewest tokens.

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
    if ranks == 1:
        return micro_batches(lengths, tokens, padded=padded, tree=tree)
    tree = RowTree.apart(len(lengths)) if tree is None else tree
    share = -(-sum(map(int, lengths)) // ranks)
    splits = [micro_batches(lengths, min(max(1, share), tokens), padded=padded)]
    splits += [
        _padded(lengths, budget) if padded else _packed(lengths, budget, PATHS_MAX * tokens, tree)
        for budget in _budgets(lengths, tokens, ranks, tree)
    ]

    def size(rows: Sequence[int]) -> int:
        if padded:
            return max(int(lengths[row]) for row in rows) * len(rows)
        return sum(int(lengths[row]) for row in rows) - int(tree.select(rows).shared.sum())

    def time(sized: Sequence[tuple[int, list[int]]]) -> tuple[int, int]:
        return -sum(negative for negative, _ in sized[::ranks]), len(sized)

    found = [
        _halved([(-size(rows), rows) for rows in split], least, lengths, tree, size)
        for split in splits
        for least in {max(len(split), ranks), -(-len(split) // ranks) * ranks}
    ]
    return [rows for _, rows in min(found, key=time)]


def _budgets(lengths: Sequence[int] | npt.NDArray[np.int64], tokens: int, ranks: int, tree: RowTree) -> list[int]:
    """Return budgets of a micro-batch: from a rank's share of all tokens, and from the longest shared path and a rank's
    share of the tokens after it, in steps of a quarter; and `tokens`."""
    sizes, path = np.asarray(lengths, np.int64), int(tree.shared.max(initial=0))
    budgets = {tokens}
    for base, rest in ((0, int(sizes.sum() - tree.shared.sum())), (path, int((sizes - path).clip(0).sum()))):
        part = max(1, -(-rest // ranks))
        while base + part < tokens and part < rest:
            budgets.add(base + part)
            part = -(-part * 5 // 4)
    return sorted(budgets)


def _halved(
    sized: Sequence[tuple[int, list[int]]],
    least: int,
    lengths: Sequence[int] | npt.NDArray[np.int64],
    tree: RowTree,
    size: Callable[[Sequence[int]], int],
) -> list[tuple[int, list[int]]]:
    """Halve the largest micro-batches of several rows until there are `least`, and return the largest first. Each comes
    with its size, negative, as `heapq` takes the least first."""
    single, wide = [each for each in sized if len(each[1]) == 1], [each for each in sized if len(each[1]) > 1]
    heapify(wide)
    while wide and len(wide) + len(single) < least:
        for rows in _halves(heappop(wide)[1], lengths, tree):
            if len(rows) > 1:
                heappush(wide, (-size(rows), rows))
            else:
                single.append((-size(rows), rows))
    return sorted(wide + single)


def _halves(
    rows: Sequence[int], lengths: Sequence[int] | npt.NDArray[np.int64], tree: RowTree
) -> tuple[list[int], list[int]]:
    """Cut rows in tree order, where the larger part has the fewest tokens: the second one computes again what its first
    row shares with the row before it."""
    chosen, part = np.asarray(rows), tree.select(rows)
    ordered = chosen[part.order]
    first = np.cumsum(np.asarray(lengths, np.int64)[ordered] - part.shared)
    cut = int(np.maximum(first[:-1], first[-1] - first[:-1] + part.shared[1:]).argmin()) + 1
    return sorted(ordered[:cut].tolist()), sorted(ordered[cut:].tolist())


def _packed(
    lengths: Sequence[int] | npt.NDArray[np.int64], tokens: int, in_rows_max: int, tree: RowTree
) -> list[list[int]]:
    """Pack runs of rows in tree order: at most `tokens` tokens, and `in_rows_max` in the rows, `tokens` or more. A run
    takes of a micro-batch the larger of both shares."""
    runs: list[list[int]] = []
    shares: list[int] = []
    size = in_rows = 0
    for row, shared in zip(tree.order.tolist(), tree.shared.tolist(), strict=True):
        length = int(lengths[row])
        size, in_rows = size + length - shared, in_rows + length
        share = max(size, -(-in_rows * tokens // in_rows_max))
        if shared and share <= tokens:
            runs[-1].append(row)
            shares[-1] = share
        else:
            runs.append([row])
            shares.append(length)
            size = in_rows = length
    long = [run for run, share in zip(runs, shares, strict=True) if share > tokens]
    short = [at for at, share in enumerate(shares) if share <= tokens]
    packed = pack([shares[at] for at in short], tokens)
    return sorted([*long, *(sorted(row for at in places for row in runs[short[at]]) for places in packed)])


def _padded(lengths: Sequence[int] | npt.NDArray[np.int64], tokens: int) -> list[list[int]]:
    batches: list[list[int]] = []
    width = 0
    for row in sorted(range(len(lengths)), key=lambda row: (-int(lengths[row]), row)):
        if not batches or width * (len(batches[-1]) + 1) > tokens:
            batches.append([])
            width = int(lengths[row])
        batches[-1].append(row)
    return batches
