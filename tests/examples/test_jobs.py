"""Each job file of examples/jobs says what it needs, passes its dry run, and names what counts as success."""

import json
import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.markdown import ROOT
from transferqueue.adapters.stages.reward_functions import load_callable
from transferqueue.cli.app import app
from transferqueue.errors import UsageError
from transferqueue.workflows.job.run.dry_run import dry_run
from transferqueue.workflows.job.settings.read import job_from_file

JOBS = ROOT / "examples" / "jobs"
FILES = sorted(JOBS.glob("*.toml"))
MAKES = "python -m transferqueue.workflows.job.tiny_model "

pytestmark = pytest.mark.slow


def commands(path: Path) -> list[list[str]]:
    """The commands of a file's head that make its models and its data."""
    lines = [
        line.lstrip("# ").strip() for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")
    ]
    return [line.removeprefix(MAKES).split() for line in lines if line.startswith(MAKES)]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with the models and data of every file, made by their own commands, but without warm-up."""
    pytest.importorskip("transformers", exc_type=ImportError)
    from transferqueue.workflows.job.tiny_model.__main__ import main

    folder = tmp_path_factory.mktemp("jobs")
    here = Path.cwd()
    os.chdir(folder)
    try:
        for command in {" ".join(words): words for path in FILES for words in commands(path)}.values():
            cold = re.sub(r"--(warm-up|until) \S+", "", " ".join(command)).split()
            assert main(cold) == 0
    finally:
        os.chdir(here)
    return folder


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_a_job_file_passes_its_dry_run(made, path, monkeypatch):
    monkeypatch.chdir(made)
    job = job_from_file(path)
    if job.algorithm.kind != "sft" and job.engine[0].kind == "vllm" and find_spec("vllm") is None:
        with pytest.raises(UsageError, match="needs vllm, which is not installed here"):
            dry_run(job, code=path.parent)
        job = job_from_file(path, set=["engine.0.kind=transformers"])
    found = dry_run(job, code=path.parent)
    assert len(found.prompts) == 2
    assert all(prompt.ids for prompt in found.prompts)
    assert found.memory_bytes >= found.row_bytes_total + found.weight_bytes
    assert any("train-0" in line and "moments" in line for line in found.devices)
    assert found.tasks[-1].name in ("train", "train_critic")


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_a_job_file_says_how_to_make_what_it_needs_and_what_is_success(path):
    head = path.read_text(encoding="utf-8").split("\n\n")[0]
    assert commands(path)
    assert f"transferqueue train examples/jobs/{path.name}" in head
    assert "What counts as success, written before the first run" in head


def test_the_command_prints_a_dry_run_as_json(made, monkeypatch):
    monkeypatch.chdir(made)
    ran = CliRunner().invoke(app, ["train", str(JOBS / "grpo-transformers.toml"), "--dry-run", "--json"])
    assert ran.exit_code == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert [task["name"] for task in found["tasks"]] == ["rollout", "reward", "advantage", "train"]
    assert list(made.glob("runs/*")) == []


@pytest.mark.parametrize("text", ["", "\x1f0", "٣", "²", "5 5", "<12+34", "<٣+٣>", "1*" * 40 + "1", "9" * 5000])
@pytest.mark.parametrize("name", ["calculator", "attempts", "guess_number"])
def test_an_environment_takes_any_text(name, text):
    environment = load_callable(f"{JOBS / 'environments.py'}:{name}", "environment")()
    environment.reset(seed=7, options={"question": "12+34=", "answer": "46"})
    observation, reward, ended, cut, info = environment.step(text)
    assert (type(observation), type(reward), type(ended), type(cut), info) == (str, float, bool, bool, {})
