"""Forward and backward passes and updates, on one process or on several ranks at once."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Final

import torch

import transferqueue as tq
from transferqueue.errors import InternalError
from transferqueue.workflows.job.settings.job import AlgorithmSettings
from transferqueue.workflows.job.stages.device_turns import DeviceTurns
from transferqueue.workflows.job.training.checkpoint import Checkpoints
from transferqueue.workflows.job.training.columns import RowColumns, joined, lengths, select
from transferqueue.workflows.job.training.gather import StreamPosition
from transferqueue.workflows.job.training.learner import StepLearner, in_minibatches
from transferqueue.workflows.job.training.publication import Publisher
from transferqueue.workflows.job.training.ranks import Command

_NONE: Final = -1
"""Ends the rows of a pass in a command."""


class Kind(IntEnum):
    """What rank 0 tells the others to do."""

    PASSES = 1
    UPDATE = 2
    DISCARD = 3
    PUBLISH = 4
    SAVE = 5
    END = 6


class Passes:
    """Rank 0's view of the learner on all ranks: `compute` as rows come, `update` when the step's rows are there.

    A step takes ``epochs`` times ``minibatches`` updates. With more than one, the rows are kept, and all passes are
    made by `update`.
    """

    def __init__(self, learner: StepLearner, algorithm: AlgorithmSettings, *, seed: int) -> None:
        self._learner, self._ranks = learner, learner.ranks
        self._passes_s, self._update_s, self._tokens = 0.0, 0.0, 0
        self._epochs, self._minibatches = algorithm.epochs, algorithm.minibatches
        self._seed = seed
        self._kept: list[RowColumns] = []
        self._kept_ids: list[int] = []

    @property
    def version(self) -> int:
        """See `StepLearner`: of all ranks, from their next pass on."""
        return self._learner.version

    @version.setter
    def version(self, version: int) -> None:
        self._learner.version = version

    @property
    def keeps_rows(self) -> bool:
        """Whether rows are computed with only when all have come."""
        return self._epochs * self._minibatches > 1

    def compute(self, columns: RowColumns, ids: list[int]) -> None:
        """Add the gradient of these rows; blocks for the passes."""
        if not self.keeps_rows:
            self._compute(columns, ids)
            return
        self._kept.append(columns)
        self._kept_ids += ids

    def update(self) -> dict[str, float]:
        """Update the weights after the step's rows were computed; returns figures, of several updates their means, and
        the times of passes and updates since the last step."""
        columns, figures = joined(self._kept) if self._kept else {}, []
        cut = [part for epoch in range(self._epochs) for part in self._minibatches_of(epoch)] if self.keeps_rows else []
        for number, rows in enumerate(cut, 1):
            self._compute(select(columns, rows), [self._kept_ids[row] for row in rows])
            figures.append(self._update(counts=number == len(cut)))
        figures = figures or [self._update(counts=True)]
        times = {
            "passes_s": self._passes_s,
            "update_s": self._update_s,
            "training_tokens_per_s": self._tokens / max(self._passes_s + self._update_s, 1e-9),
        }
        self._forget_rows()
        return of_updates(figures) | times

    def discard(self) -> None:
        """Forget the step's rows."""
        self._ranks.tell(Kind.DISCARD)
        self._forget_rows()
        self._learner.discard()

    def publish(self, version: int, pending: int) -> None:
        """Let the other ranks publish their shards, where weights are sharded. pending: number of the version."""
        if self._ranks.parallel == "fsdp2":
            self._ranks.tell(Kind.PUBLISH, [version, pending])

    def save(self, checkpoints: Checkpoints, version: int, position: StreamPosition) -> dict[str, float]:
        """Write a checkpoint with the others, who give their shards."""
        self._ranks.tell(Kind.SAVE)
        return checkpoints.save(self._learner, version, position)

    def end(self) -> None:
        """Let the others end."""
        self._ranks.tell(Kind.END)

    def _minibatches_of(self, epoch: int) -> Sequence[list[int]]:
        generator = torch.Generator().manual_seed(self._seed + 1_000_003 * self._learner.steps_taken + epoch)
        return in_minibatches(len(self._kept_ids), self._minibatches, generator)

    def _forget_rows(self) -> None:
        self._kept, self._kept_ids = [], []
        self._passes_s, self._update_s, self._tokens = 0.0, 0.0, 0

    def _compute(self, columns: RowColumns, ids: list[int]) -> None:
        started, world = time.monotonic(), self._ranks.world
        passes = self._learner.micro_batches(columns, at_least=world)
        if world > 1:
            rows_of_passes = encoded([[ids[row] for row in rows] for rows in passes])
            self._ranks.tell(Kind.PASSES, [self._learner.version, *rows_of_passes])
        for round_ in range(0, len(passes), world):
            self._learner.backward(select(columns, passes[round_]))
        self._tokens += sum(lengths(columns))
        self._passes_s += time.monotonic() - started

    def _update(self, *, counts: bool) -> dict[str, float]:
        started = time.monotonic()
        self._ranks.tell(Kind.UPDATE, [int(counts)])
        figures = self._learner.step(counts=counts)
        self._update_s += time.monotonic() - started
        return figures


