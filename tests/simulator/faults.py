"""Deliberate bugs that are put into the production code from outside, to test the tests.

Each entry of `FAULTS` replaces one attribute for as long as `planted` lasts; production code has no switch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import msgspec
import numpy as np

from tests.simulator.machine import SimJournal
from transferqueue.client.session.calls import PendingCalls
from transferqueue.errors import InternalError
from transferqueue.ledger.arrays import NO_ROWS
from transferqueue.ledger.ledger import Ledger
from transferqueue.ledger.requests import ack, flow_control, lease, put, weight_channels
from transferqueue.ledger.rows import GroupIndex, StepIndex
from transferqueue.ledger.rows.blocks import BlockRegistry
from transferqueue.ledger.rows.copies import Copies
from transferqueue.ledger.rules import finish, groups_and_staleness
from transferqueue.ledger.rules.column_ends import free_values
from transferqueue.ledger.rules.finish import finish_rows
from transferqueue.ledger.table_state import TableState
from transferqueue.ledger.tasks import task_state
from transferqueue.ledger.tasks.group_task import GroupTaskState
from transferqueue.ledger.tasks.leases import LeaseTable
from transferqueue.ledger.tasks.reservations import FlowControl
from transferqueue.ledger.tasks.task_state import TaskState
from transferqueue.policies import AckedColumns
from transferqueue.server.durability import recorded_ledger
from transferqueue.server.memory.backlog import Backlog
from transferqueue.server.memory.own_memory import OwnShardMemory
from transferqueue.server.sessions.waiting import WaitQueue
from transferqueue.server.spill.spiller import Spiller
from transferqueue.wire import messages as m

Plant = tuple[object, str, Callable[[Any], Any]]
"""The object, the name of its attribute, and a function from the attribute to its replacement."""


def _nothing(_was: Any) -> Any:
    return lambda *_args, **_terms: None


def _consumed(_was: Any) -> Any:
    return lambda table, task, rows, *, failed, now: finish_rows(table, task, rows, now) if rows.size else None


def _unfenced(_was: Any) -> Any:
    return lambda self, number, token, table, session: next(iter(self.by_id.values()))


def _too_early(was: Any) -> Any:
    return lambda self, ids, where, *, complete, now: was(self, ids, where, complete=True, now=now)


def _behind(was: Any) -> Any:
    def commit(self: Any) -> None:
        self._pending, self.held = getattr(self, "held", []), self._pending
        was(self)

    return commit


def _in_order(was: Any) -> Any:
    def answered(self: Any, answer: m.AnswerFrame) -> Any:
        oldest = next(iter(self._pending), answer.id)
        return was(self, m.AnswerFrame(answer.epoch, oldest, answer.reply))

    return answered


def _twice(was: Any) -> Any:
    def again(self: Any, *args: Any) -> None:
        was(self, *args)
        was(self, *args)

    return again


def _double_free(was: Any) -> Any:
    def close(self: Any, one: Any) -> None:
        self.reserved -= one.left
        was(self, one)

    return close


def _counted_as_failure(was: Any) -> Any:
    return lambda table, task, rows, *, failed, now: was(table, task, rows, failed=True, now=now)


def _one_less(was: Any) -> Any:
    return lambda self, unit: max(1, was(self, unit) - 1)


def _skip(was: Any) -> Any:
    return lambda ledger, number, data: None if number % 11 == 7 else was(ledger, number, data)


def _first_replica(was: Any) -> Any:
    def acked(table: Any, lease: Any, *terms: Any) -> Any:
        lease.replicas = len(lease.acked) + 1
        return was(table, lease, *terms)

    return acked


def _one_step_more(was: Any) -> Any:
    # Chosen steps of a checkpoint are those up to it, of a rollback those above: only the former gain one.
    return lambda self, chosen: was(self, lambda step: chosen(step) or chosen(step - 1))


def _oldest(was: Any) -> Any:
    def pull(channel: Any, blocks: Any, request: m.Pull, session: int) -> Any:
        oldest = min(channel.versions, default=-1)
        return was(channel, blocks, msgspec.structs.replace(request, version=oldest), session)

    return pull


def _copies_too(was: Any) -> Any:
    def lose_shard(self: Any, shard: int) -> list[int]:
        touched = [
            number
            for number, block in self._blocks.blocks.items()
            if any(extent.shard == shard for extent in block.extents)
        ]
        was(self, shard)
        return touched

    return lose_shard


def _counted_at_once(was: Any) -> Any:
    def begin(self: Any, session: int, shard: int, offset: int, nbytes: int, blocks: Any) -> Any:
        order = was(self, session, shard, offset, nbytes, blocks)
        for member, at in order.offsets.items():
            self._add(self._blocks.blocks[member], self._blocks.extents[order.extent], at)
        return order

    return begin


def _all(_was: Any) -> Any:
    return lambda _rows, _where, ids, _at: np.ones(ids.size, np.bool_)


def _always(_was: Any) -> Any:
    return lambda *_args, **_named: True


def _freed_uncovered(was: Any) -> Any:
    def acked(table: Any, task: Any, rows: Any, request: Any, session: int, now: float) -> None:
        covered = request.step <= task.counters.checkpoint
        was(table, task, rows, request, session, now)
        if not covered and isinstance(table.retention, AckedColumns):
            every = np.ones(rows.size, np.bool_)
            free_values(table, dict.fromkeys(task.task.needs, every), rows, now, task=task.task.name)

    return acked


def _always_some(was: Any) -> Any:
    class Requests(OrderedDict[int, Any]):
        def __bool__(self) -> bool:
            return True

    def begin(self: Any) -> None:
        was(self)
        self.requests = Requests()

    return begin


def _if_any(was: Any) -> Any:
    return lambda self: was(self) if len(self.requests) else None


def _frees_ended(was: Any) -> Any:
    def begin(self: Any, *terms: Any) -> None:
        was(self, *terms)
        self.keeps_ended = False

    return begin


def _lives_on(_was: Any) -> Any:
    def refused(self: Any, what: str, error: BaseException | None = None) -> Any:
        self.state.core.writing = False
        raise InternalError(f"{what} failed") from error

    return refused


FAULTS: Final[dict[str, tuple[Plant, ...]]] = {
    "rows count as consumed when they are fetched": ((ack, "return_rows", _consumed),),
    "an ack is taken without fencing": ((LeaseTable, "get", _unfenced),),
    "a row id is used again": ((put, "PutRows", lambda was: lambda first, rows: was(max(0, first - 1), rows)),),
    "a row is visible before its last "
    "block": ((TaskState, "arrive", _too_early), (GroupTaskState, "arrive", _too_early)),
    "the journal is written after the answer": ((SimJournal, "commit", _behind),),
    "staleness is checked only at the put": (
        (flow_control, "apply_stale_policy", _nothing),
        (ack, "apply_stale_policy", _nothing),
        (groups_and_staleness, "apply_stale_policy", _nothing),
        (lease, "_stale_since", lambda _was: lambda *_args: NO_ROWS),
    ),
    "a reply is matched by order": ((PendingCalls, "answered", _in_order),),
    "an extent is freed under a view": ((BlockRegistry, "pin", _nothing), (BlockRegistry, "unpin", _nothing)),
    "a reservation is freed twice": ((FlowControl, "close", _double_free),),
    "the death of a worker counts as a failure": ((ack, "return_rows", _counted_as_failure),),
    "a group is handed over incomplete": ((GroupIndex, "size_of", _one_less),),
    "a seal forgets those who wait": ((TableState, "wake_tasks", _nothing), (TableState, "wake_task", _nothing)),
    "a wake-up is lost": ((WaitQueue, "wake", _nothing),),
    "an extent is given back twice": ((OwnShardMemory, "give_back", _twice),),
    "replay skips a record": ((recorded_ledger, "_replay", _skip),),
    "an extent is never given back": ((OwnShardMemory, "give_back", _nothing),),
    "producers are not held back": ((put, "no_room", lambda _was: lambda *_args: ""),
    (flow_control, "why_reserve_waits", lambda _was: lambda *_args: "")),
    "a share is done when its first replica is": ((ack, "_ack_replica", _first_replica),),
    "a checkpoint covers the step after it": ((StepIndex, "take", _one_step_more),),
    "a pull is given the oldest version": ((weight_channels, "pull", _oldest),),
    "a predicate is not heeded": ((task_state, "matches", _all),),
    "a kept row is freed when it is done": ((TableState, "__init__", _frees_ended),),
    "a column is freed before a checkpoint covers its row": ((ack, "_finish_acked", _freed_uncovered),),
    "a column is never freed": ((finish, "end_columns", _nothing),),
    "the bytes of a table are not "
    "bounded": ((put, "no_room", lambda was: lambda table, rows, _nbytes: was(table, rows, 0)),),
    "a lost shard is not noticed": ((Copies, "lose_shard", lambda _was: lambda _self, _shard: []),),
    "a copy does not take the place of what is lost": ((Copies, "_lose", _nothing),),
    "a lost shard takes the copies elsewhere with it": ((Copies, "lose_shard", _copies_too),),
    "a lost copy is not made again": ((Copies, "_await", _nothing),),
    "a copy counts before it is written": ((Copies, "begin", _counted_at_once),),
    "a turn goes on for a due request that has "
    "ended": ((WaitQueue, "__init__", _always_some), (WaitQueue, "next_due", _if_any)),
    "a turn ends though a request is due": ((WaitQueue, "may_have_due", lambda _was: False),),
    "new rows take the memory that blocks left for "
    "others": ((Backlog, "may_have", _always), (Spiller, "_share_memory", _nothing)),
    "a server lives on with a torn ledger": ((Ledger, "_raise_torn", _lives_on),),
}  # fmt: skip


KIND_OF: Final = {
    "a turn goes on for a due request that has ended": "crowded-mixed",
    "a server lives on with a torn ledger": "interrupted",
    "a turn ends though a request is due": "crowded-backlog",
    "new rows take the memory that blocks left for others": "full-disk",
}
"""The kind of the worlds in which a bug shows, if that is not the usual one."""


@contextmanager
def planted(name: str) -> Iterator[None]:
    """The bug `name` of `FAULTS` is in the program until this ends. For one thread; never in production."""
    were = [(where, attribute, getattr(where, attribute)) for where, attribute, _ in FAULTS[name]]
    try:
        for (where, attribute, make), (_, _, was) in zip(FAULTS[name], were, strict=True):
            setattr(where, attribute, make(was))
        yield
    finally:
        for where, attribute, was in were:
            setattr(where, attribute, was)
