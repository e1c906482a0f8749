"""Micro-batches of ragged rows under a token budget, and sequences packed into one row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from transferqueue.errors import Impossible, UsageError

if TYPE_CHECKING:
    import torch


def pack(lengths: Sequence[int] | npt.NDArray[np.int64], tokens_max: int) -> list[list[int]]:
    """Put rows into micro-batches of at most `tokens_max` tokens by first-fit decreasing.

    lengths: tokens of each row. Returns positions of rows, ascending in each micro-batch; micro-batches are ordered by
    their first row. Uses at
    most 11/9 of the smallest possible number, plus one (Johnson, "Near-optimal bin packing algorithms", 1973). Raises
    `Impossible` for a row
    that is longer than the budget.
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


@dataclass(frozen=True)
class Packed:
    """Several sequences in one row, each of which attends to itself only.

    ids: int64 ``[1, tokens]``. positions: int64 ``[1, tokens]``, from 0 in each sequence. sequence: int64 ``[1, tokens]``, the index of
    each token's sequence. starts: int32 ``[sequences + 1]``, cumulative lengths, as variable-length attention kernels take them.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    sequence: torch.Tensor
    starts: torch.Tensor

    def mask(self) -> torch.Tensor:
        """Attention mask: bool ``[1, 1, tokens, tokens]``, true where a token may attend; for attention without such kernels."""
        import torch

        together = self.sequence[:, :, None] == self.sequence[:, None, :]
        return together.tril()[:, None] if together.dtype == torch.bool else together


def packed(sequences: Sequence[npt.NDArray[np.integer]]) -> Packed:
    """Concatenate sequences of token ids. Raises `UsageError` for no sequences, or an empty one."""
    import torch

    lengths = [len(ids) for ids in sequences]
    if not lengths or min(lengths) < 1:
        raise UsageError(
            f"{len(lengths)} sequences to pack, the shortest of {min(lengths, default=0)} tokens: none may be empty"
        )
    lengths_S = torch.tensor(lengths)
    ends_S = lengths_S.cumsum(0)
    starts_S = ends_S - lengths_S
    return Packed(
        ids=torch.from_numpy(np.concatenate(sequences).astype(np.int64))[None],
        positions=(torch.arange(int(ends_S[-1])) - starts_S.repeat_interleave(lengths_S))[None],
        sequence=torch.arange(len(lengths)).repeat_interleave(lengths_S)[None],
        starts=torch.cat([starts_S, ends_S[-1:]]).to(torch.int32),
    )
