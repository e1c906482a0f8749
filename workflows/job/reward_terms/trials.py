"""Tries the reward functions and the environments of a job on a row before anything starts, in the processes that a run
has them in: one that hangs or crashes ends that alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import msgspec
import numpy as np

from transferqueue.adapters.protocols import Ids
from transferqueue.adapters.stages.reward_functions import RewardFailed
from transferqueue.workflows.job.data.sequence import NumberedPrompt
from transferqueue.workflows.job.data.tokenizer import TextTokenizer
from transferqueue.workflows.job.reward_terms.environment_call import CallFailed
from transferqueue.workflows.job.reward_terms.environment_host import EnvironmentHost
from transferqueue.workflows.job.reward_terms.function_process import FunctionProcess
from transferqueue.workflows.job.reward_terms.functions import FunctionTerm
from transferqueue.workflows.job.reward_terms.reward_rows import RewardRows
from transferqueue.workflows.job.settings.environment_factories import environments_of
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
        _tried(settings.function, settings, rows, partial(_scores, settings, f"reward.{at}", rows))
        for at, settings in enumerate(job.reward)
        if settings.function
    ]
    return functions + [
        _tried(name, each, mine, partial(_first_turns, each, f"environment.{at}", mine))
        for at, (name, each) in enumerate(environments_of(job).items())
        if len(mine := _dummy_rows([one for one in prompts if one.environment in ("", name)], tokenizer))
    ]


def _tried(
    name: str,
    settings: RewardSettings | EnvironmentSettings,
    rows: RewardRows,
    score: Callable[[], tuple[Sequence[float], float]],
) -> RewardTrial:
    try:
        scores, seconds = score()
    except (RewardFailed, CallFailed) as failure:
        text = f"environment {name}: {failure}" if isinstance(failure, CallFailed) else str(failure)
        if settings.on_error == "stop":
            raise RewardFailed(f"{text}; it was tried with {rows.described(0)}", name=name) from failure
        return RewardTrial(name=name, failure=text)
    return RewardTrial(
        name=name,
        scores=[None if np.isnan(score) else float(score) for score in scores],
        seconds=seconds,
        environment=isinstance(settings, EnvironmentSettings),
    )


def _scores(settings: RewardSettings, key: str, rows: RewardRows) -> tuple[Sequence[float], float]:
    """Return what a function gives the rows, and the seconds that it took."""
    with FunctionProcess(settings.function, settings.args, timeout_s=settings.timeout_s, key=key) as process:
        term, started = FunctionTerm(process), time.monotonic()
        return term.scores(rows).tolist(), time.monotonic() - started


def _first_turns(settings: EnvironmentSettings, key: str, rows: RewardRows) -> tuple[Sequence[float], float]:
    """Return the rewards of a first turn for each row, and the seconds that they took. The first environment that gives
    a state is put back in another one, as after a failure."""
    rewards: list[float] = []
    with EnvironmentHost.of(settings, key) as host:
        started = time.monotonic()
        for number, data in enumerate(rows.data):
            with host.open(time.monotonic() + settings.episode_s) as environment:
                environment.reset(seed=number, options=dict(data))
                begun = environment.state
                _, reward, ended, cut, _ = environment.step(COMPLETION)
                rewards.append(float(reward))
                state = begun if ended or cut else environment.state
            if not number and state is not None:
                with host.open(time.monotonic() + settings.episode_s) as other:
                    other.restore(state, 0 if ended or cut else 1)
        return rewards, time.monotonic() - started


def _dummy_rows(prompts: list[NumberedPrompt], tokenizer: TextTokenizer) -> RewardRows:
    ids: Ids = np.asarray(tokenizer([COMPLETION], add_special_tokens=False)["input_ids"][0], np.int32)
    return RewardRows(
        ids=[prompt.number for prompt in prompts],
        data=[prompt.data for prompt in prompts],
        prompt_ids=[prompt.ids for prompt in prompts],
        response_ids=[ids] * len(prompts),
        tokenizer=tokenizer,
    )
