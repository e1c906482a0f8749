"""The play stage of a job: each row is an episode of an environment, played by the engine that the job names.

An environment is in Gymnasium's form, with texts. ``environment = [{ factory = "module:factory", args = {...} }]``
names a function (or class) that is called with `args` for each episode:

- ``reset(seed=, options=)``: options is the row's column ``data`` (the prompt, and the columns of the data); seed is
  the same for all responses to a prompt, which are compared, so they begin alike. Returns ``(observation, info)``. A
  text is appended to the prompt's last message, messages follow it, and the row's `prompt_ids` become those of the
  prompt with its observation; None is nothing.
- ``step(action)``: the text that the model drew in this turn. Returns
  ``(observation, reward, terminated, truncated, info)``.
- ``close()``. An attribute ``role`` says what observations are: "user" (the default), or "tool".
- ``state()`` and ``restore(state)``, if it has both: plain values after ``reset`` and each turn, from which a new
  environment goes on instead of ``reset``. Then a failed episode goes on at the turn that failed, with its tokens as
  they are, and each turn is a commit on its row (`names.EPISODE`), from which another process goes on if this one dies.
  If ``restore`` fails, the episode starts again.
- A parameter ``key`` of ``step`` without a default, if it has one: a text that is the same if this turn is made again
  (`BegunEpisode.key`).

Environments have processes of their own (`reward_terms.environment_host`). A call that raises, hangs, returns what is
no answer, or ends its process fails its episode, which is tried again (`Tries`). A row whose episode fails for good is
no answer of the policy: others may take its place (`sampling.refills`); then the job drops it, with the cause as its
reason, or ends.

A reward function is an environment of one turn (`reward_terms.one_turn`), a server of OpenEnv's protocol one whose
calls go there (`adapters.stages.openenv`), an agent one whose observations are its requests to an endpoint
(`adapters.stages.agent_environment`). Of several environments, the column `environment` names that of a row: the shares
of a batch are those of the data sources, each of which has one. Each environment has its processes, its limits, its
number of episodes at a time, and its guard against too many failures. The drop reason has its name.

A row's response is everything after its prompt: the model's tokens, and between them the observations, whose tokens
have `loss_mask` False. It has at most `sampling.tokens_max` tokens. `rewards` is the environment's weight times the sum
over the turns, which `turn_rewards` keeps; of several environments, `reward_terms` has the sum at the place of its own.
"""

from __future__ import annotations

import hashlib
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple, Self

import numpy as np

import transferqueue as tq
from transferqueue.adapters.protocols import Completion, Generator, PartialResult, Sampling
from transferqueue.adapters.stages.environments import (
    Episode,
    EpisodeEnded,
    EpisodePlayer,
    ObservationTooLong,
    as_they_end,
)
from transferqueue.adapters.stages.generation import routes_of, row_seed, row_version
from transferqueue.adapters.stages.trajectory import Trajectory
from transferqueue.errors import DeadlineExceeded, Full, NotFound, RowsChanged, UsageError
from transferqueue.workflows.flow.loop.runner import StageFailedInProcess
from transferqueue.workflows.flow.stage import Context, Work
from transferqueue.workflows.job import names
from transferqueue.workflows.job.data.prompt_data import PROMPT
from transferqueue.workflows.job.data.tokenizer import TextTokenizer, load_tokenizer
from transferqueue.workflows.job.graph import engine_of, has_several_environments
from transferqueue.workflows.job.reward_terms.environment_call import DIED, OUTPUT, CallFailed
from transferqueue.workflows.job.reward_terms.environment_host import EnvironmentHost, HostedEnvironment
from transferqueue.workflows.job.reward_terms.tries import Tries
from transferqueue.workflows.job.settings.environment_factories import environments_of
from transferqueue.workflows.job.settings.job import EnvironmentSettings, Job
from transferqueue.workflows.job.stages.all_dropped_guard import AllDroppedGuard
from transferqueue.workflows.job.stages.chat_turns import ChatTurns
from transferqueue.workflows.job.stages.failed_rows import report_failed, report_retried
from transferqueue.workflows.job.stages.policy_weights import PolicyWeights
from transferqueue.workflows.job.stages.rollout import generating
from transferqueue.workflows.job.stages.samples import SampleReporter

_SHOWN_CHARS: Final = 300
_KEEP_S: Final = 1.0
"""Longest wait for memory to keep a turn."""
_KEPT: Final = {"ids": np.int32, "drawn": np.bool_, "logprobs": np.float32, "token_versions": np.int32}
"""Lists of a trajectory, and how a row keeps them."""


