"""The process of the page, ``python -m transferqueue.web page ADDRESS HOST:PORT``, and, with ``service``, of the HTTP
service. ``transferqueue serve --web`` and ``--http`` start it.

As a process of its own, it costs the server no more than one client. It reads a line with its token and that of the
metrics from standard input, and ends when the server closes that pipe.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Final

import transferqueue as tq
from transferqueue.errors import TransferQueueError
from transferqueue.errors.text import visible
from transferqueue.transport import TcpAddress
from transferqueue.web.access import AccessPolicy, web_place
from transferqueue.web.connections import Server, configured, listening
from transferqueue.web.page.app import CONNECTIONS_MAX, Gate, make_app
from transferqueue.web.service.service import make_service
from transferqueue.web.subprocesses import CONNECT_S
from transferqueue.web.token import TOKEN_CHARS_MAX

Make = Callable[[tq.AsyncQueue, AccessPolicy], Gate]
APPS: Final[dict[str, tuple[Make, int]]] = {"page": (make_app, CONNECTIONS_MAX), "service": (make_service, 512)}
"""The application of each kind, and its limit of connections (`connections`). Each connection of the service may wait
for rows, and a session has at most 1024 waits, which include abandoned waits that have not ended yet."""


def main(arguments: list[str]) -> int:
    """Serve until standard input ends. Exits with code 1, and the reason on stderr, if it cannot serve."""
    kind, address, where = arguments
    token, metrics_token = sys.stdin.readline(2 * (TOKEN_CHARS_MAX + 1)).split()
    try:
        asyncio.run(_serve(kind, address, web_place(where), token, metrics_token))
    except TransferQueueError as error:
        sys.stderr.write(f"transferqueue web: {visible(str(error))}\n")
        return 1
    return 0


async def _serve(kind: str, address: str, place: TcpAddress, token: str, metrics_token: str) -> None:
    make, most = APPS[kind]
    with listening(place) as listener:
        here = TcpAddress(place.host, listener.getsockname()[1])
        sys.stdout.write(
            f"http://{here.host}:{here.port}/\n"
        )  # before the connection: the server waits for this line, and answers only after it
        sys.stdout.flush()
        async with tq.aconnect(address, timeout_s=CONNECT_S, label=f"web {kind}") as queue:
            server = Server(configured(make(queue, AccessPolicy(here, token, metrics_token)), most))
            loop = asyncio.get_running_loop()
            loop.add_reader(sys.stdin.fileno(), _end, server, loop)
            await server.serve(sockets=[listener])


def _end(server: Server, loop: asyncio.AbstractEventLoop) -> None:
    server.should_exit = True
    loop.remove_reader(sys.stdin.fileno())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
