"""Log-probs of rows: packed as alone, whatever the model; the same gradient however rows are grouped; refusals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transferqueue.adapters.protocols import Unsupported  # noqa: E402
from transferqueue.adapters.scoring import (  # noqa: E402
    is_packed,
    load_causal_lm,
    load_classifier,
    load_value_model,
    logprobs,
    micro_batches,
    plan_for,
    response_logprobs,
    response_scores,
)
from transferqueue.errors import NotFound, UsageError  # noqa: E402

VOCABULARY = 48
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def qwen3(**changes: Any) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(transformers.Qwen3Config(**{**SIZES, **changes})).eval()


def rows(count: int = 9, seed: int = 0) -> tuple[list[Any], list[Any]]:
    draws = np.random.default_rng(seed)
    prompts = [draws.integers(0, VOCABULARY, size) for size in draws.integers(1, 12, count)]
    responses = [draws.integers(0, VOCABULARY, size) for size in draws.integers(0, 20, count)]
    return prompts, responses


def alone(model: Any, prompts: Sequence[Any], responses: Sequence[Any], temperature: float = 1.0) -> Any:
    """Each row by itself, by the model's own forward and torch's log-softmax."""
    parts = []
    for prompt, response in zip(prompts, responses, strict=True):
        ids_1T = torch.from_numpy(np.concatenate([prompt, response]))[None]
        logits_TV = model(input_ids=ids_1T, use_cache=False).logits[0, len(prompt) - 1 : -1].float() / temperature
        wanted_T1 = torch.from_numpy(response)[:, None]
        parts.append(logits_TV[: len(response)].log_softmax(-1).gather(-1, wanted_T1)[:, 0])
    return torch.cat(parts)


def gradients(model: Any, loss: Any) -> list[Any]:
    model.zero_grad()
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


MODELS = {
    "qwen3": (lambda: qwen3(), True, True),
    "qwen3 untied": (lambda: qwen3(tie_word_embeddings=False), True, True),
    "sliding window": (
        lambda: qwen3(use_sliding_window=True, sliding_window=4, max_window_layers=0, layer_types=None),
        True,
        True,
    ),
    "absolute positions": (
        lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64)
        ),
        True,
        True,
    ),
    "scaled logits": (
        lambda: transformers.GraniteForCausalLM(
            transformers.GraniteConfig(**{k: v for k, v in SIZES.items() if k != "head_dim"}, logits_scaling=3.0)
        ),
        True,
        False,
    ),
    "capped attention": (
        lambda: transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SIZES, query_pre_attn_scalar=8)),
        False,
        False,
    ),
    "attention sinks": (
        lambda: transformers.GptOssForCausalLM(
            transformers.GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=8)
        ),
        False,
        True,
    ),
    "state space": (
        lambda: transformers.MambaForCausalLM(
            transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, state_size=4, num_hidden_layers=2)
        ),
        False,
        True,
    ),
    "biases of distance": (
        lambda: transformers.BloomForCausalLM(
            transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4)
        ),
        False,
        True,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_rows_together_are_as_rows_alone_in_every_kind_of_model(name: str) -> None:
    make, packed, own_head = MODELS[name]
    torch.manual_seed(1)
    model = make().eval()
    plan = plan_for(model)
    assert (plan.packed, plan.own_head) == (packed, own_head), plan.reason
    assert packed or plan.reason
    prompts, responses = rows()
    with torch.no_grad():
        found = response_logprobs(model, prompts, responses, temperature=0.6)
        torch.testing.assert_close(found, alone(model, prompts, responses, 0.6), rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["qwen3", "scaled logits", "state space"])
def test_the_gradient_does_not_depend_on_how_rows_are_grouped(name: str) -> None:
    torch.manual_seed(1)
    model = MODELS[name][0]().eval()
    prompts, responses = rows(8)
    weights = [torch.randn(len(response)) for response in responses]

    def sum_of(at: Sequence[int]) -> Any:
        found = response_logprobs(model, [prompts[row] for row in at], [responses[row] for row in at])
        return (found * torch.cat([weights[row] for row in at])).sum()

    wanted = gradients(model, (alone(model, prompts, responses) * torch.cat(weights)).sum())
    for groups in ([range(8)], [[5, 1, 0], [7, 2], [3, 4, 6]], [[row] for row in range(8)]):
        found = gradients(model, sum(sum_of(group) for group in groups))
        for one, other in zip(wanted, found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)


def test_chunks_and_recomputation_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (prompts, responses) = qwen3(), rows()
    whole = response_scores(model, prompts, responses, temperature=0.7, entropy=True, top_k=3)
    wanted = gradients(model, (whole.logprobs_N + whole.entropy_N).sum())
    monkeypatch.setitem(logprobs._LOGITS_MAX, "cpu", 7 * VOCABULARY)
    split = response_scores(model, prompts, responses, temperature=0.7, entropy=True, top_k=3)
    found = gradients(model, (split.logprobs_N + split.entropy_N).sum())
    for one, other in zip(wanted, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert torch.equal(whole.top_ids_NK, split.top_ids_NK)
    torch.testing.assert_close(whole.top_logprobs_NK, split.top_logprobs_NK)


def test_what_is_asked_of_the_same_logits_agrees() -> None:
    model, (prompts, responses) = qwen3(), rows()
    with torch.no_grad():
        scores = response_scores(model, prompts, responses, entropy=True, top_k=VOCABULARY)
        again = response_scores(
            model, prompts, responses, at_ids=torch.split(scores.top_ids_NK, [len(each) for each in responses])
        )
    torch.testing.assert_close(scores.top_logprobs_NK.exp().sum(-1), torch.ones(len(scores.logprobs_N)))
    torch.testing.assert_close(scores.top_logprobs_NK, again.logprobs_NK)
    own = scores.top_ids_NK == torch.from_numpy(np.concatenate(responses))[:, None]
    torch.testing.assert_close(scores.top_logprobs_NK[own], scores.logprobs_N)
    entropy = -(scores.top_logprobs_NK.exp() * scores.top_logprobs_NK).sum(-1)
    torch.testing.assert_close(entropy, scores.entropy_N, rtol=1e-4, atol=1e-5)
    assert scores.logprobs_NK is None


def test_a_model_generates_as_before_after_it_was_scored() -> None:
    """Attention in rows is for packed calls only: a padded batch with a mask is attended to as always."""
    ids_BT = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]])
    mask_BT = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    model = qwen3()
    before = model(input_ids=ids_BT, attention_mask=mask_BT).logits[:, -1]
    response_logprobs(model, [[5, 6]], [[7]])
    torch.testing.assert_close(model(input_ids=ids_BT, attention_mask=mask_BT).logits[:, -1], before)


def test_gradient_checkpointing_gives_the_same_gradient() -> None:
    model, (prompts, responses) = qwen3(), rows()
    wanted = gradients(model, response_logprobs(model, prompts, responses).sum())
    model.gradient_checkpointing_enable()
    model.train()
    found = gradients(model, response_logprobs(model, prompts, responses).sum())
    for one, other in zip(wanted, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_16_bit_weights_have_logits_of_32_bits() -> None:
    model, (prompts, responses) = qwen3(), rows()
    with torch.no_grad():
        exact = response_logprobs(model, prompts, responses)
        model.bfloat16()
        wide = response_logprobs(model, prompts, responses)
    assert wide.dtype == torch.float32
    assert (wide - exact).abs().mean() < 0.05


def test_autocast_computes_in_16_bits_and_learns_in_32() -> None:
    model, (prompts, responses) = qwen3(), rows()
    with torch.no_grad():
        exact = response_logprobs(model, prompts, responses)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = response_logprobs(model, prompts, responses)
    assert found.dtype == torch.float32
    assert 1e-5 < (found - exact).abs().mean() < 0.05
    assert {gradient.dtype for gradient in gradients(model, found.sum())} == {torch.float32}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"prompts": []}, "0 prompts and 1 responses"),
        ({"prompts": [[]]}, "the prompt of row 0 is empty"),
        ({"prompts": [[1.5]]}, "token ids of dtype float64"),
        ({"prompts": [[[1]]]}, "shape"),
        ({"responses": [[1, VOCABULARY]]}, "row 0 has token id 48; the model's vocabulary is 0 to 47"),
        ({"responses": [[-1]]}, "row 0 has token id -1"),
        ({"responses": [[1] * 64]}, "row 0 has 65 tokens; the model takes at most 64"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_k": 49}, "top_k=49; give 0 to 48"),
        ({"at_ids": [[[1]]]}, "at_ids of shapes"),
    ],
)
def test_rows_that_a_model_cannot_take_are_refused(change: dict[str, Any], text: str) -> None:
    asked: dict[str, Any] = {"prompts": [[1]], "responses": [[1, 2]], **change}
    with pytest.raises(UsageError, match=text):
        response_scores(qwen3(), **asked)


def test_a_failed_call_leaves_the_output_layer_as_it_was() -> None:
    model = qwen3()
    plan_for(model)
    handle = model.model.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        response_logprobs(model, [[1]], [[2]])
    handle.remove()
    assert model(input_ids=torch.tensor([[1, 2]])).logits.shape == (1, 2, VOCABULARY)


def test_a_model_without_weights_at_hand_is_refused() -> None:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3Config(**SIZES))
    with pytest.raises(UsageError, match=r"on the meta device; call scoring\.plan_for"):
        is_packed(model)


def test_a_model_that_looks_ahead_is_refused() -> None:
    model = transformers.BertLMHeadModel(
        transformers.BertConfig(
            vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, is_decoder=False
        )
    ).eval()
    with pytest.raises(Unsupported, match="cannot score padded rows"):
        plan_for(model)


# ---------------------------------------------------------------- loading


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    qwen3().save_pretrained(place)
    return place


def test_a_directory_is_loaded_in_the_dtype_asked_for(directory: Path) -> None:
    model = load_causal_lm(directory, dtype="float32", device="cpu")
    prompts, responses = rows(3)
    torch.testing.assert_close(
        response_logprobs(model, prompts, responses), response_logprobs(qwen3(), prompts, responses)
    )
    assert load_causal_lm(directory, device="cpu").dtype == torch.bfloat16
    assert not model.training


def test_what_cannot_be_loaded_says_why(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r'nothing" cannot be loaded'):
        load_causal_lm(tmp_path / "nothing")
    with pytest.raises(UsageError, match='dtype "int4" is unknown; give one of bfloat16, float16, float32'):
        load_causal_lm(directory, dtype="int4")
    with pytest.raises(UsageError, match=r"lacks the weights .*score.weight"):
        load_classifier(directory)


def test_a_critic_starts_at_zero_from_a_language_model(directory: Path) -> None:
    model = load_value_model(directory, dtype="float32", device="cpu")
    assert not model(input_ids=torch.tensor([[1, 2, 3]])).logits.any()
    assert model.dropout.p == 0.0


# ---------------------------------------------------------------- micro-batches


@pytest.mark.parametrize("padded", [False, True])
def test_every_row_is_in_one_micro_batch_under_the_budget(padded: bool) -> None:
    draws = np.random.default_rng(0)
    for _ in range(50):
        lengths = draws.integers(1, 40, draws.integers(1, 30)).tolist()
        tokens = int(draws.integers(1, 100))
        found = micro_batches(lengths, tokens, padded=padded)
        assert sorted(row for batch in found for row in batch) == list(range(len(lengths)))
        for batch in found:
            size = max(lengths[row] for row in batch) * len(batch) if padded else sum(lengths[row] for row in batch)
            assert size <= tokens or len(batch) == 1


def test_a_budget_of_no_tokens_is_refused() -> None:
    with pytest.raises(UsageError, match="tokens=0"):
        micro_batches([1], tokens=0)
    assert micro_batches([], tokens=1) == []
