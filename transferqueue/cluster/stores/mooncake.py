"""Mooncake Store as a store of objects: its memory may be that of many hosts.

The facts (0.3.13):

- A master knows where objects are; memory is that of clients that have a segment, and goes with them. This one has none, unless
  its address says so (``segment=``): then rows are lost with the shard only, and with none when somebody else's memory ends.
- Objects are pinned: the store evicts what it has copies of, and rows have none. So whoever joins removes what dead shards left.
- A put under a key that there is says that it was done, and changes nothing. Keys are used once.
- Memory is read and written in place once it is registered, which over TCP takes a tenth of a millisecond.
- Its calls end by deadlines of its own: when a host or the master does not answer, in about 1 and 5 seconds.
"""

from __future__ import annotations

import re
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import numpy as np

from transferqueue.errors import NotFound, OutOfMemory, Unreachable, UsageError
from transferqueue.limits import MIB, parse_bytes

_RULE: Final = "give mooncake://host:port of its master, with ?segment=SIZE to add memory of this process"
_NO_ROOM: Final = -200
_OTHER_SIZE: Final = -600
_MISSING: Final = -704
_SCRATCH_BYTES: Final = 16 * MIB
"""Memory that its client wants for itself. Nothing of ours passes there."""
_KNOCK_S: Final = 5.0
_DOUBTFUL_MAX: Final = 16
"""Memory of so many gets that failed is used for nothing else for a while: who knows whether bytes are still on their way into it."""


class MooncakeStore:
    """The store whose master is at ``mooncake://host:port``. segment: memory that this process adds to it; default: none.
    metadata: its metadata server; default: none, hosts tell each other."""

    def __init__(self, address: str, host: str = "127.0.0.1") -> None:
        self._address: Final = address
        master, options = _parse(address)
        package = _package(address)
        self._doubtful: Final[deque[list[memoryview]]] = deque(maxlen=_DOUBTFUL_MAX)
        self._pinned: Final = package.ReplicateConfig()
        self._pinned.with_hard_pin = True
        _knock(address, master)
        self._store: Any = package.MooncakeDistributedStore()
        segment = parse_bytes(options["segment"]) if "segment" in options else 0
        metadata = options.get("metadata", "P2PHANDSHAKE")
        code = self._store.setup(host, metadata, segment, _SCRATCH_BYTES, "tcp", "", master)
        if code:
            raise Unreachable(f"the store {address} cannot be joined (code {code}); is its mooncake_master running?")

    def put(self, key: str, content: memoryview) -> None:
        """See `ObjectStore`."""
        with self._registered([content]) as (at,):
            code = self._store.put_from(key, at, content.nbytes, self._pinned)
        if code == _NO_ROOM:
            raise OutOfMemory(
                f"the store {self._address} has no room for {content.nbytes} bytes; consume rows, add a segment to it, or "
                "lower --arena-bytes"
            )
        self._check(code, f"put of {key}")

    def get(self, wanted: Sequence[tuple[str, memoryview]]) -> None:
        """See `ObjectStore`."""
        keys, sizes = [key for key, _ in wanted], [into.nbytes for _, into in wanted]
        with self._registered([into for _, into in wanted]) as places:
            codes = self._store.batch_get_into(keys, places, sizes)
        if any(code not in (_MISSING, size) for size, code in zip(sizes, codes, strict=True)):
            self._doubtful.append([into for _, into in wanted])
        for key, size, code in zip(keys, sizes, codes, strict=True):
            if code in (_MISSING, _OTHER_SIZE) or 0 <= code != size:
                raise NotFound(f"object {key} of {size} bytes is not in the store {self._address} (code {code})")
            self._check(min(code, 0), f"get of {key}")

    def remove(self, keys: Sequence[str]) -> None:
        """See `ObjectStore`."""
        for key, code in zip(keys, self._store.batch_remove(list(keys), True), strict=True):
            self._check(0 if code == _MISSING else code, f"removal of {key}")

    def sweep(self, prefix: str) -> None:
        """See `ObjectStore`."""
        self._check(min(self._store.remove_by_regex(f"^{re.escape(prefix)}", True), 0), f"removal of {prefix}*")

    def close(self) -> None:
        """Leave the store, with the segment if there is one. Without its master this takes some seconds."""
        store, self._store = self._store, None
        if store is not None:
            store.close()

    @contextmanager
    def _registered(self, memory: Sequence[memoryview]) -> Iterator[list[int]]:
        """Where these lie, for as long as the store may use them there."""
        places = [np.frombuffer(one, np.uint8).ctypes.data for one in memory]
        registered = []
        try:
            for at, one in zip(places, memory, strict=True):
                self._check(self._store.register_buffer(at, one.nbytes), "memory")
                registered.append(at)
            yield places
        finally:
            for at in registered:
                self._store.unregister_buffer(at)

    def _check(self, code: int, what: str) -> None:
        if code:
            raise Unreachable(f"the store {self._address} does not answer: {what} failed with its code {code}")


def _parse(address: str) -> tuple[str, dict[str, str]]:
    try:
        found = urlsplit(address)
        port = found.port
        options = {name: values[-1] for name, values in parse_qs(found.query, strict_parsing=bool(found.query)).items()}
    except ValueError as error:
        raise UsageError(f"store {address!r} is none ({error}); {_RULE}") from error
    if found.scheme != "mooncake" or not found.hostname or not port or found.path.strip("/"):
        raise UsageError(f"store {address!r} is none of Mooncake; {_RULE}")
    if unknown := set(options) - {"segment", "metadata"}:
        raise UsageError(
            f"store {address!r} has options {sorted(unknown)}, and those are segment and metadata; {_RULE}"
        )
    return f"{found.hostname}:{port}", options


def _knock(address: str, master: str) -> None:
    """`Unreachable` if nobody listens there: its client would try for a minute and a half."""
    host, _, port = master.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _KNOCK_S).close()
    except OSError as error:
        raise Unreachable(
            f"the store {address} cannot be joined: nothing answers at {master} ({error}); start mooncake_master there"
        ) from error


def _package(address: str) -> Any:
    try:
        from mooncake import store
    except ImportError as error:
        raise UsageError(
            f"store {address} needs Mooncake, which does not load: {error}; pip install mooncake-transfer-engine-non-cuda, and "
            "with Debian apt install libibverbs1 librdmacm1"
        ) from error
    return store
