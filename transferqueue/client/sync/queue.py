# Written by `python -m tests.sync_api` from client/aio/queue.py: change it there.
"""A queue, used from threads: a handle on all tables of one deployment."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from transferqueue.client.handles.coordinators import QueueBase
from transferqueue.client.operations import snapshot, tables
from transferqueue.client.operations.pull import channel_terms
from transferqueue.client.operations.snapshot import SNAPSHOT_S, Progress, SnapshotCalls
from transferqueue.client.session.operation_runner import Operation, T, run_sync
from transferqueue.client.sync.table import Table
from transferqueue.client.sync.weight_channel import WeightChannel
from transferqueue.limits import DELTAS_MAX, REPORT_S, Limits
from transferqueue.policies import Acked, Pacing, Retention, Task
from transferqueue.schema import Field
from transferqueue.wire.answers.coordinators import (
    UnreachableCoordinator,
    audit_together,
    doctor_together,
    sessions_together,
    stats_together,
)
from transferqueue.wire.answers.doctor import DoctorAnswer
from transferqueue.wire.answers.events import EventsAnswer
from transferqueue.wire.answers.row import RowLife
from transferqueue.wire.answers.sessions import Sessions
from transferqueue.wire.answers.snapshots import StoredSnapshot
from transferqueue.wire.answers.stats import AuditAnswer, Stats


class Queue(QueueBase):
    """All tables and weight channels of one deployment. Made by `transferqueue.connect`.

    In a deployment of several coordinators, each table and weight channel is at one of them, which its name determines
    (`transferqueue docs coordinators`). Every method may be called from any thread. After `os.fork` the child gets
    `Forked`: connect again there. Any call may raise a `PeerError`: `Unreachable` if the server does not answer in
    time, `Disconnected` if it, or this session, is gone.

    Use it as a context manager. Closing ends all waits of this client with `Disconnected`, gives its leases and
    reservations back, and ends an embedded server.

    Example:
        >>> import transferqueue as tq
        >>> with tq.connect("embedded") as queue:
        ...     with tq.connect(queue.address) as same:  # as another process would
        ...         print(same.coordinators == queue.coordinators)
        True
    """

    def create_table(
        self,
        name: str,
        *,
        fields: Sequence[Field] = (),
        tasks: Sequence[Task] = (),
        limits: Limits = Limits(),  # noqa: B008  (frozen)
        pacing: Pacing | None = None,
        retention: Retention = Acked(),  # noqa: B008  (frozen)
        exist_ok: bool = False,
        replicas: int = 1,
        extra_fields: bool | None = None,
    ) -> Table:
        """Create a table, or open one that exists with the same terms. Waits for no other client.

        If no fields are declared, the first put that brings a new field adds it, unless its name is near that of a
        parameter or of another field: that is `UsageError`, with the name that was probably meant.

        Args:
            name: of the table: up to 128 letters, digits and ``_ . - /``, of which the first is a letter or ``_``.
            fields: fields that rows may have, beside those that a task needs or gives; default: none are declared.
            tasks: the consumers of its rows; default: none. `Table.add_task` declares more.
            limits: the most rows and bytes that it holds; default ``Limits()``: 65536 rows. Puts wait while it is full.
            pacing: how far production may run ahead of one of the tasks; default None: as far as the limits allow.
            retention: when rows are freed; default ``Acked()``: when all tasks are done with them.
            exist_ok: open the table if it exists with the same terms; default False.
            replicas: shards that each block of columns is written to, 1 to 4, all in one commit; default 1. Rows
                outlive the loss of one shard less, and their bytes count as often. A copy that is lost with a shard is
                made again in another one.
            extra_fields: whether rows may add further fields. True: any, and names are taken as they come. False: none.
                Default None: any if no fields are declared, else none.

        Returns:
            The table.

        Raises:
            AlreadyExists: a table of this name exists, and `exist_ok` is False or its terms differ.
            Impossible: terms under which rows would wait for ever, with the arithmetic; or fewer shards than
                `replicas`.
            NotFound: a selector `Plugin` that the server does not have.
            Full: 4096 tables exist.
            UsageError: an invalid name or term.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     tasks = [tq.Task("score", needs=["answer"], gives=["reward"]), tq.Task("train", needs=["reward"])]
            ...     table = queue.create_table("rollouts", tasks=tasks, limits=tq.Limits(rows=1024))
            ...     names = queue.tables()
            >>> names
            ['rollouts']
        """
        client = self._of(name)
        operation = tables.create_table(
            client, name, fields, tasks, limits, pacing, retention, exist_ok, replicas, extra_fields
        )
        return Table(client, run_sync(client.connection, operation))

    def table(self, name: str, timeout_s: float | None = 0.0) -> Table:
        """Open a table that exists, or wait until a client creates it.

        Args:
            name: of the table.
            timeout_s: seconds to wait for its creation; default 0: not at all; None: until it is created.

        Returns:
            The table.

        Raises:
            NotFound: it does not exist, or was not created in time. The text lists the tables that exist.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     table = queue.create_table("rollouts")
            ...     same = queue.table("rollouts")  # as another process would
            >>> same.name
            'rollouts'
        """
        client = self._of(name)
        return Table(client, run_sync(client.connection, tables.open_table(client, name, timeout_s)))

    def tables(self) -> list[str]:
        """Return the names of all tables, sorted.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     for name in ("prompts", "answers"):
            ...         table = queue.create_table(name)
            ...     queue.tables()
            ['answers', 'prompts']
        """
        return sorted([name for names in self._each(tables.tables) for name in names])

    def drop_table(self, name: str, *, empty: bool = False) -> None:
        """Remove a table with its rows. Calls that wait for it end with `NotFound`.

        Args:
            name: of the table.
            empty: refuse to remove a table that has rows; default False.

        Raises:
            NotFound: there is no such table.
            UsageError: `empty` is True and the table has rows.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     table = queue.create_table("rollouts")
            ...     queue.drop_table("rollouts", empty=True)
            ...     queue.tables()
            []
        """
        client = self._of(name)
        run_sync(client.connection, tables.drop_table(client, name, empty))

    def weights(self, channel: str, keep: int = 2, *, deltas: int = DELTAS_MAX) -> WeightChannel:
        """Return a handle on a weight channel, without asking the server.

        The channel exists once a version is published.

        Args:
            channel: name of the channel.
            keep: the newest versions that stay after a publication by this handle; default 2.
            deltas: the most differences of a tensor between two publications of all of it by this handle, 0 to 32;
                default 32. With 0 each version is whole: readers on the server's host view it where it lies, while of
                differences each makes a tensor of its own.

        Returns:
            The handle.

        Raises:
            UsageError: an invalid name, `keep` below 1, or `deltas` out of range.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     channel = queue.weights("policy", keep=4)
            >>> channel.name
            'policy'
        """
        return WeightChannel(self._of(channel), *channel_terms(channel, keep, deltas))

    def stats(self, *, timeout_s: float | None = REPORT_S) -> Stats:
        """Return counts, bytes and ages of the whole deployment now (`transferqueue docs figures`).

        Of several coordinators it is their `tables` and `channels` together, and in `coordinators` the answer of each
        by its address; an `UnreachableCoordinator` for one that is out of reach. `doctor` and `sessions` answer in the
        same way.

        Args:
            timeout_s: seconds to wait for the server; default 10; None: no limit.

        Returns:
            The figures.

        Raises:
            Unreachable: the only coordinator did not answer in time.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
            ...     rows = table.put(x=[1, 2])
            ...     figures = queue.stats()
            >>> figures.tables["t"].rows_live
            2
        """
        return stats_together(self._look_at_each(lambda: tables.observe(Stats, timeout_s=timeout_s)))

    def doctor(self, table: str | None = None, *, timeout_s: float | None = REPORT_S) -> DoctorAnswer:
        """Say which clients wait, for which rows, and which clients hold those rows.

        Args:
            table: name of a table; default None: all tables.
            timeout_s: seconds to wait for the server; default 10; None: no limit.

        Returns:
            The findings.

        Raises:
            NotFound: there is no such table.
            Unreachable: the server did not answer in time.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
            ...     findings = queue.doctor("t")
            >>> list(findings.tables)
            ['t']
        """
        if table:
            operation = tables.observe(DoctorAnswer, table, timeout_s=timeout_s)
            return run_sync(self._of(table).connection, operation)
        return doctor_together(self._look_at_each(lambda: tables.observe(DoctorAnswer, timeout_s=timeout_s)))

    def inspect(self, table: str, row: int, *, timeout_s: float | None = REPORT_S) -> RowLife:
        """Describe one row: its facts, its fields, and what happened to it in each task.

        Args:
            table: name of the table.
            row: id of the row.
            timeout_s: seconds to wait for the server; default 10; None: no limit.

        Returns:
            The description.

        Raises:
            NotFound: there is no such table, or the row was never put.
            Unreachable: the server did not answer in time.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
            ...     rows = table.put(x=[1], key="first")
            ...     life = queue.inspect("t", 0)
            >>> life.state, life.key, list(life.tasks)
            ('live', 'first', ['train'])
        """
        return run_sync(self._of(table).connection, tables.observe(RowLife, table, row, timeout_s=timeout_s))

    def sessions(self, *, timeout_s: float | None = REPORT_S) -> Sessions:
        """List connected clients: label, process, how long each has been silent, and the rows that it holds.

        Args:
            timeout_s: seconds to wait for the server; default 10; None: no limit.

        Returns:
            The clients.

        Raises:
            Unreachable: the only coordinator did not answer in time.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded", label="trainer") as queue:
            ...     sessions = queue.sessions()
            >>> [session.label for session in sessions.values()]
            ['trainer']
        """
        return sessions_together(self._look_at_each(lambda: tables.sessions(timeout_s)))

    def events(
        self, table: str, *, after: int = -1, every: int = 1, timeout_s: float | None = REPORT_S
    ) -> EventsAnswer:
        """List what happened to rows of a table since an earlier answer, oldest first.

        The server remembers about 4,096 requests of a table: `missed` says how many it had forgotten. Ask again at once
        where `more` is true (`transferqueue docs figures`).

        Args:
            table: name of the table.
            after: ``next`` of the earlier answer; default -1: list nothing, and let ``next`` be where the history ends
                now.
            every: list the events of one row in so many, the same rows in every answer; default 1: all rows.
            timeout_s: seconds to wait for the server; default 10; None: no limit.

        Returns:
            The events, and where to go on.

        Raises:
            NotFound: there is no such table.
            Unreachable: the server did not answer in time.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
            ...     start = queue.events("t")
            ...     rows = table.put(x=[1, 2])
            ...     answer = queue.events("t", after=start.next)
            >>> [(event.what, event.rows) for event in answer.events]
            [('put', [0, 1])]
        """
        return run_sync(self._of(table).connection, tables.events(table, after, every, timeout_s))

    def audit(self, *, timeout_s: float | None = REPORT_S) -> AuditAnswer:
        """Check for each table that ``rows_put == rows_live + rows_done + rows_dropped``, each counted on its own.

        Args:
            timeout_s: seconds to wait for each coordinator; default 10; None: no limit.

        Returns:
            The counts of each table, and whether they balance.

        Raises:
            Unreachable: a coordinator did not answer in time.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
            ...     rows = table.put(x=[1, 2])
            ...     counts = queue.audit()
            >>> counts.balanced, counts.tables["t"].rows_put
            (True, 2)
        """
        return audit_together(self._each(lambda: tables.observe(AuditAnswer, timeout_s=timeout_s)))

    def snapshot(
        self,
        path: str | os.PathLike[str],
        *,
        keep: int = 2,
        timeout_s: float | None = SNAPSHOT_S,
        progress: Progress | None = None,
    ) -> list[StoredSnapshot]:
        """Write all tables and weights, as of one moment, as Arrow files, while all clients go on.

        Blocks until it is written (`transferqueue docs snapshots`). The snapshot is a numbered directory in `path`,
        which is there whole or not at all. Each of several coordinators writes its own snapshot, into a directory of
        its own in `path`: each table is whole, and tables of different coordinators are of moments that lie apart.

        Args:
            path: a directory under the server's root for snapshots (`serve --snapshots`; else
                ``$TRANSFERQUEUE_SNAPSHOTS``, else ``snapshots`` where the server runs).
            keep: the newest snapshots in `path` that stay; default 2.
            timeout_s: seconds to wait; default 600; None: no limit; 0: return at once, and the work goes on.
            progress: called with the bytes done and about how many there are in all; default None.

        Returns:
            Where the snapshot of each coordinator is, and when it was made, in the order of their numbers: mostly one.

        Raises:
            DeadlineExceeded: it was not written in time; the work goes on.
            OutOfMemory: the disk is full. Earlier snapshots are whole.
            Full: another snapshot is being written.
            ShardLost: a shard that alone has some of the rows is gone.
            Unreachable: such a shard, or a coordinator, does not answer.

        Example:
            >>> import contextlib, tempfile
            >>> import transferqueue as tq
            >>> with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # where an embedded server runs
            ...     with tq.connect("embedded") as queue:
            ...         table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
            ...         rows = table.put(x=[1, 2])
            ...         (stored,) = queue.snapshot("nightly")
            >>> stored.path.endswith("/snapshots/nightly/000001")
            True
        """
        return self._carry_out(snapshot.snapshot(self._clients, path, keep, timeout_s, progress)).stored

    def restore(
        self, path: str | os.PathLike[str], *, timeout_s: float | None = SNAPSHOT_S, progress: Progress | None = None
    ) -> list[StoredSnapshot]:
        """Fill this empty deployment from a snapshot.

        Rows come back with their ids, facts and states, and so do steps, groups, clocks and weights. Blocks until all
        is there; before that, nothing is. Leases have ended, not counted as attempts, and reservations are returned.
        The number of shards and the arena may differ from those of the snapshot. Each of several coordinators restores
        its newest snapshot under `path`, into as many coordinators. If one fails, the error names it, and the others
        keep the rows that they restored.

        Args:
            path: a snapshot, or the directory that holds several, of which the newest is taken.
            timeout_s: seconds to wait; default 600; None: no limit; 0: return at once, and the work goes on.
            progress: called with the bytes done and about how many there are in all; default None.

        Returns:
            Which snapshot each coordinator restores, and when it was made, in the order of their numbers.

        Raises:
            UsageError: there is a table or a version of weights already.
            Corruption: a file is not as it was written; the text names it.
            DeadlineExceeded: it did not end in time; the work goes on.

        Example:
            >>> import contextlib, tempfile
            >>> import transferqueue as tq
            >>> with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # where an embedded server runs
            ...     with tq.connect("embedded") as queue:
            ...         table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
            ...         (stored,) = queue.snapshot("nightly")
            ...     with tq.connect("embedded") as another:
            ...         restored = another.restore(stored)
            ...         another.tables()
            ['t']
        """
        return self._carry_out(snapshot.restore(self._clients, path, timeout_s, progress)).stored

    def drain_shard(self, number: int) -> None:
        """Give out no more memory of a remote shard. Returns at once.

        The shard's process ends when the last row in it is done and the last view of it is released. A second call does
        nothing.

        Args:
            number: of the shard, as in ``stats().server.shards``.

        Raises:
            NotFound: a shard that has not joined.
            UsageError: the queue is of several coordinators; connect to that of the shard alone.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     try:
            ...         queue.drain_shard(7)
            ...     except tq.NotFound:
            ...         print("no shard 7 has joined")
            no shard 7 has joined
        """
        run_sync(self._client.connection, tables.drain_shard(number))

    def close(self) -> None:
        """End the session, and an embedded server with it.

        Calls that wait end with `Disconnected`. A second call does nothing.

        Example:
            >>> import transferqueue as tq
            >>> queue = tq.connect("embedded")
            >>> queue.close()
            >>> queue
            <Queue at ...: 0 tables used here, closed>
        """
        for client in self._clients:
            client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _carry_out(self, calls: SnapshotCalls) -> SnapshotCalls:
        """Begin a job at each coordinator, then follow each."""
        for client in self._clients:
            run_sync(client.connection, calls.begin(client))
        for client in self._clients:
            run_sync(client.connection, calls.follow(client))
        return calls

    def _each(self, operation: Callable[[], Operation[T]]) -> list[T]:
        """What each coordinator answers, one after the other."""
        return [run_sync(client.connection, operation()) for client in self._clients]

    def _look_at_each(self, operation: Callable[[], Operation[T]]) -> dict[str, T | UnreachableCoordinator]:
        """The same by address; if there are several, with those that are out of reach."""
        return {
            client.address: run_sync(client.connection, self._look(client, operation())) for client in self._clients
        }