@contextmanager
def episodes(context: Context) -> Iterator[Work]:
    """Factory of ``play``: like `rollout`, for episodes. Each row is yielded as soon as its episode ends."""
    job = context.settings(Job)
    with generating(context, job) as (engine, weights, sampling, chosen):
        tokenizer = load_tokenizer(job.model)
        with JobEpisodes(
            engine,
            weights,
            sampling,
            job,
            slots=engine_of(job, context.instance).slots,
            tokenizer=tokenizer,
            samples=SampleReporter(context, tokenizer, recorded=isinstance(context.table.retention, tq.Recorded)),
            failed=lambda row, why: report_failed(context, {row: f"row {row}, {why.text}"}, why.cause),
            retried=lambda cause: report_retried(context, cause),
            keep=partial(_keep, context.table),
        ) as play:
            yield chosen(play)


def _keep(table: tq.Table, batch: tq.Batch, row: int, turns: Mapping[str, Any]) -> None:
    """Commit the turns of a row's episode. A row that is gone meanwhile needs none, and without memory for them the
    row keeps what it has.

    Raises `LeaseExpired` once another process may have the row: whatever that one wrote, after this one read, stays.
    """
    columns: dict[str, Any] = {names.EPISODE: [turns]}
    with suppress(NotFound, DeadlineExceeded, Full), table.read([row], fields=[names.EPISODE]) as read:
        batch.renew()
        try:
            table.update([row], overwrite=True, if_unchanged=read, memory_timeout_s=_KEEP_S, **columns)
        except RowsChanged:
            batch.renew()


class EnvironmentFailed(StageFailedInProcess):
    """An environment failed, and the job says "stop": it ends the run."""


class FailedEpisode(NamedTuple):
    """An episode that failed for good. cause: the drop reason of its row."""

    cause: str
    text: str


@dataclass
class BegunEpisode:
    """What an episode goes on from. environment: what plays it. refill: which response in the place of the first it is.
    draws: the seed of its tokens. state: of its environment; None: it has none, and the episode starts again. start:
    different for each start of an episode, anywhere."""

    environment: str
    refill: int
    draws: int
    episode: Episode = field(default_factory=Episode)
    state: bytes | None = None
    start: str = ""

    def restart(self) -> None:
        """Forget its turns: the episode starts again."""
        self.episode, self.state, self.start = Episode(), None, uuid.uuid4().hex

    def fits(self, other: BegunEpisode) -> bool:
        """Whether the other one may go on from here."""
        return (self.environment, self.refill, self.draws) == (other.environment, other.refill, other.draws)

    def key(self) -> str:
        """What tells this turn from all others: a hash of its episode's start, and of all tokens up to its action."""
        tokens = np.array(self.episode.trajectory.ids, np.int32).tobytes()
        return hashlib.blake2b(self.start.encode() + tokens, digest_size=16).hexdigest()

    def kept(self) -> dict[str, Any]:
        """Return plain values of it."""
        episode, tokens, drawn = self.episode, self.episode.trajectory, self.episode.drawn
        return {
            "environment": self.environment,
            "refill": self.refill,
            "draws": self.draws,
            "start": self.start,
            "state": self.state,
            "drawn_tokens": None if drawn is None else len(drawn.ids),
            "drawn_finish": "" if drawn is None else drawn.finish_reason,
            "rewards": episode.rewards,
            "prompt_tokens": episode.prompt_tokens,
            "limit": episode.limit,
            "versions": sorted(tokens.versions),
            **{name: np.array(getattr(tokens, name), dtype).tobytes() for name, dtype in _KEPT.items()},
        }

    @classmethod
    def of(cls, kept: Mapping[str, Any]) -> Self:
        """Make it from what `kept` returned."""
        tokens = {name: np.frombuffer(kept[name], dtype).tolist() for name, dtype in _KEPT.items()}
        played = {name: kept[name] for name in ("rewards", "prompt_tokens", "limit")}
        trajectory = Trajectory(**tokens, versions=set(kept["versions"]))
        episode = Episode(trajectory, **played)
        if (drawn := kept["drawn_tokens"]) is not None:
            episode.drawn = Completion(
                prompt=0,
                sample=0,
                ids=np.array(trajectory.ids[len(trajectory.ids) - drawn :], np.int32),
                logprobs=np.array(trajectory.logprobs[len(trajectory.ids) - drawn :], np.float32),
                finish_reason=kept["drawn_finish"],
                spans=(),
            )
        told = {name: kept[name] for name in ("environment", "refill", "draws", "state", "start")}
        return cls(**told, episode=episode)


