"""The job files of the pages about each kind of job, as they stand there, by ``transferqueue train --dry-run``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.markdown import ROOT, blocks
from transferqueue.cli.app import run

pytest.importorskip("torch")
pytest.importorskip("transformers", exc_type=ImportError)

PAGES = ("grpo", "ppo", "sft", "distill", "lora")
FILES = [block for page in PAGES for block in blocks(ROOT / "docs" / "how-to" / f"{page}.md") if block.info == "toml"]
REWARD = """
def exact(completions, answer, **columns):
    return [float(text.strip() == right) for text, right in zip(completions, answer)]
"""
TALK = ["1+1=", "2", "+1=", "3"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models, data and reward that the files name."""
    from transferqueue.workflows.job.tiny_model.make import make, write_data

    folder = tmp_path_factory.mktemp("jobs")
    for name, kind in (("tiny", "qwen3"), ("teacher", "qwen3"), ("reward", "classifier")):
        make(folder / "models" / name, kind=kind)  # type: ignore[arg-type]
    write_data(folder / "data" / "sort", train=200, test=20)
    (folder / "my_rewards.py").write_text(REWARD)
    messages = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(TALK)]
    (folder / "data" / "chat").mkdir()
    for name in ("chat/train.jsonl", "chat/test.jsonl", "more.jsonl"):
        (folder / "data" / name).write_text(json.dumps({"messages": messages}) + "\n")
    return folder


@pytest.mark.parametrize("block", FILES, ids=lambda block: block.code.split("\n")[0].removeprefix("# "))
def test_the_job_of_a_page_is_one(
    block: Any, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    path = place / block.code.split("\n")[0].removeprefix("# ")
    path.write_text(block.code)
    here = ["--set", "engine=[{kind='transformers'}]"] if '"vllm"' in block.code.split("\n[")[0] else []
    assert run(["train", str(path), "--dry-run", *here]) == 0, capsys.readouterr().err
    shown = capsys.readouterr().out
    assert "# prompt 0:" in shown
    assert "# tasks" in shown


def test_each_page_has_its_files() -> None:
    assert [block.code.split("\n")[0] for block in FILES] == [
        f"# {name}.toml" for name in ("grpo", "dapo", "ppo", "sft", "distill", "lora")
    ]
