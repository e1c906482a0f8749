"""How a program gets a queue: with a server of its own inside this process, or from one that runs elsewhere."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Final

from transferqueue.client import checks
from transferqueue.client.aio import AsyncQueue, Opening
from transferqueue.client.client import Client, Data, open_client
from transferqueue.client.joining import way_in
from transferqueue.client.queue import Queue
from transferqueue.cluster.names import is_ray, parse_named
from transferqueue.errors import UsageError

CONNECT_S: Final = 10.0
"""A server that is being started is up by then; one that is not there is noticed before patience ends."""


def connect(
    address: str | None = None,
    *,
    key: str | None = None,
    timeout_s: float = CONNECT_S,
    label: str = "",
    arena_bytes: int | str | None = None,
    runtime: str | Path | None = None,
    data: Data = "auto",
) -> Queue:
    """A queue: of a server embedded in this process (no address), or of the one at ``ipc://...`` or ``tcp://...``, or of
    ``ray://NAMESPACE/NAME``, which `deploy_ray` made in the Ray cluster of this process (``ray``: the one with default names).

    A server that asks for keys is joined with a token (``tqjoin_...``, from `transferqueue keys token`) in place of the
    address, or as `key` beside a tcp address; where neither is given, with that of ``$TRANSFERQUEUE_TOKEN``: at a tcp
    address as its key, and with no address at all as the server to join instead of an embedded one.

    An embedded server ends with the queue; until then others of the same user connect to `Queue.address`.
    timeout_s: how long to wait for a server to answer, then `Unreachable`. label: how people see this client in
    `transferqueue top`. For an embedded server only: arena_bytes, the ceiling of its memory (such as ``"8GiB"``), and
    runtime, a private directory for its socket (None: the user's). data: ``"remote"`` has a tcp client send and receive its
    bytes over the network even where it could map the server's memory, as clients on other machines do.

    The queue may be used from any thread, and is closed by ``with``, by `Queue.close`, by collection of its last
    handle, or at exit.

    Example:
        >>> import transferqueue as tq
        >>> with tq.connect() as queue:
        ...     table = queue.create_table("samples", tasks=[tq.Task("train", needs=["text"])])
        ...     rows = table.put(text=["one", "two"])
        ...     with table.lease("train", rows=2) as batch:
        ...         batch["text"].list()
        ['one', 'two']
    """
    return Queue(_client(address, key, timeout_s, label, arena_bytes, runtime, data))


def aconnect(
    address: str | None = None,
    *,
    key: str | None = None,
    timeout_s: float = CONNECT_S,
    label: str = "",
    arena_bytes: int | str | None = None,
    runtime: str | Path | None = None,
    data: Data = "auto",
) -> Opening[AsyncQueue]:
    """A queue for event loops; arguments as of `connect`.

    ``queue = await tq.aconnect()``, or ``async with tq.aconnect() as queue``.
    """

    async def make() -> AsyncQueue:
        return AsyncQueue(await asyncio.to_thread(_client, address, key, timeout_s, label, arena_bytes, runtime, data))

    return Opening(make)


def _client(
    address: str | None,
    key: str | None,
    timeout_s: float,
    label: str,
    arena_bytes: int | str | None,
    runtime: str | Path | None,
    data: Data,
) -> Client:
    patience = checks.seconds("timeout_s", timeout_s)
    if not isinstance(label, str):
        raise UsageError(f"label={label!r} is {type(label).__name__}; give text")
    if address is not None and is_ray(address):
        return _of_ray(address, key, patience, label, arena_bytes is not None or runtime is not None, data)
    if address is not None or (arena_bytes is None and runtime is None):
        address, keys = way_in(address, key)
    else:
        keys = None
    if address is not None:
        if arena_bytes is not None or runtime is not None:
            raise UsageError(
                f"arena_bytes and runtime are for an embedded server, but the server at {address} runs already; give them there"
            )
        return open_client(address, patience, label, keys=keys, data=data)
    if key:
        raise UsageError("a key is for a server that runs, arena_bytes and runtime for an embedded one; give either")
    from transferqueue.server import embedded  # only who has a server of its own loads one

    server = embedded.start(arena_bytes, runtime)
    try:
        return open_client(server.inproc_address, patience, label, server, data=data)
    except BaseException:
        server.stop()
        raise


def _of_ray(address: str, key: str | None, timeout_s: float, label: str, embedded: bool, data: Data) -> Client:
    from transferqueue.cluster.on_ray import way_to

    if key or embedded:
        raise UsageError(
            f"key, arena_bytes and runtime were given with {address}, which has its own; give them to deploy_ray, or leave them out"
        )
    named, deadline = parse_named(address), time.monotonic() + timeout_s
    place, keys = way_to(named, timeout_s, near=data == "auto")
    return open_client(place, max(0.0, deadline - time.monotonic()), label, keys=keys, data=data, known_as=str(named))
