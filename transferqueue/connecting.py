"""`connect` and `aconnect`: open a queue on a running deployment, or on a server embedded in this process."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

from transferqueue.client.aio.awaitable import AwaitableContext
from transferqueue.client.client import ClientSession, Data, open_client
from transferqueue.client.handles.coordinators import check_seats
from transferqueue.client.session.addresses import (
    ADDRESS_VARIABLE,
    EMBEDDED,
    endpoints,
    listed,
    named_server,
    running_server,
)
from transferqueue.client.session.calls import seconds
from transferqueue.client.sync.queue import Queue
from transferqueue.errors import UsageError
from transferqueue.errors.on_failure import OnFailure
from transferqueue.limits import check_text
from transferqueue.transport.address import is_ray_address
from transferqueue.transport.security.keys import ClientKeys

if TYPE_CHECKING:
    from transferqueue.client.aio.queue import AsyncQueue

_log: Final = logging.getLogger("transferqueue")
_told: Final[list[str]] = []

CONNECT_S: Final = 10.0
"""Long enough for a server that is starting, short enough to notice one that is missing."""


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
    """Open a queue on a running server, or on one embedded in this process. Blocks until the server answers.

    Without an address it is the server that ``$TRANSFERQUEUE_ADDRESS`` names, else ``$TRANSFERQUEUE_TOKEN``, else this
    user's server, as for every command. If none runs, it is an embedded server, which is logged as a warning. With
    `arena_bytes` or `runtime` it is embedded in any case (`transferqueue docs environment`).

    To join a deployment of several coordinators, give the addresses of all (`transferqueue docs coordinators`). A queue
    with the address of one coordinator has the tables of that coordinator only. To join a server with keys, give a
    token (``tqjoin_...``, from `transferqueue keys token`) as the address, or as `key` beside a tcp address.

    The queue may be used from any thread. ``with``, `Queue.close`, the collection of its last handle, or the exit of
    the process closes it. An embedded server ends with the queue; until then other processes of the same user can
    connect to `Queue.address`.

    Args:
        address: ``ipc://...`` or ``tcp://...`` of a running server; ``ray://NAMESPACE/NAME`` of a deployment that
            `deploy_ray` started in the Ray cluster of this process (``ray``: the one with the default names); a join
            token; or ``embedded`` for a server in this process. Of several coordinators: a list, or text with commas,
            in any order. Default None: as above.
        key: the join token for a tcp address; default None: that of ``$TRANSFERQUEUE_TOKEN``, if it is set; "": none.
        timeout_s: seconds to wait for the server's answer; default 10.
        label: name of this client in `transferqueue top`; default "".
        arena_bytes: the most memory of an embedded server, as a number or text such as ``"8GiB"``; default None: 8 GiB,
            or three quarters of the machine's memory if that is less.
        runtime: a private directory for the socket of an embedded server; default None: the user's.
        data: default ``"auto"``: map the server's memory where possible. ``"remote"``: a tcp client sends and receives
            its bytes over the network, as clients on other machines do.
        verify: compare each block that a lease or a read names with its checksum, once; default False. Blocks have
            checksums if the server keeps them on a disk (``--durability disk``). `Corruption` then names the damaged
            rows, and the client delivers none of them.

    Returns:
        The queue.

    Raises:
        Unreachable: nothing answered in time.
        UsageError: arguments that do not fit each other, an environment variable that is set and empty, or addresses
            that do not name each coordinator of one deployment exactly once.

    Example:
        >>> import transferqueue as tq
        >>> with tq.connect("embedded") as queue:
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
    """Open a queue for event loops, as `connect`, without blocking the loop.

    Await it, or use it as a context manager: ``queue = await tq.aconnect()``, or ``async with tq.aconnect() as queue``.

    Args:
        address: as of `connect`; default None.
        key: as of `connect`; default None.
        timeout_s: seconds to wait for the server's answer; default 10.
        label: as of `connect`; default "".
        arena_bytes: as of `connect`; default None.
        runtime: as of `connect`; default None.
        data: as of `connect`; default ``"auto"``.
        verify: as of `connect`; default False.

    Returns:
        The queue.

    Raises:
        Unreachable: nothing answered in time.
        UsageError: as of `connect`.

    Example:
        >>> import transferqueue as tq
        >>> async with tq.aconnect("embedded") as queue:
        ...     names = await queue.tables()
        >>> names
        []
    """

    async def make() -> AsyncQueue:
        import asyncio

        from transferqueue.client.aio.queue import AsyncQueue

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
    """A session with each coordinator, or with an embedded server."""
    if verify not in (False, True):
        raise UsageError(f"verify={verify!r} is neither True nor False")
    deadline = time.monotonic() + seconds("timeout_s", timeout_s)
    check_text("label", label)
    own = arena_bytes is not None or runtime is not None
    if (own or key) and address not in (None, EMBEDDED):
        _refuse_ray(listed(address))
    is_default = address is None and not own and key is None
    if is_default:
        address = named_server() or running_server()
    servers = [] if address == EMBEDDED or (address is None and (own or not key)) else endpoints(address, key)
    if not servers:
        if key:
            raise UsageError(
                "a key is for a server that runs, arena_bytes and runtime for an embedded one; give either"
            )
        if verify:
            raise UsageError(
                "verify=True compares blocks with their checksums, and those of an embedded server have none: it keeps "
                "nothing on a disk; connect without it"
            )
        client = _embedded(arena_bytes, runtime, timeout_s, label, data)
        if is_default:
            _tell_embedded(client)
        return [client]
    if own:
        raise UsageError(
            f"arena_bytes and runtime are for an embedded server, but the server at {servers[0][0]} runs already; give "
            "them there"
        )
    return _joined(servers, deadline, timeout_s, label, data, verify)


