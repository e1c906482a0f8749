"""A job by AsyncFlow's calls: engines as processes, the caller puts prompts and trains."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", exc_type=ImportError)

from tests.workflows.job.jobs import job
from transferqueue.errors import UsageError
from transferqueue.workflows.job.run.folder import RunFolder
from transferqueue.workflows.job.settings.resolve import resolve
from transferqueue.workflows.service import Trainer

STEPS, PROMPTS, SAMPLES = 2, 2, 2
REWARDS = """
def short(completions, completion_ids, **columns):
    return [-float(len(ids)) for ids in completion_ids]
"""


def test_what_the_job_does_not_have_cannot_be_played():
    with pytest.raises(UsageError, match="no process critic to play; it has"):
        Trainer(job("grpo"), plays=["critic"])
    with pytest.raises(UsageError, match=r"pacing\.uses=2 with a caller that plays train"):
        Trainer(job("grpo", "pacing.uses=2"), plays=["train"])
    trainer = Trainer(job("grpo"), plays=["train"])
    with pytest.raises(UsageError, match="the engines were not started; call init_engines first"):
        trainer.service  # noqa: B018
    with pytest.raises(UsageError, match="the caller plays train: call init_engines"):
        trainer.fit()


@pytest.mark.slow
def test_the_caller_puts_prompts_and_trains(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from transferqueue.workflows.job.tiny_model.make import make, write_data
    from transferqueue.workflows.job.training.process import policy_learner

    make(tmp_path / "model")
    write_data(tmp_path / "data", train=16, test=4)
    (tmp_path / "short_rewards.py").write_text(REWARDS)
    wanted = job(
        "grpo",
        f"model.path='{tmp_path}/model'",
        "model.dtype=float32",
        f"data.path='{tmp_path}/data'",
        "data.template='{question}'",
        "reward=[{function='short_rewards:short'}]",
        "sampling.tokens_max=4",
        f"sampling.group_size={SAMPLES}",
        f"trainer.prompts_per_step={PROMPTS}",
        f"steps={STEPS}",
        "weights.dtype=float32",
        "queue.memory_gib=0.125",
    )
    with Trainer(wanted, plays=["prompts", "train"], folder=RunFolder(tmp_path / "run"), code=tmp_path) as trainer:
        service = trainer.init_engines()
        learner = policy_learner(resolve(wanted))
        service.weight_sync_notify(0, dict(learner.weights()))
        for step in range(1, STEPS + 1):
            prompts = {
                "prompt_ids": [np.array([step, 7], np.int32)] * PROMPTS,
                "data": [{"prompt": "sort 21"}] * PROMPTS,
            }
            service.put_prompts_data(prompts, samples=SAMPLES, ordinal=[step * PROMPTS, step * PROMPTS + 1])
            batch, index = service.get_experience_data("train", groups=PROMPTS, timeout_s=240)
            names = ("prompt_ids", "response_ids", "rollout_logprobs", "advantages")
            learner.accumulate({name: list(batch[name]) for name in names})
            assert learner.step()["rows"] == PROMPTS * SAMPLES
            service.weight_sync_notify(step, dict(learner.weights()))
            service.put_experience_data({}, index)
        service.seal()
        trainer.wait()
        assert service.table.audit().rows_done == STEPS * PROMPTS * SAMPLES
