"""All numbers of the job's learning, each with its reason. No torch here: every process reads them.

They were found by experiment, under one bound: the whole job in well under 180 s on two cores, where the trainer is the
slower side. A step of the default costs 0.15 s of the trainer's core and 0.08 s of the generator's. Shares of right
answers below are of chain_sum's held-out problems after the warm-up, sampled at temperature 1 unless called greedy.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from transferqueue.errors import UsageError
from transferqueue.workflows.grpo.model.shape import ModelShape
from transferqueue.workflows.grpo.model.tokenizer import VOCABULARY_SIZE
from transferqueue.workflows.job.settings.job import AlgorithmSettings


def check_weight_max(weight_max: float | None) -> None:
    """Raise `UsageError` unless it is None or a finite bound of at least 1."""
    if weight_max is not None and not 1 <= weight_max < math.inf:
        raise UsageError(
            f"weight_max={weight_max}: a weight is cut at a finite bound of at least 1, the weight of fresh rows"
        )


@dataclass(frozen=True, kw_only=True)
class LearningSettings:
    """How the job learns. The defaults are those of ``chain_sum``; `settings_for` returns those of each data set."""

    dataset: str = "chain_sum"
    """Its reward is all or nothing but for a corner case, so reward and greedy accuracy rise together."""
    seed: int = 0
    """Of weights, warm-up, prompts and draws. The held-out problems do not depend on it."""

    group_size: int = 8
    """Responses to a prompt."""
    prompts_per_step: int = 128
    """32 and 64, with as many responses in all, gained as much; 128 publishes weights and crosses the queue less often."""
    steps: int = 300
    """200 gain 0.2 to 0.3, 350 gain 0.35 to 0.43: margin over the 0.15 that the job promises, well within three minutes."""
    learning_rate: float = 4e-4
    """1e-3 without a rise undoes the warm-up and the policy collapses; 8e-4 and 2e-4 gained a tenth and a third less."""
    final_share: float = 0.1
    """Share of the learning rate at the last step."""
    gradient_norm_max: float = 1.0
    """Typical norms are 1 to 4. Adam ignores the scale, so this only evens out the weight of single batches."""
    temperature: float = 1.0
    """The held-out reward is measured at 1, so that is the policy to improve."""

    clip_low: float = 0.2
    """PPO's 0.2."""
    clip_high: float = 0.28
    """DAPO's 0.28: leaves room to raise the probability of rare right answers."""
    kl_weight: float = 0.0
    """Without: a verifiable reward on a model trained for one task needs no tether, and no reference stage."""

    weight_max: float | None = None
    """At least 1 and finite. None: PPO's clip around the policy that generated. Above: decoupled PPO with weights cut there; 2 is usual."""

    warmup_steps: int = 300
    """About 13 s, and 2 of 5 sampled answers right: enough to reinforce, with room above."""
    warmup_rows: int = 64
    """32 with as many in all learn more (51 against 38 % right) and leave less room; 128 learn half as much."""
    warmup_learning_rate: float = 1.5e-3
    """3e-3 is past the best for arithmetic: 66 against 72 % greedy accuracy, and 27 against 67 with 4 heads."""

    width: int = 128
    """96 costs a third less and leaves the warm-up at 29 % of sampled answers right, against 38."""
    layers: int = 2
    """3 learn more from as many steps, for a third more time in each: a demo must take little of it."""
    heads: int = 8
    """After the warm-up 72 % of greedy answers are right; 67 with 4 heads; 2 hardly learn."""
    hidden: int = 256
    """512 learn more from as many steps too, for a fifth more time in each."""
    context: int = 32
    """Holds the longest prompt and response of every problem set."""

    evaluation_samples: int = 4
    """For each of 512 held-out problems: a standard error of at most 0.022, in half a second."""

    def __post_init__(self) -> None:
        check_weight_max(self.weight_max)
        if not (0 < self.clip_low < 1 and 0 < self.clip_high < math.inf):
            raise UsageError(
                f"clip_low={self.clip_low} clip_high={self.clip_high}: give 0 < clip_low < 1 and a finite clip_high above 0"
            )

    def algorithm(self) -> AlgorithmSettings:
        """Return the algorithm as a job's settings say it: grpo, and with ``weight_max`` decoupled PPO's clip."""
        return AlgorithmSettings(
            kind="grpo",
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            kl=self.kl_weight,
            old="rollout" if self.weight_max is None else "trainer",
            tis_max=self.weight_max or 0.0,
        )

    def model_shape(self) -> ModelShape:
        """Return the sizes of the model."""
        return ModelShape(
            vocabulary=VOCABULARY_SIZE,
            width=self.width,
            layers=self.layers,
            heads=self.heads,
            hidden=self.hidden,
            context=self.context,
        )


SETTINGS: Final[Mapping[str, LearningSettings]] = MappingProxyType(
    {
        "chain_sum": LearningSettings(),
        # Its scorer pays for each letter in place and hardly minds letters too many, so a policy that is unsure of the
        # length of its answers learns to run on. After 100 warm-up steps it does, and is never exactly right again;
        # after 130 it is sure enough that accuracy rises with the reward.
        "spell_backward": LearningSettings(
            dataset="spell_backward", warmup_steps=130, warmup_learning_rate=3e-3, steps=240, learning_rate=8e-4
        ),
    }
)
"""Settings that learn, by data set."""


def for_engine(settings: LearningSettings) -> LearningSettings:
    """Return `settings` for a real engine on a CPU.

    Its attention needs wider heads. Steps are smaller, since it takes one request a row where the job's own sampler takes a batch; fewer
    rows need a lower learning rate.
    """
    return replace(settings, heads=4, prompts_per_step=32, steps=240, learning_rate=settings.learning_rate / 2)


def settings_for(dataset: str = "chain_sum", *, seed: int = 0) -> LearningSettings:
    """Return the settings of ``dataset`` with ``seed``; raises ``ValueError`` naming the data sets there are."""
    if dataset not in SETTINGS:
        raise ValueError(f"no settings for the data set {dataset!r}; there are {', '.join(SETTINGS)}")
    return replace(SETTINGS[dataset], seed=seed)
