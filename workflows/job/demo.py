"""The demo: asynchronous GRPO of the built-in model on questions of reasoning-gym, as a job like any other.

`make_inputs` warms up a tiny model and writes its questions; `demo_job` is the job that trains it. The numbers were
found by experiment, under one bound: the whole run in about a minute and a half on two cores. Shares of right answers
are of held-out questions of chain_sum, sampled at temperature 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from transferqueue.errors import UsageError, listing
from transferqueue.workflows.job.settings.job import (
    IN_TURN,
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

TASKS: Final = tuple(GYM_TASKS)
TRAIN_QUESTIONS: Final = 3072
HELD_OUT_QUESTIONS: Final = 512
"""A mean of 512 rewards in [0, 1] has a standard error of at most 0.022."""
_SLOTS: Final = 256
_GROUP: Final = 8


@dataclass(frozen=True, kw_only=True)
class DemoTask:
    """How a task is learned. warm_up: at most so many steps, at warm_up_lr, until the expected reward is `until`:
    enough right answers to reinforce, with room above.
    """

    steps: int
    lr: float
    warm_up: int
    warm_up_lr: float
    until: float


LEARNED: Final = {
    "chain_sum": DemoTask(steps=200, lr=8e-4, warm_up=600, warm_up_lr=1.5e-3, until=0.25),
    # Its scorer pays for each letter in place and hardly minds letters too many, so a policy that is unsure of the
    # length of its answers learns to run on: it is warmed up until it is sure enough.
    "spell_backward": DemoTask(steps=200, lr=8e-4, warm_up=600, warm_up_lr=3e-3, until=0.15),
}


def check_task(task: str) -> None:
    """Raise `UsageError` for a task that the demo does not have."""
    if task not in LEARNED:
        raise UsageError(f"no settings for the data set {task!r}; there are {listing(LEARNED)}")


def make_inputs(directory: Path, *, task: str, seed: int, real_engine: bool = False) -> None:
    """Make a warmed-up model and its questions in `directory`: ``model/``, ``data/``. Blocks for about 15 s of one
    core.

    real_engine: with heads as wide as attention of vLLM on a CPU needs.
    """
    from transferqueue.workflows.job.tiny_model.make import make, write_data

    learned = LEARNED[task]
    make(
        directory / "model",
        kind="builtin",
        task=task,
        steps=learned.warm_up,
        until=learned.until,
        lr=learned.warm_up_lr,
        seed=seed,
        num_attention_heads=4 if real_engine else 8,
    )
    write_data(directory / "data", task=task, train=TRAIN_QUESTIONS, test=HELD_OUT_QUESTIONS, seed=seed)


def demo_job(
    inputs: Path,
    *,
    task: str = "chain_sum",
    seed: int = 0,
    steps: int | None = None,
    mode: Mode = "async",
    max_staleness: int | None = None,
    engine: EngineKind = "builtin",
    rollouts: int = 1,
    kl: float = 0.0,
    weight_max: float | None = None,
    budget: int = 0,
    over_sample: float = 1.0,
    filter_equal: bool = False,
    on: Literal["processes", "ray"] = "processes",
    log: tuple[str, ...] = (),
) -> Job:
    """Return the job for the model and questions in `inputs` (see `make_inputs`).

    weight_max: decoupled PPO: clip around the policy before the step, and cut the weights of older rows here. budget:
    as of `SamplingSettings`. over_sample: as of `PacingSettings`; so is max_staleness, whose default depends on the
    mode.
    """
    learned, gym = LEARNED[task], GYM_TASKS[task]
    steps = steps or learned.steps
    least = math.ceil(over_sample) - 1 if mode in IN_TURN else 1
    options = {"vllm": {"dtype": "float32"}}.get(engine, {})
    return Job(
        name=f"demo-{task}-{mode}",
        seed=seed,
        steps=steps,
        on=on,
        model=ModelSettings(path=str(inputs / "model"), dtype="float32"),
        data=DataSettings(path=str(inputs / "data"), prompt="question", prompt_tokens_max=gym.question_chars_max + 2),
        engine=(EngineSettings(kind=engine, count=rollouts, slots=_SLOTS, options=options),),
        sampling=SamplingSettings(group_size=_GROUP, tokens_max=gym.answer_chars_max + 1, budget=budget),
        reward=(
            RewardSettings(function="transferqueue.workflows.job.tiny_model.gym_tasks:score", args={"task": task}),
        ),
        algorithm=AlgorithmSettings(
            kind="grpo",
            clip_low=0.2,
            clip_high=0.28,
            kl=kl,
            old="rollout" if weight_max is None else "trainer",
            tis_max=weight_max or 0.0,
            filter_equal=filter_equal,
        ),
        trainer=TrainerSettings(
            prompts_per_step=64, lr=learned.lr, warmup=max(1, steps // 20) if steps > 1 else 0, schedule="linear"
        ),
        pacing=PacingSettings(
            mode=mode, max_staleness=least if max_staleness is None else max_staleness, over_sample=over_sample
        ),
        weights=WeightsSettings(dtype="float32"),
        checkpoint=CheckpointSettings(every=50),
        evaluation=EvaluationSettings(
            path=str(inputs / "data"), every=0, rows=HELD_OUT_QUESTIONS, samples=4, temperature=1.0
        ),
        log=LogSettings(to=tuple(log)),
        queue=QueueSettings(memory_gib=0.25),
    )