def _refuse_ray(addresses: Iterable[str]) -> None:
    """`UsageError` for a deployment on Ray: it was given what the deployment has itself."""
    for place in addresses:
        if is_ray_address(place):
            raise UsageError(
                f"key, arena_bytes and runtime were given with {place}, which has its own; give them to deploy_ray, or "
                "leave them out"
            )


def _joined(
    servers: Iterable[tuple[str, ClientKeys | None]],
    deadline: float,
    timeout_s: float,
    label: str,
    data: Data,
    verify: bool,
) -> list[ClientSession]:
    """A session with each coordinator of these servers, or with none of them."""
    with ExitStack() as opened:
        clients = []
        for place, keys in servers:
            for client in _opened(place, keys, deadline, timeout_s, label, data):
                clients.append(client)
                opened.callback(client.close)
                if verify:
                    client.verify()
        check_seats(clients)
        opened.pop_all()
    return clients


def _opened(
    address: str, keys: ClientKeys | None, deadline: float, asked_s: float, label: str, data: Data
) -> Iterator[ClientSession]:
    """The session that an address leads to. A name on Ray leads to a session with each of its coordinators."""
    servers = {address: (address, keys)}
    if is_ray_address(address):
        from transferqueue.cluster.on_ray.lookup import server_addresses
        from transferqueue.cluster.on_ray.messages import parse_named

        servers = server_addresses(parse_named(address), _left(deadline), near=data == "auto")
    for known_as, (place, server_keys) in servers.items():
        yield open_client(
            place, _left(deadline), label, keys=server_keys, data=data, known_as=known_as, asked_s=asked_s
        )


def _left(deadline: float) -> float:
    """Seconds until the deadline, rounded for messages."""
    return max(0.0, round(deadline - time.monotonic(), 2))


def _tell_embedded(client: ClientSession) -> None:
    """Log, once in a process, that a server was embedded where no argument asked for one."""
    client.embedded_at = client.clock()
    if not _told:
        _told.append(client.address)
        _log.warning(
            "%s is not set and no server of this user runs, so a queue was embedded in this process; other processes "
            'join with tq.connect("%s"); connect("embedded") does the same without this line',
            ADDRESS_VARIABLE,
            client.address,
        )


def _embedded(
    arena_bytes: int | str | None, runtime: str | Path | None, timeout_s: float, label: str, data: Data
) -> ClientSession:
    from transferqueue.server.process import embedded  # loads the server, which other clients do not need

    server = embedded.start(arena_bytes, runtime)
    with OnFailure(server.stop):
        return open_client(server.inproc_address, timeout_s, label, server, data=data)
