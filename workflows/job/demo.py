"""The demo: asynchronous GRPO of the built-in model on questions of reasoning-gym, as a job like any other.

`make_inputs` warms up a tiny model and writes its questions; `demo_job` is the job that trains it. The numbers were
found by experiment, under one bound: the whole run in about a minute and a half on two cores. Shares of right answers
are of held-out questions of chain_sum, sampled at temperature 1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

from transferqueue.workflows.job.settings.job import (
    AlgorithmSettings,
    CheckpointSettings,
    DataSettings,
    EngineKind,
    EngineSettings,
    EvaluationSettings,
    Job,
    LogSettings,
    Mode,
    ModelSettings,
    PacingSettings,
    QueueSettings,
    RewardSettings,
    SamplingSettings,
    TrainerSettings,
    WeightsSettings,
)
from transferqueue.workflows.job.tiny_model.gym_tasks import GYM_TASKS

TASK: Final = "chain_sum"
TRAIN_QUESTIONS: Final = 3072
HELD_OUT_QUESTIONS: Final = 512
"""A mean of 512 rewards in [0, 1] has a standard error of at most 0.022."""
_SLOTS: Final = 256
_GROUP: Final = 8


def make_inputs(directory: Path, *, seed: int, real_engine: bool = False) -> None:
    """Make a warmed-up model and its questions in `directory`: ``model/``, ``data/``. Blocks for about 15 s of one
    core.

    The warm-up ends with a quarter of the answers right: enough to reinforce, with room above.

    real_engine: with heads as wide as attention of vLLM on a CPU needs.
    """
    from transferqueue.workflows.job.tiny_model.make import make, write_data

    make(
        directory / "model",
        kind="builtin",
        task=TASK,
        steps=600,
        until=0.25,
        lr=1.5e-3,
        seed=seed,
        num_attention_heads=4 if real_engine else 8,
    )
    write_data(directory / "data", task=TASK, train=TRAIN_QUESTIONS, test=HELD_OUT_QUESTIONS, seed=seed)


def demo_job(
    inputs: Path,
    *,
    seed: int = 0,
    steps: int = 200,
    mode: Mode = "async",
    engine: EngineKind = "builtin",
    rollouts: int = 1,
    on: Literal["processes", "ray"] = "processes",
    log: tuple[str, ...] = (),
) -> Job:
    """Return the job for the model and questions in `inputs` (see `make_inputs`)."""
    gym = GYM_TASKS[TASK]
    options = {"vllm": {"dtype": "float32"}}.get(engine, {})
    return Job(
        name=f"demo-{TASK}-{mode}",
        seed=seed,
        steps=steps,
        on=on,
        model=ModelSettings(path=str(inputs / "model"), dtype="float32"),
        data=DataSettings(path=str(inputs / "data"), prompt="question", prompt_tokens_max=gym.question_chars_max + 2),
        engine=(EngineSettings(kind=engine, count=rollouts, slots=_SLOTS, options=options),),
        sampling=SamplingSettings(group_size=_GROUP, tokens_max=gym.answer_chars_max + 1),
        reward=(
            RewardSettings(function="transferqueue.workflows.job.tiny_model.gym_tasks:score", args={"task": TASK}),
        ),
        algorithm=AlgorithmSettings(
            kind="grpo", clip_low=0.2, clip_high=0.28, old="rollout", tis_max=0.0, filter_equal=False
        ),
        trainer=TrainerSettings(
            prompts_per_step=64, lr=8e-4, warmup=max(1, steps // 20) if steps > 1 else 0, schedule="linear"
        ),
        pacing=PacingSettings(mode=mode),
        weights=WeightsSettings(dtype="float32"),
        checkpoint=CheckpointSettings(every=50),
        evaluation=EvaluationSettings(
            path=str(inputs / "data"), every=0, rows=HELD_OUT_QUESTIONS, samples=4, temperature=1.0
        ),
        log=LogSettings(to=tuple(log)),
        queue=QueueSettings(memory_gib=0.25),
    )
