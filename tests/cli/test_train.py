"""`transferqueue train`: what it refuses, in one line, before anything starts."""

import pytest
from typer.testing import CliRunner

from transferqueue.cli.app import app

JOB = """
model = { path = "models/none" }
data = { path = "data/none.jsonl" }
engine = [{ kind = "transformers" }]
reward = [{ function = "rewards:exact" }]
algorithm = { kind = "grpo" }
"""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "models").mkdir()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([], "train needs a job file"),
        (["--resume"], "train needs a job file"),
        (["--dry-run"], "--dry-run needs a job file"),
        (["none.toml"], "job file none.toml does not exist"),
        (
            ["job.toml", "--set", "trainer.micro_token=3"],
            "there is no such key; did you mean micro_tokens?",
        ),
        (["job.toml", "--set", "sampling.group_size=1"], "group_size=1 with grpo: all advantages are 0"),
        (["job.toml", "--dry-run"], "model.path='models/none': there is no such directory"),
        (["job.toml"], "model.path='models/none': there is no such directory"),
        (["job.toml", "--resume"], "has no unfinished run of job 'job'"),
        (["--resume", "--out", "models"], "models is no folder of a run"),
        (["--discard"], "train --discard gives up a run: --discard --out DIR"),
        (["--discard", "--resume", "--out", "models"], "it takes neither --resume nor --plan nor --dry-run"),
        (["--discard", "--out", "models"], "models is no folder of a run"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_what_is_refused_costs_one_line_and_leaves_nothing(tmp_path, words, error):
    ran = CliRunner().invoke(app, ["train", *words])
    assert ran.exit_code == 2
    assert error in ran.stderr
    assert len(ran.stderr.strip().splitlines()) == 1
    assert ran.stdout == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.toml", "models"]
