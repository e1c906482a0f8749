"""`transferqueue adopt`: the report, the files, and what it refuses."""

import json
import re

import pytest
from typer.testing import CliRunner

from tests.markdown import ROOT
from transferqueue.cli.app import app
from transferqueue.lazy import install_line

COMMAND = [
    "trl",
    "grpo",
    "--model_name_or_path",
    "models/small",
    "--dataset_name",
    "org/data",
    "--reward_funcs",
    "my.rewards.exact",
]
OPENRLHF = ["--actor.model_name_or_path", "m", "--data.prompt_dataset", "d", "--reward.remote_url", "r.py"]

RLOO = ["--algo.advantage.estimator", "rloo"]
PAGE = (ROOT / "docs/how-to/adopt.md").read_text()


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def adopt(*words):
    return CliRunner().invoke(app, ["adopt", *words])


def test_the_report_says_what_becomes_of_each_key_and_writes_nothing(tmp_path):
    ran = adopt("--", *COMMAND, "--top_p", "0.9", "--knob", "3")
    assert ran.exit_code == 0
    assert "reward_funcs=my.rewards.exact -> reward.0.function=my.rewards:exact" in ran.stdout
    assert "unknown: not in the table of this stack: not kept (1)\n  knob=3" in ran.stdout
    assert "refused: cannot be kept: the native job differs (1)\n  top_p=0.9" in ran.stdout
    assert "trl itself on this queue:\n  pip install" in ran.stdout
    assert list(tmp_path.iterdir()) == []


def test_out_writes_a_job_that_train_takes(tmp_path):
    group = ["--rollout.n_samples_per_prompt", "8"]
    ran = adopt("--out", "native", "--", *OPENRLHF, *group, "--algo.advantage.estimator", "group_norm")
    assert ran.exit_code == 0
    assert sorted(path.name for path in (tmp_path / "native").iterdir()) == ["adopted_rewards.py", "job.toml"]
    assert "the same job here:\n  transferqueue train native/job.toml --dry-run\n" in ran.stdout
    again = adopt("--out", "native", "--", *OPENRLHF, *group, *RLOO)
    assert again.exit_code == 2
    assert "job.toml is there already" in again.stderr
    assert 'kind = "grpo"' in (tmp_path / "native" / "job.toml").read_text()


def test_json_is_one_document():
    report = json.loads(adopt("--json", "--", *COMMAND).stdout)
    assert (report["stack"], report["problem"]) == ("trl", "")
    assert report["counts"]["kept"] == len([line for line in report["lines"] if line["verdict"] == "kept"])


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["none.yaml"], "none.yaml does not exist"),
        (["hello"], "hello is neither a file nor the command of a known trainer"),
        (["--stack", "keras", "hello"], "there are verl, nemo-rl, trl, openrlhf, slime"),
        (
            ["--out", "native", "--", *OPENRLHF, "--algo.advantage.estimator", "rloo"],
            "job.toml is not written: group_size=1",
        ),
        (["--try", "--", *OPENRLHF, "--rollout.n_samples_per_prompt", "8"], "--try runs jobs of trl"),
        (["--try", "--", *COMMAND], "the model models/small is not on this machine"),
    ],
)
def test_what_is_refused_costs_one_line(tmp_path, words, error):
    ran = adopt(*words)
    assert ran.exit_code == 2
    assert error in ran.stderr
    assert len(ran.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_the_page_shows_what_the_command_prints(tmp_path):
    script, report = re.findall(r"```(?:sh|text)\n(.*?)```", PAGE, re.DOTALL)[1:3]
    (tmp_path / "grpo.sh").write_text(script)
    printed = adopt("grpo.sh", "--out", "native").stdout
    assert printed.replace(install_line("drop-in"), "pip install -e '.[drop-in]'") == report
