"""Attention inside each row of a packed batch: an attention function of transformers, registered at import as `NAME`.

Tokens of all rows pass every other layer together; here each row attends to itself alone, causally. Rows of about one
length share a call of `scaled_dot_product_attention`, padded on the right: causal attention never looks there, so no
mask is needed, and the work is the sum of squares of the lengths, not the square of the sum. On a GPU with 16-bit
numbers one variable-length kernel takes all rows. A call without rows (generation, padded batches) is transformers' own
``sdpa``.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from transferqueue.adapters.protocols import Unsupported
from transferqueue.adapters.scoring.forward_rows import Bucket, PackedBuckets

NAME: Final = "transferqueue_rows"
ARGUMENT: Final = "packed_rows"
"""Keyword of a model's forward that names the rows; models pass it on to their attention."""
_HEAD_DIM_MAX: Final = 256
"""Of the variable-length kernel."""
_REFUSED: Final = ("softcap", "s_aux", "position_bias", "cache", "head_mask")
"""Arguments of other attentions that this does not compute."""


def attend_in_rows(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers asks: query ``[1, heads, N, D]`` → ``[1, N, heads, D]``. Raises `Unsupported` for what
    packing cannot do."""
    rows: PackedBuckets | None = others.pop(ARGUMENT, None)
    if rows is None:
        output: Tensor = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **others
        )[0]
        return output, None
    refused = [name for name in _REFUSED if others.get(name) is not None]
    if refused or dropout or not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise Unsupported(f"attention with {refused or 'dropout or without causality'} is not computed in packed rows")
    device = query.device.type
    if torch.is_autocast_enabled(device):  # a norm of float32 weights leaves queries wider than values
        query, key, value = (part.to(torch.get_autocast_dtype(device)) for part in (query, key, value))
    q_NHD, k_NGD, v_NGD = (part[0].transpose(0, 1) for part in (query, key, value))
    if _has_kernel(query):
        return _one_kernel(q_NHD, k_NGD, v_NGD, rows, scaling, sliding_window)[None], None
    parts = [_in_bucket(q_NHD, k_NGD, v_NGD, bucket, scaling, sliding_window) for bucket in rows.buckets]
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[None], None


def _has_kernel(query: Tensor) -> bool:
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] <= _HEAD_DIM_MAX


def _one_kernel(
    q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, rows: PackedBuckets, scaling: float | None, window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    output = varlen_attn(
        q_NHD,
        k_NGD,
        v_NGD,
        rows.offsets_R1,
        rows.offsets_R1,
        rows.longest,
        rows.longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=q_NHD.shape[1] != k_NGD.shape[1],
    )
    return output if isinstance(output, Tensor) else output[0]


def _in_bucket(
    q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, bucket: Bucket, scaling: float | None, window: int | None
) -> Tensor:
    """Attend in the rows of one bucket: ``[tokens of the bucket, heads, D]``."""
    q_RHTD, k_RGTD, v_RGTD = (_rectangle(part, bucket) for part in (q_NHD, k_NGD, v_NGD))
    width = bucket.width
    mask_TT = _window_mask(width, window, q_NHD.device) if window is not None and window < width else None
    output_RHTD = scaled_dot_product_attention(
        q_RHTD,
        k_RGTD,
        v_RGTD,
        attn_mask=mask_TT,
        is_causal=mask_TT is None,
        scale=scaling,
        enable_gqa=q_NHD.shape[1] != k_NGD.shape[1],
    )
    output_SHD = output_RHTD.transpose(1, 2).reshape(-1, *q_NHD.shape[1:])
    return output_SHD if bucket.real is None else output_SHD.index_select(0, bucket.real)


def _rectangle(part_NHD: Tensor, bucket: Bucket) -> Tensor:
    """Return the bucket's rows as ``[rows, heads, width, D]``."""
    if bucket.places is None:
        flat = part_NHD[bucket.start : bucket.start + bucket.tokens]
    else:
        flat = part_NHD.index_select(0, bucket.places)
    return flat.reshape(bucket.rows, bucket.width, *part_NHD.shape[1:]).transpose(1, 2)


def _window_mask(width: int, window: int, device: torch.device) -> Tensor:
    """Return whether token i may look at token j: bool ``[width, width]``, i - window < j <= i."""
    back_TT = torch.arange(width, device=device)[:, None] - torch.arange(width, device=device)
    return (back_TT >= 0) & (back_TT < window)


AttentionInterface.register(NAME, attend_in_rows)
AttentionMaskInterface.register(NAME, sdpa_mask)
