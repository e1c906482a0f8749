"""The bytes that a job is said to take are those that torch counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.workflows.job import jobs  # noqa: E402
from tests.workflows.job.test_learner import rows  # noqa: E402
from transferqueue.adapters.scoring import response_logprobs  # noqa: E402
from transferqueue.adapters.scoring.logprobs import _LOGITS_MAX  # noqa: E402
from transferqueue.workflows.job.devices import device_bytes  # noqa: E402
from transferqueue.workflows.job.devices.model_sizes import ModelSizes, model_sizes  # noqa: E402
from transferqueue.workflows.job.settings.resolve import resolve  # noqa: E402
from transferqueue.workflows.job.training.process import policy_learner  # noqa: E402

COLUMNS = ("prompt_ids", "response_ids", "rollout_logprobs", "advantages")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    config = transformers.Qwen3Config(
        vocab_size=48, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, tie_word_embeddings=True,
    )  # fmt: skip
    transformers.Qwen3ForCausalLM(config).save_pretrained(place)
    return place


def sizes_of(directory: Path) -> ModelSizes:
    sizes = model_sizes(str(directory))
    assert sizes is not None
    return sizes


def nbytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [[], ["trainer.master_dtype=bfloat16"], ["trainer.lora_rank=4"]])
def test_weights_gradients_and_moments_are_those_of_torch(directory: Path, changes: list[str]) -> None:
    job = resolve(jobs.job("grpo", f'model.path="{directory}"', *changes))
    learner = policy_learner(job)
    learner.accumulate(
        {name: rows()[name] for name in ("prompt_ids", "response_ids", "rollout_logprobs", "advantages")}
    )
    gradients = nbytes(learner._wide) + nbytes(parameter.grad for parameter in learner.trained)
    learner.step()
    moments = [state[name] for state in learner.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    parts = device_bytes.trained(job, sizes_of(directory)).parts
    measured = {"weights": nbytes(learner.model.parameters()), "moments": nbytes(moments), "gradients": gradients}
    if job.trainer.master_dtype != "float32":
        measured["gradients"] += gradients // 2  # the step's own, beside the float32 sums
    assert {name: parts[name] for name in measured} == pytest.approx(measured, rel=0.1)


@pytest.mark.slow
def test_activations_are_about_those_that_torch_keeps(directory: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Any] = {}

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    ids = [list(range(48))] * 8
    response_logprobs(model, ids, ids, temperature=1.0)  # makes the plan
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logprobs = response_logprobs(model, ids, ids, temperature=1.0)
    assert logprobs.requires_grad
    measured = sum(storage.nbytes() for storage in kept.values())
    job = jobs.job("grpo", "model.dtype=float32", f"trainer.micro_tokens={2 * 48 * 8}")
    assert device_bytes.trained(job, sizes_of(directory)).parts["activations"] == pytest.approx(measured, rel=0.25)


def test_logits_at_a_time_are_those_of_the_scorer() -> None:
    assert _LOGITS_MAX["cuda"] == device_bytes.LOGITS_MAX
