"""Ragged rows of token ids as one flat batch: where each row lies, and which positions predict its response.

A model sees every row of a call in one forward pass. *Packed*: all rows one after the other, ``[1, tokens]``, each with
positions from 0. *Padded*: one row a line, ``[rows, longest]``, filled up on the right. Inside, rows lie longest first,
so that rows of about one length are neighbours. *Shared*: one prompt a line, followed by all its responses; each token
sees the prompt and its own response, at the position that it would have alone. Results come back in the caller's order.
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
    """Neighbouring rows of about one length, as a rectangle.

    Args:
        start: their place in the flat batch.
        tokens: their number there.
        rows: of the rectangle.
        width: of the rectangle.
        places: the token in each field of the rectangle, int64; None: all are real, in order.
        real: fields that are no padding, int64; None: all.
    """

    start: int
    tokens: int
    rows: int
    width: int
    places: Tensor | None
    real: Tensor | None


@dataclass(frozen=True)
class PackedBuckets:
    """The rows of a packed batch, for attention. `offsets_R1`: int32, the start of each row, and the end. `longest`:
    tokens of the longest row."""

    buckets: tuple[Bucket, ...]
    offsets_R1: Tensor
    longest: int


@dataclass(frozen=True)
class ForwardRows:
    """Prompts and responses of one forward pass, on a device.

    S and R are in the caller's order.

    Args:
        ids: int64 ``[1, N]`` (packed), ``[R, longest]`` (padded) or ``[prompts, longest]`` (shared).
        positions: of the same shape.
        packed: None if not packed.
        from_S: for each response token the place, in the flattened batch, whose output predicts it.
        targets_S: the response tokens.
        last_R: the place of each row's last token (of shared rows, which lack it, the place before).
        sight_BTT: bool, which tokens each token of shared rows sees; else None.
    """

    ids_BT: Tensor
    positions_BT: Tensor
    packed: PackedBuckets | None
    from_S: Tensor
    targets_S: Tensor
    last_R: Tensor
    sight_BTT: Tensor | None = None


def forward_rows(
    prompts: Iterable[Any],
    responses: Iterable[Any],
    *,
    packed: bool,
    device: torch.device | str = "cpu",
    vocabulary: int | None = None,
    length_max: int | None = None,
) -> ForwardRows:
    """Lay out rows for one forward pass. `prompts` and `responses` are integers ``[P]`` and ``[T]`` of each row.

    Raises `UsageError` if there are no rows, not as many prompts as responses, an empty prompt (nothing predicts the
    first token), an id outside of the vocabulary, or a row of more than `length_max` tokens.
    """
    prompt_rows, response_rows, rows = _checked(prompts, responses, vocabulary, length_max)
    lengths_R = np.array([len(row) for row in rows])
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


def shared_rows(
    prompts: Iterable[Any],
    responses: Iterable[Any],
    *,
    device: torch.device | str = "cpu",
    vocabulary: int | None = None,
    length_max: int | None = None,
) -> ForwardRows:
    """Lay out rows so that those of one prompt share it. Arguments and errors as of `forward_rows`.

    A group of 8 short responses consists mostly of the prompt: the work is two to three times less, the numbers are the
    same. The last token of a response predicts nothing, so it is a target only.
    """
    prompt_rows, response_rows, _ = _checked(prompts, responses, vocabulary, length_max)
    lines: dict[bytes, int] = {}
    line_R = np.array([lines.setdefault(prompt.tobytes(), len(lines)) for prompt in prompt_rows])
    prompt_R, response_R = (np.array([len(row) for row in part]) for part in (prompt_rows, response_rows))
    inner_R = np.maximum(response_R - 1, 0)
    order_R = np.argsort(line_R, kind="stable")
    firsts_L = np.unique(line_R, return_index=True)[1]
    ahead_R = np.empty_like(inner_R)  # response tokens of the rows before it on its line
    ahead_R[order_R] = np.cumsum(inner_R[order_R]) - inner_R[order_R]
    ahead_R -= ahead_R[firsts_L][line_R]
    width = int((prompt_R + ahead_R + inner_R).max())
    shape = (len(lines), width)
    ids_LT, positions_LT, segments_LT = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.full(shape, -1)
    prompt_places = _ranges(line_R[firsts_L] * width, prompt_R[firsts_L])
    ids_LT.ravel()[prompt_places] = np.concatenate([prompt_rows[row] for row in firsts_L])
    positions_LT.ravel()[prompt_places] = _ranges(np.zeros_like(firsts_L), prompt_R[firsts_L])
    segments_LT.ravel()[prompt_places] = 0
    starts_R = line_R * width + prompt_R + ahead_R
    places = _ranges(starts_R, inner_R)
    ids_LT.ravel()[places] = np.concatenate([row[:-1] for row in response_rows])
    positions_LT.ravel()[places] = _ranges(prompt_R, inner_R)
    segments_LT.ravel()[places] = np.repeat(np.arange(1, len(inner_R) + 1), inner_R)
    from_S = _ranges(starts_R - 1, response_R)
    begins_R = (np.cumsum(response_R) - response_R)[response_R > 0]
    from_S[begins_R] = (line_R * width + prompt_R - 1)[response_R > 0]
    return ForwardRows(
        ids_BT=torch.from_numpy(ids_LT).to(device),
        positions_BT=torch.from_numpy(positions_LT).to(device),
        packed=None,
        from_S=torch.from_numpy(from_S).to(device),
        targets_S=torch.from_numpy(np.concatenate(response_rows)).to(device),
        last_R=torch.from_numpy(np.where(inner_R > 0, starts_R + inner_R, line_R * width + prompt_R) - 1).to(device),
        sight_BTT=_sight(torch.from_numpy(segments_LT).to(device)),
    )


def _sight(segments_BT: Tensor) -> Tensor:
    """Which tokens each sees: earlier ones of segment 0, the prompt, and of its own segment."""
    width = segments_BT.shape[1]
    causal_TT = torch.ones(width, width, dtype=torch.bool, device=segments_BT.device).tril()
    return causal_TT & ((segments_BT[:, None, :] == 0) | (segments_BT[:, None, :] == segments_BT[:, :, None]))


def _packed(lengths_R: Ints, device: torch.device | str) -> PackedBuckets:
    """Split rows, sorted longest first, into buckets."""
    offsets_R1 = np.concatenate([[0], lengths_R.cumsum()])
    rectangles = []
    first = 0
    for row in range(1, len(lengths_R) + 1):
        if row == len(lengths_R) or lengths_R[row] < _FILL_MIN * lengths_R[first]:
            rectangles.append(_bucket(offsets_R1[first : row + 1], device))
            first = row
    return PackedBuckets(tuple(rectangles), torch.from_numpy(offsets_R1.astype(np.int32)).to(device), int(lengths_R[0]))


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


def _checked(
    prompts: Iterable[Any], responses: Iterable[Any], vocabulary: int | None, length_max: int | None
) -> tuple[list[Ints], list[Ints], list[Ints]]:
    """Return prompts, responses, and both joined."""
    prompt_rows, response_rows = [_ids(row) for row in prompts], [_ids(row) for row in responses]
    _check_counts(prompt_rows, response_rows)
    rows = [np.concatenate(pair) for pair in zip(prompt_rows, response_rows, strict=True)]
    _check_ids(rows, np.array([len(row) for row in rows]), vocabulary, length_max)
    return prompt_rows, response_rows, rows


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
