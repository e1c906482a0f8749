"""Rows that continue rows: which tokens of a batch are computed once. No torch here.

A row may declare that its first tokens are also those of another row: the prompt of its group, the turns before it, the
trunk of its branch. So rows form trees. *Tree order* is depth first: a row comes after the row that it continues, and
of several that continue the same row, the one that leaves it last comes first. In this order a row has in common with
any earlier row the least of the numbers between the two. So a tree is its order, and one number a row: the tokens that
it shares with the row before it.

Prefixes are declared. Nothing here looks for equal tokens in different rows; declared ones are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from transferqueue.errors import UsageError

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RowTree:
    """Which tokens R rows share.

    Args:
        order: the rows in tree order.
        shared: in that order, the tokens, prompt and response, that each row shares with the one before it.

    Example:
        >>> tree = RowTree.of([-1, 0, 0, 2], [0, 7, 4, 9])  # rows 1 and 2 continue row 0, row 3 continues row 2
        >>> tree.order.tolist(), tree.shared.tolist()
        ([0, 1, 2, 3], [0, 7, 4, 9])
        >>> tree.select([3, 1]).shared.tolist()  # what rows 1 and 3 have in common
        [0, 4]
    """

    order: Ints
    shared: Ints

    @classmethod
    def of(cls, parents: Sequence[int], tokens: Sequence[int]) -> Self:
        """Return the tree of rows that continue rows.

        Args:
            parents: of each row, the earlier row that it continues; -1: none.
            tokens: of each row, how many of its first tokens are also that row's; 0 without one.

        Raises:
            UsageError: a row that continues itself or a later row, or a number of tokens below 0 or without a parent.
        """
        _check(parents, tokens)
        branches: list[list[int]] = [[] for _ in parents]
        owners: list[int] = []
        """Of each row, the row that its own tokens follow: an ancestor, if it leaves its parent before the parent's
        own tokens."""
        for row, (parent, count) in enumerate(zip(parents, tokens, strict=True)):
            while parent >= 0 and count <= tokens[parent]:
                parent = owners[parent]
            owners.append(parent)
            if parent >= 0:
                branches[parent].append(row)
        roots = [row for row, owner in enumerate(owners) if owner < 0]
        order = np.fromiter(_depth_first(roots, branches, tokens), np.int64, len(parents))
        return cls(order, np.asarray(tokens, np.int64)[order])

    @classmethod
    def of_prompts(cls, prompts: Sequence[Any]) -> Self:
        """Return the tree of rows that share nothing but whole prompts, such as the members of a group.

        Args:
            prompts: token ids of each row's prompt. Equal ones are one value, as for the queue that stores them.
        """
        values, firsts = [np.asarray(ids, np.int64) for ids in prompts], dict[bytes, int]()
        first = np.array([firsts.setdefault(ids.tobytes(), row) for row, ids in enumerate(values)], int)
        lengths = np.array([ids.size for ids in values], np.int64)
        order = np.argsort(first, kind="stable")
        return cls(order, np.where(first == np.arange(len(first)), 0, lengths)[order])

    @classmethod
    def apart(cls, rows: int) -> Self:
        """Return the tree of rows that share nothing.

        Args:
            rows: their number.
        """
        return cls(np.arange(rows), np.zeros(rows, np.int64))

    def select(self, rows: Sequence[int]) -> Self:
        """Return the tree of some rows.

        Args:
            rows: distinct rows. The new tree counts them as they stand here, from 0.
        """
        positions = np.full(len(self.order), -1)
        positions[np.asarray(rows, int)] = np.arange(len(rows))
        places = np.flatnonzero(positions[self.order] >= 0)
        shared = [int(self.shared[low + 1 : high + 1].min()) for low, high in pairwise(places)]
        return type(self)(positions[self.order[places]], np.array([0, *shared][: len(rows)], np.int64))

    def shared_by_row(self) -> Ints:
        """Return `shared` in the order of the rows."""
        shared = np.empty_like(self.shared)
        shared[self.order] = self.shared
        return shared


def _check(parents: Sequence[int], tokens: Sequence[int]) -> None:
    for row, (parent, count) in enumerate(zip(parents, tokens, strict=True)):
        if not -1 <= parent < row:
            raise UsageError(f"row {row} continues row {parent}; a row continues an earlier row, or none (-1)")
        if count < 0 or (count and parent < 0):
            raise UsageError(f"row {row} shares {count} tokens with row {parent}; give 0 or more, 0 without a parent")


def _depth_first(roots: Sequence[int], branches: Sequence[Sequence[int]], tokens: Sequence[int]) -> Iterator[int]:
    waiting = [*reversed(roots)]
    while waiting:
        yield (row := waiting.pop())
        waiting += sorted(branches[row], key=lambda branch: (tokens[branch], -branch))  # the last one is taken first
