"""The built-in model and its tokenizer: the same function as a Llama, cached or not, alone or with others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", exc_type=ImportError)
pytest.importorskip("safetensors")
import torch

from transferqueue.adapters.builtin import is_builtin
from transferqueue.adapters.builtin.model import BuiltinModel, ModelShape
from transferqueue.adapters.builtin.tokenizer import (
    ANSWER_ID,
    BOS_ID,
    EOS_ID,
    MISPLACED,
    PAD_ID,
    VOCABULARY_SIZE,
    CharacterTokenizer,
)
from transferqueue.adapters.engines.transformers import TransformersGenerator
from transferqueue.adapters.protocols import Prompt, Sampling
from transferqueue.adapters.scoring import is_packed, load_causal_lm, response_logprobs
from transferqueue.errors import NotFound, UsageError

SHAPE = ModelShape(hidden_size=32, intermediate_size=48, num_attention_heads=4)
PROMPTS = [[1, 22, 16, 23, 3], [1, 30, 3], [1, 22, 16, 23, 3], [1, 30, 3]]
RESPONSES = [[40, 41, 2], [42, 2], [43, 44, 45, 2], [50]]


@pytest.fixture(scope="module")
def model() -> BuiltinModel:
    return BuiltinModel(SHAPE, seed=3).eval()


def alone(model: BuiltinModel, prompt: list[int], response: list[int]) -> list[float]:
    """Log-probs of a response in a row of its own."""
    ids = torch.tensor([[*prompt, *response]])
    with torch.no_grad():
        logprobs = model(ids).logits.log_softmax(-1)[0, len(prompt) - 1 : -1]
    return logprobs.gather(1, torch.tensor(response)[:, None])[:, 0].tolist()


def test_rows_that_share_their_prompts_get_the_numbers_of_each_alone(model: BuiltinModel) -> None:
    assert is_packed(model)
    found = response_logprobs(model, PROMPTS, RESPONSES).tolist()
    wanted = [each for pair in zip(PROMPTS, RESPONSES, strict=True) for each in alone(model, *pair)]
    assert found == pytest.approx(wanted, abs=1e-5)


def test_drawn_tokens_have_the_logprobs_of_a_full_forward_pass(model: BuiltinModel) -> None:
    engine = TransformersGenerator(model, version=0)
    sampling = Sampling(tokens_max=5, temperature=1.0, stop_ids=(EOS_ID,), seed=1)
    drawn = list(engine.generate([Prompt.of(prompt, samples=4) for prompt in PROMPTS[:2]], sampling))
    engine.close()
    assert len(drawn) == 8
    for completion in drawn:
        wanted = alone(model, PROMPTS[completion.prompt], completion.ids.tolist())
        assert completion.logprobs.tolist() == pytest.approx(wanted, abs=1e-5)


def test_a_directory_comes_back_and_says_whose_it_is(model: BuiltinModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    loaded = load_causal_lm(tmp_path, dtype="float32")
    assert isinstance(loaded, BuiltinModel)
    assert is_builtin(tmp_path)
    assert not is_builtin(tmp_path / "none")
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in model.state_dict().items())


def test_it_is_a_llama(model: BuiltinModel, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model.save_pretrained(tmp_path)
    llama = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(llama).__name__ == "LlamaForCausalLM"
    assert dict(llama.named_parameters()).keys() == dict(model.named_parameters()).keys()
    ids = torch.tensor([PROMPTS[0]])
    assert torch.allclose(llama(ids).logits, model(ids).logits, atol=1e-5)


def test_what_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="hidden_size=30 is not a multiple"):
        ModelShape(hidden_size=30, num_attention_heads=4)
    with pytest.raises(NotFound, match="make one with `transferqueue demo`"):
        BuiltinModel.from_pretrained(tmp_path)
    BuiltinModel(SHAPE).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((tmp_path / "config.json").read_text().replace(": 48", ": 40"))
    with pytest.raises(UsageError, match="weights of another shape"):
        BuiltinModel.from_pretrained(tmp_path)


@pytest.mark.slow
def test_nothing_of_hugging_face_is_loaded_but_the_files_of_weights() -> None:
    modules = "builtin.model, transferqueue.adapters.scoring.load, transferqueue.adapters.engines.transformers"
    code = f"import sys, transferqueue.adapters.{modules}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"transformers", "tokenizers", "huggingface_hub"} & set(loaded)


# ---------------------------------------------------------------- tokenizer

TOKENIZER = CharacterTokenizer()


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


@given(st.text(alphabet="".join(map(chr, range(32, 127))) + "\n"))
def test_text_comes_back_from_its_tokens(text: str) -> None:
    assert TOKENIZER.decode(ids_of(text)) == text
    assert TOKENIZER([text])["input_ids"] == [[BOS_ID, *ids_of(text), ANSWER_ID]]
    assert all(ANSWER_ID < token < VOCABULARY_SIZE for token in ids_of(text))


def test_decoding_stops_at_the_end_token_and_does_not_repair() -> None:
    one, two = ids_of("12")
    assert TOKENIZER.decode([one, EOS_ID, two]) == "1"
    assert TOKENIZER.decode([one, PAD_ID, BOS_ID, ANSWER_ID, two]) == f"1{3 * MISPLACED}2"
    assert TOKENIZER.decode(np.empty(0, np.int32)) == ""


def test_what_is_not_in_the_vocabulary_is_refused() -> None:
    with pytest.raises(UsageError, match="has 'é'; the built-in model knows printable ASCII"):
        ids_of("café")
    for token in (-1, VOCABULARY_SIZE):
        with pytest.raises(UsageError, match=f"token {token} is outside the vocabulary"):
            TOKENIZER.decode([token])
    with pytest.raises(UsageError, match="no chat template"):
        TOKENIZER.apply_chat_template([{"role": "user", "content": "1"}])
