"""An adopted job passes the dry run: its model, its data, and the reward of the stack that its module calls."""

import json

import pytest

pytest.importorskip("yaml")
pytest.importorskip("transformers")

from transferqueue.workflows.adopt.report import adopt, write
from transferqueue.workflows.job.run.dry_run import dry_run
from transferqueue.workflows.job.settings.read import job_from_file
from transferqueue.workflows.job.tiny_model.make import make

pytestmark = pytest.mark.slow

VERL = """
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=data.jsonl data.train_batch_size=4 \\
  data.max_prompt_length=64 data.max_response_length=16 actor_rollout_ref.model.path=model \\
  actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.name=hf actor_rollout_ref.actor.ppo_mini_batch_size=2 \\
  custom_reward_function.path=score.py custom_reward_function.name=score \\
  trainer.n_gpus_per_node=1 trainer.total_training_steps=2
"""
SCORE = """
def score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(ground_truth) + len(extra_info["source"])}
"""


def test_a_verl_job_with_a_reward_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "model")
    row = {
        "prompt": [{"role": "user", "content": "sort 312"}],
        "data_source": "mine",
        "reward_model": {"style": "rule", "ground_truth": "3"},
        "extra_info": {"source": "ab"},
    }
    (tmp_path / "data.jsonl").write_text((json.dumps(row) + "\n") * 8)
    (tmp_path / "score.py").write_text(SCORE)
    (tmp_path / "run.sh").write_text(VERL)
    native = tmp_path / "native"
    native.mkdir()
    write(adopt(["run.sh"]), native)
    found = dry_run(job_from_file(native / "job.toml"), code=native, devices=[])
    assert "sort 312" in found.prompts[0].text
    assert [(trial.name, trial.scores) for trial in found.rewards] == [("adopted_rewards:reward", [5.0, 5.0])]
    assert (found.batch_rows, found.processes["train"]) == (16, 1)
