"""The play stage of a job: each row is an episode of an environment, played by the engine that the job names.

An environment is in Gymnasium's form, with texts. ``reward = [{ environment = "module:factory", args = {...} }]`` names
a function (or class) that is called with `args` for each episode:

- ``reset(seed=, options=)``: options is the row's column ``data`` (the prompt, and the columns of the data); seed is
  the same for all responses to a prompt, which are compared, so they begin alike. Returns ``(observation, info)``. The
  prompt of the data comes first; a first observation is a further message, None is nothing.
- ``step(action)``: the text that the model drew in this turn. Returns
  ``(observation, reward, terminated, truncated, info)``.
- ``close()``. A call that does not return within ``timeout_s`` is left alone in its thread, and its episode has failed.
  An attribute ``role`` says what observations are: "user" (the default), or "tool".

A row's response is everything after its prompt: the model's tokens, and between them the observations, whose tokens
have `loss_mask` False. It has at most `sampling.tokens_max` tokens. `rewards` is the term's weight times the sum over
the turns, which `turn_rewards` keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from typing import Any, Final, SupportsFloat, cast

import numpy as np

import transferqueue as tq
from transferqueue.adapters.protocols import Generator, PartialResult, Sampling
from transferqueue.adapters.stages.environments import Episode, EpisodeEnded, EpisodePlayer, as_they_end
from transferqueue.adapters.stages.generation import row_seed
from transferqueue.adapters.stages.reward_functions import load_callable
from transferqueue.errors import FlowSignal, PeerError, UsageError
from transferqueue.workflows.flow.loop.runner import StageFailedInProcess
from transferqueue.workflows.flow.stage import Context, Work
from transferqueue.workflows.job import names
from transferqueue.workflows.job.data.tokenizer import TextTokenizer, load_tokenizer
from transferqueue.workflows.job.graph import engine_of
from transferqueue.workflows.job.reward_terms.call_thread import CallThread, HungCalls
from transferqueue.workflows.job.reward_terms.tries import Tries
from transferqueue.workflows.job.settings.job import Job, RewardSettings
from transferqueue.workflows.job.stages.all_dropped_guard import AllDroppedGuard
from transferqueue.workflows.job.stages.chat_turns import ChatTurns
from transferqueue.workflows.job.stages.failed_rows import report_failed
from transferqueue.workflows.job.stages.policy_weights import PolicyWeights
from transferqueue.workflows.job.stages.rollout import generating
from transferqueue.workflows.job.stages.samples import SampleReporter

_SHOWN_CHARS: Final = 300
FAILED: Final = "environment_error"
"""Drop reason of rows whose environment raised, for an environment with ``on_error = "drop"``."""


@contextmanager
def episodes(context: Context) -> Iterator[Work]:
    """Factory of ``play``: like `rollout`, for episodes. Each row is yielded as soon as its episode ends."""
    job = context.settings(Job)
    environments = environment_of(job)
    with generating(context, job) as (engine, weights, sampling, chosen):
        tokenizer = load_tokenizer(job.model)
        yield chosen(
            JobEpisodes(
                environments,
                engine,
                weights,
                sampling,
                job,
                slots=engine_of(job, context.instance).slots,
                tokenizer=tokenizer,
                samples=SampleReporter(context, tokenizer),
                failed=lambda row, why: report_failed(context, {row: f"row {row}, {why}"}),
            )
        )


def environment_of(job: Job) -> RewardSettings:
    """Return the environment of a job. Raises `UsageError` if it has none."""
    for reward in job.reward:
        if reward.environment:
            return reward
    raise UsageError('the job has no environment: give reward = [{ environment = "module:factory" }]')


class EnvironmentFailed(StageFailedInProcess):
    """An environment raised, and the job says "stop": it ends the run. Its cause is the error."""


class LimitedEnvironment:
    """An environment whose calls raise `TimeoutError` if they take too long. calls: makes them."""

    def __init__(self, make: Callable[[], Any], calls: CallThread) -> None:
        self._calls = calls
        self._environment = calls.call("the factory", make)
        self.role: Final = getattr(self._environment, "role", "user")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Mapping[str, Any]]:
        """Start an episode."""
        returned = self._calls.call("reset", lambda: self._environment.reset(seed=seed, options=options))
        return cast(tuple[Any, Mapping[str, Any]], returned)

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, Mapping[str, Any]]:
        """Act. An error of the environment gets a note with the policy's text."""
        try:
            returned = self._calls.call("step", lambda: self._environment.step(action))
        except Exception as error:
            error.add_note(f"the policy had said {str(action)[:_SHOWN_CHARS]!r}")
            raise
        return cast(tuple[Any, SupportsFloat, bool, bool, Mapping[str, Any]], returned)

    def close(self) -> None:
        """Free its resources; nothing after a call that hangs."""
        if not self._calls.is_hung:
            self._calls.call("close", self._environment.close)


