"""Checks that every store for the bytes of a shard must pass (`storage.memory.object_store.ObjectStore`), and the
subject that they test.

Use them as the checks of generators (`conformance.generators`), with a `StoreSubject`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Final, Protocol

import numpy as np

from transferqueue.errors import NotFound, OutOfMemory, PeerError
from transferqueue.storage.elements.dtypes import U8
from transferqueue.storage.memory.object_store import ObjectStore
from transferqueue.testing.conformance.backings import content
from transferqueue.testing.conformance.report import require


class StoreSubject(Protocol):
    """A store under test, with room for 64 MiB."""

    def open(self) -> ObjectStore:
        """Connect once more; objects of other connections are visible."""

    def used_bytes(self) -> int:
        """The contents of the store, as the store reports them."""

    def fill(self) -> None:
        """Leave no room for 1 MiB more. `adapters.protocols.Unsupported` if that cannot be done here."""

    def end(self) -> None:
        """End the store and its objects. No call follows. `adapters.protocols.Unsupported` if that cannot be done."""


@contextmanager
def _opened(subject: StoreSubject) -> Iterator[tuple[ObjectStore, str]]:
    """The store, and a unique prefix of keys."""
    with closing(subject.open()) as store:
        prefix = f"check-{secrets.token_hex(8)}-"
        try:
            yield store, prefix
        finally:
            store.sweep(prefix)


def _room(nbytes: int) -> U8:
    return np.zeros(nbytes, np.uint8)


def _get(store: ObjectStore, key: str, nbytes: int) -> U8:
    into = _room(nbytes)
    store.get([(key, into.data)])
    return into


def _missing(store: ObjectStore, key: str, nbytes: int, rule: str) -> None:
    try:
        _get(store, key, nbytes)
    except NotFound:
        return
    require(False, rule, key)


# ---------------------------------------------------------------- the checks


def what_was_put_is_got(subject: StoreSubject) -> None:
    """Objects of any size, one by one and together; their source memory may change at once."""
    sizes = (1, 7, 64, 4096, 1 << 20, (16 << 20) + 3)
    with _opened(subject) as (store, prefix):
        for size in sizes:
            data = content(size, size)
            store.put(f"{prefix}{size}", data.data)
            data[:] = 0
        for size in sizes:
            require(np.array_equal(_get(store, f"{prefix}{size}", size), content(size, size)), "it comes back", size)
        wanted = [(f"{prefix}{size}", _room(size)) for size in reversed(sizes)]
        store.get([(key, into.data) for key, into in wanted])
        alike = [np.array_equal(into, content(len(into), len(into))) for _, into in wanted]
        require(all(alike), "many come together", alike)
        store.get([])


def what_one_puts_another_gets(subject: StoreSubject) -> None:
    """Another connection reads an object, also after the first was closed."""
    with _opened(subject) as (store, prefix):
        with closing(subject.open()) as other:
            other.put(f"{prefix}1", content(5000).data)
            require(np.array_equal(_get(store, f"{prefix}1", 5000), content(5000)), "it is seen at once")
        other.close()
        require(np.array_equal(_get(store, f"{prefix}1", 5000), content(5000)), "it stays")


def what_is_not_there_is_not_found(subject: StoreSubject) -> None:
    """A missing object, and one of another size, is not found; the others of the call are."""
    with _opened(subject) as (store, prefix):
        store.put(f"{prefix}1", content(1000).data)
        _missing(store, f"{prefix}2", 1000, "a key that was never put is not found")
        _missing(store, f"{prefix}1", 999, "nor is an object that is larger")
        _missing(store, f"{prefix}1", 1001, "nor is one that is smaller")
        try:
            store.get([(f"{prefix}1", _room(1000).data), (f"{prefix}2", _room(1000).data)])
        except NotFound:
            return
        require(False, "one of several that is missing is told")


def what_is_removed_is_gone_and_its_room_free(subject: StoreSubject) -> None:
    """Removal takes effect at once, also after a read; a second removal does nothing."""
    with _opened(subject) as (store, prefix):
        before, keys = subject.used_bytes(), [f"{prefix}{number}" for number in range(4)]
        for key in keys:
            store.put(key, content(1 << 20).data)
            _get(store, key, 1 << 20)
        full = subject.used_bytes()
        require(full - before >= 4 << 20, "what is put takes room", full - before)
        store.remove(keys[:3])
        store.remove([*keys[:3], f"{prefix}none"])
        store.remove([])
        for key in keys[:3]:
            _missing(store, key, 1 << 20, "a removed object is not found")
        left = subject.used_bytes()
        require(left <= full - (3 << 20), "its room is free", (full, left))
        require(np.array_equal(_get(store, keys[3], 1 << 20), content(1 << 20)), "what was not removed stays")


def a_sweep_takes_what_begins_so_and_nothing_else(subject: StoreSubject) -> None:
    """A sweep by prefix removes objects of all connections, and no others."""
    with _opened(subject) as (store, prefix):
        keys = [f"{prefix}a-1", f"{prefix}a-2", f"{prefix}ab-1", f"{prefix}b-a-1"]
        for key in keys:
            store.put(key, content(100).data)
        with closing(subject.open()) as other:
            other.sweep(f"{prefix}a-")
            other.sweep(f"{prefix}none-")
        for key in keys[:2]:
            _missing(store, key, 100, "a swept object is not found")
        for key in keys[2:]:
            require(np.array_equal(_get(store, key, 100), content(100)), "what begins otherwise stays", key)


def a_store_that_is_full_says_so(subject: StoreSubject) -> None:
    """A full store refuses objects, and evicts none."""
    with _opened(subject) as (store, prefix):
        store.put(f"{prefix}1", content(1000).data)
        subject.fill()
        try:
            store.put(f"{prefix}2", content(1 << 20).data)
        except OutOfMemory:
            _missing(store, f"{prefix}2", 1 << 20, "a refused object is absent")
            require(np.array_equal(_get(store, f"{prefix}1", 1000), content(1000)), "earlier objects stay")
            return
        require(False, "a put without room is refused with OutOfMemory")


def a_store_that_is_gone_is_told(subject: StoreSubject) -> None:
    """Each call to an ended store raises within a minute. The last check, because it ends the store."""
    with closing(subject.open()) as store:
        store.put("tq-check-1", content(1000).data)
        subject.end()
        for call in (lambda: _get(store, "tq-check-1", 1000), lambda: store.put("tq-check-2", content(1000).data)):
            try:
                call()
            except (PeerError, NotFound):
                continue
            require(False, "a call to an ended store raises")


STORE_CHECKS: Final[tuple[Callable[[StoreSubject], None], ...]] = (
    what_was_put_is_got,
    what_one_puts_another_gets,
    what_is_not_there_is_not_found,
    what_is_removed_is_gone_and_its_room_free,
    a_sweep_takes_what_begins_so_and_nothing_else,
    a_store_that_is_full_says_so,
    a_store_that_is_gone_is_told,
)
