# Written by `python -m tests.sync_api` from client/aio/table.py: change it there.
"""A table, used from threads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from transferqueue.client.handles.batch import leases_of
from transferqueue.client.handles.reservation import reservation_id
from transferqueue.client.handles.table import TableBase
from transferqueue.client.operations import ack_leases, commit, lease, tables
from transferqueue.client.operations.facts import Floats, GivenFacts, Ints, Keys, TagsGiven
from transferqueue.client.operations.rows import Rows, RowsBase
from transferqueue.client.session.run import Operation, T, run_sync
from transferqueue.client.sync.batch import Batch
from transferqueue.client.sync.pipeline import Pipeline
from transferqueue.client.sync.reservation import Reservation
from transferqueue.errors import EndOfTable
from transferqueue.limits import PIPELINE_BYTES, PIPELINE_CALLS, REPORT_S
from transferqueue.policies import Predicate, Task
from transferqueue.schema import Field, FieldsWanted
from transferqueue.wire.answers.stats import TableAudit, TableStats
from transferqueue.wire.messages import DroppedRow

if TYPE_CHECKING:
    from transferqueue.client.sync.loader import Loader


class Table(TableBase):
    """A named set of rows with fields, tasks and limits. Made by `Queue.create_table` or `Queue.table`.

    Every method may be called from any thread. A method that waits says until when; an interrupt ends the wait
    and leaves everything usable.
    """

    def put(
        self,
        table: Any = None,
        /,
        *,
        group_id: Ints = None,
        group_size: Ints = None,
        ordinal: Ints = None,
        policy_version: Ints = None,
        policy_version_max: Ints = None,
        tokens: Ints = None,
        priority: Floats = None,
        key: Keys = None,
        tags: TagsGiven = None,
        reservation: Reservation | None = None,
        timeout_s: float | None = None,
        **columns: Any,
    ) -> NDArray[np.int64]:
        """Add rows, in one commit: all of them with all their columns and facts, or nothing.

        columns: by field name, each with one value per row: torch (dense ``[rows, ...]`` or jagged), numpy, lists of
        arrays or numbers, Arrow arrays and columns of data frames, strings, bytes, plain nested values, a `Column`, or
        `Repeat` where rows or puts share values. A single value (number,
        text, dict) is given to all rows. A field that the table lacks is added. table: the same as a dict, a data frame
        of polars, pandas, duckdb or pyarrow (any with ``__arrow_c_stream__``), or `Rows`; its columns that have the
        name of a fact are that fact. A null is `SchemaError`, with its row; an index of pandas that has no name is left
        out. facts: one for all rows, or one per row. group_id, group_size: given together, and fixed from then on.
        ordinal: place of the row in its group or data set (see `cursor`). key: a name of the row, text, unique in the
        table (else `AlreadyExists`). tags: a dict of name to text, number or bool (see `TagIs`). priority: a float (see
        `Priority`). tokens: if not given, the lengths of `input_ids`, else of `prompt_ids` and `response_ids` together,
        as far as this put has them; later columns add nothing. policy_version: of the weights that made the row;
        without one (-1) it is never stale. policy_version_max: the newest weights that made a part of it. reservation:
        rows come out of it; such a put is never refused for capacity.

        Blocks while the table or the arena is full, up to `timeout_s` (0: not at all, then `Full`; None: until there is
        room; the log says each minute why it waits). Returns row ids ``[rows]``, ascending. Values are copied once,
        before it returns. `SchemaError` if a column does not fit, `Sealed`, `Impossible` for rows that could never fit,
        `DeadlineExceeded` if there was no room. It returns in time whatever the server does; if that does not answer
        the commit itself, the error is `Unreachable`, and the rows may be there or not: with keys the same put again is
        safe.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     table = queue.create_table("rollouts", tasks=[tq.Task("reward", needs=["text"])])
            ...     rows = table.put(text=["2+2=4", "2+2=5"], group_id=0, group_size=2)
            >>> rows.tolist()
            [0, 1]
        """
        facts = GivenFacts(
            group_id=group_id,
            group_size=group_size,
            ordinal=ordinal,
            policy_version=policy_version,
            policy_version_max=policy_version_max,
            tokens=tokens,
            priority=priority,
            key=key,
            tags=tags,
        )
        if table is not None:
            facts, columns = facts.with_table(table, columns)
        if reservation is None:
            return self._run(commit.put(self._client, self._terms, facts, columns, 0, timeout_s))
        number = reservation_id(self._terms, reservation)
        return self._run(commit.put(self._client, self._terms, facts, columns, number, timeout_s, reservation.used))

    def update(
        self,
        /,
        rows: Any,
        *,
        overwrite: bool = False,
        if_unchanged: RowsBase | None = None,
        group_id: Ints = None,
        group_size: Ints = None,
        ordinal: Ints = None,
        policy_version: Ints = None,
        policy_version_max: Ints = None,
        tokens: Ints = None,
        priority: Floats = None,
        key: Keys = None,
        tags: TagsGiven = None,
        **columns: Any,
    ) -> None:
        """Give existing rows more columns or facts, in one commit; arguments as of `put`.

        rows: ids, in the order of the columns' rows. overwrite: fields that are set already are replaced; otherwise
        that is `AlreadyExists`. `NotFound` if a row is gone: then nothing was changed.

        if_unchanged: the same rows as `read` or a lease brought them. The update is made only if none of the columns
        that it brought was written since (and no tags, if this update has tags); otherwise it is `RowsChanged`, and
        nothing was changed. So several processes may each read a value, compute a new one and update it, and none
        overwrites what another wrote. `UsageError` for a column that it replaces and `read` lacks, since nothing would
        compare that one: name it in the `fields` of the read. After a read of no fields (``fields=()``) the tags alone
        are compared, and columns are replaced as without if_unchanged.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
            ...     rows = table.put(x=[1])
            ...     while True:
            ...         read = table.read(rows, fields=["x"])
            ...         try:
            ...             table.update(rows, overwrite=True, if_unchanged=read, x=read["x"].numpy() + 1)
            ...             break
            ...         except tq.RowsChanged:
            ...             pass  # another process was quicker: once more
            ...     values = (table.read(rows))["x"].list()
            >>> values
            [2]
        """
        facts = GivenFacts(
            group_id=group_id,
            group_size=group_size,
            ordinal=ordinal,
            policy_version=policy_version,
            policy_version_max=policy_version_max,
            tokens=tokens,
            priority=priority,
            key=key,
            tags=tags,
        )
        self._run(commit.update(self._client, self._terms, rows, facts, columns, overwrite, if_unchanged))

    def pipeline(
        self,
        *,
        calls: int = PIPELINE_CALLS,
        bytes: int | str = PIPELINE_BYTES,  # noqa: A002
    ) -> Pipeline:
        """Puts, updates and acks that do not wait for each answer: up to `calls` of them in flight, with up to `bytes`
        of columns (and one call more). In order, each once; errors come at the next call or at the end of the block
        (see `Pipeline`).

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
            ...     with table.pipeline() as pipeline:
            ...         promises = [pipeline.put(x=[number]) for number in range(3)]
            ...     rows = [(promise.result()).tolist() for promise in promises]
            >>> rows
            [[0], [1], [2]]
        """
        return Pipeline(self._client, self._terms, calls, bytes)

    def lease(
        self,
        task: str,
        *,
        rows: int | None = None,
        tokens: int | None = None,
        groups: int | None = None,
        at_least: int | None = None,
        timeout_s: float | None = None,
        where: Predicate | Iterable[Predicate] = (),
        lease_s: float | None = None,
        time_limit_s: float | None = None,
        fields: FieldsWanted = None,
        rank: int = 0,
        world: int = 1,
        replica: tuple[int, int] | None = None,
        device: Any = None,
        awaited: Iterable[tuple[int, int]] = (),
        but_held: bool = False,
    ) -> Batch:
        """Borrow ready rows of a task: exactly one of `rows`, `tokens` (a budget) or `groups` says how many. A row that
        alone is over the budget comes alone.

        Waits at the server until there are that many (or `at_least`, or the table is sealed and only fewer are left),
        up to `timeout_s` seconds (None: no limit; the log says each minute why it waits). Requests without `where` are
        served in the order in which they came, so that small ones never starve a large one. Use it as a
        context manager: a clean exit acks, an exception gives the rows back, and so does a clean exit without the
        results that the task owes (see `Batch`).

        where: predicates that every row must satisfy. lease_s: after how long a process that is dead, stopped or cut
        off loses the rows (None: the task's); while it lives, the lease is renewed for it. time_limit_s: how long it
        may hold the batch at all, or since its last `renew` (None: the task's; 0: the lease is not renewed for it).
        Whoever holds it longer is taken to hang, and the rows are given to others. fields: columns to bring (None: the
        task's needs): names, or a mapping from names to the `Slice` of each that is wanted (None: all of it), such as
        ``{"tokens": None, "experts": tq.Slice(None, (12, 24))}``. Only slices are gathered and cross between hosts; a
        session on the server's host gets views where numpy can express them. `SchemaError` for a slice that does not
        fit its field. rank, world: this rank's share of one batch agreed for `world` ranks. replica: ``(i, n)``, this
        is peer i of n that get the identical batch; it is done when all have acked. awaited: first and last ordinal of
        spans that the caller waits for, ascending; `RowsEnded`, at once, if no row can be given and all rows of a span
        have ended. but_held: this connection releases none of the rows that it has on lease, so `EndOfTable` does not
        wait for them. With either, a request is served on its own, like one with `where`.

        device: where the tensors of the batch are to be: ``"cuda:0"``, another device of torch, or ``"cpu"`` for memory
        of this process's own. The lease begins to copy each dense or ragged column there, and `torch()`, `nested()` and
        `tensordict()` of the batch give tensors on the device, after which the calling thread's stream is ordered;
        nothing waits for the device. Texts, bytes, plain values and rows of varied shapes stay on the host, as do
        `numpy()`, `list()` and `arrow()` of all columns; `Column.device` tells. The memory stays pinned until the
        copies have ended, even if the batch ends before. `UsageError` for a device that is not here, `OutOfMemory` if
        it has no room: then the rows were given back.

        `EndOfTable` when the table is sealed and drained; `DeadlineExceeded` says what is missing and who holds it;
        `NotFound`, or `UsageError` for a request that makes no sense.
        """
        spec = lease.lease_spec(
            self._terms.name,
            task,
            rows=rows,
            tokens=tokens,
            groups=groups,
            at_least=at_least,
            timeout_s=timeout_s,
            where=where,
            lease_s=lease_s,
            time_limit_s=time_limit_s,
            fields=fields,
            rank=rank,
            world=world,
            replica=replica,
            device=device,
            awaited=awaited,
            but_held=but_held,
        )
        return self._run(lease.lease(self._client, self._terms, spec, Batch))

    def leases(
        self,
        task: str,
        *,
        rows: int | None = None,
        tokens: int | None = None,
        groups: int | None = None,
        at_least: int | None = None,
        timeout_s: float | None = None,
        where: Predicate | Iterable[Predicate] = (),
        lease_s: float | None = None,
        time_limit_s: float | None = None,
        fields: FieldsWanted = None,
        rank: int = 0,
        world: int = 1,
        replica: tuple[int, int] | None = None,
        device: Any = None,
    ) -> Iterator[Batch]:
        """Batches, one `lease` after the other, until the table is sealed and drained.

        Each is the caller's to ack or release:
        ``for batch in table.leases("train", rows=64): with batch: ...``. Arguments, waits and errors as of
        `lease`; `timeout_s` is for each of them. A batch that is collected without an ack or a release goes back, comes
        again, and is logged as a warning. A batch that was held past its time limit belongs to others: its ack is
        refused, and changes nothing. In this loop that ends only the ``with`` block of the batch, with a warning
        in the log; the loop goes on.
        """
        spec = lease.lease_spec(
            self._terms.name,
            task,
            rows=rows,
            tokens=tokens,
            groups=groups,
            at_least=at_least,
            timeout_s=timeout_s,
            where=where,
            lease_s=lease_s,
            time_limit_s=time_limit_s,
            fields=fields,
            rank=rank,
            world=world,
            replica=replica,
            device=device,
        )
        while True:
            try:
                batch = self._run(lease.lease(self._client, self._terms, spec, Batch))
            except EndOfTable:
                return
            batch._goes_on = True
            yield batch
            del batch  # the caller's alone: held here, it could not be collected while the next is waited for

    def loader(
        self,
        task: str,
        *,
        rows: int | None = None,
        tokens: int | None = None,
        groups: int | None = None,
        at_least: int | None = None,
        timeout_s: float | None = None,
        where: Predicate | Iterable[Predicate] = (),
        lease_s: float | None = None,
        time_limit_s: float | None = None,
        fields: FieldsWanted = None,
        rank: int = 0,
        world: int = 1,
        replica: tuple[int, int] | None = None,
        device: Any = None,
        prefetch: int = 2,
    ) -> Loader:
        """`leases`, fetched ahead: while one batch is computed with, up to `prefetch` more are leased and their columns
        brought together. In order; the leases of those that wait are renewed, as long as the loader is asked for
        batches.

        Arguments and waits as of `lease`; `timeout_s` counts from when a batch is asked for. Ends when the table is
        sealed and drained. An error of the fetching is raised where its batch would have come. Leaving it early
        (``with``, `close`) gives back the batches that were not taken, not as failed.

        Example: ``with table.loader("train", rows=64) as batches: for batch in batches: with batch:
        ...``
        """
        from transferqueue.client.handles.prefetch import Prefetcher
        from transferqueue.client.sync.loader import Loader  # loads asyncio, in both APIs

        spec = lease.lease_spec(
            self._terms.name,
            task,
            rows=rows,
            tokens=tokens,
            groups=groups,
            at_least=at_least,
            timeout_s=timeout_s,
            where=where,
            lease_s=lease_s,
            time_limit_s=time_limit_s,
            fields=fields,
            rank=rank,
            world=world,
            replica=replica,
            device=device,
        )
        return Loader(Prefetcher(self._client, self._terms, spec, Batch, prefetch))

    def reserve(self, rows: int, *, policy_version: int | None = None, timeout_s: float | None = None) -> Reservation:
        """Permission to start producing `rows` rows with weights of `policy_version` (None: the table's clock).

        Waits, up to `timeout_s` (None: no limit), while production is as far ahead of the pacing task as it may be, or
        while a row started now could not be trained in bound. `Impossible` if it never could.
        """
        return self._run(tables.reserve(self._client, self._terms, rows, policy_version, timeout_s, Reservation))

    def advance(self, version: int, *, timeout_s: float | None = None) -> None:
        """The trainer's version is now `version`; the clock never goes back.

        With ``on_stale=HoldClock()`` it waits, up to `timeout_s` (None: no limit), while a row of the table would
        become stale.
        """
        self._run(tables.advance(self._terms, version, timeout_s))

    def ack(self, batches: Iterable[Batch], *, step: int = -1) -> int:
        """All rows that these batches still hold are done, in one commit: a step that used the rows of many leases
        counts for all of them, or for none. Returns how many rows.

        batches: leased from this table by this connection, for one task; each ends. step: as of `Batch.ack`, which
        also says what becomes of rows that were dropped meanwhile. Results do not come with it: `update` brings them
        before. `LeaseExpired` names the batches that are over, if any is; then nothing was changed, and
        `Batch.ended` tells them from the others, which may be acked without them. `UsageError` if a row lacks a
        field that the task gives.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
            ...     rows = table.put(x=[1, 2, 3])
            ...     batches = [table.lease("train", rows=1), table.lease("train", rows=2)]
            ...     table.ack(batches, step=1)
            3
        """
        held = leases_of(batches)
        return self._run(ack_leases.ack_leases(self._client, self._terms, held, step))

    def checkpointed(self, step: int, *, task: str | None = None) -> int:
        """The model is saved up to `step`: rows acked with that step, or one before, are done now. Returns how many.

        task: whose acks (None: the task that sets the pace, or the only one). A step that was covered before: 0.
        """
        return self._run(tables.checkpointed(self._terms, step, task))

    def rollback(self, step: int, *, task: str | None = None, version: int | None = None) -> int:
        """The model is again as saved at `step` (-1: as it began): rows acked with a later step are ready again, at
        their old place. Returns how many.

        Leases of the task end, as no attempt; a late ack is `LeaseExpired`. task: as of `checkpointed`. version: the
        trainer's version is this again, and so is the clock; None: the clock stays, and rows over the staleness bound
        are judged as ever. `UsageError` for a step before the last checkpoint: its rows are done for good.
        """
        return self._run(tables.rollback(self._terms, step, task, version))

    def cursor(self, start: int = 0) -> int:
        """The lowest ordinal, from `start` on, that was not put yet or of which a row is live: where to resume
        prompts."""
        return self._run(tables.cursor(self._terms, start))

    def seal(self) -> None:
        """No more rows will enter: consumers drain what is there, then see `EndOfTable`. Twice is `Sealed`."""
        self._run(tables.seal(self._terms))

    def read(
        self,
        rows: Any = None,
        *,
        where: Predicate | Iterable[Predicate] = (),
        fields: FieldsWanted = None,
        limit: int | None = None,
        values: bool = True,
        device: Any = None,
    ) -> Rows:
        """Rows without a lease: these ids, in this order, or all live rows that satisfy `where`, at most `limit`. Does
        not wait for rows.

        fields: columns to bring, as of `lease` (None: each field that all these rows have; `Rows.left_out` names the
        others). The columns are lazy, and pin the memory of their rows until the `Rows` are released or collected.
        `NotFound` for an id that is not in the table, for an unknown field, and for a field named here that one of the
        rows does not have yet; `ColumnFreed` if it had it.

        values: False brings facts and the names of the columns alone: no bytes move, no memory stays pinned, and a view
        is `BatchEnded`. device: where the tensors are to be, as of `lease`. It does not go with ``values=False``.
        """
        return self._run(tables.read(self._client, self._terms, rows, where, fields, limit, values, device))

    def find(self, keys: str | Sequence[str]) -> NDArray[np.int64]:
        """Row ids ``[keys]`` of keys; -1 where there is no such row."""
        return self._run(tables.find(self._terms, keys))

    def drop(self, rows: Any, reason: str) -> int:
        """Rows end as dropped with this reason, for every task, leased ones too. Returns how many."""
        return self._run(tables.drop(self._terms, rows, reason))

    def dropped(self, limit: int = 100) -> list[DroppedRow]:
        """List rows that were dropped for failing too often (reason ``attempts``) and can still be taken again, the
        latest first.

        Each has `row`, `key`, `task`, `reason`, `error`, `worker` and `age_s`. `read` gives their values by their ids.
        The table keeps 4,096 of them at most, and 64 MiB of memory; the oldest are freed first, and `delete` frees them
        too.

        Args:
            limit: the most that are listed; 0: all.

        Returns:
            The rows, the latest first.
        """
        return self._run(tables.dropped(self._terms, limit))

    def retry(self, rows: Any) -> int:
        """Take dropped rows again: they are live, as if they had never failed, for each task that was not done with
        them.

        Args:
            rows: their ids, or what `dropped` listed.

        Returns:
            The number of rows.

        Raises:
            NotFound: for a row that `dropped` does not list; nothing was changed.
            Sealed: the table has ended, so no worker would take the rows.
            Full: the table has no room for so many rows now.
        """
        return self._run(tables.retry(self._terms, rows))

    def delete(self, rows: Any) -> int:
        """Free rows that nobody needs any more; live ones end as dropped first. Returns how many."""
        return self._run(tables.delete(self._terms, rows))

    def free_columns(self, rows: Any, fields: Iterable[str], *, again: bool = False) -> int:
        """Free columns of these rows, which live on with their other columns. Returns how many values were freed;
        values that a row does not have do not count. The memory of a put returns when all its columns are freed and no
        view of them is left; that of a column of 256 KiB or more returns by itself in a table with `ManualColumns` or
        `AckedColumns`. Reading a freed column is `ColumnFreed`; `update` may write it again.

        `UsageError`, and nothing changes, if a task that needs a column still has work with one of the rows. again:
        then, or if the task is done with the row, it waits until the column is written again, and gets the row again; a
        lease of the row ends, and the column is as if it had not been written yet. Not for a task that takes groups.
        `NotFound` for a row or field that is not in the table.
        """
        return self._run(tables.free_columns(self._terms, rows, fields, again))

    def add_task(self, task: Task) -> None:
        """Declare one more task; ``from_`` says whether it sees the rows that are there."""
        self._run(tables.add_task(self._client, self._terms, task))

    def add_fields(self, fields: Sequence[Field]) -> None:
        """Declare more fields."""
        self._run(tables.add_fields(self._client, self._terms, fields))

    def stats(self, *, timeout_s: float | None = REPORT_S) -> TableStats:
        """Counts, bytes and ages of this table now (`transferqueue docs observing`).

        `Unreachable` if the server does not answer within `timeout_s` (None: no limit).
        """
        return self._run(tables.table_stats(self.name, timeout_s))

    def audit(self, *, timeout_s: float | None = REPORT_S) -> TableAudit:
        """``rows_put == rows_live + rows_done + rows_dropped``, each counted on its own, and how rows were dropped.
        timeout_s: as of `stats`."""
        return self._run(tables.table_audit(self.name, timeout_s))

    def _run(self, operation: Operation[T]) -> T:
        return run_sync(self._client.connection, operation)
