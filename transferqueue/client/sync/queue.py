# Written by `python -m tests.sync_api` from client/aio/queue.py: change it there.
"""A queue, used from threads: a handle on all tables of one deployment."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from transferqueue.client.handles.coordinators import QueueBase
from transferqueue.client.operations import snapshot, tables
from transferqueue.client.operations.snapshot import SNAPSHOT_S, Progress, SnapshotCalls
from transferqueue.client.operations.weights import channel_name
from transferqueue.client.session.run import Operation, T, run_sync
from transferqueue.client.sync.table import Table
from transferqueue.client.sync.weight_channel import WeightChannel
from transferqueue.limits import REPORT_S, Limits
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
    """All tables of one deployment; what `transferqueue.connect` gives.

    Of a deployment of several coordinators it is all of them: each table and weight channel is at one, which its name
    says (`transferqueue docs cluster`).

    Every method may be called from any thread. After `os.fork` the child gets `Forked`: connect again there.
    Closing ends all waits of this client with `Disconnected`, gives its leases and reservations back, and, if the
    server is embedded, ends that too. Use it as a context manager.
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
        """Make a table. Returns at once.

        tasks: who takes its rows; `add_task` declares more. limits: the most rows and bytes it holds; puts wait when it
        is full. pacing: how far production may run ahead of one of the tasks (None: as far as the limits allow).
        retention: when rows are freed. fields: those that rows may have, beside those that a task needs or gives.
        Without any, the first put that brings a new field adds it, unless its name is near that of a parameter or of
        another field: that is `UsageError`, with the name that was probably meant. extra_fields: True: rows may add any
        further field, and names are taken as they come. False: none. None: any if no fields are declared. replicas:
        shards that each block of columns is written to, all in one commit, so that rows outlive the loss of one less;
        their bytes count as often. A copy that is lost with a shard is made again in another one. `AlreadyExists`
        unless `exist_ok` and the terms are the same; `Impossible` for terms under which rows would wait for ever, with
        the arithmetic, and with fewer shards than `replicas`.
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
            timeout_s: how long to wait for its creation. 0: not at all; None: until it is created.

        Raises:
            NotFound: it does not exist, or was not created in time. The text lists the tables that exist.
        """
        client = self._of(name)
        return Table(client, run_sync(client.connection, tables.open_table(client, name, timeout_s)))

    def tables(self) -> list[str]:
        """Names of all tables, sorted."""
        return sorted([name for names in self._each(tables.tables) for name in names])

    def drop_table(self, name: str, *, empty: bool = False) -> None:
        """Remove a table: its rows are dropped, whoever waits for it gets `NotFound`. empty: `UsageError` while it has
        rows."""
        client = self._of(name)
        run_sync(client.connection, tables.drop_table(client, name, empty))

    def weights(self, channel: str, keep: int = 2) -> WeightChannel:
        """The weight channel of this name; it exists once something is published. keep: versions kept."""
        return WeightChannel(self._of(channel), *channel_name(channel, keep))

    def stats(self, *, timeout_s: float | None = REPORT_S) -> Stats:
        """Counts, bytes and ages of the whole deployment now (`transferqueue docs observing`).

        Of several coordinators: their `tables` and `channels` together, and in `coordinators` what each said by its
        address; an `UnreachableCoordinator` for one that is out of reach. So are `doctor` and `sessions`. `Unreachable`
        if the server does not answer within `timeout_s` (None: no limit), as of all reports.
        """
        return stats_together(self._look_at_each(lambda: tables.observe(Stats, timeout_s=timeout_s)))

    def audit(self, *, timeout_s: float | None = REPORT_S) -> AuditAnswer:
        """For each table ``rows_put == rows_live + rows_done + rows_dropped``, each counted on its own. Of all
        coordinators, or the error of the first that is out of reach."""
        return audit_together(self._each(lambda: tables.observe(AuditAnswer, timeout_s=timeout_s)))

    def doctor(self, table: str | None = None, *, timeout_s: float | None = REPORT_S) -> DoctorAnswer:
        """Who waits for what, what is missing and who holds it; for one table or all."""
        if table:
            operation = tables.observe(DoctorAnswer, table, timeout_s=timeout_s)
            return run_sync(self._of(table).connection, operation)
        return doctor_together(self._look_at_each(lambda: tables.observe(DoctorAnswer, timeout_s=timeout_s)))

    def inspect(self, table: str, row: int, *, timeout_s: float | None = REPORT_S) -> RowLife:
        """One row: its facts, fields and what happened to it in each task."""
        return run_sync(self._of(table).connection, tables.observe(RowLife, table, row, timeout_s=timeout_s))

    def events(
        self, table: str, *, after: int = -1, every: int = 1, timeout_s: float | None = REPORT_S
    ) -> EventsAnswer:
        """What happened to rows of a table since an earlier answer, oldest first (`transferqueue docs observing`).

        after: `next` of that answer; -1: nothing is listed yet, and `next` is where the history ends now. every: of one
        row in so many, which are the same ones in every answer. The server remembers about 4,096 requests of a table:
        `missed` says how many it had forgotten. Ask again at once where `more` is true.
        """
        return run_sync(self._of(table).connection, tables.events(table, after, every, timeout_s))

    def sessions(self, *, timeout_s: float | None = REPORT_S) -> Sessions:
        """Connected clients by session number as text: label, process, last heard of, what they hold."""
        return sessions_together(self._look_at_each(lambda: tables.sessions(timeout_s)))

    def drain_shard(self, number: int) -> None:
        """Lend nothing more of a remote shard (see ``stats().server.shards``). Returns at once; the shard's
        process ends when the last row in it is done and the last view of it is gone. Again: nothing. `NotFound` for one
        that has not joined."""
        run_sync(self._client.connection, tables.drain_shard(number))

    def snapshot(
        self,
        path: str | os.PathLike[str],
        *,
        keep: int = 2,
        timeout_s: float | None = SNAPSHOT_S,
        progress: Progress | None = None,
    ) -> list[StoredSnapshot]:
        """Write everything there is at one moment, while all go on, as Arrow files that anything reads
        (`transferqueue docs snapshots`).

        path: a directory under the server's root for snapshots (`serve --snapshots`; else ``$TRANSFERQUEUE_SNAPSHOTS``,
        else ``snapshots`` where the server runs); the snapshot is a numbered directory in it, there whole or not at
        all, and the newest `keep` stay. Blocks until it is written, up to `timeout_s` (0: not at all):
        `DeadlineExceeded` then; the work goes on. progress: called with bytes done and about how many in all.
        `OutOfMemory` if the disk is full: earlier ones are whole; `Full` if another is being written;
        `ShardLost` or `Unreachable` if a shard that alone has rows is gone or silent. Each of several coordinators
        writes its own snapshot, into a directory of its own in `path`: each table is whole, and tables of different
        coordinators are of moments that lie apart.

        Returns:
            Where the snapshot of each coordinator is, and when it was made, in the order of their numbers: mostly one.
        """
        return (self._carry_out(snapshot.snapshot(self._clients, path, keep, timeout_s, progress))).stored

    def restore(
        self, path: str | os.PathLike[str], *, timeout_s: float | None = SNAPSHOT_S, progress: Progress | None = None
    ) -> list[StoredSnapshot]:
        """Make this empty deployment what a snapshot is of: rows with ids, facts and states, steps, groups, clock,
        weights.

        path: a snapshot, or the directory that holds several: the newest. Leases have ended as no attempt, reservations
        returned; the number of shards and the arena may be others. Blocks, up to `timeout_s`; nothing is there before
        all is. `Corruption` names a file that is not as it was written; `UsageError` if there is a table or weights.
        Each of several coordinators restores its newest snapshot under `path`, into as many coordinators. If one fails,
        the error names it, and the others keep what they restored.

        Returns:
            Which snapshot each coordinator restores, and when it was made, in the order of their numbers.
        """
        return (self._carry_out(snapshot.restore(self._clients, path, timeout_s, progress))).stored

    def close(self) -> None:
        """End the session, and an embedded server with it. Waits end with `Disconnected`. Again: nothing."""
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