class PlayedEpisode(NamedTuple):
    """A row to play: the tokens and the data of its prompt, the prompt's number, the row's ordinal, the name of its
    environment (empty: the only one), what keeps its turns (None: nothing does), and the turns that it has."""

    prompt: Any
    data: Mapping[str, Any]
    number: int
    ordinal: int
    environment: str = ""
    keep: Callable[[Mapping[str, Any]], None] | None = None
    begun: BegunEpisode | None = None


class JobEnvironment:
    """One environment of a job: its processes, its limits, and its failures. key: of its settings, for messages."""

    def __init__(self, name: str, settings: EnvironmentSettings, job: Job, *, key: str, slots: int) -> None:
        self.name, self.settings = name, settings
        self.host = EnvironmentHost.of(settings, key)
        self.turn = threading.BoundedSemaphore(settings.slots or slots)
        self._is_one_of_several = has_several_environments(job)
        self._guard = AllDroppedGuard(
            job,
            f"environment {name} failed",
            "see failed_rows.jsonl in the folder of the run",
            most=(f"{key}.failed_max", settings.failed_max),
        )

    @property
    def place(self) -> str:
        """For messages."""
        settings = self.settings
        return settings.factory or settings.function or settings.url or settings.agent

    def cause(self, failure: CallFailed) -> str:
        """The drop reason of a row that fails so."""
        return f"{failure.cause}/{self.name}" if self._is_one_of_several else failure.cause

    def count(self, played: Episode | FailedEpisode) -> None:
        """Count an episode. Raises as `AllDroppedGuard.count` does."""
        is_kept = isinstance(played, Episode)
        last = "" if isinstance(played, Episode) else played.text
        self._guard.count(kept=int(is_kept), dropped=int(not is_kept), last=last)


