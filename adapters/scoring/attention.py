"""Attention inside each row of a packed batch (`PackedRows`), as an attention function of transformers, registered at
import as `NAME`. A call without rows (generation, padded batches) is transformers' own ``sdpa``."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from transferqueue.adapters.protocols import Unsupported
from transferqueue.adapters.scoring.row_attention import ARGUMENT, PackedRows

NAME: Final = "transferqueue_rows"
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
    rows: PackedRows | None = others.pop(ARGUMENT, None)
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
    return rows.attend(query, key, value, scaling=scaling, window=sliding_window), None


AttentionInterface.register(NAME, attend_in_rows)
AttentionMaskInterface.register(NAME, sdpa_mask)
