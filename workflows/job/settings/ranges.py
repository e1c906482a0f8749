"""The range of each number of a job, in one table. No torch here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from transferqueue.errors import UsageError
from transferqueue.workflows.job.settings.job import Job


@dataclass(frozen=True)
class NumberRange:
    """Numbers from `low` to `high`. above: `low` itself is refused. or_zero: 0 is allowed too. why: what the number is,
    for the error."""

    low: float = 0.0
    high: float = math.inf
    above: bool = False
    below: bool = False
    or_zero: bool = False
    why: str = ""

    def admits(self, value: float) -> bool:
        """Whether `value` lies in the range."""
        if not math.isfinite(value):
            return False
        if self.or_zero and value == 0:
            return True
        low = value > self.low if self.above else value >= self.low
        return low and (value < self.high if self.below else value <= self.high)

    def __str__(self) -> str:
        low = f"more than {self.low:g}" if self.above else f"at least {self.low:g}"
        high = "" if self.high == math.inf else f" and {'below' if self.below else 'at most'} {self.high:g}"
        return ("0, or " if self.or_zero else "") + low + high


_COUNT: Final = NumberRange(1)
_PROCESSES: Final = NumberRange(1, 1024, why="they are processes of this machine")
_POSITIVE: Final = NumberRange(0, above=True)
_SHARE: Final = NumberRange(0, 1)
_ANY: Final = NumberRange(0)

RANGES: Final[dict[str, NumberRange]] = {
    "seed": NumberRange(0, 2**63 - 1),
    "steps": NumberRange(1, 1e9),
    "threads": NumberRange(0, 1024, why="0 divides the cores"),
    "data.sources.weight": _POSITIVE,
    "data.sampler.low": _SHARE,
    "data.sampler.high": _SHARE,
    "data.sampler.share": NumberRange(0, 1, above=True),
    "data.epochs": NumberRange(0, why="0 goes over the data as often as the steps need"),
    "data.prompt_tokens_max": _COUNT,
    "engine.count": _PROCESSES,
    "engine.tensor_parallel": _COUNT,
    "engine.slots": NumberRange(1, 65_536),
    "sampling.group_size": _COUNT,
    "sampling.group_min": NumberRange(2, or_zero=True, why="a response that is alone is compared with nothing"),
    "sampling.refills": NumberRange(0, 8, why="each may take a whole episode's time"),
    "sampling.tokens_max": _COUNT,
    "sampling.temperature": NumberRange(
        0, above=True, why="responses to learn from are drawn, not the most probable ones"
    ),
    "sampling.budget": NumberRange(0, why="0 is no bound"),
    "reward.processes": _PROCESSES,
    "reward.timeout_s": _POSITIVE,
    "environment.slots": NumberRange(0, why="0 is the engine's"),
    "environment.timeout_s": _POSITIVE,
    "environment.episode_s": _POSITIVE,
    "environment.failed_max": _SHARE,
    "reward.failed_max": _SHARE,
    "algorithm.std_eps": _ANY,
    "algorithm.clip_low": NumberRange(0, 1, below=True, why="0 takes the one of the kind"),
    "algorithm.clip_high": NumberRange(0, why="0 takes the one of the kind"),
    "algorithm.dual_clip": NumberRange(1, above=True, or_zero=True),
    "algorithm.tis_max": NumberRange(1, or_zero=True, why="it bounds a ratio whose usual value is 1"),
    "algorithm.entropy": _ANY,
    "algorithm.kl": _ANY,
    "algorithm.overlong_buffer": _ANY,
    "algorithm.overlong_penalty": _ANY,
    "algorithm.token_staleness.mask": NumberRange(0, why="0 leaves no token out"),
    "algorithm.gamma": _SHARE,
    "algorithm.lam": _SHARE,
    "algorithm.value_clip": _ANY,
    "algorithm.epochs": _COUNT,
    "algorithm.minibatches": _COUNT,
    "algorithm.top_k": NumberRange(0, 1024),
    "reference.tokens": _COUNT,
    "reference.processes": _PROCESSES,
    "reference.sync_every": NumberRange(0, why="0 keeps the reference as it is"),
    "critic.tokens": _COUNT,
    "critic.processes": _PROCESSES,
    "critic.lr": _POSITIVE,
    "teacher.tokens": _COUNT,
    "teacher.processes": _PROCESSES,
    "trainer.prompts_per_step": _COUNT,
    "trainer.ranks": _PROCESSES,
    "trainer.micro_tokens": _COUNT,
    "trainer.at_least": _COUNT,
    "trainer.lora_rank": NumberRange(0, 65_536, why="0 trains all weights"),
    "trainer.lora_alpha": _POSITIVE,
    "trainer.lr": _POSITIVE,
    "trainer.warmup": _ANY,
    "trainer.weight_decay": _ANY,
    "trainer.betas": NumberRange(0, 1, below=True, why="they are decays of moving averages"),
    "trainer.gradient_norm_max": NumberRange(0, above=True, why="it bounds the norm of a step's gradient"),
    "trainer.patience_s": NumberRange(0, 86_400, above=True, why="a rank must have the time for its passes"),
    "pacing.depth": _ANY,
    "pacing.max_staleness": _ANY,
    "pacing.uses": NumberRange(1, 16, why="1 trains each row once"),
    "pacing.over_sample": NumberRange(1, 16, why="1 starts exactly one batch"),
    "elastic.min": NumberRange(0, 1024, why="0 ends the last process while no row waits"),
    "elastic.max": NumberRange(0, 1024, why="0 keeps the counts of engine"),
    "weights.every": _COUNT,
    "weights.keep": _COUNT,
    "checkpoint.every": NumberRange(0, why="0 writes none"),
    "checkpoint.keep": _COUNT,
    "evaluation.every": NumberRange(0, why="0 evaluates before and after the run only"),
    "evaluation.rows": _COUNT,
    "evaluation.samples": _COUNT,
    "evaluation.sets.rows": NumberRange(0, why="0 takes evaluation.rows"),
    "evaluation.sets.samples": NumberRange(0, why="0 takes evaluation.samples"),
    "evaluation.temperature": _ANY,
    "evaluation.pass_at": NumberRange(1, why="each is a number of responses"),
    "evaluation.patience": NumberRange(0, why="0 takes all steps"),
    "log.samples": _ANY,
    "queue.memory_gib": NumberRange(0, 1 << 20, above=True),
    "queue.record_gib": NumberRange(0, 1 << 20, why="0 is no bound"),
    "queue.record_days": NumberRange(0, 36_500, why="0 keeps them"),
    "ray.replicas": NumberRange(1, 8),
    "ray.shard_gib": NumberRange(0, 1 << 20, why="0 is as much as queue.memory_gib"),
}
"""NumberRange of each number, by its key; of arrays without the place."""


def check_ranges(job: Job) -> None:
    """Raise `UsageError` for the first number that is out of its range."""
    for key, value in numbers(job):
        range_ = RANGES.get(".".join(name for name in key.split(".") if not name.isdigit()))
        if range_ is not None and not range_.admits(value):
            why = f": {range_.why}" if range_.why else ""
            raise UsageError(f"{key}={value!r}: give {range_}{why}")


def numbers(table: Any, at: str = "") -> Iterator[tuple[str, float]]:
    """Yield key and value of each number below `table`; those of free tables such as options are not looked at."""
    for name in table.__struct_fields__:
        value, key = getattr(table, name), f"{at}{name}"
        if isinstance(value, msgspec.Struct):
            yield from numbers(value, f"{key}.")
        elif isinstance(value, tuple):
            for place, inner in enumerate(value):
                if isinstance(inner, msgspec.Struct):
                    yield from numbers(inner, f"{key}.{place}.")
                elif isinstance(inner, int | float):
                    yield f"{key}.{place}", inner
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield key, value
