"""The play stage of a job: each row is an episode of an environment, played by the engine that the job names.

An environment is in Gymnasium's form, with texts. ``reward = [{ environment = "module:factory", args = {...} }]`` names
a function (or class) that is called with `args` for each episode:

- ``reset(seed=, options=)``: options is the row's column ``data`` (the prompt, and the columns of the data); seed is
  the same for all responses to a prompt, which are compared, so they begin alike. Returns ``(observation, info)``. The
  prompt of the data comes first; a first observation is a further message, None is nothing.
- ``step(action)``: the text that the model drew in this turn. Returns
  ``(observation, reward, terminated, truncated, info)``.
- ``close()``. An attribute ``role`` says what observations are: "user" (the default), or "tool".

Environments have processes of their own (`reward_terms.environment_host`). A call that raises, hangs, returns what is
no answer, or ends its process fails its episode, which is tried again (`Tries`). A row whose episode fails for good is
no answer of the policy: the job drops it, with the cause as its reason, or ends.

A row's response is everything after its prompt: the model's tokens, and between them the observations, whose tokens
have `loss_mask` False. It has at most `sampling.tokens_max` tokens. `rewards` is the term's weight times the sum over
the turns, which `turn_rewards` keeps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, Self

import numpy as np

import transferqueue as tq
from transferqueue.adapters.protocols import Generator, PartialResult, Sampling
from transferqueue.adapters.stages.environments import Episode, EpisodeEnded, EpisodePlayer, as_they_end
from transferqueue.adapters.stages.generation import row_seed
from transferqueue.errors import UsageError
from transferqueue.workflows.flow.loop.runner import StageFailedInProcess
from transferqueue.workflows.flow.stage import Context, Work
from transferqueue.workflows.job import names
from transferqueue.workflows.job.data.tokenizer import TextTokenizer, load_tokenizer
from transferqueue.workflows.job.graph import engine_of
from transferqueue.workflows.job.reward_terms.environment_call import CallFailed
from transferqueue.workflows.job.reward_terms.environment_host import EnvironmentHost, HostedEnvironment
from transferqueue.workflows.job.reward_terms.tries import Tries
from transferqueue.workflows.job.settings.job import Job, RewardSettings
from transferqueue.workflows.job.stages.all_dropped_guard import AllDroppedGuard
from transferqueue.workflows.job.stages.chat_turns import ChatTurns
from transferqueue.workflows.job.stages.failed_rows import report_failed, report_retried
from transferqueue.workflows.job.stages.policy_weights import PolicyWeights
from transferqueue.workflows.job.stages.rollout import generating
from transferqueue.workflows.job.stages.samples import SampleReporter

_SHOWN_CHARS: Final = 300


@contextmanager
def episodes(context: Context) -> Iterator[Work]:
    """Factory of ``play``: like `rollout`, for episodes. Each row is yielded as soon as its episode ends."""
    job = context.settings(Job)
    environments = environment_of(job)
    with generating(context, job) as (engine, weights, sampling, chosen):
        tokenizer = load_tokenizer(job.model)
        with JobEpisodes(
            environments,
            engine,
            weights,
            sampling,
            job,
            slots=engine_of(job, context.instance).slots,
            tokenizer=tokenizer,
            samples=SampleReporter(context, tokenizer, recorded=isinstance(context.table.retention, tq.Recorded)),
            failed=lambda row, why: report_failed(context, {row: f"row {row}, {why.text}"}, why.cause),
            retried=lambda cause: report_retried(context, cause),
        ) as play:
            yield chosen(play)


def environment_of(job: Job) -> RewardSettings:
    """Return the environment of a job. Raises `UsageError` if it has none."""
    for reward in job.reward:
        if reward.environment:
            return reward
    raise UsageError('the job has no environment: give reward = [{ environment = "module:factory" }]')


class EnvironmentFailed(StageFailedInProcess):
    """An environment failed, and the job says "stop": it ends the run. Its cause is the error."""


class FailedEpisode(NamedTuple):
    """An episode that failed for good. cause: the drop reason of its row."""

    cause: str
    text: str


class JobEpisodes:
    """The function of ``play``. Starts the process of its environments; may be called from several threads at once. A
    context manager.

    samples: gets rows as they end (None: nothing does). failed: gets the row id of a dropped one, and why. retried:
    gets the cause of each failure that another try follows.
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
        failed: Callable[[int, FailedEpisode], None] = lambda row, why: None,
        retried: Callable[[str], None] = lambda cause: None,
    ) -> None:
        self._failed, self._retried = failed, retried
        self._settings, self._weights, self._job, self._slots = settings, weights, job, slots
        self._guard = AllDroppedGuard(
            job,
            "their environments failed",
            "see failed_rows.jsonl in the folder of the run",
            most=("reward.0.failed_max", settings.failed_max),
        )
        self._host = EnvironmentHost(
            settings.environment, settings.args, timeout_s=settings.timeout_s, episode_s=settings.episode_s
        )
        self._engine, self._sampling, self._samples = engine, sampling, samples
        self._tokenizer = tokenizer or load_tokenizer(job.model)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes of its environments."""
        self._host.close()

    def __call__(self, batch: tq.Batch) -> Iterator[PartialResult]:
        """Yield each row as its episode ends; rows that wait for newer weights come last."""
        prompts, data = [np.asarray(ids, np.int32) for ids in batch["prompt_ids"]], batch[names.DATA].list()
        ordinals, size = batch.ordinal.tolist(), self._job.sampling.group_size
        for version, rows in self._weights.turns(batch):
            with self._weights.at(version):

                def played(at: int, given_up: Callable[[], bool], rows: list[int] = rows) -> Episode | FailedEpisode:
                    row = rows[at]
                    return self.episode(prompts[row], data[row], ordinals[row] // size, ordinals[row], given_up)

                for at, episode in as_they_end(played, len(rows), self._slots):
                    row = rows[at]
                    part = self._part(row, len(prompts[row]), episode)
                    yield part
                    if isinstance(episode, FailedEpisode):
                        self._failed(int(batch.rows[row]), episode)
                    elif self._samples is not None:
                        ids, reward = part.columns["response_ids"][0], float(part.columns["rewards"][0])
                        reason = part.columns["finish_reason"][0]
                        self._samples.report_row(version, data[row], ids, reward, ordinals[row], reason)
                    is_kept = isinstance(episode, Episode)
                    last = episode.text if isinstance(episode, FailedEpisode) else ""
                    self._guard.count(kept=int(is_kept), dropped=int(not is_kept), last=last)

    def episode(
        self, prompt: Any, data: Mapping[str, Any], number: int, ordinal: int, given_up: Callable[[], bool]
    ) -> Episode | FailedEpisode:
        """Play one row. number: of its prompt, which the environment's seed is made from.

        Raises `EnvironmentFailed` if its environment fails for good and the job says "stop".
        """
        tries, alone, until = Tries(), False, time.monotonic() + self._settings.episode_s
        while True:
            try:
                with self._host.open(until, alone=alone) as environment:
                    return self._play(environment, prompt, data, number, ordinal, given_up)
            except CallFailed as failure:
                if tries.failed(str(failure), may_pass=failure.may_pass) and time.monotonic() < until:
                    if given_up():
                        raise EpisodeEnded from failure
                    self._retried(failure.cause)
                    alone = failure.was_running
                    tries.pause()
                    continue
                text = self._failure(failure, tries.count, ordinal, data)
                if self._settings.on_error == "drop":
                    return FailedEpisode(failure.cause, text)
                raise EnvironmentFailed(f'{text}; set on_error = "drop" to go on without such rows') from failure

    def _play(
        self,
        environment: HostedEnvironment,
        prompt: Any,
        data: Mapping[str, Any],
        number: int,
        ordinal: int,
        given_up: Callable[[], bool],
    ) -> Episode:
        turns = ChatTurns(self._tokenizer, self._sampling.stop_ids, environment.role)
        player = EpisodePlayer(
            self._engine,
            self._sampling,
            encode=turns.encode,
            decode=turns.decode,
            tokens_max=self._job.sampling.tokens_max,
        )
        try:
            return player.play(
                environment,
                begin=prompt,
                seed=row_seed(self._job.seed, number),
                options=dict(data),
                draws=row_seed(self._job.seed, ordinal),
                given_up=given_up,
            )
        except UsageError as error:  # such as a chat template that leaves turns out: no try helps
            raise StageFailedInProcess(f"reward.environment {self._settings.environment}: {error}") from error

    def _failure(self, failure: CallFailed, attempts: int, ordinal: int, data: Mapping[str, Any]) -> str:
        place = f"; it is {failure.place}" if failure.place else ""
        return (
            f"reward.environment {self._settings.environment}: the episode of ordinal {ordinal} failed: {failure} "
            f"(try {attempts}){place}; its data is {str(dict(data))[:_SHOWN_CHARS]}"
        )

    def _part(self, at: int, prompt: int, episode: Episode | FailedEpisode) -> PartialResult:
        if isinstance(episode, FailedEpisode):
            return PartialResult(at=np.array([at]), columns={}, drop=episode.cause)
        columns = {name: [value] for name, value in episode.trajectory.response(prompt).items()}
        rewards = {
            "rewards": np.array([self._settings.weight * sum(episode.rewards)], np.float32),
            "turn_rewards": [np.array(episode.rewards, np.float32)],
            "finish_reason": [episode.finish_reason],
        }
        facts = {**episode.trajectory.facts(), "tokens": len(episode.trajectory.ids) - prompt}
        return PartialResult(at=np.array([at]), columns=columns | rewards, facts=facts)
