"""Scores of rows by models of transformers: log-probs, values, rewards, most probable tokens; packed, with a gradient or without."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transferqueue.lazy import lazy_names

if TYPE_CHECKING:
    from transferqueue.adapters.scoring.load import load_causal_lm, load_classifier, load_value_model
    from transferqueue.adapters.scoring.logprobs import ResponseScores, response_logprobs, response_scores
    from transferqueue.adapters.scoring.micro_batches import micro_batches
    from transferqueue.adapters.scoring.plan import is_packed, plan_for

__all__ = [
    "ResponseScores",
    "is_packed",
    "load_causal_lm",
    "load_classifier",
    "load_value_model",
    "micro_batches",
    "plan_for",
    "response_logprobs",
    "response_scores",
]

__getattr__ = lazy_names(
    __name__,
    {
        "load": "load_causal_lm load_classifier load_value_model",
        "logprobs": "ResponseScores response_logprobs response_scores",
        "micro_batches": "micro_batches",
        "plan": "is_packed plan_for",
    },
)
