"""Attention inside each row of a packed batch.

Tokens of all rows pass every other layer together; here each token attends causally to its own row alone. Rows with
about as many own tokens share a call of `scaled_dot_product_attention`, padded on the right: causal attention never
looks there, and the work is the sum of squares of the lengths, not the square of the sum. A row that shares tokens has
queries for its own ones only, which attend to keys and values of its whole path. On a GPU with 16-bit numbers one
variable-length kernel takes all rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

ARGUMENT: Final = "packed_rows"
"""Keyword of a model's forward that names the rows; models pass it on to their attention."""
_HEAD_DIM_MAX: Final = 256
"""Of the variable-length kernel."""


@dataclass(frozen=True)
class Bucket:
    """Neighbouring rows with about as many own tokens, after as many shared ones, as a rectangle.

    Args:
        start: the place of their own tokens in the flat batch.
        tokens: their number there.
        rows: of the rectangle.
        width: of the rectangle.
        places: the token in each field of the rectangle, int64; None: all are real, in order.
        real: fields that are no padding, int64; None: all.
        shared: the places of the tokens before, row by row, int64; None: there are none.
    """

    start: int
    tokens: int
    rows: int
    width: int
    places: Tensor | None
    real: Tensor | None
    shared: Tensor | None


@dataclass(frozen=True)
class Spans:
    """Rows one after the other. `offsets_R1`: int32, the start of each row, and the end. `longest`: tokens of the
    longest."""

    offsets_R1: Tensor
    longest: int


@dataclass(frozen=True)
class PackedRows:
    """The rows of a packed batch, for attention.

    Args:
        buckets: all of them.
        own: the rows' own tokens, as they lie in the batch.
        paths: all tokens of each row; `own` if rows share none.
        places_K: the place of each token of `paths`, int64; None if rows share none.
        masks: of the buckets' attention, made in the first layer and kept for the others.
    """

    buckets: tuple[Bucket, ...]
    own: Spans
    paths: Spans
    places_K: Tensor | None
    masks: dict[tuple[int, int, int | None, torch.dtype], Tensor | None] = field(default_factory=dict)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float | None = None,
        window: int | None = None,
    ) -> Tensor:
        """Attend inside each row: query ``[1, heads, N, D]`` → ``[1, N, heads, D]``. scaling: of the scores (None: by
        D). window: a token sees this many, itself included (None: all before it)."""
        q_NHD, k_NGD, v_NGD = (part[0].transpose(0, 1) for part in (query, key, value))
        if _has_kernel(query):
            return _one_kernel(q_NHD, k_NGD, v_NGD, self, scaling, window)[None]
        parts = [self._in_bucket(q_NHD, k_NGD, v_NGD, bucket, scaling, window) for bucket in self.buckets]
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[None]

    def _in_bucket(
        self, q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, bucket: Bucket, scaling: float | None, window: int | None
    ) -> Tensor:
        """Attend in the rows of one bucket: ``[own tokens of the bucket, heads, D]``."""
        q_RHTD, k_RGTD, v_RGTD = (_rectangle(part, bucket) for part in (q_NHD, k_NGD, v_NGD))
        if bucket.shared is not None:
            k_RGTD, v_RGTD = (
                torch.cat([_by_row(part.index_select(0, bucket.shared), bucket.rows), own], dim=2)
                for part, own in ((k_NGD, k_RGTD), (v_NGD, v_RGTD))
            )
        kind = (bucket.width, k_RGTD.shape[2], window, q_NHD.dtype)
        if kind not in self.masks:
            self.masks[kind] = _mask(*kind, q_NHD.device)
        mask_TK = self.masks[kind]
        output_RHTD = scaled_dot_product_attention(
            q_RHTD,
            k_RGTD,
            v_RGTD,
            attn_mask=mask_TK,
            is_causal=mask_TK is None,
            scale=scaling,
            enable_gqa=q_NHD.shape[1] != k_NGD.shape[1],
        )
        output_SHD = output_RHTD.transpose(1, 2).reshape(-1, *q_NHD.shape[1:])
        return output_SHD if bucket.real is None else output_SHD.index_select(0, bucket.real)


def _has_kernel(query: Tensor) -> bool:
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] <= _HEAD_DIM_MAX


def _one_kernel(
    q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, rows: PackedRows, scaling: float | None, window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    if rows.places_K is not None:
        k_NGD, v_NGD = (part.index_select(0, rows.places_K) for part in (k_NGD, v_NGD))
    output = varlen_attn(  # with fewer queries than keys, the last query stands at the last key
        q_NHD,
        k_NGD,
        v_NGD,
        rows.own.offsets_R1,
        rows.paths.offsets_R1,
        rows.own.longest,
        rows.paths.longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=q_NHD.shape[1] != k_NGD.shape[1],
    )
    return output if isinstance(output, Tensor) else output[0]


def _rectangle(part_NHD: Tensor, bucket: Bucket) -> Tensor:
    """Return the own tokens of the bucket's rows as ``[rows, heads, width, D]``."""
    if bucket.places is None:
        flat = part_NHD[bucket.start : bucket.start + bucket.tokens]
    else:
        flat = part_NHD.index_select(0, bucket.places)
    return _by_row(flat, bucket.rows)


def _by_row(flat_SHD: Tensor, rows: int) -> Tensor:
    return flat_SHD.reshape(rows, -1, *flat_SHD.shape[1:]).transpose(1, 2)


def _mask(queries: int, keys: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """Return what is added to the scores of each query, ``[queries, keys]``: 0 for the last `window` positions up to
    its own, else minus infinity. The last query stands at the last key. None: as many queries as keys, and no window.
    """
    if queries == keys and (window is None or window >= keys):
        return None
    back_TK = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
    sees_TK = (back_TK >= 0) & (back_TK < (window or keys))
    return torch.zeros(queries, keys, dtype=dtype, device=device).masked_fill_(~sees_TK, -torch.inf)
