"""The log-probs that vLLM drew with and those that the trainer computes for the same tokens: how far they are apart."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm", reason="make test-engines installs it")
os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}

import torch

from transferqueue.adapters.protocols import Prompt, Sampling
from transferqueue.adapters.scoring import load_causal_lm, response_logprobs
from transferqueue.adapters.vllm.engine import VllmGenerator
from transferqueue.workflows.job.tiny_model.make import make
from transferqueue.workflows.job.tiny_model.tokenizer import build_tokenizer

MEAN_MAX = {"float32": 5e-6, "bfloat16": 0.02}


@contextmanager
def engine(directory: Path, dtype: str) -> Iterator[VllmGenerator]:
    found = VllmGenerator(
        str(directory),
        dtype=dtype,
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=32,
        kv_cache_memory_bytes=64 << 20,
    )
    yield found
    found.close()
    with warnings.catch_warnings():  # vLLM leaves a context of ZeroMQ to the garbage collector
        warnings.simplefilter("ignore", ResourceWarning)
        del found
        gc.collect()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", MEAN_MAX)
def test_the_trainer_and_vllm_agree_on_the_tokens_that_were_drawn(tmp_path: Path, dtype: str) -> None:
    make(tmp_path, steps=20)
    tokenizer = build_tokenizer()
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"sort {number}"}], add_generation_prompt=True, return_dict=False
        )
        for number in range(1000, 1032)
    ]
    model = load_causal_lm(tmp_path, dtype=dtype, device="cpu")
    with engine(tmp_path, dtype) as vllm:
        for temperature in (1.0, 0.6):
            sampling = Sampling(tokens_max=48, temperature=temperature, seed=1)
            drawn = list(vllm.generate([Prompt.of(ids, samples=2) for ids in prompts], sampling))
            with torch.no_grad():
                found = response_logprobs(
                    model,
                    [prompts[each.prompt] for each in drawn],
                    [each.ids for each in drawn],
                    temperature=temperature,
                )
            difference = np.abs(found.numpy() - np.concatenate([each.logprobs for each in drawn]))
            print(
                f"{dtype}, T={temperature}: {len(difference)} tokens, mean {difference.mean():.2g}, max "
                f"{difference.max():.2g}"
            )
            assert len(difference) > 200
            assert difference.mean() < MEAN_MAX[dtype]
