"""Scoring by transformers: the conformance kit, packed and padded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.engines.conform import against, conform
from transferqueue.adapters.scoring import (
    is_packed,
    response_logprobs,
    response_values,
    rewards_of,
    teacher_top_k,
)
from transferqueue.testing.conformance.scorers import SCORER_CHECKS, Scorer, ScorerSubject

SIZE = 24
PAD = 0


class TransformersScorer:
    """A language model, a critic and a classifier of transformers."""

    def __init__(self, policy: Any, critic: Any, classifier: Any) -> None:
        self.policy, self.critic, self.classifier = policy, critic, classifier

    def logprobs(self, prompts: Any, responses: Any, *, temperature: float = 1.0) -> Any:
        return response_logprobs(self.policy, prompts, responses, temperature=temperature)

    def top_k(self, prompts: Any, responses: Any, *, k: int) -> tuple[Any, Any]:
        return teacher_top_k(self.policy, prompts, responses, k=k)

    def values(self, prompts: Any, responses: Any) -> Any:
        return response_values(self.critic, prompts, responses)

    def rewards(self, prompts: Any, responses: Any) -> Any:
        return rewards_of(self.classifier, prompts, responses)

    def parameters(self) -> Sequence[Any]:
        return list(self.policy.parameters())


class Qwen3Subject:
    """Qwen3, whose rows are packed."""

    vocabulary, pad_id = SIZE, PAD
    packed = True
    architecture = "Qwen3"

    def config(self, **changes: Any) -> Any:
        sizes = {
            "vocab_size": SIZE,
            "hidden_size": SIZE,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "max_position_embeddings": 64,
            "initializer_range": 0.3,
            "pad_token_id": PAD,
            "eos_token_id": PAD,
            "num_labels": 1,
            "classifier_dropout": 0.0,
        }
        return getattr(transformers, f"{self.architecture}Config")(**{**sizes, **changes})

    def model(self, task: str, **changes: Any) -> Any:
        torch.manual_seed(3)
        model = getattr(transformers, f"{self.architecture}For{task}")(self.config(**changes)).eval()
        assert is_packed(model) == self.packed
        return model

    def open(self) -> Scorer:
        return TransformersScorer(
            self.model("CausalLM"), self.model("TokenClassification"), self.model("SequenceClassification")
        )

    def successor(self) -> Scorer:
        """Every layer adds nothing; the output layer turns the token's own embedding into the next token."""
        model = self.model("CausalLM", tie_word_embeddings=False)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    parameter.zero_()
            model.get_input_embeddings().weight.copy_(torch.eye(SIZE))
            model.get_output_embeddings().weight.copy_(5 * torch.eye(SIZE).roll(1, 0))
        return TransformersScorer(model, None, None)


class Gemma2Subject(Qwen3Subject):
    """Gemma 2, whose capped attention cannot be packed."""

    packed = False
    architecture = "Gemma2"

    def config(self, **changes: Any) -> Any:
        return super().config(**{"query_pre_attn_scalar": 8, "final_logit_softcapping": None, **changes})

    def model(self, task: str, **changes: Any) -> Any:
        model = super().model(task, **changes)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                torch.nn.init.zeros_(parameter)  # of Gemma: a scale of 1
        return model


@pytest.mark.parametrize("check", SCORER_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("subject", [Qwen3Subject(), Gemma2Subject()], ids=["packed", "padded"])
def test_transformers_scores(check: Callable[[ScorerSubject], None], subject: Qwen3Subject) -> None:
    name = "scoring" if subject.packed else "scoring-padded"
    conform("scorer", name, against("transformers", "torch"), check, subject)
