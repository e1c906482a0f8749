"""Low-rank adapters: nothing changes at first, only they are trained, and what is published is the model without them,
merged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import transferqueue as tq
from transferqueue.errors import UsageError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

from tests.adapters.test_scoring import VOCABULARY, qwen3, rows  # noqa: E402
from tests.engines.test_scoring import Qwen3Subject  # noqa: E402
from transferqueue.adapters.protocols import Unsupported  # noqa: E402
from transferqueue.adapters.scoring import (  # noqa: E402
    add_lora,
    checkpoint_gradients,
    has_lora,
    load_adapter,
    plan_for,
    published_weights,
    response_logprobs,
    save_adapter,
)
from transferqueue.adapters.scoring.lora import AdapterWeights, save_published_adapter  # noqa: E402
from transferqueue.adapters.weights import ChannelWeights, ModuleWeights, copy_weights, spec  # noqa: E402


def trained(model: Any, steps: int = 2) -> Any:
    prompts, responses = rows()
    optimizer = torch.optim.AdamW([part for part in model.parameters() if part.requires_grad], lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        (-response_logprobs(model, prompts, responses).mean()).backward()
        optimizer.step()
    return model


@torch.no_grad()
def test_a_fresh_adapter_changes_nothing() -> None:
    model, (prompts, responses) = qwen3(), rows()
    before = response_logprobs(model, prompts, responses)
    names = add_lora(model, rank=2)
    assert len(names) == 2 * 7
    assert has_lora(model)
    torch.testing.assert_close(response_logprobs(model, prompts, responses), before, rtol=0, atol=0)


def test_only_the_adapters_are_trained() -> None:
    plain, model = dict(qwen3().named_parameters()), qwen3()
    add_lora(model, rank=2)
    trained(model)
    for name, parameter in model.named_parameters():
        if name in plain:
            assert torch.equal(parameter, plain[name])
            assert not parameter.requires_grad
        else:
            assert name.endswith((".lora_a", ".lora_b"))
            assert parameter.any()


@torch.no_grad()
def test_an_engine_gets_the_model_without_adapters() -> None:
    with torch.enable_grad():
        model = qwen3()
        add_lora(model, rank=4, alpha=8.0)
        trained(model)
    source, plain, (prompts, responses) = published_weights(model), qwen3(), rows()
    assert source.metadata() == ModuleWeights(plain).metadata()
    assert {name: spec(tensor) for name, tensor in source} == source.metadata()
    copy_weights(source, plain)
    wanted = response_logprobs(model, prompts, responses)
    torch.testing.assert_close(response_logprobs(plain, prompts, responses), wanted, rtol=0, atol=2e-5)
    assert (wanted - response_logprobs(qwen3(), prompts, responses)).abs().max() > 0.1


def test_a_model_without_adapters_publishes_its_weights_as_they_are() -> None:
    model = qwen3()
    assert type(published_weights(model)) is ModuleWeights
    assert not has_lora(model)


def test_wide_adapters_beside_16_bit_weights_learn_with_checkpointed_gradients() -> None:
    model = qwen3().bfloat16()
    plan_for(model)
    add_lora(model, rank=2, dtype=torch.float32)
    checkpoint_gradients(model)
    trained(model)
    adapters = [part for name, part in model.named_parameters() if ".lora_" in name]
    assert {part.dtype for part in adapters} == {torch.float32}
    assert all(part.any() for part in adapters)
    assert {tensor.dtype for _, tensor in published_weights(model)} == {torch.bfloat16}


def test_a_critics_score_layer_is_trained_whole() -> None:
    model = Qwen3Subject().model("TokenClassification")
    add_lora(model, rank=2)
    whole = {name for name, part in model.named_parameters() if part.requires_grad and ".lora_" not in name}
    assert whole == {"score.weight", "score.bias"}


def test_adapters_are_saved_as_peft_reads_them(tmp_path: Path) -> None:
    model = qwen3()
    add_lora(model, rank=2, alpha=6.0)
    trained(model)
    save_adapter(model, tmp_path, base="models/base")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 2, 6.0)
    assert config["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    tensors = safetensors_torch.load_file(tmp_path / "adapter_model.safetensors")
    assert len(tensors) == 2 * 14
    b = tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"]
    assert torch.equal(b, model.model.layers[0].self_attn.q_proj.lora_b)


def test_adapters_of_a_channel_are_saved_as_the_trainer_saves_them(tmp_path: Path) -> None:
    model = qwen3()
    add_lora(model, rank=2, alpha=6.0)
    trained(model)
    save_adapter(model, tmp_path / "trainer", base="")
    with tq.connect("embedded") as queue:
        channel = queue.weights("policy")
        channel.publish(0, dict(AdapterWeights(model)))
        with channel.pull() as weights:
            source = ChannelWeights(queue.address, weights, merged=False)
            save_published_adapter(source, tmp_path / "engine")
            assert torch.equal(source.tensor("model.norm.weight"), model.model.norm.weight)
            assert "model.layers.0.self_attn.q_proj.weight" in source.changed()
        channel.publish(1, dict(ModuleWeights(qwen3())))
        with (
            channel.pull() as weights,
            pytest.raises(UsageError, match='version 1 of channel "policy" has no adapters'),
        ):
            save_published_adapter(ChannelWeights(queue.address, weights), tmp_path / "none")
    files = sorted(path.name for path in (tmp_path / "trainer").iterdir())
    assert files == ["adapter_config.json", "adapter_model.safetensors"]
    for name in files:
        assert (tmp_path / "engine" / name).read_bytes() == (tmp_path / "trainer" / name).read_bytes()


def test_what_cannot_be_adapted_is_refused() -> None:
    model = qwen3()
    with pytest.raises(UsageError, match="rank=0"):
        add_lora(model, rank=0)
    with pytest.raises(UsageError, match="alpha=-1"):
        add_lora(model, rank=1, alpha=-1.0)
    with pytest.raises(UsageError, match="has no adapters"):
        save_adapter(model, "nowhere", base="")
    add_lora(model, rank=1)
    with pytest.raises(UsageError, match="has adapters already"):
        add_lora(model, rank=1)
    with pytest.raises(Unsupported, match="no linear layers"):
        add_lora(torch.nn.Embedding(VOCABULARY, 4), rank=1)
    with pytest.raises(Unsupported, match="cannot checkpoint gradients"):
        checkpoint_gradients(torch.nn.Embedding(VOCABULARY, 4))


def test_only_the_chosen_layers_get_adapters() -> None:
    model = qwen3()
    names = add_lora(model, rank=2, targets=["q_proj", "v_proj"])
    assert len(names) == 2 * 2
    assert {name.rpartition(".")[2] for name in names} == {"q_proj", "v_proj"}
    with pytest.raises(UsageError, match=r"is called qproj; there are down_proj, .* v_proj"):
        add_lora(qwen3(), rank=2, targets=["qproj"])


@torch.no_grad()
def test_training_begins_with_saved_adapters(tmp_path: Path) -> None:
    with torch.enable_grad():
        model = qwen3()
        add_lora(model, rank=2, targets=["q_proj"])
        trained(model)
    save_adapter(model, tmp_path, base="models/base")
    again, (prompts, responses) = qwen3(), rows()
    add_lora(again, rank=2, targets=["q_proj"])
    load_adapter(again, tmp_path)
    wanted = response_logprobs(model, prompts, responses)
    torch.testing.assert_close(response_logprobs(again, prompts, responses), wanted, rtol=0, atol=0)


@pytest.mark.parametrize("terms", [{"rank": 4, "targets": ["q_proj"]}, {"rank": 2}])
def test_adapters_of_another_rank_or_of_other_layers_are_refused(tmp_path: Path, terms: dict[str, Any]) -> None:
    saved = qwen3()
    add_lora(saved, rank=2, targets=["q_proj"])
    save_adapter(saved, tmp_path, base="models/base")
    model = qwen3()
    add_lora(model, **terms)
    with pytest.raises(UsageError, match=r"are of another model, or of other layers: base_model.model.* differ"):
        load_adapter(model, tmp_path)
    with pytest.raises(UsageError, match=r"cannot be read: .*; give a directory that peft wrote"):
        load_adapter(model, tmp_path / "gone")
