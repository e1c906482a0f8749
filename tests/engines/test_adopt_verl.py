"""`transferqueue adopt --try` of a job of verl, with verl 0.9.1's own trainer on a CPU (`make test-stacks`)."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("verl") is None or importlib.util.find_spec("torchdata") is None:
    pytest.skip("make test-stacks installs verl and its trainer", allow_module_level=True)

from typer.testing import CliRunner

from bench.stacks.verl_job import VerlJob, prepare
from transferqueue.cli.app import app

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SCRIPT = """
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \\
    data.train_files=train.json data.val_files=test.json \\
    data.train_batch_size=1024 data.max_prompt_length=64 data.max_response_length=16 \\
    actor_rollout_ref.model.path=Qwen/Qwen3-0.6B \\
    actor_rollout_ref.actor.optim.lr=1e-3 actor_rollout_ref.actor.ppo_mini_batch_size=256 \\
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 \\
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32 \\
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=4 \\
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32 \\
    reward.custom_reward_function.path=reward.py \\
    trainer.n_gpus_per_node=8 trainer.total_training_steps=20
"""
SMALL = (
    "actor_rollout_ref.model.path=model",
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
)
"""What a trial on a CPU gives after the file."""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    prepare(folder, VerlJob.warm_up_steps)
    (folder / "run.sh").write_text(SCRIPT)
    return folder


def tried(*more: str) -> tuple[int, list[dict[str, Any]]]:
    """The exit code of a trial, and its outcomes."""
    ran = CliRunner().invoke(app, ["adopt", "--try", "--json", "run.sh", *SMALL, *more])
    assert ran.exit_code in (0, 1), ran.stderr
    return ran.exit_code, json.loads(ran.stdout)["tried"]


def test_two_steps_of_verl_on_both_queues_and_of_the_native_job_have_equal_losses(
    prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(prepared)
    sessions = set(Path("/tmp").glob("ray*/session_*"))
    code, outcomes = tried(
        f"+ray_kwargs.ray_init.runtime_env.env_vars.PYTHONPATH={prepared}", "trainer.rollout_data_dir=rollouts"
    )
    assert not Path("rollouts").exists()
    assert set(Path("/tmp").glob("ray*/session_*")) == sessions
    assert [(each["other"], each["differs"], each["notes"]) for each in outcomes] == [
        ("itself on this queue", None, []),
        ("the native job", None, []),
    ]
    assert code == 0
    losses = [step["loss"] for each in outcomes for step in each["figures"]]
    assert [abs(theirs - ours) < 1e-5 for theirs, ours in losses] == [True] * 4
    assert all(abs(theirs) > 1e-3 for theirs, _ in losses)


def test_an_algorithm_that_the_trial_does_not_map_is_compared_on_both_queues_alone(
    prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(prepared)
    code, (outcome,) = tried("algorithm.adv_estimator=reinforce_plus_plus")
    assert (code, outcome["other"], outcome["differs"]) == (0, "itself on this queue", None)
    assert "reinforce_plus_plus gives each token an advantage" in outcome["notes"][0]
