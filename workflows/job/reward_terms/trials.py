"""Tries the reward functions of a job on a row before anything starts, in a process of its own: a function that hangs
or crashes ends that alone."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any, Final

import msgspec
import numpy as np

from transferqueue.adapters.protocols import Ids
from transferqueue.adapters.stages.reward_functions import RewardFailed, load_callable
from transferqueue.workflows.job.data.sequence import NumberedPrompt
from transferqueue.workflows.job.data.tokenizer import TextTokenizer
from transferqueue.workflows.job.reward_terms.function_process import FunctionProcess
from transferqueue.workflows.job.reward_terms.functions import FunctionTerm
from transferqueue.workflows.job.reward_terms.reward_rows import RewardRows
from transferqueue.workflows.job.settings.environment_factories import environments_of, factory_of
from transferqueue.workflows.job.settings.job import EnvironmentSettings, Job, RewardSettings

COMPLETION: Final = "42"
"""The answer of the dummy rows."""


class RewardTrial(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a reward function for dummy rows. scores: None where it does not apply. failure: why it gave none,
    if rows may be dropped. environment: whether it was the first turn of an environment.
    """

    name: str
    scores: list[float | None] = []
    seconds: float = 0.0
    failure: str = ""
    environment: bool = False

    def text(self) -> str:
        """Return it for people."""
        if self.failure:
            return f"rows like these are dropped: {self.failure}"
        scores = ", ".join("none" if score is None else f"{score:g}" for score in self.scores)
        said = "a first turn" if self.environment else "a response"
        return f"{scores} for {said} of {COMPLETION!r} to each prompt, in {self.seconds * 1000:.1f} ms"


def try_rewards(job: Job, prompts: list[NumberedPrompt], tokenizer: TextTokenizer) -> list[RewardTrial]:
    """Call each reward function with a response "42" to each of these prompts, and take one such turn in each
    environment.

    Blocks while a module is imported and called: at most `piped_process.START_S` and the function's ``timeout_s``.
    Raises `RewardFailed` if a function or an environment raises, hangs or gives no score (unless its rows may be
    dropped), and what `load_reward` raises.
    """
    rows = _dummy_rows(prompts, tokenizer)
    functions = [
        _tried(settings.function, settings.function, settings.args, settings, f"reward.{at}", rows)
        for at, settings in enumerate(job.reward)
        if settings.function
    ]
    return functions + [
        _tried(name, f"{__name__}:{FirstTurns.__name__}", _first_turns(each), each, f"environment.{at}", mine)
        for at, (name, each) in enumerate(environments_of(job).items())
        if len(mine := _dummy_rows([one for one in prompts if one.environment in ("", name)], tokenizer))
    ]


def _first_turns(settings: EnvironmentSettings) -> dict[str, Any]:
    factory, args = factory_of(settings)
    return {"environment": factory, "args": dict(args)}


def _tried(
    name: str,
    function: str,
    args: Mapping[str, Any],
    settings: RewardSettings | EnvironmentSettings,
    key: str,
    rows: RewardRows,
) -> RewardTrial:
    is_environment = isinstance(settings, EnvironmentSettings)
    with FunctionProcess(function, args, timeout_s=settings.timeout_s, key=key) as process:
        term = FunctionTerm(process)
        started = time.monotonic()
        try:
            scores = process.scores(_episodes(rows), len(rows)) if is_environment else term.scores(rows)
        except RewardFailed as failure:
            if settings.on_error == "stop":
                text = f"{failure}; it was tried with {rows.described(0)}"
                raise RewardFailed(text, name=name) from failure
            return RewardTrial(name=name, failure=str(failure))
    return RewardTrial(
        name=name,
        scores=[None if np.isnan(score) else float(score) for score in scores],
        seconds=time.monotonic() - started,
        environment=is_environment,
    )


def _episodes(rows: RewardRows) -> dict[str, list[Any]]:
    return {"completions": [COMPLETION] * len(rows), "episodes": [dict(data) for data in rows.data]}


class FirstTurns:
    """The first turn of episodes of an environment, as a reward function: `environment` names its factory."""

    def __init__(self, environment: str, args: dict[str, Any]) -> None:
        self._name, self._args = environment, args
        self._make = load_callable(environment, "environment.factory")

    def __call__(self, completions: Sequence[str], episodes: Sequence[dict[str, Any]]) -> Sequence[float]:
        """Return the reward of the first turn of each episode. Raises `RewardFailed` for an environment that raises."""
        doing, rewards = "made", []
        try:
            for number, (completion, options) in enumerate(zip(completions, episodes, strict=True)):
                doing = "made"
                with closing(self._make(**self._args)) as environment:
                    doing = "reset"
                    environment.reset(seed=number, options=options)
                    doing = "stepped"
                    rewards.append(float(environment.step(completion)[1]))
        except Exception as error:
            text = f"environment {self._name} raised {type(error).__name__} when it was {doing}: {error}"
            raise RewardFailed(text, name=self._name) from error
        return rewards


def _dummy_rows(prompts: list[NumberedPrompt], tokenizer: TextTokenizer) -> RewardRows:
    ids: Ids = np.asarray(tokenizer([COMPLETION], add_special_tokens=False)["input_ids"][0], np.int32)
    return RewardRows(
        ids=[prompt.number for prompt in prompts],
        data=[prompt.data for prompt in prompts],
        prompt_ids=[prompt.ids for prompt in prompts],
        response_ids=[ids] * len(prompts),
        tokenizer=tokenizer,
    )
