"""Responses of some rows as flat tensors: what losses read. Nothing is padded."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from transferqueue.errors import UsageError

_PER_ROW = ("offsets_R1",)
_PER_CHOICE = ("teacher_logprobs_NK", "logprobs_NK")


@dataclass(frozen=True, kw_only=True, slots=True)
class Responses:
    """The response tokens of R rows, one row after the other: N tokens in all.

    ``logprobs_N``: the trained policy's, with a gradient. ``mask_N`` (bool): tokens that the loss is over.
    ``offsets_R1`` (int64): row r has tokens ``offsets_R1[r]`` to ``offsets_R1[r + 1]``. All others are read by some
    algorithms only and get no gradient, save ``values_N``, ``logprobs_NK`` and ``entropies_N``:

    - ``rollout_logprobs_N``: of the policy that drew the tokens. ``old_logprobs_N``: of the policy before the step, for
      ``old = "trainer"``; None where the step takes one update, since the policy before it is then the trained one.
    - ``advantages_N``: a row's advantage repeated over its tokens, or one for each token.
    - ``ref_logprobs_N``: the reference's. ``entropies_N``: of the policy's distributions, for the figures and the
      entropy bonus.
    - ``values_N``, ``old_values_N``, ``returns_N``: the critic's values now, those that GAE was made with, and its
      returns.
    - ``teacher_logprobs_NK``, ``logprobs_NK``: of the teacher and of the policy at the same K tokens for each position.
      K is 1, the token that was drawn, for the reverse direction, which reads ``logprobs_N``.

    All floats have one dtype and device. Positions where the mask is False may hold anything finite. `UsageError` for
    shapes that differ.
    """

    logprobs_N: Tensor
    mask_N: Tensor
    offsets_R1: Tensor
    rollout_logprobs_N: Tensor | None = None
    old_logprobs_N: Tensor | None = None
    advantages_N: Tensor | None = None
    ref_logprobs_N: Tensor | None = None
    entropies_N: Tensor | None = None
    values_N: Tensor | None = None
    old_values_N: Tensor | None = None
    returns_N: Tensor | None = None
    teacher_logprobs_NK: Tensor | None = None
    logprobs_NK: Tensor | None = None

    def __post_init__(self) -> None:
        tokens = len(self.mask_N)
        if self.mask_N.dtype != torch.bool:
            raise UsageError(f"mask_N is {self.mask_N.dtype}: give torch.bool, True for tokens that the loss is over")
        offsets = self.offsets_R1.tolist() if self.offsets_R1.ndim == 1 else []
        if offsets[:1] != [0] or offsets[-1] != tokens or offsets != sorted(offsets):
            raise UsageError(f"offsets_R1 is {self.offsets_R1.tolist()}: give ascending offsets from 0 to {tokens}")
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None or field.name in _PER_ROW:
                continue
            wanted = 2 if field.name in _PER_CHOICE else 1
            if value.ndim != wanted or len(value) != tokens:
                raise UsageError(f"{field.name} has shape {tuple(value.shape)}, the mask {tokens} tokens")

    def rows_of_tokens(self) -> Tensor:
        """Return the row of each token, int64 ``[N]``."""
        lengths_R = self.offsets_R1.diff()
        rows_R = torch.arange(len(lengths_R), device=lengths_R.device)
        return torch.repeat_interleave(rows_R, lengths_R, output_size=len(self.mask_N))

    def row_sums(self, values_N: Tensor) -> Tensor:
        """Return the sum of ``values_N`` over the unmasked tokens of each row, ``[R]``."""
        sums_R = values_N.new_zeros(len(self.offsets_R1) - 1)
        return sums_R.index_add(0, self.rows_of_tokens(), values_N.where(self.mask_N, 0))

    def over_tokens(self, values_R: Tensor) -> Tensor:
        """Return ``values_R`` with each row's value repeated over its tokens, ``[N]``."""
        return values_R[self.rows_of_tokens()]

    def column(self, name: str, reader: str) -> Tensor:
        """Return the tensor called ``name``; `UsageError` where it is absent, which says that ``reader`` reads it."""
        value: Tensor | None = getattr(self, name)
        if value is None:
            raise UsageError(f"the responses have no {name}, which {reader} reads")
        return value
