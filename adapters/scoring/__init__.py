"""Scores of rows by models of transformers: log-probs, values, rewards, most probable tokens; packed, with a gradient
or without. Tokens that rows share are computed once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transferqueue.lazy import lazy_names

if TYPE_CHECKING:
    from transferqueue.adapters.scoring.batching import micro_batches
    from transferqueue.adapters.scoring.load import (
        checkpoint_gradients,
        load_causal_lm,
        load_classifier,
        load_value_model,
    )
    from transferqueue.adapters.scoring.logprobs import (
        ResponseScores,
        response_logprobs,
        response_scores,
        teacher_top_k,
    )
    from transferqueue.adapters.scoring.lora import add_lora, has_lora, load_adapter, published_weights, save_adapter
    from transferqueue.adapters.scoring.plan import is_packed, plan_for
    from transferqueue.adapters.scoring.stages import LogProbs, RewardModel, TeacherTopK, Values
    from transferqueue.adapters.scoring.trees import RowTree
    from transferqueue.adapters.scoring.values import response_values, rewards_of

__all__ = [
    "LogProbs",
    "ResponseScores",
    "RewardModel",
    "RowTree",
    "TeacherTopK",
    "Values",
    "add_lora",
    "checkpoint_gradients",
    "has_lora",
    "is_packed",
    "load_adapter",
    "load_causal_lm",
    "load_classifier",
    "load_value_model",
    "micro_batches",
    "plan_for",
    "published_weights",
    "response_logprobs",
    "response_scores",
    "response_values",
    "rewards_of",
    "save_adapter",
    "teacher_top_k",
]

__getattr__ = lazy_names(
    __name__,
    {
        "lora": "add_lora has_lora load_adapter published_weights save_adapter",
        "load": "checkpoint_gradients load_causal_lm load_classifier load_value_model",
        "logprobs": "ResponseScores response_logprobs response_scores teacher_top_k",
        "batching": "micro_batches",
        "plan": "is_packed plan_for",
        "stages": "LogProbs RewardModel TeacherTopK Values",
        "trees": "RowTree",
        "values": "response_values rewards_of",
    },
)
