"""An exported model in vLLM and in transformers: the log-probs of the policy that was trained."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="make test-engines installs it")
vllm = pytest.importorskip("vllm", reason="make test-engines installs it")

from tests.workflows.job.test_export import RESPONSES, run_of
from transferqueue.adapters.scoring import response_logprobs
from transferqueue.workflows.job.run.export import export_run
from transferqueue.workflows.job.run_files import checkpoint_path
from transferqueue.workflows.job.tiny_model.make import make

PROMPT = [5, 6, 7]


def of_vllm(path: Path) -> list[float]:
    """The log-probs of the first response's tokens, which are given as part of a prompt."""
    engine = vllm.LLM(
        str(path), dtype="float32", enforce_eager=True, max_model_len=64, kv_cache_memory_bytes=16 << 20, seed=0
    )
    terms = vllm.SamplingParams(max_tokens=1, prompt_logprobs=0)
    (output,) = engine.generate([{"prompt_token_ids": PROMPT + RESPONSES[0]}], terms, use_tqdm=False)
    found = zip(RESPONSES[0], output.prompt_logprobs[len(PROMPT) :], strict=True)
    return [position[token].logprob for token, position in found]


@pytest.mark.parametrize("kind", ["export", "checkpoint", "merged"])
def test_vllm_loads_the_model_of_a_run(kind: str, tmp_path: Path) -> None:
    make(tmp_path / "base")
    changes = ["trainer.lora_rank=2"] if kind == "merged" else []
    folder, learner = run_of(tmp_path, *changes, steps=(1,))
    place = tmp_path / "out"
    if kind == "checkpoint":
        place = checkpoint_path(folder / "checkpoints" / "train", 1)
    else:
        export_run(folder, place, merge=kind == "merged")
    with torch.no_grad():
        wanted: Any = response_logprobs(learner.model, [PROMPT], RESPONSES[:1])
    torch.testing.assert_close(torch.tensor(of_vllm(place)), wanted, rtol=0, atol=1e-3)
