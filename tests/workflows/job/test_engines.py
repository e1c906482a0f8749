"""Engines from settings: what they are made with, and what is refused."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from tests.workflows.job.policies import job_of
from transferqueue.adapters.protocols import Prompt, Sampling
from transferqueue.errors import Impossible, TransferQueueError, UsageError
from transferqueue.workflows.job.engines import open_engine
from transferqueue.workflows.job.tiny_model.make import make


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("policy")
    make(place)
    return place


def opened(directory: Path, engine: dict[str, Any], **tables: Any) -> Any:
    job = job_of(directory, engine=[engine], **tables)
    return open_engine(job.engine[0], job)


@pytest.mark.parametrize("reproducible", [False, True])
def test_the_transformers_engine_generates_with_its_directory(directory: Path, reproducible: bool) -> None:
    engine = opened(directory, {"kind": "transformers", "slots": 2}, reproducible=reproducible)
    with closing(engine):
        assert engine.version == -1
        found = list(engine.generate([Prompt.of([1, 2, 3], samples=5)], Sampling(tokens_max=4)))
    assert len(found) == 5


@pytest.mark.parametrize(
    ("engine", "tables", "error", "message"),
    [
        (
            {"kind": "transformers", "tensor_parallel": 2},
            {},
            UsageError,
            r"engine\.0\.tensor_parallel=2 .* set it to 1",
        ),
        (
            {"kind": "transformers", "options": {"wings": 2}},
            {},
            UsageError,
            r"engine\.0\.options=\{'wings': 2\}: .* other arguments",
        ),
        ({"kind": "vllm_server"}, {}, UsageError, r"engine\.0\.kind=\"vllm_server\" needs engine\.0\.url"),
        ({"kind": "sglang_server", "url": "http://127.0.0.1:9"}, {}, UsageError, r'options has no "weights"'),
        (
            {"kind": "openai", "url": "http://127.0.0.1:9/v1"},
            {"steps": 10},
            Impossible,
            r"step 10 would train rows that are 9 versions old; pacing\.max_staleness=1 allows 2 steps",
        ),
    ],
)
def test_an_engine_that_cannot_be_is_refused(
    directory: Path, engine: dict[str, Any], tables: dict[str, Any], error: type[TransferQueueError], message: str
) -> None:
    with pytest.raises(error, match=message):
        opened(directory, engine, **tables)


class Mine:
    """An engine of a user's own, as a job's factory."""

    version = -1

    def __init__(self, directory: str, *, slots: int, wings: int = 0) -> None:
        self.given = directory, slots, wings

    def generate(self, prompts: Any, sampling: Any, *, timeout_s: float = 0.0) -> Any:
        raise NotImplementedError

    pause = resume = update_weights = close = generate


def neither(directory: str, slots: int) -> dict[str, Any]:
    return {directory: slots}


def test_a_factory_makes_an_engine_of_ones_own(directory: Path) -> None:
    engine = {"kind": "factory", "factory": f"{__name__}:Mine", "slots": 3, "options": {"wings": 2}}
    assert opened(directory, engine).given == (str(directory), 3, 2)


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"factory": f"{__name__}:neither"}, r"returned dict, which is no generator"),
        ({"factory": f"{__name__}:Mine", "options": {"claws": 1}}, r"options=\{'claws': 1\}: .* other arguments"),
        ({"factory": f"{__name__}:Yours"}, r"engine\.0\.factory .*: the module has no Yours"),
    ],
)
def test_a_factory_that_makes_none_is_named(directory: Path, engine: dict[str, Any], message: str) -> None:
    with pytest.raises(TransferQueueError, match=message):
        opened(directory, {"kind": "factory", **engine})


def test_an_endpoint_serves_as_many_steps_as_the_staleness_allows(directory: Path) -> None:
    engine = opened(directory, {"kind": "openai", "url": "http://127.0.0.1:9/v1"}, steps=2)
    with closing(engine):
        assert engine.version == 0


def test_a_model_that_is_nowhere_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UsageError, match="model nobody/nothing: neither a directory here nor a model"):
        opened(Path("nobody/nothing"), {"kind": "transformers"})
