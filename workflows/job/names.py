"""The names that the parts of a job share: its table, its weight channels, its tasks. No torch here."""

from __future__ import annotations

from typing import Final

TABLE: Final = "rollouts"
"""The table of the job: one row for each response."""
POLICY: Final = f"{TABLE}/policy"
"""Weight channel of the trained policy, and clock of the table; its name starts with the table's, so both have the same
home coordinator."""
CRITIC: Final = f"{TABLE}/critic"
"""Weight channel of the critic: version k is the critic after step k, as of the policy. The process that scores values
follows it."""
FULL: Final = f"{TABLE}/full"
"""Weight channel on which the trainer of a job that over-samples announces full batches: version k says that the batch
is full that makes weights k."""

FIRST: Final = f"{TABLE}/first"
"""Weight channel that says with which version and prompt the table begins, where the step of a row decides its
version."""

PASS_RATES: Final = f"{TABLE}/pass_rates"
"""Channel on which the advantage stage tells the source of prompts how many responses of each group passed."""

DATA: Final = "data"
"""Column with a prompt's row of the data file, a dict of plain values: `prompt` as rewards see it (a text, or a list of
messages), and the columns that rewards or environments ask for, by the names that they use."""
IMAGES: Final = "images"
"""Column with the encoded images of a prompt, in jobs with `data.images`: a list of bytes, in the order of its text."""
ENVIRONMENT: Final = "environment"
"""Column with the name of the environment that plays the row, in jobs with several."""
EPISODE: Final = "episode"
"""Column with the turns of an episode that are over, a dict of plain values, for the process that plays it on after the
death of another; None before its first, and where its environment gives no state."""
REWARD_TERMS: Final = "reward_terms"
"""Column with each reward's own score before weights: float32 ``[rewards]`` in the order of the job, NaN where a reward
does not apply. Of several environments, each has one, and that which played the row applies."""

EXPECTED_TOKENS: Final = "expected_tokens"
"""Column with the tokens that a row's response is expected to have: int32, 0 for no expectation."""
RANKER_VERSION: Final = "ranker_version"
"""Column with the version of the ranker that expected them: int32, 0 before its first."""

PROMPTS: Final = "prompts"
"""Process that puts the prompts; no task."""
RANK: Final = "rank"
"""Gives rows their expected tokens before they are generated, where rows are dispatched by length."""
LENGTHS: Final = "lengths"
"""Teaches the ranker: sees each finished row once. Served by the process of `RANK`."""
ROLLOUT: Final = "rollout"
PLAY: Final = "play"
"""Instead of rollout and reward where rows are episodes of an environment."""
REWARD: Final = "reward"
REFERENCE: Final = "reference"
PROXIMAL: Final = "proximal"
VALUE: Final = "value"
TEACHER: Final = "teacher"
ADVANTAGE: Final = "advantage"
TRAIN: Final = "train"
TRAIN_CRITIC: Final = "train_critic"
TRAINERS: Final = (TRAIN, TRAIN_CRITIC)
EVALUATE: Final = "evaluate"
"""Process that scores held-out prompts; no task."""

PREFILLED: Final = "prefilled"
"""Kind of the event of an update of weights: ``tokens`` of running rows that the engine reads again with them."""
MEASURES: Final = ("reward", "kl", "loss")
"""Figures that say how good a policy is; an evaluation has the one of its job's kind."""
LOWER_IS_BETTER: Final = ("kl", "loss")
OPEN_STATES: Final = ("pending", "held", "ready", "leased")
"""States of a row that a task has not acked."""

CRITIC_STEP: Final = "critic_step"
"""Kind of the event with the figures of a step of the critic's trainer."""

STALE_USE: Final = "stale_use"
SURPLUS_USE: Final = "surplus_use"
"""Why rows end that were trained, and have uses left: they are too old, or the trainer needs no more."""


def further_uses(uses: int) -> tuple[str, ...]:
    """Return the tasks of the uses of a row after its first, which is `TRAIN`. The process of `TRAIN` serves them.

    >>> further_uses(3)
    ('train_use_2', 'train_use_3')
    """
    return tuple(f"{TRAIN}_use_{use}" for use in range(2, uses + 1))
