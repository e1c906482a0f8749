"""docs/learn/three-stages.md as it stands there: its files and commands; each stage begins with the model of the one
before. And a finished run that is lengthened."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.markdown import ROOT, blocks
from transferqueue.workflows.job.run.folder import RunFolder
from transferqueue.workflows.job.run_files import checkpoint_path, checkpoint_steps, json_lines

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", exc_type=ImportError)

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1500)]
PAGE = ROOT / "docs" / "learn" / "three-stages.md"
PROMPTS, RESPONSES = [[5, 6, 7], [8, 9]], [[10, 11, 12], [13, 4]]


def command(place: Path, *words: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(words, cwd=place, env=environment, capture_output=True, text=True, timeout=1000)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def transferqueue(place: Path, *words: str) -> str:
    return command(place, sys.executable, "-m", "transferqueue.cli", *words)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the commands of the page were run."""
    folder = tmp_path_factory.mktemp("stages")
    for block in blocks(PAGE):
        if block.info == "toml":
            (folder / block.code.split(":")[0].removeprefix("# ")).write_text(block.code)
    (shell,) = (block.code for block in blocks(PAGE) if block.info == "sh")
    for line in shell.splitlines():
        words = shlex.split(line, comments=True)
        if words[0] == "python":
            command(folder, sys.executable, *words[1:])
        else:
            transferqueue(folder, *words[1:])
    return folder


def logprobs(path: Path) -> Any:
    from transferqueue.adapters.scoring import response_logprobs

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        return response_logprobs(model, PROMPTS, RESPONSES)


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def test_each_stage_begins_with_the_model_of_the_one_before(place: Path) -> None:
    runs = {name: place / "runs" / name for name in ("sft", "grpo", "distill")}
    jobs = {name: RunFolder(folder).job() for name, folder in runs.items()}
    assert jobs["grpo"].model.path == jobs["grpo"].model.tokenizer == "runs/sft/model"
    assert jobs["distill"].teacher.path == "runs/grpo/model"
    assert jobs["distill"].model.path == "runs/sft/checkpoints/train/step-00000020"
    for folder in runs.values():
        train = folder / "checkpoints" / "train"
        torch.testing.assert_close(
            logprobs(folder / "model"), logprobs(checkpoint_path(train, checkpoint_steps(train)[-1])), rtol=0, atol=0
        )
    cold, first, second = (
        logprobs(at) for at in (place / "models/tiny", runs["sft"] / "model", runs["grpo"] / "model")
    )
    assert (first - cold).abs().max() > 0.5
    assert 0 < (second - first).abs().max() < 0.5  # two steps of a small rate away, if it began there
    assert summary(runs["grpo"])["before"] > 0.1  # the reward of random weights is 0
    mine = logprobs(place / "models" / "mine")
    torch.testing.assert_close(mine, logprobs(runs["distill"] / "model"), rtol=0, atol=0.2)


def test_a_finished_run_is_lengthened(place: Path) -> None:
    folder = place / "runs" / "sft"
    said = transferqueue(place, "train", "--resume", "--out", "runs/sft", "--set", "steps=44")
    assert "goes on after step 40 of 44, that of its newest checkpoint" in said
    assert [line["step"] for line in json_lines(folder / "steps.jsonl")] == [*range(1, 45)]
    found = summary(folder)
    assert (found["starts"], found["steps"], found["rows_put"], found["rows_done"]) == (2, 44, 4 * 32, 4 * 32)
    assert checkpoint_steps(folder / "checkpoints" / "train") == [40, 44]
    torch.testing.assert_close(
        logprobs(folder / "model"), logprobs(folder / "checkpoints/train/step-00000044"), rtol=0, atol=0
    )
    state = json.loads((folder / "checkpoints/train/step-00000044/state.json").read_text())
    assert state["position"] == [44 * 32, [], []]
