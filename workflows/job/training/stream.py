"""Gathers the rows of a step from the queue, and computes with them as they come.

1. Leases are held from the first row of a step to its ack, over any number of requests. The client renews them.
2. All new rows of a step are acked together with their step, in one commit, after the weights that learned from them
   are published; then those of further uses (rule 6). A trainer that dies at any moment has counted all new rows of a
   step or none; of further uses, a rollback to its checkpoint returns what it counted since.
3. If a lease is lost before the update (the process was stopped for long, or the task was rolled back), others have its
   rows: the step is abandoned, its gradient is discarded, and its other rows are released.
4. If a lease is lost after the update, the model has learned from rows that may come again. Those that still exist are
   acked as soon as they come again, with the step that learned from them, and are not computed with. Rows that come in
   one lease with them are released, and leased again.
5. A wait for rows ends with rows, at the end of the table, when a place that it waits for is gone, or at its deadline.
   The server says which: the lease names the places (``awaited``), and that its rows are not given back (``but_held``).
6. Rows that are trained in several steps have a task for each use, whose lease, ack and return are as of the first. A
   step takes for use u + 1 the places that the step before took for use u, so no step has a row twice, and a slow row
   keeps back no other. Those rows have all their columns, and are leased without a wait. Rows that have become too old
   are not leased; the trainer drops them (`drop_used`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

import transferqueue as tq
from transferqueue.errors import DeadlineExceeded, EndOfTable, LeaseExpired, NotFound, RowsEnded, UsageError
from transferqueue.limits import LEASES_PER_REQUEST_MAX, SECONDS_MAX, SPANS_AWAITED_MAX
from transferqueue.workflows.flow.events import WAIT, Event, TimeSpan
from transferqueue.workflows.job.training.columns import RowColumns
from transferqueue.workflows.job.training.gather import (
    StepGatherer,
    StepShape,
    StreamPosition,
    places_of,
    spans_of,
)

Compute = Callable[[RowColumns, list[int]], None]
"""Takes columns of some rows of the step, and the ids of the rows."""
_NO_PLACE: Final = (-2, -3)
"""A span that no row is in; those without an ordinal have -1."""


@dataclass(frozen=True, kw_only=True)
class StreamTerms:
    """The lease terms of a trainer. whole: units are groups of `group_rows` rows, whose ordinals are neighbours; else
    single rows. fields: columns of the computation and of the figures. further_uses: tasks of the uses after the first.
    stall_s: longest wait for a row (default: no limit).
    """

    task: str
    shape: StepShape
    whole: bool
    group_rows: int
    fields: tuple[str, ...]
    further_uses: tuple[str, ...] = ()
    stall_s: float = SECONDS_MAX


@dataclass(slots=True)
class GatheredStep:
    """The rows of one step, leased until `ack`. task: of their first use. idle_s: seconds spent waiting for rows.
    version_from: see `RowStream.step`."""

    task: str
    batches: list[tq.Batch] = field(default_factory=list)
    idle_s: float = 0.0
    version_from: int = -1

    @property
    def new(self) -> list[tq.Batch]:
        """The rows that no step has trained before."""
        return [batch for batch in self.batches if batch.task == self.task]

    @property
    def again(self) -> list[tq.Batch]:
        """The others."""
        return [batch for batch in self.batches if batch.task != self.task]

    @property
    def rows(self) -> list[int]:
        """Ids of the new rows."""
        return [int(row) for batch in self.new for row in batch.rows]

    @property
    def is_held(self) -> bool:
        """Whether all leases are still held, as far as the client knows."""
        return not any(batch.ended for batch in self.batches)


@dataclass(frozen=True, slots=True)
class Unit:
    """A group or a row of a batch: positions in the batch, by ordinal."""

    batch: int
    rows: npt.NDArray[np.intp]


class RowStream:
    """The rows of one task, step by step. `ack` may be called from another thread than the others. position: where an
    earlier process was."""

    def __init__(
        self,
        table: tq.Table,
        terms: StreamTerms,
        *,
        emit: Callable[[Event], None],
        position: StreamPosition | None = None,
    ) -> None:
        self.table, self.terms = table, terms
        self._emit = emit
        self._gatherer: StepGatherer[Unit] = StepGatherer(terms.shape, position)
        self._learned: dict[tuple[str, int], int] = {}
        """Rows by task that the model has learned from and that may come again, with their step."""
        self._again = (() if position is None else position.again)[: len(terms.further_uses)]
        """Places that the next step takes for each further use; fewer uses in the first steps."""
        self._lost: set[int] = set()
        """Places of further uses whose lease was lost after the update: they come again, to be acked."""

    def step(self, compute: Compute, *, version_from: int = -1, again_from: int = -1) -> GatheredStep | None:
        """Gather the rows of the next step, and compute with them as they come. None: the table has ended.

        version_from: take only new rows that this version of the policy, or a later one, generated (-1: any).
        again_from: likewise, rows for a further use. The last step of a table may have fewer rows. Blocks;
        `DeadlineExceeded` when no row came for ``stall_s``. If `compute` raises, all rows are released, new ones that
        it computed with as failed.
        """
        gathered = GatheredStep(self.terms.task, version_from=version_from)
        try:
            again = self._take_again(gathered, again_from)
            if self.terms.shape.stream:
                self._compute_again(gathered, again, compute)
            while not self._gatherer.is_complete:
                self._take_more(gathered)
                self._compute(gathered, compute)
            if not self.terms.shape.stream and gathered.new:
                self._compute_again(gathered, again, compute)
            self._compute(gathered, compute)
        except BaseException:
            self.give_up(gathered)
            raise
        if not gathered.new:
            self.give_up(gathered)
            return None
        return gathered

    @property
    def position(self) -> StreamPosition:
        """Which places were trained, or are gone."""
        return self._gatherer.position._replace(again=self._again)

    def finish(self) -> None:
        """The model has learned from the step: its rows are `ack`ed next, and others make the next step."""
        self._again = (self._gatherer.taken, *self._again)[: len(self.terms.further_uses)]
        self._gatherer.finish()

    def drop_used(self, reason: str, *, below_version: int | None = None) -> None:
        """Drop the rows that a step has trained and that have further uses, which then do not take place; with
        `below_version` those alone that older weights generated: new rows of these are too old as well. The last use is
        open for all of them."""
        oldest, finished, _ = self._gatherer.position
        if below_version is None:
            places = [self._within(span) for span in ((0, oldest - 1), *spans_of(finished))]
        else:
            places = [[tq.VersionBetween(low=0, high=below_version - 1)]]
        for where in places:
            for last in self.terms.further_uses[-1:]:
                while (batch := self._lease_again(last, where)) is not None:
                    batch.drop(reason)

    def forget_unknown(self, is_done: Callable[[str, int], bool], reason: str = "") -> int:
        """Train only those places again whose rows the table has and has counted the uses before of: a table that began
        anew, or from an older snapshot, has others. Returns how many others there were. is_done: whether a task has
        counted a row. reason: if there are others, drop the rows that have uses left and no step to come."""
        if not self._again:
            return 0
        uses, before = (self.terms.task, *self.terms.further_uses), [set(places_of(spans)) for spans in self._again]
        live = self.table.read(fields=[], values=False)
        place_of = dict(zip(live.rows.tolist(), (live.ordinal // self._unit_rows).tolist(), strict=True))
        known = []
        for task, places in zip(uses, before, strict=False):
            done = {row: is_done(task, row) for row, place in place_of.items() if place in places}
            open_places = {place_of[row] for row, is_counted in done.items() if not is_counted}
            known.append({place_of[row] for row in done} - open_places)
        self._again = tuple(map(spans_of, known))
        kept = set().union(*known)
        if forgotten := sum(map(len, before)) - sum(map(len, known)):
            left = [row for row, place in place_of.items() if place not in kept and is_done(self.terms.task, row)]
            with suppress(NotFound):  # one of them ended in between: the others go when they are too old
                if left and reason:
                    self.table.drop(left, reason)
        return forgotten

    def give_up(self, gathered: GatheredStep) -> None:
        """Release the rows of a step that the model has not learned from."""
        self._gatherer.discard()
        for batch in gathered.batches:
            try:
                batch.release()
            except LeaseExpired:
                continue  # others have its rows already
            except tq.BatchEnded:
                continue  # released as failed

    def ack(self, gathered: GatheredStep, step: int) -> int:
        """Ack all rows with their step, those of each use in one commit. Returns how many rows were lost meanwhile, by
        a lost lease or dropped."""
        lost = self._ack(gathered.new, step)
        for task in self.terms.further_uses:
            batches, most = [batch for batch in gathered.again if batch.task == task], LEASES_PER_REQUEST_MAX
            lost += sum(self._ack(batches[at : at + most], step) for at in range(0, len(batches), most))
        return lost

    def _ack(self, batches: list[tq.Batch], step: int) -> int:
        task, lost, dropped = batches[0].task if batches else "", [], 0
        while batches:
            try:
                dropped = sum(map(len, batches)) - self.table.ack(batches, step=step)
                break
            except (LeaseExpired, tq.BatchEnded):
                lost += [int(row) for batch in batches if batch.ended for row in batch.rows]
                if task != self.terms.task:
                    for batch in (batch for batch in batches if batch.ended):
                        self._lost.update((batch.ordinal // self._unit_rows).tolist())
                batches = [batch for batch in batches if not batch.ended]
        self._learned.update(dict.fromkeys(((task, row) for row in lost), step))
        return len(lost) + dropped

    # ------------------------------------------------------------ rows of earlier steps

    def _take_again(self, gathered: GatheredStep, version_from: int) -> list[Unit]:
        """Lease the rows that the step trains again; in the order of uses and places."""
        taken: list[Unit] = []
        newer = [tq.VersionBetween(low=version_from)] if version_from >= 0 else []
        lost, self._lost = self._lost, set()
        for use, task in enumerate(self.terms.further_uses):
            units: list[tuple[int, Unit]] = []
            places = set(places_of(self._again[use])) if use < len(self._again) else set()
            for span in spans_of(places | lost) or [_NO_PLACE]:  # asks for none, so that the server knows who serves it
                while (batch := self._lease_again(task, [*self._within(span), *newer])) is not None:
                    if not self._ended_known(batch):
                        units += self._units(batch, len(gathered.batches))
                        gathered.batches.append(batch)
            taken += [unit for _, unit in sorted(units, key=lambda placed: placed[0])]
        return taken

    def _within(self, span: tuple[int, int]) -> list[tq.Compare | tq.VersionBetween]:
        """Rows of these places."""
        first, last = (place * self._unit_rows for place in (span[0], span[1] + 1))
        return [tq.Compare("ordinal", ">=", first), tq.Compare("ordinal", "<", last)]

    def _lease_again(self, task: str, where: Sequence[tq.Compare | tq.VersionBetween]) -> tq.Batch | None:
        """Lease rows for a further use; None: there are no more of them."""
        units, terms = self.terms.shape.units, self.terms
        try:
            return self.table.lease(
                task,
                groups=units if terms.whole else None,
                rows=None if terms.whole else units,
                at_least=1,
                where=list(where),
                fields=list(terms.fields),
                timeout_s=0,
            )
        except (DeadlineExceeded, EndOfTable):
            return None

    def _compute_again(self, gathered: GatheredStep, units: Sequence[Unit], compute: Compute) -> None:
        """Compute with rows of earlier steps. If that fails they are released as they were: they wait for nothing."""
        shape = self.terms.shape
        size = shape.at_least if shape.order == "ordinal" else max(1, len(units))
        for part in (units[at : at + size] for at in range(0, len(units), size)):
            compute(self._columns(gathered, part), self._ids(gathered, part))

    # ------------------------------------------------------------ leases

    def _take_more(self, gathered: GatheredStep) -> None:
        started = time.monotonic()
        try:
            batch = self._leased(started, gathered)
        finally:
            ended = time.monotonic()
            gathered.idle_s += ended - started
            self._emit(TimeSpan(name=WAIT, start=started, end=ended))
        if batch is None:
            self._gatherer.end()
        elif not self._ended_known(batch):
            for place, unit in self._units(batch, len(gathered.batches)):
                self._gatherer.add(place, unit)
            gathered.batches.append(batch)

    def _leased(self, started: float, gathered: GatheredStep) -> tq.Batch | None:
        """Lease the next rows, or None at the end of the table. Places that are gone move the window on."""
        while True:
            left_s = max(0.0, self.terms.stall_s - (time.monotonic() - started))
            try:
                return self._lease(left_s, holds=bool(gathered.new), version_from=gathered.version_from)
            except EndOfTable:
                return None
            except RowsEnded as ended:
                self._gatherer.gone(first // self._unit_rows for first, _ in ended.ordinals)

    def _lease(self, timeout_s: float, *, holds: bool, version_from: int) -> tq.Batch:
        wanted, terms = self._gatherer.wanted(), self.terms
        where: list[tq.Compare | tq.VersionBetween] = []
        if wanted.below is not None:
            where.append(tq.Compare("ordinal", "<", wanted.below * self._unit_rows))
        if version_from >= 0:
            where.append(tq.VersionBetween(low=version_from))
        return self.table.lease(
            terms.task,
            groups=wanted.units if terms.whole else None,
            rows=None if terms.whole else wanted.units,
            at_least=wanted.at_least,
            where=where,
            fields=list(terms.fields),
            timeout_s=timeout_s,
            awaited=self._awaited(),
            but_held=holds,
        )

    @property
    def _unit_rows(self) -> int:
        return self.terms.group_rows if self.terms.whole else 1

    def _awaited(self) -> list[tuple[int, int]]:
        """First and last ordinal of each place that is missing, of the lowest ones if there are very many."""
        rows = self._unit_rows
        return [(place * rows, (place + 1) * rows - 1) for place in self._gatherer.missing()[:SPANS_AWAITED_MAX]]

    def _ended_known(self, batch: tq.Batch) -> bool:
        """Whether the model has learned from units of this batch before. They are then acked with the step that did,
        and the other rows released: the next lease has them alone."""
        known: dict[int, list[int]] = {}
        for _, unit in self._units(batch, 0) if self._learned else ():
            rows = batch.rows[unit.rows].tolist()
            steps = [self._learned[batch.task, row] for row in rows if (batch.task, row) in self._learned]
            if len(steps) == len(rows):
                known.setdefault(max(steps), []).extend(rows)
        for step, rows in known.items():
            batch.ack(rows, step=step)
        if known and not batch.ended:
            batch.release()
        return bool(known)

    def _units(self, batch: tq.Batch, number: int) -> Iterator[tuple[int, Unit]]:
        """The units of a batch, with their places."""
        if self.terms.shape.order == "ordinal" and int(batch.ordinal.min()) < 0:
            raise UsageError(
                f'row {int(batch.rows[batch.ordinal.argmin()])} of table "{self.table.name}" has no ordinal, which '
                "reproducible=true needs; put rows with ordinal=, or set reproducible=false"
            )
        order = np.lexsort((batch.rows, batch.ordinal))
        if not self.terms.whole:
            for row in order:
                yield int(batch.ordinal[row]), Unit(number, np.array([row]))
            return
        groups = batch.group_id[order]
        for group in dict.fromkeys(groups.tolist()):
            rows = order[groups == group]
            yield int(batch.ordinal[rows[0]]) // self._unit_rows, Unit(number, rows)

    # ------------------------------------------------------------ rows

    def _compute(self, gathered: GatheredStep, compute: Compute) -> None:
        for part in self._gatherer.parts():
            try:
                compute(self._columns(gathered, part), self._ids(gathered, part))
            except Exception as error:
                for number in dict.fromkeys(unit.batch for unit in part):
                    batch = gathered.batches[number]
                    rows = np.concatenate([batch.rows[unit.rows] for unit in part if unit.batch == number])
                    batch.release(rows, failed=True, reason=f"{type(error).__name__}: {error}"[:1000])
                raise

    def _columns(self, gathered: GatheredStep, part: Sequence[Unit]) -> RowColumns:
        return {name: _values(gathered, part, name) for name in self.terms.fields}

    def _ids(self, gathered: GatheredStep, part: Sequence[Unit]) -> list[int]:
        return [int(gathered.batches[unit.batch].rows[row]) for unit in part for row in unit.rows]


def _values(gathered: GatheredStep, part: Sequence[Unit], name: str) -> list[Any]:
    columns = {number: gathered.batches[number][name] for number in dict.fromkeys(unit.batch for unit in part)}
    return [columns[unit.batch][int(row)] for unit in part for row in unit.rows]
