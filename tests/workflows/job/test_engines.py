"""Engines from settings: what they are made with, and what is refused."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from tests.workflows.job.policies import job_of
from transferqueue.adapters.protocols import Prompt, Sampling
from transferqueue.errors import TransferQueueError, UsageError
from transferqueue.workflows.job.engines import local_checkpoint, model_directory, open_engine
from transferqueue.workflows.job.settings.job import EngineSettings
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


def test_an_engine_that_takes_other_options_is_refused(directory: Path) -> None:
    with pytest.raises(UsageError, match=r"engine\.0\.options=\{'wings': 2\}: .* other arguments"):
        opened(directory, {"kind": "transformers", "options": {"wings": 2}})


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


def test_the_revision_of_the_policy_is_not_that_of_another_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    constants = pytest.importorskip("huggingface_hub").constants
    for name, revision, commit in (("policy", "v2", "c1"), ("draft", "main", "c2")):
        place = tmp_path / f"models--lab--{name}"
        for folder in (place / "refs", place / "snapshots" / commit):
            folder.mkdir(parents=True)
        (place / "refs" / revision).write_text(commit)
        (place / "snapshots" / commit / "config.json").write_text("{}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    job = job_of(Path("unused"), model={"path": "lab/policy", "revision": "v2"})
    assert Path(model_directory(EngineSettings(kind="transformers"), job)).name == "c1"
    assert Path(model_directory(EngineSettings(kind="transformers", model="lab/draft"), job)).name == "c2"
    checkpoint = local_checkpoint(job)
    assert checkpoint is not None
    assert Path(checkpoint).name == "c1"
    assert local_checkpoint(job_of(Path("unused"), model={"path": "lab/nowhere"})) is None


def test_a_model_that_is_nowhere_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UsageError, match="model nobody/nothing: neither a directory here nor a model"):
        opened(Path("nobody/nothing"), {"kind": "transformers"})
