"""Mooncake Store as an object store: its memory may span many hosts.

Facts about version 0.3.13 that this module relies on:

- A master knows where objects are. Their memory belongs to clients with a segment, and is lost with such a client. This
  client has no segment unless its address asks for one (``segment=``).
- Objects are pinned, because otherwise the store evicts objects, and rows have no second copy. So a shard that joins
  removes the objects that dead shards left.
- A put with an existing key reports success and changes nothing. So each key is used once.
- Registered memory is read and written in place. Registration takes a tenth of a millisecond over TCP.
- Calls have deadlines of their own: about 1 second if a host does not answer, 5 if the master does not.
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
"""Memory that Mooncake's client needs for itself. No rows pass through it."""
_KNOCK_S: Final = 5.0
_DOUBTFUL_MAX: Final = 16
"""Buffers of this many failed gets are not reused for a while: the store may still write into them."""


class MooncakeStore:
    """The store whose master is at ``mooncake://host:port``. Options of the address: ``segment``, the memory that this
    process adds (default: none); ``metadata``, a metadata server (default: none, hosts exchange metadata directly).
    `Unreachable` if the store cannot be joined."""

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
                f"the store {self._address} has no room for {content.nbytes} bytes; consume rows, add a segment to it, "
                "or lower --arena-bytes"
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
        """Leave the store, with the segment if there is one. Takes some seconds if the master is gone."""
        store, self._store = self._store, None
        if store is not None:
            store.close()

    @contextmanager
    def _registered(self, memory: Sequence[memoryview]) -> Iterator[list[int]]:
        """Register these buffers with the store, and give their addresses."""
        places = [np.frombuffer(buffer, np.uint8).ctypes.data for buffer in memory]
        registered = []
        try:
            for at, buffer in zip(places, memory, strict=True):
                self._check(self._store.register_buffer(at, buffer.nbytes), "memory")
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
        parts = urlsplit(address)
        port = parts.port
        options = {name: values[-1] for name, values in parse_qs(parts.query, strict_parsing=bool(parts.query)).items()}
    except ValueError as error:
        raise UsageError(f"store {address!r} is none ({error}); {_RULE}") from error
    if parts.scheme != "mooncake" or not parts.hostname or not port or parts.path.strip("/"):
        raise UsageError(f"store {address!r} is none of Mooncake; {_RULE}")
    if unknown := set(options) - {"segment", "metadata"}:
        raise UsageError(
            f"store {address!r} has options {sorted(unknown)}, and those are segment and metadata; {_RULE}"
        )
    return f"{parts.hostname}:{port}", options


def _knock(address: str, master: str) -> None:
    """Raise `Unreachable` at once if nothing listens there: Mooncake's client would retry for 90 seconds."""
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
            f"store {address} needs Mooncake, which does not load: {error}; pip install "
            "mooncake-transfer-engine-non-cuda, and with Debian apt install libibverbs1 librdmacm1"
        ) from error
    return store
