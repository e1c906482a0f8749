"""How a program gets a queue: with a server of its own inside this process, or from one that runs elsewhere."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from transferqueue.client.aio.awaitable import AwaitableContext
from transferqueue.client.aio.queue import AsyncQueue
from transferqueue.client.client import ClientSession, Data, open_client
from transferqueue.client.handles.coordinators import check_seats
from transferqueue.client.operations import arguments as checks
from transferqueue.client.session.addresses import EMBEDDED, endpoints, listed, named_server
from transferqueue.client.sync.queue import Queue
from transferqueue.cluster.on_ray.messages import is_ray_address, parse_named
from transferqueue.errors import UsageError
from transferqueue.transport.security.keys import ClientKeys

CONNECT_S: Final = 10.0
"""A server that is being started is up by then; one that is not there is noticed before patience ends."""


def connect(
    address: str | Sequence[str] | None = None,
    *,
    key: str | None = None,
    timeout_s: float = CONNECT_S,
    label: str = "",
    arena_bytes: int | str | None = None,
    runtime: str | Path | None = None,
    data: Data = "auto",
    verify: bool = False,
) -> Queue:
    """A queue: of the server at ``ipc://...`` or ``tcp://...``, or of ``ray://NAMESPACE/NAME``, which `deploy_ray` made in the Ray
    cluster of this process (``ray``: the one with default names), or of a server embedded in this process (``embedded``).

    Without an address it is the server that ``$TRANSFERQUEUE_ADDRESS`` names, else ``$TRANSFERQUEUE_TOKEN``, as of every command;
    where neither is set, or arena_bytes or runtime is given, it is an embedded one (docs/ENVIRONMENT.md).

    A deployment of several coordinators is joined by the addresses of all, in any order: joined by commas, or in a list
    (docs/CLUSTER.md); `UsageError` unless they are all of one deployment, each once. One address leads to one alone, and to
    what it has.

    A server that asks for keys is joined with a token (``tqjoin_...``, from `transferqueue keys token`) in place of the
    address, or as `key` beside a tcp address; where neither is given, with that of ``$TRANSFERQUEUE_TOKEN``.

    An embedded server ends with the queue; until then others of the same user connect to `Queue.address`.
    timeout_s: how long to wait for a server to answer, then `Unreachable`. label: how people see this client in
    `transferqueue top`. For an embedded server only: arena_bytes, the ceiling of its memory (such as ``"8GiB"``), and
    runtime, a private directory for its socket (None: the user's). data: ``"remote"`` has a tcp client send and receive its
    bytes over the network even where it could map the server's memory, as clients on other machines do. verify: compare each
    block that a lease or a read names with the checksum that it was put with, once; blocks have one where the server
    keeps them on a disk (``--durability disk``). `Corruption` then names the rows that are damaged, and nothing of them is handed out.

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
    return Queue(*_clients(address, key, timeout_s, label, arena_bytes, runtime, data, verify))


def aconnect(
    address: str | Sequence[str] | None = None,
    *,
    key: str | None = None,
    timeout_s: float = CONNECT_S,
    label: str = "",
    arena_bytes: int | str | None = None,
    runtime: str | Path | None = None,
    data: Data = "auto",
    verify: bool = False,
) -> AwaitableContext[AsyncQueue]:
    """A queue for event loops; arguments as of `connect`.

    ``queue = await tq.aconnect()``, or ``async with tq.aconnect() as queue``.
    """

    async def make() -> AsyncQueue:
        return AsyncQueue(
            *await asyncio.to_thread(_clients, address, key, timeout_s, label, arena_bytes, runtime, data, verify)
        )

    return AwaitableContext(make)


def _clients(
    address: str | Sequence[str] | None,
    key: str | None,
    timeout_s: float,
    label: str,
    arena_bytes: int | str | None,
    runtime: str | Path | None,
    data: Data,
    verify: bool,
) -> list[ClientSession]:
    """A session with each coordinator, or with a server of its own."""
    if verify not in (False, True):
        raise UsageError(f"verify={verify!r} is neither True nor False")
    deadline = time.monotonic() + checks.seconds("timeout_s", timeout_s)
    if not isinstance(label, str):
        raise UsageError(f"label={label!r} is {type(label).__name__}; give text")
    own = arena_bytes is not None or runtime is not None
    for place in [] if address in (None, EMBEDDED) else listed(address):
        if is_ray_address(place) and (own or key):
            raise UsageError(
                f"key, arena_bytes and runtime were given with {place}, which has its own; give them to deploy_ray, or leave them out"
            )
    if address is None and not own and key is None:
        address = named_server()
    ways = [] if address == EMBEDDED or (address is None and (own or not key)) else endpoints(address, key)
    if not ways:
        if key:
            raise UsageError(
                "a key is for a server that runs, arena_bytes and runtime for an embedded one; give either"
            )
        if verify:
            raise UsageError(
                "verify=True compares blocks with their checksums, and those of an embedded server have none: it keeps nothing on a "
                "disk; connect without it"
            )
        return [_embedded(arena_bytes, runtime, timeout_s, label, data)]
    if own:
        raise UsageError(
            f"arena_bytes and runtime are for an embedded server, but the server at {ways[0][0]} runs already; give them there"
        )
    with ExitStack() as opened:
        clients = []
        for place, keys in ways:
            for client in _opened(place, keys, deadline, label, data):
                clients.append(client)
                opened.callback(client.close)
                if verify:
                    client.verify()
        check_seats(clients)
        opened.pop_all()
    return clients


def _opened(address: str, keys: ClientKeys | None, deadline: float, label: str, data: Data) -> Iterator[ClientSession]:
    """The sessions that an address leads to: one, or with a name on Ray those of all its coordinators."""
    ways = {address: (address, keys)}
    if is_ray_address(address):
        from transferqueue.cluster.on_ray.lookup import server_addresses

        ways = server_addresses(parse_named(address), _left(deadline), near=data == "auto")
    for known_as, (place, shown) in ways.items():
        yield open_client(place, _left(deadline), label, keys=shown, data=data, known_as=known_as)


def _left(deadline: float) -> float:
    """Seconds, as a person would say them."""
    return max(0.0, round(deadline - time.monotonic(), 2))


def _embedded(
    arena_bytes: int | str | None, runtime: str | Path | None, timeout_s: float, label: str, data: Data
) -> ClientSession:
    from transferqueue.server.process import embedded  # only who has a server of its own loads one

    server = embedded.start(arena_bytes, runtime)
    try:
        return open_client(server.inproc_address, timeout_s, label, server, data=data)
    except BaseException:
        server.stop()
        raise