class JobEpisodes:
    """The function of ``play``. Starts the processes of its environments; may be called from several threads at once. A
    context manager.

    samples: gets rows as they end (None: nothing does). failed: gets the row id of a dropped one, and why. retried:
    gets the cause of each failure that another try, or another response, follows. keep: gets the batch, a row id and
    its turns, before each answer that is drawn and before each that the environment gets.
    """

    def __init__(
        self,
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
        keep: Callable[[tq.Batch, int, Mapping[str, Any]], None] = lambda batch, row, turns: None,
    ) -> None:
        self._failed, self._retried, self._keep = failed, retried, keep
        self._weights, self._job, self._slots = weights, job, slots
        self._environments: dict[str, JobEnvironment] = {}
        try:
            for at, (name, settings) in enumerate(environments_of(job).items()):
                self._environments[name] = JobEnvironment(name, settings, job, key=f"environment.{at}", slots=slots)
        except BaseException:
            self.close()
            raise
        self._engine, self._sampling, self._samples = engine, sampling, samples
        self._tokenizer = tokenizer or load_tokenizer(job.model)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes of its environments."""
        for environment in self._environments.values():
            environment.host.close()

    def environment(self, name: str) -> JobEnvironment:
        """The environment of this name; empty: the first."""
        return self._environments[name] if name else next(iter(self._environments.values()))

    def __call__(self, batch: tq.Batch) -> Iterator[PartialResult]:
        """Yield each row as its episode ends; rows that wait for newer weights come last."""
        episodes = self._episodes(batch)
        for version, rows in self._weights.turns(batch):
            with self._weights.at(version):
                for at, episode in self.played([episodes[row] for row in rows], counts=True):
                    row, wanted = rows[at], episodes[rows[at]]
                    part = self._part(row, wanted, episode)
                    yield part
                    if isinstance(episode, FailedEpisode):
                        self._failed(int(batch.rows[row]), episode)
                    elif self._samples is not None:
                        ids, reward = part.columns["response_ids"][0], float(part.columns["rewards"][0])
                        reason, data = part.columns["finish_reason"][0], dict(wanted.data)
                        if "prompt_ids" in part.columns:
                            data[PROMPT] = self._tokenizer.decode(part.columns["prompt_ids"][0].tolist())
                        self._samples.report_row(batch.version, data, ids, reward, wanted.ordinal, reason)
                    self.environment(wanted.environment).count(episode)

    def _episodes(self, batch: tq.Batch) -> list[PlayedEpisode]:
        size, several = self._job.sampling.group_size, has_several_environments(self._job)
        played_by = batch[names.ENVIRONMENT].list() if several else [""] * len(batch)
        keeps = names.EPISODE in batch.fields
        kept = batch[names.EPISODE].list() if keeps else [None] * len(batch)
        rows = zip(batch.rows.tolist(), batch.ordinal.tolist(), played_by, kept, strict=True)
        return [
            PlayedEpisode(
                np.asarray(ids, np.int32),
                data,
                ordinal // size,
                ordinal,
                environment,
                partial(self._keep, batch, row) if keeps else None,
                self._begun(turns, batch),
            )
            for ids, data, (row, ordinal, environment, turns) in zip(
                batch["prompt_ids"], batch[names.DATA].list(), rows, strict=True
            )
        ]

    def _begun(self, turns: Mapping[str, Any] | None, batch: tq.Batch) -> BegunEpisode | None:
        """Return the turns that a row has, if they are not too old."""
        begun, pacing = BegunEpisode.of(turns) if turns else None, self._job.pacing
        if begun is None or pacing.max_staleness is None:
            return begun
        drawn = np.array([version for version in begun.episode.trajectory.token_versions if version >= 0], np.int32)
        oldest = batch.version - pacing.max_staleness
        return begun if not len(drawn) or row_version(drawn, pacing.staleness_of) >= oldest else None

    def played(
        self, episodes: Sequence[PlayedEpisode], *, counts: bool = False
    ) -> Iterator[tuple[int, Episode | FailedEpisode]]:
        """Play rows side by side, and yield each with its place among them as it ends. counts: responses that others
        replace count as dropped. Raises as `as_they_end` does, and `EnvironmentFailed`."""

        def play(at: int, given_up: Callable[[], bool]) -> Episode | FailedEpisode:
            return self._play(episodes[at], given_up, counts=counts)

        return as_they_end(play, len(episodes), self._slots)

    def reward(self, wanted: PlayedEpisode, episode: Episode) -> float:
        """Return the reward of a row: the sum over its turns, times the weight of its environment."""
        return self.environment(wanted.environment).settings.weight * sum(episode.rewards)

    def _play(self, episode: PlayedEpisode, given_up: Callable[[], bool], *, counts: bool) -> Episode | FailedEpisode:
        """Play one row, when its environment has a place. If the environment fails for good, up to `sampling.refills`
        other responses to the prompt take the place of this one.

        Raises `EnvironmentFailed` if the last of them fails for good and the environment's settings say "stop".
        """
        environment, begun, refills = self.environment(episode.environment), episode.begun, self._job.sampling.refills
        refill = begun.refill if begun and self._fresh(environment, episode, begun.refill).fits(begun) else 0
        with environment.turn:
            while True:
                at = self._fresh(environment, episode, refill)
                played = self._member(environment, episode, begun if begun and begun.fits(at) else at, given_up)
                if isinstance(played, Episode) or refill >= refills:
                    break
                self._retried(played.cause)
                if counts:
                    environment.count(played)
                refill += 1
        if isinstance(played, FailedEpisode) and environment.settings.on_error == "stop":
            raise EnvironmentFailed(f'{played.text}; set on_error = "drop" to go on without such rows')
        return played

    def _fresh(self, environment: JobEnvironment, episode: PlayedEpisode, refill: int) -> BegunEpisode:
        """Return a response to a prompt before its start."""
        draws = row_seed(self._job.seed, episode.ordinal)
        draws = row_seed(draws, refill) if refill else draws
        return BegunEpisode(f"{environment.name}={environment.place}", refill, draws)

    def _member(
        self, environment: JobEnvironment, episode: PlayedEpisode, at: BegunEpisode, given_up: Callable[[], bool]
    ) -> Episode | FailedEpisode:
        """Play an episode on from `at`, with further tries."""
        tries, alone, until = Tries(), False, time.monotonic() + environment.settings.episode_s
        while True:
            try:
                with environment.host.open(until, alone=alone) as hosted:
                    return self._turns(environment, hosted, episode, at, given_up)
            except CallFailed as failure:
                if tries.failed(str(failure), may_pass=failure.may_pass) and time.monotonic() < until:
                    if given_up():
                        raise EpisodeEnded from failure
                    self._retried(environment.cause(failure))
                    alone = failure.was_running
                    tries.pause()
                    continue
                return FailedEpisode(environment.cause(failure), _described(environment, failure, tries.count, episode))

    def _turns(
        self,
        environment: JobEnvironment,
        hosted: HostedEnvironment,
        episode: PlayedEpisode,
        at: BegunEpisode,
        given_up: Callable[[], bool],
    ) -> Episode:
        """Play an episode on from `at`, which becomes its last turn."""
        if at.state is None:
            at.restart()
        else:
            _restore(hosted, at)

        def turned(played: Episode) -> None:
            at.episode, at.state, drawn = played, hosted.state, played.drawn
            if drawn is not None:
                hosted.key = at.key()
            lacks_routes = drawn is not None and drawn.routes is not None  # which are not kept: it is drawn again
            if episode.keep and at.state is not None and (played.turns or drawn) and not lacks_routes:
                episode.keep(at.kept())

        turns = ChatTurns(self._tokenizer, self._sampling.stop_ids, hosted.role, self._job.data.system)
        player = EpisodePlayer(
            self._engine,
            self._sampling,
            encode=turns.encode,
            decode=turns.decode,
            tokens_max=self._job.sampling.tokens_max,
        )
        try:
            return player.play(
                hosted,
                begin=lambda observation: _begun(episode, turns, observation),
                seed=row_seed(self._job.seed, episode.number),
                options=dict(episode.data),
                draws=at.draws,
                given_up=given_up,
                begun=None if at.state is None else at.episode,
                turned=turned,
            )
        except ObservationTooLong as error:
            raise CallFailed(str(error), cause=OUTPUT) from error
        except UsageError as error:  # such as a chat template that leaves turns out: no try helps
            raise StageFailedInProcess(f"environment {environment.place}: {error}") from error

    def _part(self, at: int, wanted: PlayedEpisode, episode: Episode | FailedEpisode) -> PartialResult:
        if isinstance(episode, FailedEpisode):
            return PartialResult(at=np.array([at]), columns={}, drop=episode.cause)
        prompt, environment = episode.prompt_tokens, self.environment(wanted.environment)
        columns = {name: [value] for name, value in episode.trajectory.response(prompt).items()}
        if not np.array_equal(played := np.array(episode.trajectory.ids[:prompt], np.int32), wanted.prompt):
            columns["prompt_ids"] = [played]  # they have the first observation
        if wanted.keep is not None:
            columns[names.EPISODE] = [None]  # it is over: if its row comes back, it starts again
        rewards: dict[str, Any] = {
            "rewards": np.array([self.reward(wanted, episode)], np.float32),
            "turn_rewards": [np.array(episode.rewards, np.float32)],
            "finish_reason": [episode.finish_reason],
        }
        if has_several_environments(self._job):
            own = [sum(episode.rewards) if name == environment.name else np.nan for name in self._environments]
            rewards[names.REWARD_TERMS] = [np.array(own, np.float32)]
        if self._job.algorithm.router_replay and episode.trajectory.last is not None:
            rewards["routes"] = [routes_of(episode.trajectory.last)]
        facts = {**episode.trajectory.facts(), "tokens": len(episode.trajectory.ids) - prompt}
        if (of := self._job.pacing.staleness_of) != "oldest":
            facts["policy_version"] = row_version(columns["token_versions"][0], of)
        return PartialResult(at=np.array([at]), columns=columns | rewards, facts=facts)


def _begun(episode: PlayedEpisode, turns: ChatTurns, observation: Any) -> tuple[Any, int]:
    """Return the tokens of a prompt with its first observation, and how many are the observation's. Both are made from
    the data: a row that is played again may have an earlier observation in its `prompt_ids`."""
    bare = turns.prompt(episode.data[PROMPT])
    ids = turns.prompt(episode.data[PROMPT], observation) if observation else bare
    return ids, len(ids) - len(bare)


def _restore(hosted: HostedEnvironment, at: BegunEpisode) -> None:
    """Put an environment back. If that fails, `at` has no turns any more, so that the next try starts again."""
    try:
        hosted.restore(at.state or b"", at.episode.turns)
    except CallFailed as failure:
        if failure.cause != DIED or failure.was_running:  # else it was not made
            at.restart()
        raise


def _described(environment: JobEnvironment, failure: CallFailed, attempts: int, episode: PlayedEpisode) -> str:
    place = f"; it is {failure.place}" if failure.place else ""
    return (
        f"environment {environment.place}: the episode of ordinal {episode.ordinal} failed: {failure} "
        f"(try {attempts}){place}; its data is {str(dict(episode.data))[:_SHOWN_CHARS]}"
    )
