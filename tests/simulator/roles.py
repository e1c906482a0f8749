"""The workers of `Rollouts`, and the account that each reply is compared with. The account knows only what clients
know."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from tests.simulator import job
from tests.simulator.job import SimJob, Steps
from tests.simulator.machine import PromiseBroken
from transferqueue.errors import DeadlineExceeded, FlowSignal, OutOfMemory, Sealed, UsageError
from transferqueue.limits import HISTORY_EVENTS_MAX, Limits
from transferqueue.policies import (
    Complete,
    DeliverPartial,
    DropGroup,
    DropStale,
    Fifo,
    Freshest,
    HoldClock,
    LongestFirst,
    OldestVersionFirst,
    Pacing,
    Priority,
    Refill,
    Requeue,
    Retry,
    Task,
)
from transferqueue.schema import Field
from transferqueue.wire import messages as m

if TYPE_CHECKING:
    from tests.simulator.process import Process
    from transferqueue.ledger.state import LedgerState

GROUPS: Final = 11
ALONE: Final = ("stale", "group_incomplete", "attempts")
"""Reasons for which the queue drops rows on its own."""
SCORE: Final = Field("score", "int64")


EVENTS_CHECKED: Final = 64
"""Of a table, after each event of the server, which adds a few."""


class ClientAccount:
    """Everything that replies told clients. Knows nothing of the ledger; raises `PromiseBroken` at the first
    contradiction.

    roomy: the arena has a page for each part of each group that may be ahead, so groups may be put in parts. A smaller
    arena could fill with parts of unfinished groups, and the missing rows could never be put.
    """

    def __init__(self, chance: random.Random, *, roomy: bool) -> None:
        self.size, self.staleness = chance.choice((2, 3, 4)), chance.choice((1, 2, 3))
        self.retry = Retry(first_s=chance.choice((0.1, 1.0)), max_s=8.0, attempts=chance.choice((1, 3, 6, None)))
        self.incomplete = chance.choice(
            (DropGroup(), DeliverPartial(), Refill()) if roomy else (DropGroup(), DeliverPartial())
        )
        self.in_parts = roomy
        self.least = chance.randint(1, self.size) if isinstance(self.incomplete, DeliverPartial) else self.size
        self.on_stale = chance.choice((DropStale(), DropStale(), HoldClock(), Requeue("score")))
        self.selector = chance.choice((Fifo(), OldestVersionFirst(), Freshest(), LongestFirst(), Priority()))
        self.rows_max = chance.choice((8, 12, 20)) * self.size
        self.channel: str | None = None
        self.producing = 2
        self.groups_left = GROUPS
        self.groups = 0
        self.seals_early = chance.random() < 0.5
        self.stamps = 0
        self.version_of: dict[int, int] = {}
        self.stamp_of: dict[int, int] = {}
        self.row_of: dict[int, int] = {}
        self.put = 0
        self.maybe_put = 0
        self.token: dict[tuple[str, int], int] = {}
        self.failed: dict[tuple[str, int], int] = {}
        """(task, row) -> how often a worker said, perhaps in vain, that its work failed."""
        self.given_without: dict[int, int] = {}
        """Group -> how many members a lease of it lacked at most. They may come later: "train" passes them over, and
        they are done when "score" is done with them."""
        self.acked: dict[tuple[str, int], int] = {}
        self.maybe_acked: set[tuple[str, int]] = set()
        self.clock = 0

    def new(self, rows: int, version: int) -> list[int]:
        """Make stamps for rows that are about to be put."""
        made = list(range(self.stamps + 1, self.stamps + rows + 1))
        self.stamps += rows
        self.version_of.update(dict.fromkeys(made, version))
        return made

    def advanced(self, version: int) -> None:
        """The clock reached at least this version."""
        self.clock = max(self.clock, version)

    def next_group(self) -> int:
        """The number of a new group."""
        self.groups += 1
        return self.groups

    def record_stamp(self, row: int, stamp: int) -> None:
        """A row was read with this stamp. Each row has one stamp, and each stamp one row."""
        if stamp not in self.version_of:
            raise PromiseBroken(f"torn or strange bytes: row {row} holds {stamp}, which nobody wrote")
        if self.stamp_of.setdefault(row, stamp) != stamp or self.row_of.setdefault(stamp, row) != row:
            raise PromiseBroken(
                f"row {row} holds {stamp}; before, row {self.row_of.get(stamp)} did, or it held another"
            )

    def record_lease(self, task: str, rows: list[int], lease: m.Leased, groups: list[int], clock: int) -> None:
        """A worker leased rows. clock: the version that was confirmed before it asked."""
        for row in rows:
            key = task, row
            if self.is_redone(task):
                continue
            if lease.token > self.acked.get(
                key, lease.token
            ):  # a lower token belongs to an earlier lease whose reply came late
                raise PromiseBroken(f'row {row} is given to task "{task}" again though its ack was confirmed')
            if lease.token > self.token.get(key, 0):
                self.token[key] = lease.token
        if task == "train":
            for group in set(groups):
                if not self.least <= groups.count(group) <= self.size:
                    raise PromiseBroken(
                        f"group {group} was given with {groups.count(group)} of {self.size}, at least {self.least}"
                    )
                lacks = self.size - groups.count(group)
                self.given_without[group] = max(lacks, self.given_without.get(group, 0))
            for row, version in zip(rows, job.fact(lease.content, "policy_version"), strict=True):
                if self.version_of.get(self.stamp_of.get(row, 0), version) != version and not self.is_redone("score"):
                    raise PromiseBroken(f"row {row} is said to be of version {version}, which it was not put with")
                lag = clock - version
                if lag > self.staleness:
                    raise PromiseBroken(f"row {row} was given {lag} versions late; the bound is {self.staleness}")

    def is_redone(self, task: str) -> bool:
        """Whether this task may rightly lease rows again: stale rows are scored again with newer weights."""
        return task == "score" and isinstance(self.on_stale, Requeue)

    def fails(self, task: str, rows: list[int]) -> None:
        """A worker is about to release rows as failed."""
        for row in rows:
            self.failed[task, row] = self.failed.get((task, row), 0) + 1

    def spent(self) -> int:
        """The number of rows that failed as often as they may, so that they may have been dropped for that."""
        most = self.retry.attempts
        return 0 if most is None else len({row for (_, row), failed in self.failed.items() if failed >= most})

    def done(self, task: str, rows: list[int], token: int) -> None:
        """An ack was confirmed."""
        for row in rows:
            if self.is_redone(task):
                self.acked[task, row] = token
                continue
            if self.token[task, row] != token:
                raise PromiseBroken(
                    f"row {row}: the ack of lease {token} was taken after {self.token[task, row]} was given out"
                )
            if self.acked.setdefault((task, row), token) != token:
                raise PromiseBroken(f'row {row} was acked twice in task "{task}"')


class Rollouts(SimJob):
    """Groups are produced, scored and trained, within bounds on rows, pace and staleness."""

    table = "t"

    def __init__(self, chance: random.Random, *, roomy: bool) -> None:
        self.account = ClientAccount(chance, roomy=roomy)

    def roles(self) -> dict[str, Callable[[Process], Steps]]:
        """See `SimJob`."""
        account = self.account
        work: list[Callable[[Process], Steps]] = [partial(producer, account=account)] * 2
        work += [partial(consumer, account=account, task="score")] * 2
        work += [partial(consumer, account=account, task="train")] * 2
        work.append(partial(closer, account=account))
        return {f"worker {at}": partial(self._opened, role=role) for at, role in enumerate(work)}

    def _opened(self, process: Process, role: Callable[[Process], Steps]) -> Steps:
        yield create(self.account)
        yield from role(process)

    def check_books(self, state: LedgerState, *, whole: bool) -> None:
        """See `SimJob`."""
        if (table := state.tables.get(self.table)) is None:
            return
        for event in table.history.since(0 if whole else table.history.end - EVENTS_CHECKED, HISTORY_EVENTS_MAX):
            if event.what == "acked":
                acked = {(event.task, row) for row in event.rows.tolist()}
                if strange := acked - self.account.maybe_acked:
                    raise PromiseBroken(f"the books say that a worker acked {sorted(strange)}, and none did")

    def judge(self, state: LedgerState) -> None:
        """See `SimJob`."""
        table, account = state.tables[self.table], self.account
        if table.rows_live:
            raise PromiseBroken(f"{table.rows_live} rows are without a fate after the end")
        if not account.put <= table.rows_put <= account.maybe_put:
            raise PromiseBroken(
                f"{table.rows_put} rows were put; producers were told of {account.put}, and sent {account.maybe_put}"
            )
        sure = sum(("score", row) in account.acked for task, row in account.acked if task == "train")
        might = sum(task == "train" for task, _ in account.maybe_acked) + sum(account.given_without.values())
        if not sure <= table.rows_done <= might or not set(table.rows_dropped) <= set(ALONE):
            raise PromiseBroken(
                f"{table.rows_done} rows are done; {sure} to {might} were acked; dropped: {table.rows_dropped}"
            )
        if table.rows_dropped.get("attempts", 0) > account.spent():
            raise PromiseBroken(f"{table.rows_dropped} rows were dropped; {account.spent()} failed too often")


def create(account: ClientAccount) -> m.CreateTable:
    """The request that makes the table of a run."""
    score = Task("score", needs=["body"], gives=["score"], selector=account.selector, lease_s=2.0, retry=account.retry)
    groups = Complete(deadline_s=8.0, min_size=account.least, incomplete=account.incomplete)
    train = Task("train", needs=["body", "score"], lease_s=2.5, retry=account.retry, groups=groups)
    pacing = Pacing(
        "train", batch_rows=2 * account.size, depth=2, max_staleness=account.staleness,
        on_stale=account.on_stale, channel=account.channel,
    )  # fmt: skip
    return m.CreateTable("t", [job.BODY, SCORE], [score, train], Limits(rows=account.rows_max), pacing, exist_ok=True)


def producer(process: Process, account: ClientAccount) -> Steps:
    """Put groups until there are enough."""
    while account.groups_left > 0:
        yield from job.persistently(process, partial(_produce, process, account))
    account.producing -= 1


def _produce(process: Process, account: ClientAccount) -> Steps:
    """Put one group or, where the queue asks for refills, the missing rows of earlier groups. Sometimes in two puts."""
    try:
        reserved = yield m.Reserve("t", account.size, wait_s=3.0)
    except DeadlineExceeded:
        if not isinstance(account.incomplete, Refill):
            raise
        reserved = yield m.Reserve("t", 1)  # a refill alone needs no room
    account.groups_left -= 1
    try:
        yield from _fill(process, account, reserved)
    except (FlowSignal, OutOfMemory):  # as the client does at the end of a `with table.reserve()`
        yield m.Unreserve("t", reserved.reservation)
        raise


def _fill(process: Process, account: ClientAccount, reserved: m.Reserved) -> Steps:
    wanted = [group for group, missing in reserved.refills for _ in range(missing)]
    if not wanted and reserved.rows == account.size:
        wanted = [account.next_group()] * account.size
    first = process.world.random.choice((len(wanted), len(wanted), 1)) if account.in_parts else len(wanted)
    for part in (wanted[:first], wanted[first:]):
        if part:
            yield from _put(process, account, reserved, part)
    if len(wanted) < reserved.rows:
        yield m.Unreserve("t", reserved.reservation)


def _put(process: Process, account: ClientAccount, reserved: m.Reserved, groups: list[int]) -> Steps:
    chance, rows = process.world.random, len(groups)
    stamps = account.new(rows, reserved.version)
    block = yield from job.write(process, stamps)
    facts = m.RowFacts(
        group_id=job.pack(groups), group_size=struct.pack(f"<{rows}i", *[account.size] * rows),
        policy_version=job.pack([reserved.version] * rows), tokens=job.pack([chance.randint(1, 9) for _ in groups]),
        priority=struct.pack(f"<{rows}d", *[chance.random() for _ in groups]),
    )  # fmt: skip
    account.maybe_put += rows
    try:
        reply = yield m.PutRequest("t", rows, m.Columns([job.BODY], [block], facts=facts), reserved.reservation)
    finally:
        if process.alive:
            process.send_unawaited(m.ReturnGrant(block.extent))
    account.put += rows
    for row, stamp in zip(range(reply.first, reply.first + rows), stamps, strict=True):
        account.record_stamp(row, stamp)


def consumer(process: Process, account: ClientAccount, task: str) -> Steps:
    """Lease, read, read again, and ack with results; the trainer advances the clock too."""
    yield from job.until_end(process, partial(_consume, process, account, task))


def _consume(process: Process, account: ClientAccount, task: str) -> Steps:
    clock, chance = account.clock, process.world.random
    lease = yield _lease_of(process, account, task)
    rows, groups = job.unpack(lease.content.rows), job.fact(lease.content, "group_id")
    blocks = job.blocks_of(lease.content)
    job.view(process, blocks)
    try:
        _read(process, account, lease)
        if task == "train" and rows and "score" not in {one.field for one in lease.content.inline}:
            raise PromiseBroken(f"rows {rows} were given to task train without the score that it needs")
        account.record_lease(task, rows, lease, groups, clock)
        yield chance.uniform(0.01, 0.4)
        if chance.random() < 0.1:
            yield m.Renew("t", lease.lease, lease.token)
        _read(process, account, lease)
        if task == "score" and rows and chance.random() < 0.05:
            yield from _ack_without_result(lease)
        if task == "score" and chance.random() < 0.08:
            yield from _give_back(process, account, lease, rows)
        else:
            yield from _ack(account, task, lease, rows)
    finally:
        job.let_go(process, blocks)
    if task == "train" and account.channel is None:
        version = lease.version + 1
        yield m.AdvanceClock("t", version, wait_s=1.0)
        account.advanced(version)


def _lease_of(process: Process, account: ClientAccount, task: str) -> m.LeaseRequest:
    chance = process.world.random
    wait_s = 60.0 if process.world.healed else 2.0
    if task == "train":
        return m.LeaseRequest("t", task, groups=1, wait_s=wait_s)
    if chance.random() < 0.2:
        return m.LeaseRequest("t", task, tokens=chance.randint(9, 20), at_least=1, wait_s=wait_s)
    return m.LeaseRequest("t", task, rows=account.size, at_least=chance.randint(1, account.size), wait_s=wait_s)


def _give_back(process: Process, account: ClientAccount, lease: m.Leased, rows: list[int]) -> Steps:
    failed = process.world.random.random() < 0.5
    if failed:
        account.fails("score", rows)
    yield m.ReleaseRequest("t", lease.lease, lease.token, failed=failed, reason="ValueError: for a change")


def _ack_without_result(lease: m.Leased) -> Steps:
    """Send an ack without the result that the next task needs: it must be refused, and the rows stay on lease, but for
    rows that were dropped meanwhile."""
    try:
        done = yield m.Ack("t", lease.lease, lease.token)
    except UsageError:
        return
    assert isinstance(done, m.DoneReply)
    if done.rows:
        raise PromiseBroken("an ack of task score was accepted without the score that task train needs")


def _ack(account: ClientAccount, task: str, lease: m.Leased, rows: list[int]) -> Steps:
    columns = None
    if task == "score":
        scores = job.pack([account.stamp_of[row] * 7 for row in rows])
        facts = m.RowFacts(policy_version=job.pack([lease.version] * len(rows)) if account.is_redone(task) else None)
        columns = m.Columns([SCORE], inline=[m.Inline("score", scores)], facts=facts)
    account.maybe_acked.update((task, row) for row in rows)
    if rows:
        ended = yield m.Ack("t", lease.lease, lease.token, columns=columns)
        if ended.rows == len(
            rows
        ):  # fewer: some rows left the lease, dropped or refilled, and the reply does not say which
            account.done(task, rows, lease.token)


def _read(process: Process, account: ClientAccount, lease: m.Leased) -> None:
    for row, stamp in job.stamps_of(process, lease.content).items():
        account.record_stamp(row, stamp)
    for row, score in zip(job.unpack(lease.content.rows), job.inline(lease.content, "score"), strict=False):
        if score != account.stamp_of[row] * 7:
            raise PromiseBroken(f"row {row} has the result of another: {score}")


def closer(process: Process, account: ClientAccount) -> Steps:
    """Seal the table when all groups are put; in some runs only after all faults have ended."""
    while account.producing or not (account.seals_early or process.world.healed):
        yield 0.25
    try:
        yield m.Seal("t")
    except Sealed:
        return
