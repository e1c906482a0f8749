from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import transferqueue as tq
from tests.engines.conform import against, conform
from tests.engines.tiny import TinySubject, model, save

pytest.importorskip("vllm", reason="make test-engines installs it")
os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}

from transferqueue.adapters.protocols import Generator, Prompt, Sampling
from transferqueue.adapters.vllm.engine import VllmGenerator
from transferqueue.adapters.weights import ChannelWeights, ModuleWeights
from transferqueue.testing.conformance.generators import GENERATOR_CHECKS, GeneratorSubject


class Subject(TinySubject):
    """One engine for all checks, put back to weights 0: it takes long to start."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.engine = VllmGenerator(
            str(save(directory)),
            dtype="float32",
            enforce_eager=True,
            max_model_len=256,
            max_num_seqs=32,
            kv_cache_memory_bytes=64 << 20,
        )

    def open(self) -> Generator:
        self.engine.resume()
        self.engine.update_weights(self.weights(0), 0)
        return self.engine


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    found = Subject(tmp_path_factory.mktemp("model"))
    yield found
    found.engine.close()
    with warnings.catch_warnings():  # vLLM leaves a context of ZeroMQ to the garbage collector
        warnings.simplefilter("ignore", ResourceWarning)
        del found.engine
        gc.collect()


@pytest.mark.slow
def test_two_workers_load_their_parts_of_version_after_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their first version is whole, the others are in parts: with each they draw as the model does."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    with tq.connect() as queue:
        engine = VllmGenerator(
            str(save(tmp_path)),
            dtype="float32",
            enforce_eager=True,
            max_model_len=256,
            kv_cache_memory_bytes=64 << 20,
            tensor_parallel_size=2,
            distributed_executor_backend="mp",
        )
        try:
            channel, prompt = queue.weights("policy"), Prompt(ids=np.arange(5, 12, dtype=np.int32))
            for version, which in enumerate((1, 0, 1)):
                channel.publish(version, dict(ModuleWeights(model(which))))
                with channel.pull(version=version) as weights:
                    engine.update_weights(ChannelWeights(queue.address, weights), version)
                (drawn,) = engine.generate([prompt], Sampling(tokens_max=12, seed=version))
                ids = torch.from_numpy(np.concatenate([prompt.ids, drawn.ids]).astype(np.int64))
                with torch.no_grad():
                    logits = model(which)(ids[None]).logits[0, len(prompt.ids) - 1 : -1]
                expected = torch.log_softmax(logits, -1).gather(1, ids[len(prompt.ids) :, None])[:, 0]
                assert torch.allclose(expected, torch.from_numpy(drawn.logprobs), atol=1e-4)
                assert drawn.spans == ((version, 12),)
        finally:
            engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("check", GENERATOR_CHECKS, ids=lambda check: check.__name__)
def test_vllm(check: Callable[[GeneratorSubject], None], subject: Subject) -> None:
    conform("generator", "vllm", against("vllm-cpu"), check, subject)


@pytest.mark.slow
def test_a_step_that_fails_is_the_engines_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = VllmGenerator(
        str(save(tmp_path)), dtype="float32", enforce_eager=True, max_model_len=256, kv_cache_memory_bytes=64 << 20
    )

    def fails() -> None:
        raise RuntimeError("no such kernel")

    try:
        monkeypatch.setattr(engine._engine, "step", fails)
        prompt = Prompt(ids=np.arange(5, 12, dtype=np.int32))
        with pytest.raises(RuntimeError, match="no such kernel"):
            next(iter(engine.generate([prompt], Sampling(tokens_max=4))))
        with pytest.raises(tq.Disconnected, match="the engine died: no such kernel"):
            next(iter(engine.generate([prompt], Sampling(tokens_max=4))))
    finally:
        engine.close()
    with pytest.raises(tq.Disconnected, match="was closed"):
        next(iter(engine.generate([prompt], Sampling(tokens_max=4))))
