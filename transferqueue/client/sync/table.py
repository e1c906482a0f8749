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
from transferqueue.client.operations import commit, lease, tables
from transferqueue.client.operations.continues import continues_of
from transferqueue.client.operations.row_metadata import Floats, GivenFacts, Ints, Keys, TagsGiven
from transferqueue.client.operations.rows import Rows, RowsBase
from transferqueue.client.session.operation_runner import Operation, T, run_sync
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
    and leaves everything usable. Beside the errors that a method names, any call may raise a `PeerError`, and
    `NotFound` after the table was dropped.

    Example:
        >>> import transferqueue as tq
        >>> with tq.connect("embedded") as queue:
        ...     tasks = [tq.Task("train", needs=["x"])]
        ...     table = queue.create_table("samples", tasks=tasks, limits=tq.Limits(rows=64))
        >>> table.name, table.fields, list(table.tasks), table.limits.rows, table.pacing, table.retention
        ('samples', {}, ['train'], 64, None, Acked())
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
        parent: Any = None,
        continued: Iterable[str] | None = None,
        timeout_s: float | None = None,
        **columns: Any,
    ) -> NDArray[np.int64]:
        """Add rows in one commit: all of them with all their columns and facts, or none.

        Blocks while the table or the arena is full, up to `timeout_s`; the log says each minute why it waits. Values
        are copied once, before it returns. A server that hangs delays it no longer than `timeout_s`.

        A column has one value for each row: a torch tensor (dense ``[rows, ...]`` or jagged), a numpy array, a list of
        arrays or numbers, an Arrow array, a column of a data frame, strings, bytes, plain nested values, a `Column`,
        `Repeat` where rows or puts share values. A single value (number,
        text or dict) is given to all rows. A null is `SchemaError`, with its row. A fact is one value for all rows, or
        one for each.

        Args:
            table: all columns at once: a dict, `Rows`, or a data frame of polars, pandas, duckdb or pyarrow (any with
                ``__arrow_c_stream__``); default None. Its columns that have the name of a fact are that fact. An index
                of pandas without a name is left out.
            group_id: group of the row, 0 or more; default None: none. Given together with `group_size`; both stay as
                they are put.
            group_size: rows of the group when it is whole, at most 65536; default None.
            ordinal: place of the row in its group or data set (see `cursor`); default None: none.
            policy_version: oldest version of the weights that made the row; default None: none, and it is never stale.
            policy_version_max: newest version of the weights that made a part of the row; default None.
            tokens: length of the row in tokens; default None: the lengths of `input_ids`, else of `prompt_ids` and
                `response_ids` together, as far as this put has them; later columns add nothing. Needed if these
                continue a parent's, and then of the whole row.
            priority: a number, for the selector `Priority`; default None.
            key: a name of the row, unique in the table: text of up to 512 characters; default None: none.
            tags: a dict of name to text, number or bool, for `TagIs`; default None: none.
            reservation: the reservation that the rows come out of; default None. Such a put never waits for the table's
                limits.
            parent: the id of a row of the table that all rows of this put continue, or one id for each row (-1: none);
                default None. A row then has in its `continued` columns the parent's value and after it the value given
                here, as a turn of an agent has the turns before it. What the parent has is stored once, sent at most
                once in a reply (`Batch.tree`), and stays for as long as a row that continues it, whatever becomes of
                the parent. A row continues at most 256 others, one after another.
            continued: names of the columns that continue the parent's, ragged ones; default None: all ragged columns
                of this put. Others are whole.
            timeout_s: seconds to wait for room; default None: until there is room; 0: not at all.
            **columns: values of each field, by its name. A field that the table lacks is added, if it may be.

        Returns:
            Row ids: int64 ``[rows]``, ascending.

        Raises:
            SchemaError: a column or fact does not fit its field or the number of rows, or the table takes no such
                field.
            AlreadyExists: another row has the key.
            Impossible: rows that could never fit the table.
            Sealed: the table is sealed.
            Full: there is no room and `timeout_s` is 0.
            DeadlineExceeded: there was no room in time.
            NotFound: the reservation is used up, was returned, or is of another session; or a parent is not in the
                table any more, or lacks a continued column.
            ColumnFreed: a continued column of a parent was freed.
            UsageError: more than 65536 rows (16384 with keys or tags), an invalid fact, or a new field whose name is
                near that of a parameter or field.
            Unreachable: the server did not answer the commit. The rows may be there or not; with keys the same put
                again is safe.

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
        number = 0 if reservation is None else reservation_id(self._terms, reservation)
        used = None if reservation is None else reservation._used
        continues = continues_of(parent, continued)
        return self._run(
            commit.put(self._client, self._terms, facts, columns, number, timeout_s, used, continues=continues)
        )

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
        """Borrow ready rows of a task. Exactly one of `rows`, `tokens` and `groups` says how many.

        Waits at the server, up to `timeout_s`, until there are that many, or `at_least`, or the table is sealed and
        only fewer are left; the log says each minute why it waits. Requests without `where`, `awaited` and `but_held`
        are served in the order in which they came, so that small ones never starve a large one.

        Use it as a context manager: a clean exit acks the rows, an exception gives them back, and so does
        a clean exit without the results that the task owes (see `Batch`).

        With `device`, the lease begins to copy each dense or ragged column there and does not wait for the copies:
        `torch()`, `nested()` and `tensordict()` give the copied tensors, and order the calling thread's stream after
        the copies. Texts, bytes, plain values and rows of varied shapes stay on the host, as do `numpy()`, `list()` and
        `arrow()` of all columns. The memory stays pinned until the copies have ended, even if the batch ends before.

        Args:
            task: name of the task.
            rows: the number of rows, at most 65536; default None.
            tokens: the most tokens; default None. A row that alone has more comes alone.
            groups: the number of whole groups, at most 4096, of a task that takes groups; default None.
            at_least: the fewest rows, tokens or groups to return; default None: as many as were asked for. Of rows
                that continue others (``put(parent=)``), one reply names at most 32,768 stored values.
            timeout_s: seconds to wait; default None: no limit; 0: not at all.
            where: a predicate, or up to 16 of them, that every row must satisfy; default: none.
            lease_s: seconds after which a process that is dead, stopped or cut off loses the rows, if the server does
                not see its end before; default None: those of the task. While the process lives, the client renews the
                lease.
            time_limit_s: seconds that the batch may be held, from the lease or its last `renew`; default None: those of
                the task; 0: the client does not renew the lease. A process that holds it longer counts as hanging, and
                its rows are given to others.
            fields: columns to bring: names, or a mapping from names to the `Slice` of each that is wanted (None: all of
                it), such as ``{"tokens": None, "experts": tq.Slice(None, (12, 24))}``; default None: the task's needs.
                Only slices are gathered and cross between hosts; on the server's host they are views where numpy can
                express them.
            rank: index of this rank among `world`, which share one agreed batch; default 0.
            world: number of ranks that share the batch; default 1.
            replica: ``(i, n)``: this is peer i of n that get the identical batch, which is done when all have acked;
                default None: one.
            device: where the tensors of the batch are, such as ``"cuda:0"``, or ``"cpu"`` for memory of this process's
                own; default None: views of shared memory.
            awaited: pairs of first and last ordinal, ascending, of rows that the caller waits for; default: none. If no
                row can be given and all rows of a span have ended, the call ends at once with `RowsEnded`.
            but_held: this connection will not release the rows that it has on lease, so `EndOfTable` does not wait for
                them; default False.

        Returns:
            The batch. Its rows are this worker's until it acks or releases them, or the lease ends.

        Raises:
            EndOfTable: the table is sealed, and the task has drained it.
            DeadlineExceeded: there were too few rows in time; the text names the rows and the client that holds them.
            RowsEnded: all rows of an awaited span have ended.
            Impossible: a request that could never be filled.
            NotFound: an unknown task or field.
            SchemaError: a slice does not fit its field.
            UsageError: arguments that do not fit each other, or a device that is not here.
            OutOfMemory: no room for the copies; the rows were given back.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     table = queue.create_table("t", tasks=[tq.Task("double", needs=["x"], gives=["y"])])
            ...     rows = table.put(x=[1, 2])
            ...     with table.lease("double", rows=2, timeout_s=10) as batch:
            ...         batch.ack(y=batch["x"].numpy() * 2)
            ...     batch.ended
            2
            True
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
        """Yield batches, one `lease` after the other, until the table is sealed and drained.

        Each batch is the caller's to ack or release: use it as a context manager. A batch that is collected without
        either goes back, comes again, and is logged as a warning. A batch that was held past its time limit belongs to
        others: its ack is refused, and changes nothing. In this loop that ends only the block of the batch, with a
        warning in the log; the loop goes on. Errors are those of `lease`, but for `EndOfTable`, which ends the loop.
        Tasks and threads may share one such iterator: each batch goes to one of them.

        Args:
            task: name of the task.
            rows: as of `lease`.
            tokens: as of `lease`.
            groups: as of `lease`.
            at_least: as of `lease`.
            timeout_s: seconds to wait for each batch; default None: no limit.
            where: as of `lease`.
            lease_s: as of `lease`.
            time_limit_s: as of `lease`.
            fields: as of `lease`.
            rank: as of `lease`.
            world: as of `lease`.
            replica: as of `lease`.
            device: as of `lease`.

        Raises:
            DeadlineExceeded: a batch did not come in time.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
            ...     rows = table.put(x=[1, 2, 3])
            ...     table.seal()
            ...     values = []
            ...     for batch in table.leases("train", rows=2):
            ...         with batch:
            ...             values.append(batch["x"].list())
            >>> values
            [[1, 2], [3]]
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
        return Leases(self, spec)

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
        """Yield batches as `leases` does, fetched ahead.

        While one batch is computed with, up to `prefetch` more are leased and their columns brought together, in order.
        The client renews the leases of those that wait, as long as the loader is asked for batches. An error of the
        fetching is raised where its batch would have come. Leaving the loader early (``with``, `close`) gives
        back the batches that were not taken, not as failed.

        Args:
            task: name of the task.
            rows: as of `lease`.
            tokens: as of `lease`.
            groups: as of `lease`.
            at_least: as of `lease`.
            timeout_s: seconds to wait, from the moment when a batch is asked for; default None: no limit.
            where: as of `lease`.
            lease_s: as of `lease`.
            time_limit_s: as of `lease`.
            fields: as of `lease`.
            rank: as of `lease`.
            world: as of `lease`.
            replica: as of `lease`.
            device: as of `lease`.
            prefetch: the most batches that are fetched or ready ahead of the caller, at least 1; default 2.

        Returns:
            The loader: an iterator and a context manager.

        Raises:
            UsageError: arguments that do not fit each other. Errors of a lease are raised by the loader.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
            ...     rows = table.put(x=[1, 2, 3])
            ...     table.seal()
            ...     values = []
            ...     with table.loader("train", rows=2) as batches:
            ...         for batch in batches:
            ...             with batch:
            ...                 values.append(batch["x"].list())
            >>> values
            [[1, 2], [3]]
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
        """Read rows without a lease. Does not wait for rows.

        The columns are lazy, and pin the memory of their rows until the `Rows` are released or collected. Views that
        were taken before stay valid.

        Args:
            rows: row ids, in the order wanted; default None: all rows that were not dropped, ascending.
            where: a predicate, or up to 16 of them, that every row must satisfy; default: none.
            fields: columns to bring, as of `lease`; default None: each field that all these rows have. `Rows.left_out`
                names the others.
            limit: the most rows, at least 1; default None: all.
            values: default True; False: bring facts and the names of the columns alone. Then no bytes move, no memory
                stays pinned, and using a column is `BatchEnded`.
            device: where the tensors are, as of `lease`; default None. It does not go with ``values=False``.

        Returns:
            The rows.

        Raises:
            NotFound: an id that is not in the table, an unknown field, or a field that one of the rows does not have
                yet.
            ColumnFreed: a row had the field, and it was freed.
            SchemaError: a slice does not fit its field.
            UsageError: too many rows for one request; the text says how many may be read at a time.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
            ...     rows = table.put(x=[1, 2, 3], tags=[{"split": "a"}, {"split": "b"}, {"split": "a"}])
            ...     values = table.read(where=tq.TagIs("split", "a"))["x"].list()
            >>> values
            [1, 3]
        """
        return self._run(tables.read(self._client, self._terms, rows, where, fields, limit, values, device))

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
        """Give existing rows more columns or facts, in one commit. Does not wait for the table's limits.

        With `if_unchanged`, several processes may each read a value, compute a new one and update it, and none
        overwrites a value that another wrote. The update is made only if no column that it brings was written since the
        read, and no tags if it has tags. After a read of no fields (``fields=()``) the tags alone are compared, and
        columns are replaced as without it.

        Args:
            rows: row ids, in the order of the columns' rows.
            overwrite: replace fields that are set already; default False: refuse to.
            if_unchanged: the same rows as `read` or a lease returned them; default None: compare nothing.
            group_id: refused: the group of a row stays as it was put.
            group_size: refused, as `group_id`.
            ordinal: as of `put`.
            policy_version: as of `put`.
            policy_version_max: as of `put`.
            tokens: as of `put`.
            priority: as of `put`.
            key: as of `put`.
            tags: as of `put`; they replace all tags of the row.
            **columns: as of `put`.

        Raises:
            NotFound: a row is not live. Nothing was changed.
            AlreadyExists: a field of a row is set and `overwrite` is False, or another row has the key.
            RowsChanged: a row was written after it was read. Nothing was changed.
            SchemaError: a column does not fit its field.
            UsageError: nothing to change, or `if_unchanged` lacks a column that the update replaces: name it in the
                `fields` of the read.

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
            ...     values = table.read(rows)["x"].list()
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

    def ack(self, batches: Iterable[Batch], *, step: int = -1) -> int:
        """Ack all rows that these batches still hold, in one commit.

        A step that used the rows of many leases counts for all of them, or for none. Results do not come with this ack:
        `update` brings them before. Rows that were dropped meanwhile are treated as by `Batch.ack`.

        Args:
            batches: up to 256 batches that this connection leased from this table for one task. Each of them ends.
            step: the trainer's step, as of `Batch.ack`; default -1: the rows are done at once.

        Returns:
            The number of rows.

        Raises:
            LeaseExpired: some leases are over; the text names them. Nothing was changed. `Batch.ended` tells them
                from the others, which may be acked without them.
            BatchEnded: a batch was acked or released before. Nothing was changed.
            UsageError: a row lacks a field that the task gives, or the batches do not belong together.

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
        return self._run(lease.ack_leases(self._client, self._terms, held, step))

    def find(self, keys: str | Sequence[str]) -> NDArray[np.int64]:
        """Find rows by their keys.

        Args:
            keys: one key, or a sequence of them.

        Returns:
            Row ids: int64 ``[keys]``; -1 for a key that no row has.

        Raises:
            UsageError: a key that is no text, or longer than 512 characters.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
            ...     rows = table.put(x=[1, 2], key=["a", "b"])
            ...     found = table.find(["b", "c"])
            >>> found.tolist()
            [1, -1]
        """
        return self._run(tables.find(self._terms, keys))

    def seal(self) -> None:
        """Let no more rows enter. Consumers drain the rows that are there, and then get `EndOfTable`.

        Raises:
            Sealed: the table is sealed already.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
            ...     table.seal()
            ...     try:
            ...         batch = table.lease("train", rows=1)
            ...     except tq.EndOfTable:
            ...         print("no more rows")
            no more rows
        """
        self._run(tables.seal(self._terms))

    def reserve(self, rows: int, *, policy_version: int | None = None, timeout_s: float | None = None) -> Reservation:
        """Ask for permission to start producing rows, before any work is spent on them.

        Waits, up to `timeout_s`, while production is as far ahead of the pacing task as it may be, or while a row that
        is started now could not be trained within its bound. Use it as a context manager, which returns at
        its end the rows that were not put.

        Args:
            rows: the number of rows, at least 1.
            policy_version: version of the weights that will produce them; default None: the table's clock.
            timeout_s: seconds to wait; default None: no limit; 0: not at all.

        Returns:
            The reservation, for ``put(reservation=...)``.

        Raises:
            Impossible: so many rows, or rows of this version, could never be reserved; with the arithmetic.
            Sealed: the table is sealed.
            Full: they cannot be reserved now, and `timeout_s` is 0.
            DeadlineExceeded: they could not be reserved in time.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     pacing = tq.Pacing("train", batch_rows=4, depth=0)
            ...     table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])], pacing=pacing)
            ...     with table.reserve(4) as reservation:
            ...         rows = table.put(x=[1, 2, 3, 4], reservation=reservation)
            ...     try:
            ...         table.reserve(1, timeout_s=0)
            ...     except tq.Full:
            ...         print("the trainer has its batch")
            the trainer has its batch
        """
        return self._run(tables.reserve(self._client, self._terms, rows, policy_version, timeout_s, Reservation))

    def pipeline(
        self,
        *,
        calls: int = PIPELINE_CALLS,
        bytes: int | str = PIPELINE_BYTES,  # noqa: A002
    ) -> Pipeline:
        """Send puts, updates and acks without waiting for each answer.

        They are carried out in the order of the calls, each once. An error comes at the next call or at the end of the
        block (see `Pipeline`).

        Args:
            calls: the most calls in flight, 1 to 512; default 64.
            bytes: the most bytes of columns in flight, and one call more, as a number or text such as ``"16MiB"``;
                default 16 MiB.

        Returns:
            The pipeline, to be used as a context manager.

        Raises:
            UsageError: `calls` or `bytes` out of range.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
            ...     with table.pipeline() as pipeline:
            ...         promises = [pipeline.put(x=[number]) for number in range(3)]
            ...     rows = [promise.result().tolist() for promise in promises]
            >>> rows
            [[0], [1], [2]]
        """
        return Pipeline(self._client, self._terms, calls, bytes)

    def drop(self, rows: Any, reason: str) -> int:
        """Drop rows for every task, leased ones too.

        Args:
            rows: row ids.
            reason: a name that statistics count the rows under, such as ``"too_long"``; at most 256 different ones a
                table.

        Returns:
            The number of rows.

        Raises:
            NotFound: a row is not live. Nothing was changed.
            UsageError: an invalid reason.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
            ...     rows = table.put(x=[1, 2])
            ...     table.drop(rows[:1], "too_long")
            ...     counts = table.audit()
            1
            >>> counts.dropped
            {'too_long': 1}
        """
        return self._run(tables.drop(self._terms, rows, reason))

    def delete(self, rows: Any) -> int:
        """Free rows. Live rows are dropped first, with reason ``deleted``.

        Args:
            rows: row ids.

        Returns:
            The number of rows.

        Raises:
            NotFound: a row is not in the table. Nothing was changed.
            UsageError: a row is leased: wait for its ack, or drop it.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
            ...     rows = table.put(x=[1, 2])
            ...     table.delete(rows[:1])
            1
        """
        return self._run(tables.delete(self._terms, rows))

    def dropped(self, limit: int = 100) -> list[DroppedRow]:
        """List rows that were dropped for failing too often (reason ``attempts``) and can still be taken again.

        Each has `row`, `key`, `task`, `reason`, `error`, `worker` and `age_s`. `read` gives their values by their ids.
        The table keeps 4,096 of them at most, and 64 MiB of memory; the oldest are freed first, and `delete` frees them
        too.

        Args:
            limit: the most that are listed; default 100; 0: all.

        Returns:
            The rows, the latest first.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     tasks = [tq.Task("score", needs=["x"], retry=tq.Retry(attempts=1))]
            ...     table = queue.create_table("t", tasks=tasks)
            ...     rows = table.put(x=[1])
            ...     batch = table.lease("score", rows=1)
            ...     batch.release(failed=True, reason="no answer")
            ...     [(row.row, row.task, row.error) for row in table.dropped()]
            1
            [(0, 'score', 'no answer')]
        """
        return self._run(tables.dropped(self._terms, limit))

    def retry(self, rows: Any) -> int:
        """Take dropped rows again.

        They are live, as if they had never failed, for each task that was not done with them.

        Args:
            rows: their ids, or the list that `dropped` returned.

        Returns:
            The number of rows.

        Raises:
            NotFound: a row that `dropped` does not list. Nothing was changed.
            Sealed: the table has ended, so no worker would take the rows.
            Full: the table has no room for so many rows now.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     tasks = [tq.Task("score", needs=["x"], retry=tq.Retry(attempts=1))]
            ...     table = queue.create_table("t", tasks=tasks)
            ...     rows = table.put(x=[1])
            ...     batch = table.lease("score", rows=1)
            ...     batch.release(failed=True, reason="no answer")
            ...     table.retry(table.dropped())
            1
            1
        """
        return self._run(tables.retry(self._terms, rows))

    def advance(self, version: int, *, timeout_s: float | None = None) -> None:
        """Set the table's clock to the trainer's version. The clock never goes back.

        With ``on_stale=HoldClock()`` it waits, up to `timeout_s`, while a row of the table would become stale.

        Args:
            version: of the trainer, 0 or more.
            timeout_s: seconds to wait; default None: no limit; 0: not at all.

        Raises:
            UsageError: a version below the clock, or a table whose clock is a weight channel.
            DeadlineExceeded: rows held the clock for all that time.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     pacing = tq.Pacing("train", batch_rows=1, max_staleness=1)
            ...     table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])], pacing=pacing)
            ...     rows = table.put(x=[1, 2], policy_version=[0, 1])
            ...     table.advance(2)  # the first row is two versions behind now
            ...     counts = table.audit()
            >>> counts.dropped
            {'stale': 1}
        """
        self._run(tables.advance(self._terms, version, timeout_s))

    def checkpointed(self, step: int, *, task: str | None = None) -> int:
        """Report that the model is saved up to `step`: rows acked with that step, or an earlier one, are done now.

        Args:
            step: of the checkpoint, 0 or more.
            task: the task whose acks are meant; default None: the pacing task, or the only one.

        Returns:
            The number of rows; 0 for a step that was covered before.

        Raises:
            NotFound: there is no such task.
            UsageError: `task` is None, and the table has several tasks and no pacing.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
            ...     rows = table.put(x=[1, 2])
            ...     batch = table.lease("train", rows=2)
            ...     batch.ack(step=7)
            ...     table.checkpointed(7)  # the model of step 7 is saved
            2
            2
        """
        return self._run(tables.checkpointed(self._terms, step, task))

    def rollback(self, step: int, *, task: str | None = None, version: int | None = None) -> int:
        """Report that the model is again as it was saved at `step`: rows acked with a later step are ready again.

        They come back at their old place. Leases of the task end, not counted as attempts; a late ack is
        `LeaseExpired`.

        Args:
            step: of the checkpoint that was restored; -1: as the training began.
            task: as of `checkpointed`; default None.
            version: the trainer's version, which the clock goes back to; default None: the clock stays, and rows over
                the staleness bound are judged by it.

        Returns:
            The number of rows that are ready again.

        Raises:
            NotFound: there is no such task.
            UsageError: a step before the last checkpoint, whose rows are done for good; or a version above the clock.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
            ...     rows = table.put(x=[1, 2])
            ...     batch = table.lease("train", rows=2)
            ...     batch.ack(step=7)
            ...     table.rollback(6)  # the trainer restarts from its checkpoint of step 6
            2
            2
        """
        return self._run(tables.rollback(self._terms, step, task, version))

    def cursor(self, start: int = 0) -> int:
        """Return the lowest ordinal that was not put yet or of which a row is live: where to resume prompts.

        Args:
            start: the first ordinal to look at, 0 or more; default 0.

        Raises:
            UsageError: `start` is no such number.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
            ...     rows = table.put(x=[1, 2], ordinal=[0, 1])
            ...     batch = table.lease("train", rows=1)
            ...     batch.ack()
            ...     table.cursor()
            1
            1
        """
        return self._run(tables.cursor(self._terms, start))

    def add_task(self, task: Task) -> None:
        """Declare one more task. The same declaration again changes nothing.

        Args:
            task: the task; its ``from_`` says whether it gets the rows that are there.

        Raises:
            AlreadyExists: the table has a task of this name with other terms.
            Impossible: the task would wait for ever, such as for columns of live rows that were freed.
            UsageError: invalid terms, or the table has 64 tasks.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
            ...     table.add_task(tq.Task("count", needs=["x"]))
            >>> list(table.tasks)
            ['train', 'count']
        """
        self._run(tables.add_task(self._client, self._terms, task))

    def add_fields(self, fields: Sequence[Field]) -> None:
        """Declare more fields. A field that is declared already changes nothing.

        Args:
            fields: the fields.

        Raises:
            SchemaError: the table has a field of this name with another dtype, shape or rule.
            UsageError: the table would have more than 1024 fields, or a name is near that of a parameter or field.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
            ...     table.add_fields([tq.Field("reward", "float32")])
            >>> table.fields["reward"].dtype
            'float32'
        """
        self._run(tables.add_fields(self._client, self._terms, fields))

    def free_columns(self, rows: Any, fields: Iterable[str], *, again: bool = False) -> int:
        """Free columns of rows, which live on with their other columns.

        The memory of a put returns when all its columns are freed and no view of them is left; that of a column of 256
        KiB or more returns by itself in a table with `ManualColumns` or `AckedColumns`. Reading a freed column is
        `ColumnFreed`; `update` may write it again.

        Args:
            rows: row ids.
            fields: names of the columns, at least one.
            again: default False: refuse to free a column that a task still needs. True: such a task, and one that is
                done with the row, waits until the column is written again, and then gets the row again. A lease of the
                row ends, and the column is as if it had not been written yet.

        Returns:
            The number of values that were freed; values that a row does not have do not count.

        Raises:
            NotFound: a row or field is not in the table.
            UsageError: a task that needs the column still has work with a row; or `again` for a task that takes groups.
                Nothing was changed.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     table = queue.create_table("t", retention=tq.ManualColumns())
            ...     rows = table.put(x=[1, 2], draft=["a", "b"])
            ...     table.free_columns(rows, ["draft"])
            ...     read = table.read(rows)
            2
            >>> read.fields
            ('x',)
        """
        return self._run(tables.free_columns(self._terms, rows, fields, again))

    def stats(self, *, timeout_s: float | None = REPORT_S) -> TableStats:
        """Return counts, bytes and ages of this table now (`transferqueue docs figures`).

        Args:
            timeout_s: seconds to wait for the server; default 10; None: no limit.

        Returns:
            The figures.

        Raises:
            Unreachable: the server did not answer in time.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
            ...     rows = table.put(x=[1, 2])
            ...     figures = table.stats()
            >>> figures.rows_put, figures.rows_live
            (2, 2)
        """
        return self._run(tables.table_stats(self.name, timeout_s))

    def audit(self, *, timeout_s: float | None = REPORT_S) -> TableAudit:
        """Check that ``rows_put == rows_live + rows_done + rows_dropped``, each counted on its own.

        Args:
            timeout_s: seconds to wait for the server; default 10; None: no limit.

        Returns:
            The counts, and how rows were dropped.

        Raises:
            Unreachable: the server did not answer in time.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
            ...     rows = table.put(x=[1, 2, 3])
            ...     table.drop(rows[:1], "too_long")
            ...     counts = table.audit()
            1
            >>> counts.rows_put, counts.rows_live, counts.dropped
            (3, 2, {'too_long': 1})
        """
        return self._run(tables.table_audit(self.name, timeout_s))

    def _run(self, operation: Operation[T]) -> T:
        return run_sync(self._client.connection, operation)


class Leases(Iterator[Batch]):
    """The batches of `Table.leases`. Holds none of them, so a batch that its taker forgets is collected."""

    def __init__(self, table: Table, spec: lease.LeaseSpec) -> None:
        self._table, self._spec = table, spec

    def __next__(self) -> Batch:
        """Lease the next batch. Each call is a lease of its own, so calls may overlap."""
        table = self._table
        try:
            batch = table._run(lease.lease(table._client, table._terms, self._spec, Batch))
        except EndOfTable:
            raise StopIteration from None
        batch._goes_on = True
        return batch
