"""The bytes that a job is said to take are those that torch counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.scale import only_long  # noqa: E402
from tests.workflows.job import jobs  # noqa: E402
from tests.workflows.job.test_export import HeldBytes  # noqa: E402
from tests.workflows.job.test_learner import rows  # noqa: E402
from transferqueue.adapters.engines import key_value_cache, running_batch  # noqa: E402
from transferqueue.adapters.engines.running_batch import Row, RunningBatch  # noqa: E402
from transferqueue.adapters.protocols import Prompt, Sampling  # noqa: E402
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


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write("Llama", tmp_path_factory.mktemp("small"))


def write(kind: str, place: Path) -> Path:
    """Write a model whose activations are larger than its weights."""
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=512, hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, head_dim=32, max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(place)
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
    assert {name: parts[name] for name in measured} == pytest.approx(measured, rel=0.1)


PASSES = [
    ["model.dtype=float32"],
    ["model.dtype=bfloat16"],
    ["model.dtype=bfloat16", "trainer.master_dtype=bfloat16"],
    ["model.dtype=float32", "trainer.gradient_checkpointing=true"],
    ["model.dtype=bfloat16", "trainer.gradient_checkpointing=true"],
    ["model.dtype=bfloat16", "trainer.lora_rank=4"],
]
ROWS, TOKENS = 8, 48


@pytest.mark.slow
@pytest.mark.parametrize("changes", PASSES, ids=", ".join)
@pytest.mark.parametrize("kind", ["Qwen3", *only_long("Llama", "Qwen2")])
def test_the_passes_of_a_step_hold_as_many_bytes_as_torch_has_at_most(
    kind: str, changes: list[str], tmp_path: Path
) -> None:
    """Of the second micro-batch of a step, with the gradients of the first one."""
    write(kind, tmp_path)
    tokens = f"trainer.micro_tokens={2 * TOKENS * ROWS}"
    few = ("sampling.group_size=2", "trainer.prompts_per_step=1")
    job = resolve(jobs.job("grpo", f'model.path="{tmp_path}"', tokens, *few, *changes))
    ids = np.arange(TOKENS)
    assert_held(job, tmp_path, [ids + row for row in range(ROWS)], [ids] * ROWS)


@pytest.mark.slow
@pytest.mark.parametrize("changes", PASSES[:3], ids=", ".join)
def test_a_group_with_a_long_prompt_holds_as_many_bytes_as_torch_has_at_most(
    changes: list[str], tmp_path: Path
) -> None:
    """Attention holds keys and values of the prompt for each member."""
    write("Llama", tmp_path)
    prompt, ids = np.arange(400), np.arange(4)
    tokens = f"trainer.micro_tokens={len(prompt) + len(ids) * ROWS}"
    job = resolve(jobs.job("grpo", f'model.path="{tmp_path}"', tokens, f"sampling.group_size={ROWS}", *changes))
    assert_held(job, tmp_path, [prompt] * ROWS, [ids] * ROWS)


def assert_held(job: Any, model: Path, prompts: list[Any], responses: list[Any]) -> None:
    """Compare what the job is said to take with what a pass over the rows holds."""
    learner = policy_learner(job)
    columns = {
        "prompt_ids": prompts,
        "response_ids": responses,
        "rollout_logprobs": [np.full(len(response), -3.0) for response in responses],
        "advantages": [1.0] * ROWS,
    }
    assert len(learner.micro_batches(columns)) == 1
    with HeldBytes(learner.model.parameters()) as held:
        for _ in range(2):
            learner.accumulate(columns)
    parts = device_bytes.trained(job, sizes_of(model)).parts
    assert parts.pop("moments") > 0
    assert sum(parts.values()) == pytest.approx(held.peak, rel=0.1)


def activations(kind: str, *changes: str) -> int:
    sizes = ModelSizes(
        parameters=100_000, layers=2, hidden=64, inner=96, queries=64, keys=32, vocabulary=48, head_norms=False
    )
    return device_bytes.trained(jobs.job(kind, "model.dtype=float32", *changes), sizes).parts["activations"]


def test_a_pass_in_float32_holds_one_mask_of_its_longest_response() -> None:
    short, long = ("sampling.tokens_max=16", "sampling.tokens_max=1016")
    assert activations("grpo", long) - activations("grpo", short) == 4 * (1016 * (32 + 1016) - 16 * (32 + 16))
    assert activations("grpo", long, "model.dtype=bfloat16") == activations("grpo", short, "model.dtype=bfloat16")
    alone = ("trainer.prompts_per_step=1", "sampling.group_size=1")
    assert activations("sft", long, *alone) == activations("sft", short, *alone)


@pytest.mark.parametrize("kind", ["grpo", "sft"])
def test_rows_of_different_prompts_of_a_step_may_share_one(kind: str) -> None:
    one, two, many, more = (activations(kind, f"trainer.prompts_per_step={prompts}") for prompts in (1, 2, 16, 32))
    assert one < two < many == more


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_scorer_holds_as_many_bytes_as_torch_has_at_most(small: Path, dtype: str) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(small, dtype=dtype)
    ids = [[*range(row, row + 128)] for row in range(ROWS)]
    with torch.no_grad(), HeldBytes(model.parameters()) as held:
        response_logprobs(model, ids, ids)
    assert device_bytes.scored(sizes_of(small), dtype, 256 * ROWS).total == pytest.approx(held.peak, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("prompt", "response"), [(64, 128), (400, 40), *only_long((256, 256), (64, 448))])
def test_an_engine_holds_as_many_bytes_as_torch_has_at_most(small: Path, prompt: int, response: int) -> None:
    """Three times as many rows as slots: others begin as some end."""
    lengths = (f"data.prompt_tokens_max={prompt}", f"sampling.tokens_max={response}", f"engine.0.slots={ROWS}")
    job = resolve(jobs.job("grpo", f'model.path="{small}"', "model.dtype=float32", *lengths))
    model, draws = transformers.AutoModelForCausalLM.from_pretrained(small), np.random.default_rng(0)
    batch = RunningBatch(model, ROWS)
    sizes = [response] * ROWS + draws.integers(response // 2, response + 1, 2 * ROWS).tolist()
    prompts = [Prompt(ids=draws.integers(0, 500, prompt).astype(np.int32)) for _ in sizes]
    terms = [Sampling(tokens_max=size) for size in sizes]
    with HeldBytes(model.parameters()) as held:
        batch.add(Row(None, number, 0, *each) for number, each in enumerate(zip(prompts, terms, strict=True)))
        while len(batch):
            batch.step(version=0)
    expected = device_bytes.generated(job, sizes_of(small), job.engine[0])
    assert expected.total == pytest.approx(held.peak, rel=0.1)


def test_limits_are_those_of_scorer_and_engine() -> None:
    assert _LOGITS_MAX["cuda"] == device_bytes.LOGITS_MAX
    assert running_batch._BEGIN_TOKENS_MAX == device_bytes.BEGIN_TOKENS_MAX
    assert key_value_cache.ROOM_TOKENS == device_bytes.ROOM_TOKENS