class JobEpisodes:
    """The function of ``play``. Loads the factory of environments; may be called from several threads at once.

    samples, failed: get rows as they end (None: nothing does); `failed` the row id of a dropped one and why.
    """

    def __init__(
        self,
        settings: RewardSettings,
        engine: Generator,
        weights: PolicyWeights,
        sampling: Sampling,
        job: Job,
        *,
        slots: int,
        tokenizer: TextTokenizer | None = None,
        samples: SampleReporter | None = None,
        failed: Callable[[int, str], None] = lambda row, why: None,
    ) -> None:
        self._hung, self._failed = HungCalls(), failed
        self._settings, self._weights, self._job, self._slots = settings, weights, job, slots
        self._guard = AllDroppedGuard(
            job, "their environments failed", "see failed_rows.jsonl in the folder of the run"
        )
        self._factory = load_callable(settings.environment, "reward.environment")
        self._engine, self._sampling, self._samples = engine, sampling, samples
        self._tokenizer = tokenizer or load_tokenizer(job.model)

    def __call__(self, batch: tq.Batch) -> Iterator[PartialResult]:
        """Yield each row as its episode ends; rows that wait for newer weights come last."""
        prompts, data = [np.asarray(ids, np.int32) for ids in batch["prompt_ids"]], batch[names.DATA].list()
        ordinals, size = batch.ordinal.tolist(), self._job.sampling.group_size
        for version, rows in self._weights.turns(batch):
            with self._weights.at(version):

                def played(at: int, given_up: Callable[[], bool], rows: list[int] = rows) -> Episode | str:
                    row = rows[at]
                    return self.episode(prompts[row], data[row], ordinals[row] // size, ordinals[row], given_up)

                for at, episode in as_they_end(played, len(rows), self._slots):
                    row = rows[at]
                    part = self._part(row, len(prompts[row]), episode)
                    yield part
                    if isinstance(episode, str):
                        self._failed(int(batch.rows[row]), episode)
                    elif self._samples is not None:
                        ids, reward = part.columns["response_ids"][0], float(part.columns["rewards"][0])
                        reason = part.columns["finish_reason"][0]
                        self._samples.report_row(version, data[row], ids, reward, ordinals[row], reason)
                    is_kept = isinstance(episode, Episode)
                    self._guard.count(kept=int(is_kept), dropped=int(not is_kept))

    def episode(
        self, prompt: Any, data: Mapping[str, Any], number: int, ordinal: int, given_up: Callable[[], bool]
    ) -> Episode | str:
        """Play one row; returns why its environment failed if it did and the job drops such rows. number: of its
        prompt, which the environment's seed is made from.

        An environment that raises, or whose call takes too long, gets other tries (`Tries`).
        """
        tries = Tries()
        while True:
            try:
                return self._play(prompt, data, number, ordinal, given_up)
            except (PeerError, FlowSignal, EpisodeEnded, StageFailedInProcess):
                raise
            except Exception as error:
                if tries.failed(f"{type(error).__name__}: {error}") and not given_up():
                    tries.pause()
                    continue
                text = self._failure(error, tries.count, ordinal, data)
                if self._settings.on_error == "drop" and not given_up():
                    return text
                raise EnvironmentFailed(f'{text}; set on_error = "drop" to go on without such rows') from error

    def _play(
        self, prompt: Any, data: Mapping[str, Any], number: int, ordinal: int, given_up: Callable[[], bool]
    ) -> Episode:
        make = partial(self._factory, **self._settings.args)
        with (
            CallThread(self._settings.timeout_s, self._hung) as calls,
            closing(LimitedEnvironment(make, calls)) as environment,
        ):
            turns = ChatTurns(self._tokenizer, self._sampling.stop_ids, environment.role)
            player = EpisodePlayer(
                self._engine,
                self._sampling,
                encode=turns.encode,
                decode=turns.decode,
                tokens_max=self._job.sampling.tokens_max,
            )
            return player.play(
                environment,
                begin=prompt,
                seed=row_seed(self._job.seed, number),
                options=dict(data),
                draws=row_seed(self._job.seed, ordinal),
                given_up=given_up,
            )

    def _failure(self, error: Exception, attempts: int, ordinal: int, data: Mapping[str, Any]) -> str:
        notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
        return (
            f"reward.environment {self._settings.environment}: the episode of ordinal {ordinal} failed with "
            f"{type(error).__name__}: {error} (try {attempts}){notes}; its data is {str(dict(data))[:_SHOWN_CHARS]}"
        )

    def _part(self, at: int, prompt: int, episode: Episode | str) -> PartialResult:
        if isinstance(episode, str):
            return PartialResult(at=np.array([at]), columns={}, drop=FAILED)
        columns = {name: [value] for name, value in episode.trajectory.response(prompt).items()}
        rewards = {
            "rewards": np.array([self._settings.weight * sum(episode.rewards)], np.float32),
            "turn_rewards": [np.array(episode.rewards, np.float32)],
            "finish_reason": [episode.finish_reason],
        }
        facts = {**episode.trajectory.facts(), "tokens": len(episode.trajectory.ids) - prompt}
        return PartialResult(at=np.array([at]), columns=columns | rewards, facts=facts)