class PassesInTurn(Passes):
    """Passes on a device that the engine of this process uses in turn. turns: of the two. Other arguments as of
    `Passes`."""

    def __init__(self, learner: StepLearner, algorithm: AlgorithmSettings, *, seed: int, turns: DeviceTurns) -> None:
        super().__init__(learner, algorithm, seed=seed)
        self._turns = turns

    def compute(self, columns: RowColumns, ids: list[int]) -> None:
        """See `Passes`; takes the device."""
        self._turns.to_trainer()
        super().compute(columns, ids)

    def discard(self) -> None:
        """See `Passes`; gives the device back, since the rows are generated again."""
        super().discard()
        self._turns.to_engine()


def of_updates(figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the figures of a step of several updates: the mean of each over the updates that have it.

    >>> of_updates([{"loss": 1.0, "engine_error": 0.01}, {"loss": 3.0}])
    {'loss': 2.0, 'engine_error': 0.01}
    """
    names = dict.fromkeys(name for each in figures for name in each)
    values = {name: [each[name] for each in figures if name in each] for name in names}
    return {name: sum(found) / len(found) for name, found in values.items()}


def encoded(passes: Sequence[Sequence[int]]) -> list[int]:
    """Return the row ids of passes as one list.

    >>> encoded([[4, 9], [7]])
    [4, 9, -1, 7, -1]
    """
    return [number for rows in passes for number in (*rows, _NONE)]


def decoded(values: Sequence[int]) -> list[list[int]]:
    """Return the passes that `encoded` wrote.

    >>> decoded([4, 9, -1, 7, -1])
    [[4, 9], [7]]
    """
    passes: list[list[int]] = [[]]
    for value in values:
        if value == _NONE:
            passes.append([])
        else:
            passes[-1].append(value)
    return passes[:-1]


class RankFollower:
    """Ranks but the first: carry out the commands of rank 0. fields: columns that the loss reads. publisher: publishes
    the shards of this rank."""

    def __init__(
        self,
        learner: StepLearner,
        table: tq.Table,
        fields: Sequence[str],
        checkpoints: Checkpoints | None,
        publisher: Publisher,
    ) -> None:
        self._learner, self._table, self._fields = learner, table, list(fields)
        self._checkpoints, self._publisher = checkpoints, publisher

    def run(self) -> None:
        """Serve until rank 0 ends. Raises when a rank is gone."""
        try:
            while (command := self._learner.ranks.hear()).kind != Kind.END:
                self._carry_out(command)
            self._publisher.wait()
        finally:
            self._publisher.close()

    def _carry_out(self, command: Command) -> None:
        match Kind(command.kind):
            case Kind.PASSES:
                self._learner.version = command.values[0]
                self._compute(decoded(command.values[1:]))
            case Kind.UPDATE:
                self._publisher.wait_copied()
                self._learner.step(counts=bool(command.values[0]))
            case Kind.DISCARD:
                self._learner.discard()
            case Kind.PUBLISH:
                version, pending = command.values
                self._publisher.publish(version, self._learner.own_weights(), pending=pending)
            case Kind.SAVE if self._checkpoints is not None:
                self._checkpoints.save(self._learner, -1, StreamPosition())
            case _:
                raise InternalError(f"rank {self._learner.ranks.rank} received the unknown command {command}")

    def _compute(self, passes: Sequence[Sequence[int]]) -> None:
        """Make this rank's passes; one without rows repeats those of the first rank with weight 0."""
        rank, world = self._learner.ranks.rank, self._learner.ranks.world
        for first in range(0, len(passes), world):
            has_rows = first + rank < len(passes)
            if has_rows or self._learner.ranks.parallel == "fsdp2":
                rows = passes[first + rank] if has_rows else passes[first]
                self._learner.backward(self._read(rows), weight=float(has_rows))

    def _read(self, rows: Sequence[int]) -> RowColumns:
        with self._table.read(rows, fields=self._fields) as read:
            return {name: list(read[name]) for name in self._fields}
