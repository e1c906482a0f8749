"""The loop of a trainer: gather a step, update, publish, ack, save; and how it begins and ends.

1. In order for each step k: update, publish the version that learned from the rows, ack the rows with step k; every so
   often a checkpoint of k, and then ``checkpointed(k)``. Without checkpoints ``checkpointed(k)`` follows the ack at
   once, and a trainer that begins says it again for the step of its weights.
2. A trainer that begins loads the newest checkpoint c, says ``checkpointed(c)`` again (the death may have been between
   the two), and then ``rollback(c)``: rows of later steps come again, and leases of an earlier life end. Versions only
   rise: if a version after that of c was published, the weights of c are published again under the next number. Rows of
   the lost versions are then as stale as the table's pacing says. Where the step of a row decides its version
   (`step_versions`), a step that is taken again makes the same bits, and its version is not published again.
3. After its last step, or when evaluations improve no more (`evaluation.patience`), the policy's trainer seals the
   table and drops the rows that were generated ahead: they end as dropped ("surplus").
4. The critic's trainer goes on until the table ends. It and the policy's are a pair, which goes back to the same
   checkpoint (`pair`).
5. Rows that are trained in several steps (`pacing.uses`) have a task for each use, and all of them go back to the same
   step. Rows that are too old for a further use are dropped with the next checkpoint, when those before are final
   ("stale_use"); rows that have uses left after the last step, with it ("surplus_use").
6. In sync mode the critic takes the rows of step k + 1 only if the policy generated them after its step k (`pair`, rule
   4).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np

import transferqueue as tq
from transferqueue.adapters.protocols import WeightSource
from transferqueue.errors import NotFound, Sealed
from transferqueue.workflows.job import names
from transferqueue.workflows.job.training.checkpoint import Checkpoints
from transferqueue.workflows.job.training.columns import RowColumns
from transferqueue.workflows.job.training.passes import Passes
from transferqueue.workflows.job.training.publication import Publisher, next_version
from transferqueue.workflows.job.training.row_figures import again_figures, row_figures
from transferqueue.workflows.job.training.step_rows import TakenRows, computes_on
from transferqueue.workflows.job.training.stream import GatheredStep, RowStream

STEP_ROWS: Final = "step_rows"
"""Kind of the event with the rows of a step."""
SURPLUS: Final = "surplus"
"""Why rows end that were generated ahead of a trainer that needs no more."""


@dataclass(frozen=True, kw_only=True)
class TrainerTerms:
    """task: whose rows are trained. steps: of the whole run. save_every: steps between two checkpoints (0: none).
    publish_every: likewise.

    endless: go on after the last step, until the table ends. kind: of the event that reports a step. reward: whether
    rows bring rewards. seals: the table ends with this trainer. evaluate_every: steps between two evaluations (0:
    before and after only). in_turn: rows of a step are taken only if the weights of the step before generated them
    (rule 6). by_step: versions are the numbers of steps (rule 2). tells_rows: report the rows of each step.
    further_uses: tasks of the uses of rows after the first. staleness: most versions of rows at these; None: their age
    is decided by their steps.
    """

    task: str
    steps: int
    save_every: int
    publish_every: int = 1
    endless: bool = False
    kind: str = "step"
    rewards: tuple[str, ...] = ()
    seals: bool = True
    evaluate_every: int = 0
    in_turn: bool = False
    by_step: bool = False
    tells_rows: bool = False
    further_uses: tuple[str, ...] = ()
    staleness: int | None = None


class Evaluations(Protocol):
    """Where a trainer asks for evaluations of held-out prompts."""

    def request(self, step: int, version: int) -> None:
        """Ask for one of `version`, which has been published after `step` steps. Returns at once."""

    def end(self) -> None:
        """No more requests will come."""

    def stalled(self) -> bool:
        """Whether the run is to end, since evaluations improve no more."""


class Partner(Protocol):
    """The other trainer of a pair, and what both have on the disk
    (`transferqueue.workflows.job.training.policy_critic_pair`)."""

    def newest(self) -> Mapping[str, int]:
        """Return the step of the newest checkpoints that belong together, by task."""

    def first_version(self) -> int:
        """Return the version that both publish first in this life; -1 if none is agreed."""

    def wait(self, version: int) -> None:
        """Wait until the other has published that version."""

    def is_trained(self, row: int) -> bool:
        """Whether an earlier life of the policy's trainer has acked this row, or the row is gone."""


