"""Scores of rows by models of transformers: log-probs, values, rewards, most probable tokens; packed, with a gradient or without."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transferqueue.lazy import lazy_names

if TYPE_CHECKING:
    from transferqueue.adapters.scoring.batching import micro_batches
    from transferqueue.adapters.scoring.load import load_causal_lm, load_classifier, load_value_model
    from transferqueue.adapters.scoring.logprobs import (
        ResponseScores,
        response_logprobs,
        response_scores,
        teacher_top_k,
    )
    from transferqueue.adapters.scoring.plan import is_packed, plan_for
    from transferqueue.adapters.scoring.stages import LogProbs, RewardModel, TeacherTopK, Values
    from transferqueue.adapters.scoring.values import response_values, rewards_of

__all__ = [
    "LogProbs",
    "ResponseScores",
    "RewardModel",
    "TeacherTopK",
    "Values",
    "is_packed",
    "load_causal_lm",
    "load_classifier",
    "load_value_model",
    "micro_batches",
    "plan_for",
    "response_logprobs",
    "response_scores",
    "response_values",
    "rewards_of",
    "teacher_top_k",
]

__getattr__ = lazy_names(
    __name__,
    {
        "load": "load_causal_lm load_classifier load_value_model",
        "logprobs": "ResponseScores response_logprobs response_scores teacher_top_k",
        "batching": "micro_batches",
        "plan": "is_packed plan_for",
        "stages": "LogProbs RewardModel TeacherTopK Values",
        "values": "response_values rewards_of",
    },
)
