"""Environments in Gymnasium's form as a stage: each row is an episode, played by a generator.

Rules:

- An episode is one token sequence (`trajectory`): observations and the model's tokens, in turn.
- All episodes of a batch take a turn together: one request to the generator for each turn.
- A completion that was cut short (`ABORT`) is continued before the environment gets it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Protocol, SupportsFloat

import numpy as np

from transferqueue.adapters.protocols import (
    ABORT,
    GENERATE_S,
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

_FACTS: Final = ("policy_version", "policy_version_max", "tokens")


class Environment(Protocol):
    """The methods of ``gymnasium.Env`` that a stage uses."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Mapping[str, Any]]:
        """Start an episode. Return the first observation and an info mapping."""

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, Mapping[str, Any]]:
        """Act. Return observation, reward, terminated, truncated, and an info mapping."""

    def close(self) -> None:
        """Free its resources."""


@dataclass
class _Episode:
    environment: Environment
    trajectory: Trajectory = field(default_factory=Trajectory)
    reward: float = 0.0
    turns: int = 0
    over: bool = False


class Episodes:
    """The stage ``play``: each row is played as an episode and gets its token sequence, the sum of its rewards, and its number of turns.

    make: creates an environment for a row. fields: passed to ``reset`` as ``options``. seed: name of the field that is
    the ``seed``, if any.
    encode: token ids of an observation and the number of its turn (from 0). decode: an action from the token ids that the
    model drew. sampling: for each turn. turns_max: an episode that is not over after so many turns is truncated. timeout_s: of
    each request.
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
        timeout_s: float = GENERATE_S,
    ) -> None:
        if turns_max < 1 or not (fields or seed):
            raise UsageError(
                f"episodes with turns_max={turns_max}, fields={tuple(fields)}, seed={seed}: give at least one turn, and a "
                "field or a seed that tells one row from another"
            )
        self._make, self._generator, self._sampling = make, generator, sampling
        self._encode, self._decode = encode, decode
        self._fields, self._seed = tuple(fields), seed
        self._turns_max, self._timeout_s = turns_max, timeout_s

    @property
    def needs(self) -> Sequence[str]:
        """Fields that an episode starts from."""
        return (*self._fields, *(() if self._seed is None else (self._seed,)))

    @property
    def gives(self) -> Sequence[str]:
        """Fields of the sequence, its reward, and its number of turns."""
        return (*FIELDS, "rewards", "turns")

    def __call__(self, batch: tq.Batch) -> Iterator[PartialResult]:
        """Play all rows to their end, and yield them as one part."""
        episodes: list[_Episode] = []
        try:
            for row in self._rows(batch):
                episodes.append(_Episode(self._make()))
                self._reset(episodes[-1], row)
            while playing := [episode for episode in episodes if not episode.over]:
                self._turn(playing)
        finally:
            for episode in episodes:
                episode.environment.close()
        yield PartialResult(columns=_columns(episodes), facts=_facts(episodes))

    def _rows(self, batch: tq.Batch) -> list[Mapping[str, Any]]:
        columns = [batch[name].list() for name in self.needs]
        return [dict(zip(self.needs, values, strict=True)) for values in zip(*columns, strict=True)]

    def _reset(self, episode: _Episode, row: Mapping[str, Any]) -> None:
        options = {name: row[name] for name in self._fields} or None
        seed = None if self._seed is None else int(row[self._seed])
        observation, _ = episode.environment.reset(seed=seed, options=options)
        episode.trajectory.add_input(self._encode(observation, 0))

    def _turn(self, playing: Sequence[_Episode]) -> None:
        """Generate one completion for each episode and pass it to its environment."""
        for episode, completion in zip(playing, self._completions(playing), strict=True):
            episode.trajectory.add_output(
                completion.ids, completion.logprobs, [version for version, _ in completion.spans]
            )
            episode.turns += 1
            observation, reward, ended, cut, _ = episode.environment.step(self._decode(completion.ids))
            episode.reward += float(reward)
            episode.over = bool(ended or cut or episode.turns >= self._turns_max)
            if not episode.over:
                episode.trajectory.add_input(self._encode(observation, episode.turns))

    def _completions(self, playing: Sequence[_Episode]) -> list[Completion]:
        """Return one completion for each episode; those cut short are requested again, with their tokens so far."""
        unfinished = {at: Prompt.of(episode.trajectory.ids) for at, episode in enumerate(playing)}
        completions: dict[int, Completion] = {}
        while unfinished:
            places = list(unfinished)
            for completion in self._generator.generate(
                list(unfinished.values()), self._sampling, timeout_s=self._timeout_s
            ):
                at = places[completion.prompt]
                if completion.finish_reason == ABORT:
                    unfinished[at] = replace(unfinished[at], begun=completion)
                else:
                    completions[at] = completion
                    del unfinished[at]
        return [completions[at] for at in range(len(playing))]


def _columns(episodes: Sequence[_Episode]) -> Mapping[str, Any]:
    rows = [episode.trajectory.columns() for episode in episodes]
    return {name: [row[name] for row in rows] for name in FIELDS} | {
        "rewards": np.array([episode.reward for episode in episodes], np.float32),
        "turns": np.array([episode.turns for episode in episodes], np.int32),
    }


def _facts(episodes: Sequence[_Episode]) -> Mapping[str, Any]:
    rows = [episode.trajectory.facts() for episode in episodes]
    return {name: np.array([row[name] for row in rows]) for name in _FACTS}
