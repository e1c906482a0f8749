"""Stores that a shard may keep its bytes in, by address, and what is left in them of shards that died.

::

    mooncake://host:port?segment=4GiB    the memory of a Mooncake Store, by the address of its master (`mooncake`)
    file:///var/tmp/rows                 files in a private directory, such as one on a fast disk (`directory`)
    scheme://...                         what entry point ``transferqueue.stores`` registers under that scheme: a callable
                                         of the address and of this machine's name, which gives an `ObjectStore`

The law: objects of a shard have a prefix of their own, and a file in this user's runtime directory is named by it and locked
while the shard lives. A shard that begins with a store first removes there what shards of this machine left that died: their
files are not locked. What is left by a machine that died must be removed by hand (docs/CLUSTER.md).
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final

from transferqueue.cluster.stores.directory import DirectoryStore
from transferqueue.cluster.stores.mooncake import MooncakeStore
from transferqueue.errors import UsageError, listing
from transferqueue.storage.memory.object_store import ObjectBacking, ObjectStore
from transferqueue.transport import FileLock, runtime_directory
from transferqueue.transport.system.private_files import private_directory

Opener = Callable[[str, str], ObjectStore]
"""Makes a store of its address, on a machine that others reach by this name."""
GROUP: Final = "transferqueue.stores"
_OWN: Final[dict[str, Opener]] = {"file": DirectoryStore, "mooncake": MooncakeStore}
_NAME_BYTES: Final = 8


def open_store(address: str, host: str = "127.0.0.1") -> ObjectStore:
    """The store at `address`. host: of this machine, as others reach it. `UsageError` for an address that names none,
    `Unreachable` if nothing answers there within the store's own deadline."""
    scheme, separator, _ = address.partition("://")
    opener = _OWN.get(scheme) or next((one.load() for one in entry_points(group=GROUP, name=scheme)), None)
    if not separator or opener is None:
        known = listing([*_OWN, *(one.name for one in entry_points(group=GROUP))])
        raise UsageError(f"store {address!r} is none; give scheme://..., where the scheme is one of {known}")
    store: ObjectStore = opener(address, host)
    return store


@contextmanager
def kept_in(address: str, host: str, capacity: int) -> Iterator[ObjectBacking]:
    """A backing of `capacity` bytes in the store at `address`, and nothing of it left there afterwards. Errors as of `open_store`."""
    lives = private_directory(runtime_directory(), "runtime directory")
    store = open_store(address, host)
    try:
        _sweep(lives, address, store)
        lock = FileLock(lives / f"{_mark(address)}{secrets.token_hex(_NAME_BYTES)}{_SUFFIX}", inherited=False)
        lock.take()
        try:
            objects = ObjectBacking(store, prefix_of(lock.path), capacity)
            try:
                yield objects
            finally:
                objects.close()
        except BaseException:
            lock.release(unlink=False)  # whoever is next looks what is left
            raise
        lock.release(unlink=not objects.unremoved)
    finally:
        store.close()


_SUFFIX: Final = ".store.lock"


def prefix_of(life: Path) -> str:
    """With what the keys of a shard begin, by the file that it locks."""
    return f"tq-{life.name.removesuffix(_SUFFIX)}-"


def _mark(address: str) -> str:
    return hashlib.blake2b(address.encode(), digest_size=_NAME_BYTES).hexdigest() + "-"


def _sweep(lives: Path, address: str, store: ObjectStore) -> None:
    for path in lives.glob(f"{_mark(address)}*{_SUFFIX}"):
        lock = FileLock(path, inherited=False)
        if lock.take():
            swept = False
            try:
                store.sweep(prefix_of(path))
                swept = True
            finally:
                lock.release(unlink=swept)
