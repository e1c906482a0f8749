"""Advisory locks of keys: leases of the queue.

A key hashes to one of `STRIPES` tables with one row. Who leases the row has the lock: others wait at the server, in the
order in which they came. The client renews the lease while its process lives, and the lock is free again when that
ends. Two keys may share a stripe, and then wait for each other. Stripes are taken in ascending order, so two calls with
several keys do not block each other for ever. A local lock is of this process alone: its own task of these tables, and
its own hash.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from typing import Final

import xxhash

import transferqueue as tq
from transferqueue.adapters.transfer_queue.errors import LockLostError
from transferqueue.client.operations.lease import renew
from transferqueue.client.session.operation_runner import run_sync
from transferqueue.errors import AlreadyExists, BatchEnded, LeaseExpired
from transferqueue.limits import SECONDS_MAX

STRIPES: Final = 64
LEASE_S: Final = 30.0
GLOBAL: Final = "global"
LOCAL: Final = "local"
_TASKS: Final = [tq.Task(name, time_limit_s=SECONDS_MAX) for name in (GLOBAL, LOCAL)]
_LOST: Final = (LeaseExpired, BatchEnded)
"""Of a release: the lock was lost, which `KeyLock.check` says."""
_held: Final[ContextVar[frozenset[str]]] = ContextVar("transfer_queue_locks", default=frozenset())
"""Kinds of locks that this thread or task holds."""


class KeyLock:
    """Held keys."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = keys
        self._leases: list[tq.Batch | tq.AsyncBatch] = []

    def check(self) -> None:
        """Raise `LockLostError` if the lock is lost; call it before a write that must not be made without it."""
        for lease in self._leases:
            try:
                run_sync(lease._lease.client.connection, renew(lease._lease, None))
            except _LOST as error:
                raise LockLostError(f"the lock of keys {self._keys[:5]} was lost: {error}") from error


def _stripes(kind: str, keys: str | Sequence[str], partition_id: str) -> tuple[list[str], list[int]]:
    """The keys, and their stripes in the order in which they are taken. ``RuntimeError`` for a nested lock."""
    named = [keys] if isinstance(keys, str) else list(keys)
    if not named:
        raise ValueError(f"a {kind} lock of no keys; name at least one")
    if kind in _held.get():
        raise RuntimeError(f"a {kind} lock inside another one could wait for ever; give all keys to one call")
    if LOCAL in _held.get():
        raise RuntimeError("a global lock inside a local one could wait for ever; take the global one first")
    scope = f"{os.getpid()}@{os.uname().nodename}" if kind == LOCAL else ""
    hashes = {xxhash.xxh3_64_intdigest(f"{scope}\0{partition_id}\0{key}".encode()) for key in named}
    return named, sorted({number % STRIPES for number in hashes})


def _left(timeout_s: float | None, began: float) -> float | None:
    return None if timeout_s is None else max(0.0, timeout_s - (time.monotonic() - began))


def _table(queue: tq.Queue, stripe: int) -> tq.Table:
    """The table of a stripe, with its row."""
    table = queue.create_table(f"locks.{stripe}", tasks=_TASKS, retention=tq.Manual(), exist_ok=True)
    with suppress(AlreadyExists):
        table.put(key=["lock"], timeout_s=0)
    return table


async def _async_table(queue: tq.AsyncQueue, stripe: int) -> tq.AsyncTable:
    table = await queue.create_table(f"locks.{stripe}", tasks=_TASKS, retention=tq.Manual(), exist_ok=True)
    with suppress(AlreadyExists):
        await table.put(key=["lock"], timeout_s=0)
    return table


@contextmanager
def locked(
    queue: tq.Queue, kind: str, keys: str | Sequence[str], partition_id: str, timeout_s: float | None, lease_s: float
) -> Iterator[KeyLock]:
    """Hold keys in this thread."""
    named, stripes = _stripes(kind, keys, partition_id)
    if _has_loop():
        raise RuntimeError("a lock that is waited for here would stop the event loop; use the async_ one")
    began, lock = time.monotonic(), KeyLock(named)
    with ExitStack() as releasing:
        for stripe in stripes:
            lease = _table(queue, stripe).lease(kind, rows=1, timeout_s=_left(timeout_s, began), lease_s=lease_s)
            releasing.callback(_release, lease)
            lock._leases.append(lease)
        before = _held.get()
        _held.set(before | {kind})
        releasing.callback(_held.set, before)
        yield lock


@asynccontextmanager
async def async_locked(
    queue: tq.AsyncQueue,
    kind: str,
    keys: str | Sequence[str],
    partition_id: str,
    timeout_s: float | None,
    lease_s: float,
) -> AsyncIterator[KeyLock]:
    """Hold keys in this task."""
    named, stripes = _stripes(kind, keys, partition_id)
    began, lock = time.monotonic(), KeyLock(named)
    async with AsyncExitStack() as releasing:
        for stripe in stripes:
            table = await _async_table(queue, stripe)
            lease = await table.lease(kind, rows=1, timeout_s=_left(timeout_s, began), lease_s=lease_s)
            releasing.push_async_callback(_async_release, lease)
            lock._leases.append(lease)
        before = _held.get()
        _held.set(before | {kind})
        releasing.callback(_held.set, before)
        yield lock


def _has_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _release(lease: tq.Batch) -> None:
    with suppress(*_LOST):
        lease.release()


async def _async_release(lease: tq.AsyncBatch) -> None:
    with suppress(*_LOST):
        await lease.release()
