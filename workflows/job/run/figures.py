"""The figures of a run's steps: name, unit, meaning, how each is made, and the rule of thumb that says when it shows
trouble; and those of its evaluations, which have no rules.

Everything that shows a step reads this description: ``steps.jsonl`` and the loggers (all figures), the curves of the
page, ``learning.png`` and the summary (those with `StepFigure.curve`), the warnings, and the tables of the reference
(``python -m tests.figures``). A name that ends in ``/`` stands for one figure for each term, reason or task.

A rule looks at one step, and at the steps before it. `transferqueue.workflows.job.run.run_warnings` says when it is
told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from transferqueue.workflows.job import names
from transferqueue.workflows.job.reward_terms.term_names import term_names
from transferqueue.workflows.job.settings.job import Job

Step = Mapping[str, Any]
"""Figures of a step as ``steps.jsonl`` has them."""

TRUNCATED_MAX: Final = 0.25
EQUAL_GROUPS_MAX: Final = 0.75
KL_MAX: Final = 0.5
"""Nats a token."""
KL_TIMES_MAX: Final = 10.0
"""Growth over the median of the steps before, from `KL_GROWN_MIN` nats a token on."""
KL_GROWN_MIN: Final = 0.1
KL_STEPS_MIN: Final = 5
"""Steps before, without which growth is not judged."""
STALENESS_MAX: Final = 2.0
ENGINE_ERROR_MAX: Final = 0.05
"""Rounding to bfloat16 comes to 0.005 on average, a tenth of it."""
OWN_TOKENS_MIN: Final = 30
"""Fewest tokens of a mean that is judged: a single token may differ by more than the bound."""
MOVEMENT_MAX: Final = 0.5
CLIPPED_MAX: Final = 0.3
ENTROPY_SHARE_MIN: Final = 0.05
DROPPED_MAX: Final = 0.1
PREFILLED_MAX: Final = 0.1


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What a rule sees: the name of the figure and its value, the step, the steps before it, and the job."""

    name: str
    value: float
    step: Step
    earlier: Sequence[Step]
    job: Job

    @property
    def part(self) -> str:
        """The term, reason or task of a figure with ``/``."""
        return self.name.partition("/")[2]

    def usual(self, steps: int) -> float | None:
        """The median of the figure over the steps before; None with fewer than `steps` of them."""
        values = [each[self.name] for each in self.earlier if isinstance(each.get(self.name), int | float)]
        return median(values) if len(values) >= steps else None


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule of thumb. about: when it breaks, for the reference. breaks: returns what is wrong, in words; empty while
    it holds. remedy: what it means, and what to do. patience: steps in a row in which it breaks before it is told."""

    about: str
    breaks: Callable[[Judged], str]
    remedy: str
    patience: int = 3


@dataclass(frozen=True, kw_only=True)
class StepFigure:
    """A figure of a step. made: who measures it, and how. curve: it is drawn on the page and in ``learning.png``, and
    stands in the summary. by_value: a histogram, rows by value, and no number."""

    name: str
    meaning: str
    made: str
    unit: str = ""
    rule: Rule | None = None
    curve: bool = False
    by_value: bool = False


def _truncated(at: Judged) -> str:
    if at.value <= TRUNCATED_MAX:
        return ""
    return f"{at.value:.0%} of responses are cut at tokens_max = {at.job.sampling.tokens_max}".replace("%", " %")


def _equal_groups(at: Judged) -> str:
    groups = int(at.step.get("groups", 0))
    if at.value <= EQUAL_GROUPS_MAX:
        return ""
    return f"all rewards of {round(at.value * groups)} of {groups} groups are equal"


def _equal_rewards(at: Judged) -> str:
    if at.value or "equal_groups" in at.step or at.step.get("rows", 0) < 2:
        return ""
    return f"the rewards of all rows are {at.step['reward']:g}"


def _dead_term(at: Judged) -> str:
    weights = dict(zip(term_names(at.job), (term.weight for term in at.job.environment or at.job.reward), strict=False))
    if at.value or at.step.get("rows", 0) < 2 or weights.get(at.part) == 0:
        return ""
    return f"reward term {at.part} is {at.step[f'reward/{at.part}']:g} in every row"


def _kl(at: Judged) -> str:
    before = at.usual(KL_STEPS_MIN)
    grown = before is not None and before > 0 and at.value > max(KL_GROWN_MIN, KL_TIMES_MAX * before)
    if at.value <= KL_MAX and not grown:
        return ""
    from_what = f", from {before:.2g}" if before is not None else ""
    return f"{_KL_OF[at.name]} explodes: {at.value:.2g} nats a token{from_what}"


_KL_OF: Final = {
    "ref_kl": "the KL from the reference",
    "rollout_kl": "the KL between the trained policy and the one that drew the tokens",
}


def _stale(at: Judged) -> str:
    if at.value <= STALENESS_MAX:
        return ""
    return f"rows are stale: the policy that drew them is {at.value:.1f} versions old on average"


def _engine_error(at: Judged) -> str:
    tokens = int(at.step.get("own_tokens", OWN_TOKENS_MIN))
    if at.value <= ENGINE_ERROR_MAX or tokens < OWN_TOKENS_MIN:
        return ""
    return (
        f"the engine has other weights than the trainer: log-probs of {tokens:,} tokens that it drew with the "
        f"trainer's own version differ by {at.value:.2g} nats"
    )


def _movement(at: Judged) -> str:
    if at.value <= MOVEMENT_MAX:
        return ""
    return f"log-probs of tokens that older versions drew have moved by {at.value:.2g} nats"


def _clipped(at: Judged) -> str:
    share = at.value + float(at.step.get("clipped_high") or 0.0)
    return f"{100 * share:.0f} % of tokens are clipped" if share > CLIPPED_MAX else ""


def _entropy(at: Judged) -> str:
    before = at.usual(KL_STEPS_MIN)
    if before is None or at.value >= ENTROPY_SHARE_MIN * before:
        return ""
    return f"the entropy fell from {before:.2g} to {at.value:.2g} nats a token"


def _critic(at: Judged) -> str:
    if at.part != "explained_variance" or at.value >= 0:
        return ""
    return f"the critic's values are worse than a constant: explained variance {at.value:.2g}"


def _dropped(at: Judged) -> str:
    rows = float(at.step.get("rows") or 0.0)
    if not at.value or at.value <= DROPPED_MAX * rows or at.part in (names.STALE_USE, names.SURPLUS_USE):
        return ""
    return f"{at.value:,.0f} rows were dropped ({at.part}) while {rows:,.0f} were trained"


def _prefilled(at: Judged) -> str:
    drawn = float(at.step.get("length_mean") or 0.0) * float(at.step.get("rows") or 0.0)
    if not drawn or at.value <= PREFILLED_MAX * drawn:
        return ""
    return f"engines read {at.value:,.0f} tokens again because weights changed, while {drawn:,.0f} were trained"


_TRAINER: Final = "trainer"
_PER_DRAWN: Final = "trainer: mean over the tokens of the loss, of several updates their mean"
_PER_ROW: Final = "trainer: over the step's rows"
_TIMES: Final = "trainer: clock, since the report of the step before"
_KL_RULE: Final = Rule(
    about=f"above {KL_MAX:g}, or above {KL_GROWN_MIN:g} and {KL_TIMES_MAX:g} times the median of the steps before",
    breaks=_kl,
    remedy="lower trainer.lr, raise algorithm.kl, or go back to an earlier checkpoint",
    patience=1,
)

FIGURES: Final[tuple[StepFigure, ...]] = (
    StepFigure(name="step", meaning="Number of the step, from 1.", made=_TRAINER),
    StepFigure(name="version", meaning="Version of the weights after it.", made=_TRAINER),
    StepFigure(name="reward", meaning="Mean reward.", made=_PER_ROW, curve=True),
    StepFigure(
        name="reward_std",
        meaning="Standard deviation of the rewards.",
        made=_PER_ROW,
        curve=True,
        rule=Rule(
            about="0, where rows have no groups",
            breaks=_equal_rewards,
            remedy="they teach nothing; see the rewards by `transferqueue samples`",
        ),
    ),
    StepFigure(
        name="group_std",
        meaning="Standard deviation of the rewards of a prompt's responses, mean over prompts.",
        made=_PER_ROW,
    ),
    StepFigure(name="groups", meaning="Prompts with several responses.", made=_PER_ROW),
    StepFigure(
        name="equal_groups",
        unit="share",
        meaning="Share of groups whose rewards are all equal.",
        made="trainer: over the step's groups, after `filter_equal`",
        curve=True,
        rule=Rule(
            about=f"above {EQUAL_GROUPS_MAX:g}",
            breaks=_equal_groups,
            remedy="they teach nothing; choose prompts of which some answers are right, or raise sampling.group_size",
        ),
    ),
    StepFigure(name="reward/", meaning="Mean score of a reward term, before its weight.", made=_PER_ROW, curve=True),
    StepFigure(
        name="reward_std/",
        meaning="Standard deviation of its scores.",
        made=_PER_ROW,
        rule=Rule(
            about="0, of a term with a weight: every row has the same score",
            breaks=_dead_term,
            remedy="it teaches nothing; see its scores by `transferqueue samples`, and what it looks for",
        ),
    ),
    StepFigure(
        name="reward_share/",
        unit="share",
        meaning="Share of the rows to which the term applies; of several environments, of the rows that one played.",
        made=_PER_ROW,
    ),
    StepFigure(name="length_mean", unit="tokens", meaning="Mean length of a response.", made=_PER_ROW, curve=True),
    StepFigure(name="length_p50", unit="tokens", meaning="Median length.", made=_PER_ROW),
    StepFigure(name="length_p95", unit="tokens", meaning="Length that 95 % do not exceed.", made=_PER_ROW),
    StepFigure(name="length_max", unit="tokens", meaning="Longest response.", made=_PER_ROW, curve=True),
    StepFigure(
        name="truncated",
        unit="share",
        meaning="Share of responses that were cut at `sampling.tokens_max`.",
        made="trainer: rows whose finish reason is `length`",
        curve=True,
        rule=Rule(
            about=f"above {TRUNCATED_MAX:g}",
            breaks=_truncated,
            remedy="raise it, or see by `transferqueue samples` whether responses end at all",
            patience=1,
        ),
    ),
    StepFigure(name="loss", meaning="Loss, over its weight.", made=_PER_DRAWN, curve=True),
    StepFigure(
        name="entropy",
        unit="nats",
        meaning="Entropy of the policy a token.",
        made="trainer: mean of −log-prob of the drawn tokens",
        curve=True,
        rule=Rule(
            about=f"below {ENTROPY_SHARE_MIN:g} of the median of the steps before",
            breaks=_entropy,
            remedy="the policy has nearly one answer; lower trainer.lr, raise sampling.temperature or clip_high",
        ),
    ),
    StepFigure(
        name="ref_kl",
        unit="nats",
        meaning="KL from the reference, a token.",
        made="trainer: `algorithm.kl_estimator` at the drawn tokens",
        curve=True,
        rule=_KL_RULE,
    ),
    StepFigure(
        name="rollout_kl",
        unit="nats",
        meaning="KL between the trained policy and the one that drew the tokens, a token.",
        made="trainer: k3 at the drawn tokens",
        curve=True,
        rule=_KL_RULE,
    ),
    StepFigure(name="teacher_kl", unit="nats", meaning="KL to the teacher, a token.", made=_PER_DRAWN, curve=True),
    StepFigure(name="teacher_mass", meaning="Probability of the teacher's tokens, by the teacher.", made=_PER_DRAWN),
    StepFigure(name="student_mass", meaning="The same by the student.", made=_PER_DRAWN),
    StepFigure(name="ratio", meaning="Ratio of the trained policy to the one before the step.", made=_PER_DRAWN),
    StepFigure(
        name="clipped_low",
        unit="share",
        meaning="Tokens whose loss the lower bound changed.",
        made=_PER_DRAWN,
        curve=True,
        rule=Rule(
            about=f"above {CLIPPED_MAX:g}, together with `clipped_high`",
            breaks=_clipped,
            remedy="they teach nothing more; lower trainer.lr, take fewer updates a step, or where rows are stale set "
            'algorithm.old="trainer"',
        ),
    ),
    StepFigure(
        name="clipped_high",
        unit="share",
        meaning="Tokens whose loss the upper bound changed.",
        made=_PER_DRAWN,
        curve=True,
    ),
    StepFigure(name="dual_clipped", unit="share", meaning="Tokens whose loss `dual_clip` changed.", made=_PER_DRAWN),
    StepFigure(name="tis_weight", meaning="Truncated importance weight.", made=_PER_DRAWN),
    StepFigure(
        name="engine_error",
        unit="nats",
        meaning="Difference of a token's log-prob by the trainer and by the engine that had the same weights.",
        made="trainer: mean of the absolute difference over the `own_tokens` of the step, before its update",
        curve=True,
        rule=Rule(
            about=f"above {ENGINE_ERROR_MAX:g}, over at least {OWN_TOKENS_MIN} tokens",
            breaks=_engine_error,
            remedy="compare its model, chat template and temperature with the trainer's, and the published weights",
            patience=1,
        ),
    ),
    StepFigure(
        name="unreplayed_error",
        unit="nats",
        meaning="What `engine_error` would be without `algorithm.router_replay`.",
        made="trainer: as `engine_error`, over the first pass of the step, with its own choice of experts",
        curve=True,
    ),
    StepFigure(
        name="policy_movement",
        unit="nats",
        meaning="The same difference where the weights differ: what the policy moved since, and the engine's error.",
        made="trainer: mean over all other tokens",
        curve=True,
        rule=Rule(
            about=f"above {MOVEMENT_MAX:g}",
            breaks=_movement,
            remedy="lower trainer.lr or pacing.max_staleness; if engine_error is high too, the engine is the cause",
        ),
    ),
    StepFigure(
        name="own_tokens",
        unit="tokens",
        meaning="Of `tokens`, those that the engine drew with the version that the trainer has.",
        made="trainer: by `token_versions`",
    ),
    StepFigure(
        name="stale_tokens",
        unit="tokens",
        meaning="Tokens that `algorithm.token_staleness` left out of the loss.",
        made="trainer: by `token_versions`",
    ),
    StepFigure(name="gradient_norm", meaning="Norm of the gradient before clipping.", made=_TRAINER, curve=True),
    StepFigure(name="lr", meaning="Learning rate.", made=_TRAINER),
    StepFigure(
        name="critic/",
        meaning="The critic's newest step: its `loss`, `value_error` (squared), `value_clipped` (share of tokens), "
        "`gradient_norm`, `lr`, and `explained_variance` (share of the variance of the returns).",
        made="critic's trainer: mean over the response tokens of its step",
        curve=True,
        rule=Rule(
            about="`explained_variance` below 0",
            breaks=_critic,
            remedy="its advantages are noise; raise critic.lr or algorithm.value_clip, or begin from a "
            "trained value model",
            patience=20,
        ),
    ),
    StepFigure(
        name="staleness",
        unit="rows",
        meaning="Rows by versions behind the table's clock: those of `pacing.staleness_of`.",
        made="trainer: when it leased them",
        by_value=True,
    ),
    StepFigure(
        name="staleness_mean",
        unit="versions",
        meaning="Mean of it.",
        made=_PER_ROW,
        curve=True,
        rule=Rule(
            about=f"above {STALENESS_MAX:g}",
            breaks=_stale,
            remedy="lower pacing.max_staleness or pacing.depth, or correct for it (algorithm.tis_max)",
        ),
    ),
    StepFigure(
        name="token_staleness",
        unit="tokens",
        meaning="Tokens of responses by versions behind the table's clock, where their version is known.",
        made="trainer: by `token_versions`",
        by_value=True,
    ),
    StepFigure(
        name="rows",
        unit="rows",
        meaning="New rows of the step; other figures of rows are of these.",
        made=_TRAINER,
    ),
    StepFigure(
        name="reused_rows",
        unit="rows",
        meaning="Rows of earlier steps that it trained again (`pacing.uses`).",
        made=_TRAINER,
    ),
    StepFigure(
        name="reused_staleness",
        unit="rows",
        meaning="These by versions behind the table's clock.",
        made="trainer: when it leased them",
        by_value=True,
    ),
    StepFigure(
        name="tokens",
        unit="tokens",
        meaning="Tokens of the loss, over all updates' mean; those of rows that are trained again too.",
        made=_TRAINER,
    ),
    StepFigure(name="passes", meaning="Forward and backward passes.", made=_TRAINER),
    StepFigure(name="lost_rows", unit="rows", meaning="Rows whose lease was lost after the update.", made=_TRAINER),
    StepFigure(name="step_s", unit="s", meaning="Time of the step.", made=_TIMES, curve=True),
    StepFigure(name="idle_s", unit="s", meaning="Of it: waiting for rows.", made=_TIMES, curve=True),
    StepFigure(name="passes_s", unit="s", meaning="Of it: forward and backward passes.", made=_TIMES, curve=True),
    StepFigure(
        name="update_s", unit="s", meaning="Of it: sums over ranks, clipping, optimizer.", made=_TIMES, curve=True
    ),
    StepFigure(
        name="stood_still_s",
        unit="s",
        meaning="Of it: standing still for the publication of weights.",
        made=_TIMES,
        curve=True,
    ),
    StepFigure(name="save_s", unit="s", meaning="Of it: writing a checkpoint.", made=_TIMES),
    StepFigure(
        name="generation_tokens_per_s",
        unit="tokens/s",
        meaning="Speed of generation.",
        made="run: the step's response tokens over the mean time that a generating process worked since the last step",
        curve=True,
    ),
    StepFigure(
        name="training_tokens_per_s",
        unit="tokens/s",
        meaning="Speed of training.",
        made="trainer: prompt and response tokens of all passes over `passes_s` and `update_s`",
        curve=True,
    ),
    StepFigure(
        name="dropped/",
        unit="rows",
        meaning="Rows that were dropped for a reason.",
        made="run: statistics of the table, since the step before",
        rule=Rule(
            about=f"above {DROPPED_MAX:g} of the rows of the step",
            breaks=_dropped,
            remedy="their generation was in vain; stale: lower pacing.depth, or raise pacing.max_staleness; else "
            "see the log of the stage",
        ),
    ),
    StepFigure(
        name="retried/",
        unit="episodes",
        meaning="Episodes of environments that failed for a cause, and were tried again or replaced.",
        made="run: reports of the generating processes, since the step before",
    ),
    StepFigure(
        name="failure_rate/",
        unit="share",
        meaning="Share of the tries of rows that failed for a cause: those that were dropped, tried again or replaced.",
        made="run: `dropped/` and `retried/`, over these and the rows of the step",
        curve=True,
    ),
    StepFigure(
        name="prefilled_again",
        unit="tokens",
        meaning="Tokens of running rows that engines in these processes read again because weights changed.",
        made="run: reports of the generating processes, since the step before",
        curve=True,
        rule=Rule(
            about=f"above {PREFILLED_MAX:g} of the tokens of the step's responses",
            breaks=_prefilled,
            remedy='set weights.kv = "salt", which keeps their caches, or raise weights.every',
        ),
    ),
    StepFigure(
        name="queue_age_s/",
        unit="s",
        meaning="Age of the next row of a task; null: none waits.",
        made="run: statistics of the table",
    ),
)
"""All figures of a step, in the order in which they are shown."""
_SCORED: Final = "jobs with rewards"
_DRAWN: Final = "jobs that generate"
HELD_OUT_FIGURES: Final[tuple[StepFigure, ...]] = (
    StepFigure(name="when", meaning="`before` the first step, `during` the run, or `after` the last step.", made="all"),
    StepFigure(
        name="step",
        meaning="Step after which the trainer asked for it; its weights are those of `version`.",
        made="all",
    ),
    StepFigure(name="version", meaning="Version of the weights.", made="all"),
    StepFigure(
        name="asked_version",
        meaning="Version that the trainer asked for; only where a newer one was evaluated, since it was freed.",
        made="all",
    ),
    StepFigure(name="rows", unit="rows", meaning="Responses, or episodes, of the means below.", made="all"),
    StepFigure(name="reward", meaning="Mean reward.", made=_SCORED),
    StepFigure(name="reward/", meaning="Mean score of a reward term, before its weight.", made=_SCORED),
    StepFigure(
        name="pass@",
        meaning="Probability that one of k responses to a prompt passes, by `evaluation.pass_at` and `pass_reward`.",
        made=_SCORED,
    ),
    StepFigure(name="failed", unit="rows", meaning="Rows that are left out, since their reward failed.", made=_SCORED),
    StepFigure(
        name="kl", unit="nats", meaning="Divergence from the teacher, a token; lower is better.", made="`distill`"
    ),
    StepFigure(
        name="loss", unit="nats", meaning="−log-prob of a token of held-out responses; lower is better.", made="`sft`"
    ),
    StepFigure(name="tokens", unit="tokens", meaning="Mean length of a response, or of an episode.", made=_DRAWN),
    StepFigure(name="ended", unit="share", meaning="Share of responses that drew an end token.", made=_DRAWN),
    StepFigure(name="turns", meaning="Mean number of turns of an episode.", made="environments"),
)
"""All figures of an evaluation. A further set of prompts has the same, after its name: ``aime/reward``."""
_BY_NAME: Final = {figure.name: figure for figure in FIGURES}


def described(name: str) -> StepFigure | None:
    """Return the description of a figure by its name in ``steps.jsonl``; None for a name that has none.

    >>> described("reward/exact").name
    'reward/'
    """
    return _BY_NAME.get(name) or _BY_NAME.get(f"{name.partition('/')[0]}/")


def numbers(step: Step) -> dict[str, float]:
    """Return the numbers of a step with a description, in the order of `FIGURES`."""
    order = {figure.name: at for at, figure in enumerate(FIGURES)}
    found = {
        name: (order[figure.name], float(value))
        for name, value in step.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and (figure := described(name))
    }
    return {name: value for name, (_, value) in sorted(found.items(), key=lambda item: (item[1][0], item[0]))}


def curves(steps: Sequence[Step]) -> list[str]:
    """Return the names of the figures of these steps that are drawn, in the order of `FIGURES`."""
    names = numbers({name: value for step in steps for name, value in step.items() if value is not None})
    return [name for name in names if (figure := described(name)) and figure.curve]


def not_finite(step: Step) -> list[str]:
    """Return the names of the figures of a step that are no finite numbers, though they must be."""
    return [
        name
        for name, value in step.items()
        if value is None and (figure := described(name)) is not None and figure.name != "queue_age_s/"
    ]
