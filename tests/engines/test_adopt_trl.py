"""`transferqueue adopt` beside the installed TRL: the keys and the defaults of its table are TRL's, and a trial trains
both."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("trl") is None or importlib.util.find_spec("yaml") is None:
    pytest.skip("make test-engines installs TRL", allow_module_level=True)

from trl import GRPOConfig, ModelConfig
from trl.scripts.grpo import GRPOScriptArguments
from typer.testing import CliRunner

from transferqueue.cli.app import app
from transferqueue.workflows.adopt.apply import rule_of
from transferqueue.workflows.adopt.stacks.trl import TRL
from transferqueue.workflows.job.tiny_model.make import make

pytestmark = pytest.mark.slow
FIELDS = {field.name: field.default for of in (ModelConfig, GRPOConfig) for field in dataclasses.fields(of)}


def test_the_defaults_are_trls() -> None:
    launcher = {"num_processes"}  # an argument of accelerate
    assumed = {name: value for name, value in TRL.defaults.items() if name not in launcher}
    assert {name: FIELDS.get(name) for name in assumed} == assumed


def test_what_is_refused_is_off_where_it_is_left_out() -> None:
    """A rule that only refuses has no line for a key that is left out."""
    rules = {name: rule_of(TRL, name) for name in FIELDS}
    refused = {name: rule for name, rule in rules.items() if rule is not None and rule.refused}
    assert [name for name, rule in refused.items() if FIELDS[name] not in (None, *rule.harmless)] == []


def test_every_option_of_trls_script_has_its_place() -> None:
    """None falls through as unknown."""
    options = [field.name for field in dataclasses.fields(GRPOScriptArguments)] + list(FIELDS)
    assert [name for name in options if rule_of(TRL, name) is None] == []


def test_a_key_of_the_table_is_one_of_trls_or_of_its_script() -> None:
    old = {"max_prompt_length", "torch_dtype", "warmup_ratio", "use_liger_loss"}
    of_script = ("dataset", "reward_", "chat_template_path", "ignore_bias_buffers")
    script = {rule.name for rule in TRL.rules if rule.name.startswith(of_script)}
    launcher = {"num_processes", "num_machines", "config_file", "accelerate_config", "config", "overwrite_output_dir"}
    names = {rule.name for rule in TRL.rules if "*" not in rule.name} - old - script - launcher
    assert names - set(FIELDS) == set()


# ---------------------------------------------------------------- a trial

QUICKSTART = """
model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct
dataset_name: trl-lib/DeepMath-103K
reward_funcs: [accuracy_reward]
"""
"""TRL's quickstart of GRPO as a file; all else is TRL's default."""
SMALL = {
    "model_name_or_path": "model",
    "dataset_name": "data",
    "reward_funcs": "my_rewards.odd",
    "num_generations": "4",
    "max_completion_length": "12",
    "learning_rate": "1e-3",
    "beta": "0.04",
    "use_bias_correction_kl": "false",
    "max_steps": "20",
}
"""What a trial on a CPU gives after the file. The rate is large, so that the second step sees the reference."""
REWARD = """
def odd(completions, completion_ids, solution, **others):
    scored = zip(completions, completion_ids, solution)
    return [sum(i % 2 for i in ids) / len(ids) + (right in text[0]["content"]) for text, ids, right in scored]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make(tmp_path / "model", initializer_range=0.3)
    (tmp_path / "data").mkdir()
    rows = [
        {"prompt": [{"role": "user", "content": f"sort {number * 37}"}], "solution": str(number)}
        for number in range(10, 26)
    ]
    (tmp_path / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "my_rewards.py").write_text(REWARD)
    (tmp_path / "grpo.yaml").write_text(QUICKSTART)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


def tried(*more: str, **changes: str) -> tuple[int, dict[str, Any]]:
    """The exit code of a trial, and its outcome."""
    options = [word for name, value in {**SMALL, **changes}.items() for word in (f"--{name}", value)]
    ran = CliRunner().invoke(app, ["adopt", "--try", "--json", *more, "grpo.yaml", "--", *options])
    assert ran.exit_code in (0, 1), ran.stderr
    (outcome,) = json.loads(ran.stdout)["tried"]
    return ran.exit_code, outcome


@pytest.mark.timeout(1800)
def test_two_steps_of_trl_and_of_the_native_job_have_equal_losses(folder: Path) -> None:
    code, outcome = tried(loss_type="grpo")
    assert (code, outcome["differs"], outcome["notes"]) == (0, None, [])
    losses = [step["loss"] for step in outcome["figures"]]
    assert [abs(theirs - ours) < 1e-5 for theirs, ours in losses] == [True, True]
    assert abs(losses[1][0]) > 1e-3
    assert [sorted(step) for step in outcome["figures"]] == [["gradient_norm", "kl", "loss", "lr", "reward"]] * 2


@pytest.mark.timeout(1800)
def test_a_key_that_was_changed_by_hand_is_named(folder: Path) -> None:
    CliRunner().invoke(app, ["adopt", "--out", "native", "grpo.yaml", "--", *(f"--{k}={v}" for k, v in SMALL.items())])
    job = folder / "native" / "job.toml"
    written = job.read_text()
    assert "kl = 0.04" in written
    job.write_text(written.replace("kl = 0.04", "kl = 0.4"))
    code, outcome = tried("--out", "native")
    assert (code, outcome["differs"]["step"], outcome["differs"]["figure"]) == (1, 2, "loss")
    assert outcome["differs"]["why"][0] == "algorithm.kl is 0.4, where adopt writes 0.04"
