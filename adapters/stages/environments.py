"""Environments in Gymnasium's form as a stage: each row is an episode, played by a generator.

- An episode is one token sequence (`trajectory`): observations and the model's tokens, in turn.
- Episodes do not wait for each other. Each is played in a thread of its own, with a request to the generator for each
  turn, and its row is yielded as soon as it is over. A generator that batches requests generates the turns of several
  episodes together.
- A completion that was cut short (`ABORT`) is continued before the environment gets it.
- An environment is made, stepped and closed by one thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Protocol, SupportsFloat, TypeVar

import numpy as np

from transferqueue.adapters.protocols import (
    ABORT,
    GENERATE_S,
    LENGTH,
    STOP,
    Completion,
    Generator,
    Ids,
    PartialResult,
    Prompt,
    Sampling,
)
from transferqueue.adapters.stages.trajectory import FIELDS, Trajectory
from transferqueue.errors import UsageError

if TYPE_CHECKING:
    import transferqueue as tq

T = TypeVar("T")

EPISODES_MAX: Final = 64
"""Most episodes of one batch that are played at once; each has a thread."""


class Environment(Protocol):
    """The methods of ``gymnasium.Env`` that a stage uses."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Mapping[str, Any]]:
        """Start an episode. Return the first observation and an info mapping."""

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, Mapping[str, Any]]:
        """Act. Return observation, reward, terminated, truncated, and an info mapping."""

    def close(self) -> None:
        """Free its resources."""


@dataclass
class Episode:
    """An episode: its tokens, the reward of each turn, and why it ended: `STOP` (the environment ended it) or `LENGTH`
    (a limit cut it, or the last turn). An episode that has not ended can be played on."""

    trajectory: Trajectory = field(default_factory=Trajectory)
    rewards: list[float] = field(default_factory=list)
    finish_reason: str = ""
    prompt_tokens: int = 0
    """Tokens before the first answer."""
    limit: int | None = None
    """Most tokens, those before the first answer among them."""
    drawn: Completion | None = None
    """The model's tokens of a turn that the environment has not answered."""

    @property
    def turns(self) -> int:
        """Number of turns so far."""
        return len(self.rewards)


class EpisodeEnded(Exception):
    """This episode was abandoned because another one of the batch failed."""


class ObservationTooLong(UsageError):
    """The first observation leaves the model no token of the episode."""


class EpisodePlayer:
    """Plays episodes with one generator. Safe from several threads, one for each episode.

    Args:
        encode: ids of an observation, from it, the number of its turn from 1, and the tokens that the model drew before
            it.
        decode: an action from the tokens that the model drew.
        sampling: of a turn.
        tokens_max: of a whole episode, beside the tokens of its prompt. An episode that reaches it is cut.
        turns_max: turns of an episode. An episode that reaches it is cut.
        timeout_s: of each request.
    """

    def __init__(
        self,
        generator: Generator,
        sampling: Sampling,
        *,
        encode: Callable[[Any, int, Ids], Sequence[int] | Ids],
        decode: Callable[[Ids], Any],
        turns_max: int | None = None,
        tokens_max: int | None = None,
        timeout_s: float = GENERATE_S,
    ) -> None:
        self._generator, self._sampling = generator, sampling
        self._encode, self._decode = encode, decode
        self._turns_max, self._tokens_max, self._timeout_s = turns_max, tokens_max, timeout_s

    def play(
        self,
        environment: Environment,
        *,
        begin: Callable[[Any], tuple[Sequence[int] | Ids, int]],
        seed: int | None = None,
        options: dict[str, Any] | None = None,
        draws: int | None = None,
        given_up: Callable[[], bool] = lambda: False,
        begun: Episode | None = None,
        turned: Callable[[Episode], None] = lambda episode: None,
    ) -> Episode:
        """Play one episode to its end. Blocks. `begin` makes the tokens before the first answer from the first
        observation, and says how many of them are the observation's; `draws` is the seed of the drawn tokens. `begun`
        is played on: its environment is as it was after the turns of it. `turned` is called before each answer is
        drawn, and before the environment gets it. Raises `EpisodeEnded` between two turns once `given_up` returns True,
        `ObservationTooLong` if the first observation leaves no token of ``tokens_max``, and the environment's
        exceptions.
        """
        episode = begun or self._begun(*begin(environment.reset(seed=seed, options=options)[0]))
        while not episode.finish_reason:
            if given_up():
                raise EpisodeEnded
            turned(episode)
            self._turn(environment, episode, draws, turned)
        return episode

    def _begun(self, ids: Sequence[int] | Ids, observed: int) -> Episode:
        """Return an episode before its first turn."""
        limit = None if self._tokens_max is None else len(ids) - observed + self._tokens_max
        if limit is not None and len(ids) >= limit:
            raise ObservationTooLong(
                f"the first observation has {observed} tokens, of at most {self._tokens_max} for "
                "observations and answers: none is left for an answer; shorten it, or raise sampling.tokens_max"
            )
        episode = Episode(prompt_tokens=len(ids), limit=limit)
        episode.trajectory.add_input(ids)
        return episode

    def _turn(
        self, environment: Environment, episode: Episode, draws: int | None, turned: Callable[[Episode], None]
    ) -> None:
        """Generate one completion, if that is not done, and pass it to the environment."""
        limit = episode.limit
        left = None if limit is None else limit - len(episode.trajectory.ids)
        if episode.drawn is None:
            if left is not None and left < 1:
                episode.finish_reason = LENGTH
                return
            episode.drawn = self._complete(episode, left, draws)
            episode.trajectory.add_completion(episode.drawn)
            turned(episode)
        completion = episode.drawn
        observation, reward, ended, cut, _ = environment.step(self._decode(completion.ids))
        episode.drawn = None
        episode.rewards.append(float(reward))
        if ended or cut or episode.turns == self._turns_max:
            whole = completion.finish_reason != LENGTH
            episode.finish_reason = STOP if ended and whole else LENGTH
            return
        ids = self._encode(observation, episode.turns, completion.ids)
        if limit is not None and len(episode.trajectory.ids) + len(ids) >= limit:
            episode.finish_reason = LENGTH
            return
        episode.trajectory.add_input(ids)

    def _complete(self, episode: Episode, left: int | None, draws: int | None) -> Completion:
        """Draw the tokens of one turn; an aborted request is sent again with its tokens so far."""
        most = self._sampling.tokens_max if left is None else min(left, self._sampling.tokens_max)
        seed = None if draws is None else int(np.random.SeedSequence([draws, episode.turns]).generate_state(1)[0])
        prompt = Prompt(ids=np.array(episode.trajectory.ids, np.int32), seed=seed)
        while True:
            request = self._generator.generate(
                [prompt], replace(self._sampling, tokens_max=most), timeout_s=self._timeout_s
            )
            with closing(request) as completions:
                completion = next(completions)
            if completion.finish_reason != ABORT:
                return completion
            prompt = replace(prompt, begun=completion) if len(completion.ids) else prompt


