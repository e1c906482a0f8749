"""Numbers that a model gives to rows: values of a critic, a number for each response token, and rewards of a
classifier, one for each row."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from transferqueue.adapters.protocols import Unsupported
from transferqueue.adapters.scoring.plan import inputs, lay_out, unwrapped
from transferqueue.errors import UsageError


def response_values(model: nn.Module, prompts: Iterable[Any], responses: Iterable[Any]) -> Tensor:
    """Return the value before each response token: float32 ``[N]``, rows one after the other.

    The value of token t reads the prompt and the tokens before t: it is the expected return of the tokens that are
    still to be drawn. It has a gradient unless gradients are off. One forward pass for all rows.

    Args:
        model: a token classifier with one label (`load_value_model`).
        prompts: integers ``[P]`` of each row.
        responses: integers ``[T]`` of each row.

    Raises:
        UsageError: rows that the model cannot take, or a model of another kind.
    """
    rows = lay_out(model, prompts, responses)
    values_BT1 = model(**inputs(rows)).logits
    if values_BT1.shape != (*rows.ids_BT.shape, 1):
        raise UsageError(
            f"{type(unwrapped(model)).__name__} gives {tuple(values_BT1.shape)} for tokens {tuple(rows.ids_BT.shape)}; "
            "a value model gives one number for each token: load it by load_value_model"
        )
    values_N: Tensor = values_BT1.flatten().index_select(0, rows.from_S).float()
    return values_N


@torch.no_grad()
def rewards_of(model: nn.Module, prompts: Iterable[Any], responses: Iterable[Any]) -> Tensor:
    """Return the score of each row: float32 ``[R]``, without a gradient.

    The score is that of the last token that the row has, whatever the padding token is. (Transformers' own forward
    takes the last token that is not padding: an end token that pads too is overlooked.) One forward pass for all rows.

    Args:
        model: a sequence classifier with one label over a causal model (`load_classifier`).
        prompts: integers ``[P]`` of each row.
        responses: integers ``[T]`` of each row.

    Raises:
        UsageError: rows that the model cannot take.
        Unsupported: a classifier without a layer ``score``.
    """
    inner = unwrapped(model)
    head = getattr(inner, "score", None)
    if not isinstance(head, nn.Module):
        raise Unsupported(
            f"{type(inner).__name__} has no layer `score`; give a sequence classifier over a causal model"
        )
    rows = lay_out(model, prompts, responses)
    hidden_BTH = inner.base_model(**inputs(rows)).last_hidden_state
    last_RH = hidden_BTH.reshape(-1, hidden_BTH.shape[-1]).index_select(0, rows.last_R)
    scores_R: Tensor = head(last_RH)[:, 0].float()
    return scores_R
