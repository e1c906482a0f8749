"""The process of the page, ``python -m transferqueue.web page ADDRESS HOST:PORT``, and, with ``service``, of the HTTP service.
Started by ``transferqueue serve --web`` and ``--http``.

A process of its own, so that it costs the server no more than one client does. Its standard input is its lifeline: first one line
with its token and that of the metrics, then nothing; when the other end closes, the server is gone, and so is this process.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable
from typing import Final

import transferqueue as tq
from transferqueue.errors import AddressInUse, TransferQueueError
from transferqueue.text import visible
from transferqueue.transport import TcpAddress
from transferqueue.web.access import AccessPolicy, web_place
from transferqueue.web.connections import Server, configured
from transferqueue.web.page.app import Gate, make_app
from transferqueue.web.service.service import make_service
from transferqueue.web.token import TOKEN_CHARS_MAX

Make = Callable[[tq.AsyncQueue, AccessPolicy], Gate]
APPS: Final[dict[str, tuple[Make, int]]] = {"page": (make_app, 128), "service": (make_service, 512)}
"""What is served, and how many connections it has at most (`connections`): each of the service may be a
wait for rows, of which a session has at most 1024, those that were given up and are not over yet among them."""


def main(arguments: list[str]) -> int:
    """Serve until standard input ends; the exit code. 1: it cannot be, and stderr says why."""
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
    with _listening(place) as listener:
        here = TcpAddress(place.host, listener.getsockname()[1])
        sys.stdout.write(f"http://{here.host}:{here.port}/\n")  # now: the server that waits for this answers only then
        sys.stdout.flush()
        async with tq.aconnect(address, label=f"web {kind}") as queue:
            server = Server(configured(make(queue, AccessPolicy(here, token, metrics_token)), most))
            loop = asyncio.get_running_loop()
            loop.add_reader(sys.stdin.fileno(), _end, server, loop)
            await server.serve(sockets=[listener])


def _end(server: Server, loop: asyncio.AbstractEventLoop) -> None:
    server.should_exit = True
    loop.remove_reader(sys.stdin.fileno())


def _listening(place: TcpAddress) -> socket.socket:
    family = socket.AF_INET6 if place.host.startswith("[") else socket.AF_INET
    try:
        listener = socket.create_server((place.host.strip("[]"), place.port), family=family)
    except OSError as error:
        raise AddressInUse(
            f"web address {place.host}:{place.port} cannot be listened at: {error.strerror}; take another"
        ) from error
    # Inherited by connections. Head and body leave apart, and without it the body waits 40 ms for the peer to have the head.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
