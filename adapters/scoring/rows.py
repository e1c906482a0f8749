"""Ragged rows of token ids as one flat batch: where each row lies, and which positions predict its response.

A model sees every row of a call in one forward pass. *Packed*: all rows one after the other, ``[1, tokens]``, each with positions
from 0. *Padded*: one row a line, ``[rows, longest]``, filled up on the right. Inside, rows lie longest first, so that
rows of about one length are neighbours; results come back in the caller's order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from transferqueue.errors import UsageError

Ints = npt.NDArray[np.int64]

_FILL_MIN: Final = 0.75
"""Rows share an attention call if the shortest has at least this share of the tokens of the longest."""


@dataclass(frozen=True)
class Bucket:
    """Neighbouring rows of about one length, as a rectangle. start, tokens: their place in the flat batch. rows, width: of the rectangle.

    places: which token stands in each field of the rectangle; real: fields that are no padding; both int64. None: all are real, in order.
    """

    start: int
    tokens: int
    rows: int
    width: int
    places: Tensor | None
    real: Tensor | None


@dataclass(frozen=True)
class PackedBuckets:
    """The rows of a packed batch, for attention. offsets_R1: int32, where each row begins, and the end. longest: tokens of the longest row."""

    buckets: tuple[Bucket, ...]
    offsets_R1: Tensor
    longest: int


@dataclass(frozen=True)
class ForwardRows:
    """Prompts and responses of one forward pass, on a device.

    ids, positions: int64 ``[1, N]`` (packed) or ``[R, longest]`` (padded). packed: None if padded. from_S: for each
    response token the place, in the flattened batch, whose output predicts it. targets_S: the response tokens. last_R: the
    place of each row's last token. S and R are in the caller's order.
    """

    ids_BT: Tensor
    positions_BT: Tensor
    packed: PackedBuckets | None
    from_S: Tensor
    targets_S: Tensor
    last_R: Tensor


def forward_rows(
    prompts: Iterable[Any],
    responses: Iterable[Any],
    *,
    packed: bool,
    device: torch.device | str = "cpu",
    vocabulary: int | None = None,
    length_max: int | None = None,
) -> ForwardRows:
    """Lay out rows for one forward pass. prompts, responses: integers ``[P]`` and ``[T]`` of each row.

    Raises `UsageError` if there are no rows, not as many prompts as responses, an empty prompt (nothing predicts the first
    token), an id outside of the vocabulary, or a row of more than `length_max` tokens.
    """
    prompt_rows, response_rows = [_ids(row) for row in prompts], [_ids(row) for row in responses]
    _check_counts(prompt_rows, response_rows)
    rows = [np.concatenate(pair) for pair in zip(prompt_rows, response_rows, strict=True)]
    lengths_R = np.array([len(row) for row in rows])
    _check_ids(rows, lengths_R, vocabulary, length_max)
    order_R = np.argsort(-lengths_R, kind="stable")
    starts_R = np.empty_like(lengths_R)
    step_R = lengths_R[order_R] if packed else np.full_like(lengths_R, lengths_R.max())
    starts_R[order_R] = np.cumsum(step_R) - step_R
    prompt_lengths = np.array([len(row) for row in prompt_rows])
    response_lengths = lengths_R - prompt_lengths
    positions_N = _ranges(np.zeros_like(lengths_R), lengths_R)
    places_N = np.repeat(starts_R, lengths_R) + positions_N
    shape = (1, int(lengths_R.sum())) if packed else (len(rows), int(lengths_R.max()))
    ids_BT, positions_BT = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    ids_BT.ravel()[places_N] = np.concatenate(rows)
    positions_BT.ravel()[places_N] = positions_N
    return ForwardRows(
        ids_BT=torch.from_numpy(ids_BT).to(device),
        positions_BT=torch.from_numpy(positions_BT).to(device),
        packed=_packed(lengths_R[order_R], device) if packed else None,
        from_S=torch.from_numpy(_ranges(starts_R + prompt_lengths - 1, response_lengths)).to(device),
        targets_S=torch.from_numpy(np.concatenate(response_rows)).to(device),
        last_R=torch.from_numpy(starts_R + lengths_R - 1).to(device),
    )


def _packed(lengths_R: Ints, device: torch.device | str) -> PackedBuckets:
    """Split rows, sorted longest first, into buckets."""
    offsets_R1 = np.concatenate([[0], lengths_R.cumsum()])
    found = []
    first = 0
    for row in range(1, len(lengths_R) + 1):
        if row == len(lengths_R) or lengths_R[row] < _FILL_MIN * lengths_R[first]:
            found.append(_bucket(offsets_R1[first : row + 1], device))
            first = row
    return PackedBuckets(tuple(found), torch.from_numpy(offsets_R1.astype(np.int32)).to(device), int(lengths_R[0]))


def _bucket(offsets_R1: Ints, device: torch.device | str) -> Bucket:
    starts_R, lengths_R = offsets_R1[:-1], np.diff(offsets_R1)
    rows, width, start = len(lengths_R), int(lengths_R[0]), int(offsets_R1[0])
    tokens = int(offsets_R1[-1]) - start
    if tokens == rows * width:
        return Bucket(start, tokens, rows, width, None, None)
    columns_T = np.arange(width)
    places_RT = starts_R[:, None] + np.minimum(columns_T, lengths_R[:, None] - 1)
    real_S = np.flatnonzero(columns_T < lengths_R[:, None])
    return Bucket(
        start,
        tokens,
        rows,
        width,
        torch.from_numpy(places_RT.ravel()).to(device),
        torch.from_numpy(real_S).to(device),
    )


def _ids(row: Any) -> Ints:
    ids = np.asarray(row)
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
        raise UsageError(f"token ids of dtype {ids.dtype} and shape {ids.shape}; give integers of shape [tokens]")
    return ids.astype(np.int64)


def _ranges(starts_R: Ints, lengths_R: Ints) -> Ints:
    """Concatenate start, start + 1, … of each length."""
    ends_R = np.cumsum(lengths_R)
    ranges: Ints = np.arange(ends_R[-1]) + np.repeat(starts_R - ends_R + lengths_R, lengths_R)
    return ranges


def _check_counts(prompts: Sequence[Ints], responses: Sequence[Ints]) -> None:
    if not prompts or len(prompts) != len(responses):
        raise UsageError(
            f"{len(prompts)} prompts and {len(responses)} responses; give at least one, and as many of each"
        )
    empty = next((row for row, prompt in enumerate(prompts) if not len(prompt)), None)
    if empty is not None:
        raise UsageError(f"the prompt of row {empty} is empty; its first response token is predicted by nothing")


def _check_ids(rows: Sequence[Ints], lengths_R: Ints, vocabulary: int | None, length_max: int | None) -> None:
    if length_max is not None and lengths_R.max() > length_max:
        row = int(lengths_R.argmax())
        raise UsageError(f"row {row} has {lengths_R[row]} tokens; the model takes at most {length_max}")
    if vocabulary is None:
        return
    for row, ids in enumerate(rows):
        if ids.min() < 0 or ids.max() >= vocabulary:
            bad = int(ids.min() if ids.min() < 0 else ids.max())
            raise UsageError(f"row {row} has token id {bad}; the model's vocabulary is 0 to {vocabulary - 1}")
