"""A language model small enough to run anywhere, with two sets of weights and the truth about both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from transferqueue.adapters.engines.sampling import log_distribution
from transferqueue.adapters.protocols import Generator, Ids, Logprobs, Sampling, WeightSource
from transferqueue.adapters.weights import ModuleWeights, TensorWeights

transformers = pytest.importorskip("transformers", reason="make test-engines installs it")

VOCABULARY = 64


def config() -> Any:
    return transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.25,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )


def model(which: int) -> Any:
    """The model with weights 0 or 1, in float32."""
    torch.manual_seed(which)
    return transformers.AutoModelForCausalLM.from_config(config(), dtype=torch.float32).eval()


def save(directory: Path, which: int = 0) -> Path:
    """The model as a directory that engines load."""
    model(which).save_pretrained(directory)
    return directory


def tokenizer() -> Any:
    """Words w2 … w63, one token each; a conversation is what was said, in order."""
    import tokenizers

    words = {"<pad>": 0, "<eos>": 1, **{f"w{number}": number for number in range(2, VOCABULARY)}}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    found = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>")
    found.chat_template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    return found


class TinySubject:
    """All of a `GeneratorSubject` but `open`."""

    stop_ids = (1, 2, 3, 4)

    def __init__(self) -> None:
        self.models = {which: model(which) for which in (0, 1)}

    def open(self) -> Generator:
        raise NotImplementedError

    def prompts(self) -> Sequence[Ids]:
        draws = np.random.default_rng(7)
        return [draws.integers(5, VOCABULARY, size=n).astype(np.int32) for n in (3, 9, 5, 12, 4, 7, 6, 10)]

    def weights(self, which: int) -> WeightSource:
        return ModuleWeights(self.models[which])

    def misfit(self) -> WeightSource:
        tensors = dict(self.models[1].state_dict())
        name = next(iter(tensors))
        return TensorWeights(tensors | {name: torch.zeros(3, 3)})

    @torch.no_grad()
    def logprobs(self, which: int, context: Ids, ids: Ids, sampling: Sampling) -> Logprobs:
        tokens_1T = torch.from_numpy(np.concatenate([context, ids])).long()[None]
        logits_TV = self.models[which](input_ids=tokens_1T).logits[0, len(context) - 1 : -1]
        logprobs_TV = log_distribution(logits_TV, sampling)
        found: Logprobs = logprobs_TV.gather(-1, torch.from_numpy(ids).long()[:, None])[:, 0].numpy()
        return found
