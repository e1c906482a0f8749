"""Ragged rows of token ids as one flat batch: where each row lies, and which positions predict its response.

A model sees every row of a call in one forward pass. *Packed*: all rows one after the other, ``[1, tokens]``, each with
positions from 0. *Padded*: one row a line, ``[rows, longest]``, filled up on the right. Inside, rows lie longest first,
so that rows of about one length are neighbours. Results come back in the caller's order.

Packed rows may form trees (`trees.RowTree`). Each row then has *own* tokens, those after the ones that it shares, and
only these lie in the batch, at the positions that they would have alone. They attend to the row's whole *path*: the
shared tokens, wherever they lie, and its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from transferqueue.adapters.scoring.row_attention import Bucket, PackedRows, Spans
from transferqueue.adapters.scoring.trees import RowTree
from transferqueue.errors import UsageError

Ints = npt.NDArray[np.int64]

_FILL_MIN: Final = 0.75
"""Rows share an attention call if the shortest has at least this share of the tokens of the longest."""


@dataclass(frozen=True)
class ForwardRows:
    """Prompts and responses of one forward pass, on a device.

    S and R are in the caller's order.

    Args:
        ids: int64 ``[1, N]`` (packed) or ``[R, longest]`` (padded).
        positions: of the same shape.
        packed: None if not packed.
        from_S: for each response token the place, in the flattened batch, whose output predicts it.
        targets_S: the response tokens.
        last_R: the place of each row's last token.
        pixels: of the images of padded rows, in the order of the lines.
        once: where rows share response tokens, each of them once, as positions in S, and for all of S the position
            among these; else None.
    """

    ids_BT: Tensor
    positions_BT: Tensor
    packed: PackedRows | None
    from_S: Tensor
    targets_S: Tensor
    last_R: Tensor
    once: tuple[Tensor, Tensor] | None
    pixels: Mapping[str, Tensor] = field(default_factory=dict)


def forward_rows(
    prompts: Iterable[Any],
    responses: Iterable[Any],
    *,
    packed: bool,
    device: torch.device | str = "cpu",
    vocabulary: int | None = None,
    length_max: int | None = None,
    tree: RowTree | None = None,
) -> ForwardRows:
    """Lay out rows for one forward pass. `prompts` and `responses` are integers ``[P]`` and ``[T]`` of each row;
    `tree`: what packed rows share (None: nothing).

    Raises `UsageError` if there are no rows, not as many prompts as responses, an empty prompt (nothing predicts the
    first token), an id outside of the vocabulary, a row of more than `length_max` tokens, or a tree of other rows.
    """
    prompt_rows, response_rows, rows = _checked(prompts, responses, vocabulary, length_max)
    tree = RowTree.apart(len(rows)) if tree is None else tree
    _check_shared(tree, rows)
    lengths_R, shared_R = np.array([len(row) for row in rows]), tree.shared_by_row()
    own_R = lengths_R - shared_R
    order_R = np.lexsort((-own_R, shared_R))
    starts_R = np.empty_like(own_R)
    step_R = own_R[order_R] if packed else np.full_like(own_R, own_R.max())
    starts_R[order_R] = np.cumsum(step_R) - step_R
    paths = _paths(tree, lengths_R, starts_R)
    places_N = np.concatenate([path[shared:] for path, shared in zip(paths, shared_R, strict=True)])
    shape = (1, int(own_R.sum())) if packed else (len(rows), int(own_R.max()))
    ids_BT, positions_BT = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    ids_BT.ravel()[places_N] = np.concatenate([row[shared:] for row, shared in zip(rows, shared_R, strict=True)])
    positions_BT.ravel()[places_N] = _ranges(shared_R, own_R)
    from_S = [path[len(prompt) - 1 : -1] for path, prompt in zip(paths, prompt_rows, strict=True)]
    places_S = [path[len(prompt) :] for path, prompt in zip(paths, prompt_rows, strict=True)]
    return ForwardRows(
        ids_BT=torch.from_numpy(ids_BT).to(device),
        positions_BT=torch.from_numpy(positions_BT).to(device),
        packed=_packed([paths[row] for row in order_R], shared_R[order_R], device) if packed else None,
        from_S=torch.from_numpy(np.concatenate(from_S)).to(device),
        targets_S=torch.from_numpy(np.concatenate(response_rows)).to(device),
        last_R=torch.from_numpy(np.array([path[-1] for path in paths])).to(device),
        once=_once(np.concatenate(places_S), device),
    )


def _once(places_S: Ints, device: torch.device | str) -> tuple[Tensor, Tensor] | None:
    """Return the positions of each place once, and for every position that of its place among these."""
    places_U, first_U, again_S = np.unique(places_S, return_index=True, return_inverse=True)
    if len(places_U) == len(places_S):
        return None
    return torch.from_numpy(first_U).to(device), torch.from_numpy(again_S).to(device)


def _paths(tree: RowTree, lengths_R: Ints, starts_R: Ints) -> list[Ints]:
    """Return the place of each token of each row. starts_R: of the rows' own tokens."""
    paths: list[Ints] = [np.empty(0, np.int64)] * len(lengths_R)
    before = paths[0]
    for row, shared in zip(tree.order, tree.shared, strict=True):
        own = np.arange(starts_R[row], starts_R[row] + lengths_R[row] - shared)
        paths[row] = before = np.concatenate([before[:shared], own])
    return paths