class NoEvaluations:
    """Of a job without held-out prompts."""

    def request(self, step: int, version: int) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing."""

    def stalled(self) -> bool:
        """Return False."""
        return False


@dataclass
class Trainer:
    """The loop of rank 0. step: steps taken so far. latest: the newest version published. weights: returns this rank's
    published weights."""

    table: tq.Table
    stream: RowStream
    passes: Passes
    publisher: Publisher
    weights: Callable[[], WeightSource]
    checkpoints: Checkpoints | None
    terms: TrainerTerms
    figures: Callable[..., None]
    evaluations: Evaluations = field(default_factory=NoEvaluations)
    partner: Partner | None = None
    full: Callable[[int, Sequence[int]], None] = lambda version, rows: None
    """Called with the version that a step makes, and its rows, once they have all come."""
    clock: Callable[[], float] = time.monotonic
    step: int = 0
    latest: int = -1
    version: int = -1
    """Version of the weights as they are."""
    _stalled: bool = False
    _saved: int = -1
    _save_s: float = 0.0
    _reported_at: float = 0.0
    _in_turn: bool = False
    _trained: list[Any] = field(default_factory=list)
    _rows: TakenRows = field(default_factory=TakenRows)

    def begin(self, *, resumed: bool) -> None:
        """Bring table and channel to the step of the weights. resumed: from a checkpoint (rule 2)."""
        if self.terms.save_every:
            if resumed:
                self._confirm()
                self._saved = self.step
            for task in (*reversed(self.terms.further_uses), self.terms.task):  # the first last: it may requeue rows
                self.table.rollback(self.step, task=task)
        else:
            self.table.checkpointed(self.step, task=self.terms.task)
        self._in_turn = self.terms.in_turn and self._begins_with_partner
        self._publish_first()
        self.passes.version = self.version
        self.publisher.stood_still_s()  # for the first version: of no step
        self._reported_at = self.clock()
        if self._evaluates(self.step):
            self.evaluations.request(self.step, self.version)

    def run(self) -> None:
        """Train until the last step or the end of the table; then save, and end the table if it ends with this
        trainer."""
        try:
            while not self._has_all_steps:
                gathered = self.stream.step(
                    self._compute, version_from=self.version if self._in_turn else -1, again_from=self._oldest_version
                )
                if gathered is None:
                    break
                if gathered.is_held:
                    self._take(gathered)
                    self._stalled = not self._has_all_steps and self.evaluations.stalled()
                else:
                    self.passes.discard()
                    self._rows = TakenRows()
                    self.stream.give_up(gathered)
            if self._stalled:
                self._evaluate_last()
            self.publisher.wait()
            self._save()
            if self.terms.seals:
                self.stream.drop_used(names.SURPLUS_USE)
                self._end()
            self.evaluations.end()
            self.passes.end()
        finally:
            self.publisher.close()

    @property
    def _has_all_steps(self) -> bool:
        return self._stalled or (self.step >= self.terms.steps and not self.terms.endless)

    @property
    def _oldest_version(self) -> int:
        """The oldest version of rows that are trained again."""
        return -1 if self.terms.staleness is None else max(0, self.version - self.terms.staleness)

    @property
    def _begins_with_partner(self) -> bool:
        """Whether both trainers of the pair begin now. A critic that starts again alone finds the version that both
        began with: the policy has finished."""
        return self.partner is not None and self.latest < self.partner.first_version()

    def _publish_first(self) -> None:
        """Publish the weights as they are, unless they are the newest. Of a pair the critic is first, and waits for the
        policy (`pair`, rule 3)."""
        first = -1 if self.partner is None else self.partner.first_version()
        if self.partner is not None and self.terms.seals:
            self.partner.wait(first)
        if self.latest < max(first, 0) or self.version != self.latest:
            self._publish(lambda: None, least=first)
            self.publisher.wait()
        if self.partner is not None and not self.terms.seals:
            self.partner.wait(first)

    # ------------------------------------------------------------ a step

    def _compute(self, columns: RowColumns, ids: list[int]) -> None:
        if self.terms.tells_rows:
            self._rows.add(columns, ids)
        self.passes.compute(columns, ids)

    def _take(self, gathered: GatheredStep) -> None:
        self.full(next_version(self.latest, self.step + 1), gathered.rows)
        self.publisher.wait_copied()
        taken, self._rows = {"version": self.passes.version, **self._rows.values()}, TakenRows()
        metrics = self.passes.update()
        self.stream.finish()
        self.step += 1
        step, publishes = self.step, self._publishes()
        report = self._report(gathered, metrics, self._next_version() if publishes else self.version)

        def ack() -> None:
            lost = self.stream.ack(gathered, step)
            if not self.terms.save_every:
                self.table.checkpointed(step, task=self.terms.task)
            self.figures(self.terms.kind, **report, lost_rows=lost)
            if self.terms.tells_rows:
                self.figures(STEP_ROWS, step=step, **computes_on(), **taken)
            if self._evaluates(step):
                self.evaluations.request(step, report["version"])

        if publishes:
            self._publish(ack)
        else:
            self.publisher.ack(ack)
        if self.terms.save_every and (self.step % self.terms.save_every == 0 or self.step == self.terms.steps):
            self.publisher.wait()
            self._save()

    def _evaluate_last(self) -> None:
        """Publish the weights of a run that ends early, and have them evaluated."""
        if not self._publishes():
            self._publish(lambda: None)
            self.publisher.wait()
        if not self._evaluates(self.step):
            self.evaluations.request(self.step, self.version)

    def _evaluates(self, step: int) -> bool:
        every = self.terms.evaluate_every
        return step in (0, self.terms.steps) or bool(every and step % every == 0)

    def _publishes(self) -> bool:
        return self.step % self.terms.publish_every == 0 or self.step == self.terms.steps

    def _publish(self, then: Callable[[], None], *, least: int = 0) -> None:
        self.version = self._next_version(least)
        if self.version > self.latest:
            self.latest = self.version
            pending = self.publisher.begin(self.version)
            self.passes.publish(self.version, pending)
            self.publisher.publish(self.version, self.weights(), then, pending=pending)
        else:
            self.publisher.ack(then)
        self.passes.version = self.version

    def _next_version(self, least: int = 0) -> int:
        """The version of the weights as they are; not above the newest: they are published."""
        return self.step if self.terms.by_step else max(least, next_version(self.latest, self.step))

    def _save(self) -> None:
        if self.checkpoints is None or not self.terms.save_every or self._saved == self.step:
            return
        started = self.clock()
        written = self.passes.save(self.checkpoints, self.version, self.stream.position)
        self._confirm()
        self._saved = self.step
        self._save_s += self.clock() - started
        if self.terms.seals:
            self.figures("checkpoint", **written)

    def _confirm(self) -> None:
        """Say up to which step rows are safe in a checkpoint; of a pair, for both, once both have one."""
        own = (self.terms.task, *self.terms.further_uses)
        safe = dict.fromkeys(own, self.step) if self.partner is None else self.partner.newest()
        for task, step in safe.items():
            self.table.checkpointed(step, task=task)
        if self._oldest_version > 0:
            self.stream.drop_used(names.STALE_USE, below_version=self._oldest_version)

    def _report(self, gathered: GatheredStep, metrics: Mapping[str, float], version: int) -> dict[str, Any]:
        self._trained.append(np.array(gathered.rows))
        now, before, saved_s = self.clock(), self._reported_at, self._save_s
        self._reported_at, self._save_s = now, 0.0
        return {
            "step": self.step,
            "version": version,
            **metrics,
            **row_figures(gathered.new, self.terms.rewards),
            **(again_figures(gathered.again) if self.terms.further_uses else {}),
            "step_s": now - before,
            "idle_s": gathered.idle_s,
            "stood_still_s": self.publisher.stood_still_s(),
            "save_s": saved_s,
        }

    # ------------------------------------------------------------ the end

    def _end(self) -> None:
        """Seal the table and drop rows that no life of this trainer has learned from. Those that it has may be live:
        the critic is not done with them."""
        with suppress(Sealed):  # the source did, or an earlier life of this process
            self.table.seal()
        if not self._has_all_steps:
            return  # the table ended, so no row is left
        while surplus := self._surplus():
            with suppress(NotFound):  # one of them ended in between: each time there are fewer
                self.table.drop(surplus, SURPLUS)

    def _surplus(self) -> list[int]:
        trained = np.concatenate(self._trained) if self._trained else np.empty(0, np.int64)
        rows = np.setdiff1d(self.table.read(fields=[]).rows, trained).tolist()
        return rows if self.partner is None else [row for row in rows if not self.partner.is_trained(row)]