def as_they_end(play: Callable[[int, Callable[[], bool]], T], rows: int, at_once: int) -> Iterator[tuple[int, T]]:
    """Call ``play(row, given_up)`` for every row, each in a thread, at most `at_once` at a time; yield row and result
    as they end.

    When one raises, or the iterator is closed, `given_up` returns True for the others, which are awaited; the first
    error is raised. One row is played by the calling thread.
    """
    if rows == 1:
        yield 0, play(0, lambda: False)
        return
    ended = threading.Event()
    with ThreadPoolExecutor(min(rows, at_once), thread_name_prefix="episode") as threads:
        row_of: dict[Future[T], int] = {threads.submit(play, row, ended.is_set): row for row in range(rows)}
        try:
            for future in as_completed(row_of):
                yield row_of[future], future.result()
        finally:
            ended.set()


class Episodes:
    """The stage ``play``: each row is played as an episode.

    It gets the token sequence of the episode, the sum of its rewards, the rewards of its turns, and its number of
    turns. Rows come back one at a time, as their episodes end.

    Args:
        make: creates an environment for a row, in the thread that plays it.
        generator: draws the actions.
        sampling: of each turn.
        encode: token ids of an observation and the number of its turn, from 0.
        decode: an action from the token ids that the model drew.
        turns_max: an episode that is not over after so many turns is truncated; at least 1.
        fields: passed to ``reset`` as ``options``; default: none.
        seed: name of the field that is the ``seed``; default None.
        at_once: episodes of a batch that are played at once, at least 1; default 64.
        timeout_s: seconds for each request to the generator; default 600.

    Raises:
        UsageError: a number below 1, or neither `fields` nor `seed`.
    """

    def __init__(
        self,
        make: Callable[[], Environment],
        generator: Generator,
        sampling: Sampling,
        *,
        encode: Callable[[Any, int], Sequence[int] | Ids],
        decode: Callable[[Ids], Any],
        turns_max: int,
        fields: Sequence[str] = (),
        seed: str | None = None,
        at_once: int = EPISODES_MAX,
        timeout_s: float = GENERATE_S,
    ) -> None:
        if turns_max < 1 or at_once < 1 or not (fields or seed):
            raise UsageError(
                f"episodes with turns_max={turns_max}, at_once={at_once}, fields={tuple(fields)}, seed={seed}: give at "
                "least one turn, one episode, and a field or a seed that tells one row from another"
            )
        self._make, self._at_once = make, at_once
        self._fields, self._seed = tuple(fields), seed
        self._begin = lambda observation: (encode(observation, 0), 0)
        self._player = EpisodePlayer(
            generator,
            sampling,
            encode=lambda observation, turn, _: encode(observation, turn),
            decode=decode,
            turns_max=turns_max,
            timeout_s=timeout_s,
        )

    @property
    def needs(self) -> Sequence[str]:
        """Fields that an episode starts from."""
        return (*self._fields, *(() if self._seed is None else (self._seed,)))

    @property
    def gives(self) -> Sequence[str]:
        """Fields of the sequence, its reward, the rewards of its turns, and their number."""
        return (*FIELDS, "rewards", "turn_rewards", "turns")

    def __call__(self, batch: tq.Batch) -> Iterator[PartialResult]:
        """Yield each row as its episode ends.

        Args:
            batch: a leased batch with the fields of `needs`.
        """
        columns = [batch[name].list() for name in self.needs]
        rows = [dict(zip(self.needs, values, strict=True)) for values in zip(*columns, strict=True)]
        for at, episode in as_they_end(lambda row, given_up: self._play(rows[row], given_up), len(rows), self._at_once):
            yield PartialResult(at=np.array([at]), columns=_columns(episode), facts=episode.trajectory.facts())

    def _play(self, row: Mapping[str, Any], given_up: Callable[[], bool]) -> Episode:
        seed = None if self._seed is None else int(row[self._seed])
        with closing(self._make()) as environment:
            options = {name: row[name] for name in self._fields} or None
            return self._player.play(environment, begin=self._begin, seed=seed, options=options, given_up=given_up)


def _columns(episode: Episode) -> Mapping[str, Any]:
    return {name: [value] for name, value in episode.trajectory.columns().items()} | {
        "rewards": np.array([sum(episode.rewards)], np.float32),
        "turn_rewards": [np.array(episode.rewards, np.float32)],
        "turns": np.array([episode.turns], np.int32),
    }
