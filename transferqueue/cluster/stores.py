"""Opens the store of a shard by its address, and removes objects that dead shards left in it.

::

    mooncake://host:port?segment=4GiB    the memory of a Mooncake Store, by the address of its master
    file:///var/tmp/rows                 files in a private directory, such as one on a fast disk
    scheme://...                         any scheme with an entry point in ``transferqueue.stores``: a callable
                                         of the address and of this machine's name, which gives an `ObjectStore`

The keys of a shard have their own prefix. A file in the user's runtime directory has the prefix in its name, and is
locked while the shard lives. A shard that starts with a store first removes the objects of dead shards of this machine:
their files are not locked. Objects of a lost machine must be removed by hand (`transferqueue docs shards`).
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

from transferqueue.errors import UsageError, listing
from transferqueue.lazy import Plugins
from transferqueue.storage.memory.object_store import ObjectBacking, ObjectStore
from transferqueue.transport import FileLock, runtime_directory
from transferqueue.transport.system.private_files import private_directory

STORES: Final = Plugins(
    "transferqueue.stores",
    {
        "file": "transferqueue.adapters.stores.directory:DirectoryStore",
        "mooncake": "transferqueue.adapters.stores.mooncake:MooncakeStore",
    },
)
"""Each opens a store, from its address and this machine's name as other machines see it."""
_NAME_BYTES: Final = 8


def open_store(address: str, host: str = "127.0.0.1") -> ObjectStore:
    """Open the store at `address`. `host` is this machine's name as other machines see it. `UsageError` for an invalid
    address, `Unreachable` if the store does not answer within its own deadline."""
    scheme, separator, _ = address.partition("://")
    if not separator or scheme not in STORES.places:
        raise UsageError(
            f"store {address!r} is unknown; give scheme://..., where the scheme is one of {listing(STORES.places)}"
        )
    store: ObjectStore = STORES.load(scheme)(address, host)
    return store


@contextmanager
def kept_in(address: str, host: str, capacity: int) -> Iterator[ObjectBacking]:
    """A backing of `capacity` bytes in the store at `address`. Removes its objects at the end. Errors as in
    `open_store`."""
    lives = private_directory(runtime_directory(), "runtime directory")
    store = open_store(address, host)
    try:
        _sweep(lives, address, store)
        lock = FileLock(lives / f"{_mark(address)}{secrets.token_hex(_NAME_BYTES)}{_SUFFIX}", inherited=False)
        lock.take()
        is_empty = False
        try:
            objects = ObjectBacking(store, prefix_of(lock.path), capacity)
            with closing(objects):
                yield objects
            is_empty = not objects.unremoved
        finally:
            lock.release(unlink=is_empty)  # otherwise the next shard removes the objects that are left
    finally:
        store.close()


_SUFFIX: Final = ".store.lock"


def prefix_of(life: Path) -> str:
    """The prefix of a shard's keys, from the file that it locks."""
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
