from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from transferqueue.workflows.grpo.learning.settings import LearningSettings
from transferqueue.workflows.grpo.model.llama import from_llama, save_llama, to_llama
from transferqueue.workflows.grpo.model.transformer import Transformer


def small() -> Transformer:
    model = Transformer(replace(LearningSettings(), width=64, heads=2, hidden=96).model_shape())
    model.initialize(torch.Generator().manual_seed(3))
    return model.eval()


def test_there_and_back_is_exact() -> None:
    model = small()
    weights = model.state_dict()
    back = from_llama(to_llama(weights, model.shape), model.shape)
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weights[name]) for name in weights)


def test_the_llama_is_the_same_function(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="make test-engines installs it")
    model = small()
    llama = transformers.AutoModelForCausalLM.from_pretrained(save_llama(model, tmp_path), dtype=torch.float32)
    tokens_BT = torch.randint(4, 90, (3, 17), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(llama(input_ids=tokens_BT).logits, model(tokens_BT), atol=2e-5, rtol=1e-4)