def _packed(paths: Sequence[Ints], shared_R: Ints, device: torch.device | str) -> PackedRows:
    """Split rows with own tokens into buckets: of those that share as many tokens, most own tokens first."""
    kept = [row for row, path in enumerate(paths) if len(path) > shared_R[row]]
    paths, shared_R = [paths[row] for row in kept], shared_R[kept]
    lengths_R = np.array([len(path) for path in paths])
    own_R, buckets, first = lengths_R - shared_R, [], 0
    for row in range(1, len(paths) + 1):
        if row < len(paths) and shared_R[row] == shared_R[first] and own_R[row] >= _FILL_MIN * own_R[first]:
            continue
        buckets.append(_bucket(paths[first:row], int(shared_R[first]), own_R[first:row], device))
        first = row
    own = _spans(own_R, device)
    if not shared_R.any():
        return PackedRows(tuple(buckets), own, own, None)
    places_K = torch.from_numpy(np.concatenate(paths)).to(device)
    return PackedRows(tuple(buckets), own, _spans(lengths_R, device), places_K)


def _spans(lengths_R: Ints, device: torch.device | str) -> Spans:
    offsets_R1 = np.concatenate([[0], lengths_R.cumsum()])
    return Spans(torch.from_numpy(offsets_R1.astype(np.int32)).to(device), int(lengths_R.max()))


def _bucket(paths: Sequence[Ints], shared: int, own_R: Ints, device: torch.device | str) -> Bucket:
    def placed(places: Ints) -> Tensor:
        return torch.from_numpy(places.ravel()).to(device)

    rows, width, start, tokens = len(own_R), int(own_R[0]), int(paths[0][shared]), int(own_R.sum())
    shared_RC = placed(np.stack([path[:shared] for path in paths])) if shared else None
    if tokens == rows * width:
        return Bucket(start, tokens, rows, width, None, None, shared_RC)
    columns_T = np.arange(width)
    starts_R = start + np.cumsum(own_R) - own_R
    places_RT = starts_R[:, None] + np.minimum(columns_T, own_R[:, None] - 1)
    real_S = np.flatnonzero(columns_T < own_R[:, None])
    return Bucket(start, tokens, rows, width, placed(places_RT), placed(real_S), shared_RC)


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


def _check_shared(tree: RowTree, rows: Sequence[Ints]) -> None:
    if len(tree.order) != len(rows):
        raise UsageError(f"a tree of {len(tree.order)} rows for {len(rows)} rows; give the tree of these rows")
    before = rows[0][:0]
    for row, shared in zip(tree.order.tolist(), tree.shared.tolist(), strict=True):
        equal = min(shared, len(rows[row]), len(before))
        differing = np.flatnonzero(rows[row][:equal] != before[:equal])
        if equal < shared or len(differing):
            at = int(differing[0]) if len(differing) else equal
            raise UsageError(
                f"row {row} shares {shared} tokens with another row by its tree, and differs from it at token {at}; "
                "declare only tokens that are the same"
            )
        before = rows[row]


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
