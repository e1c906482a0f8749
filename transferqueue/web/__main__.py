"""The process of the page: ``python -m transferqueue.web ADDRESS HOST:PORT``, started by ``transferqueue serve --web``.

A process of its own, so that a page costs the server no more than one client does. Its standard input is its lifeline: first
the token in one line, then nothing; when the other end closes, the server is gone, and so is the page.
"""

from __future__ import annotations

import asyncio
import socket
import sys

import uvicorn

import transferqueue as tq
from transferqueue.errors import AddressInUse, TransferQueueError
from transferqueue.transport import TcpAddress
from transferqueue.web.app import make_app
from transferqueue.web.door import Door, web_place

TOKEN_CHARS_MAX = 256


def main(arguments: list[str]) -> int:
    """Serve until standard input ends; the exit code. 1: it cannot be, and stderr says why."""
    address, where = arguments
    token = sys.stdin.readline(TOKEN_CHARS_MAX).strip()
    try:
        asyncio.run(_serve(address, web_place(where), token))
    except TransferQueueError as error:
        sys.stderr.write(f"transferqueue web: {error}\n")
        return 1
    return 0


async def _serve(address: str, place: TcpAddress, token: str) -> None:
    with _listening(place) as listener:
        here = TcpAddress(place.host, listener.getsockname()[1])
        sys.stdout.write(f"http://{here.host}:{here.port}/\n")  # now: the server that waits for this answers only then
        sys.stdout.flush()
        async with tq.aconnect(address, label="web page") as queue:
            config = uvicorn.Config(
                make_app(queue, Door(here, token)),
                log_level="warning",
                access_log=False,
                server_header=False,
                lifespan="off",
                ws="none",
                timeout_graceful_shutdown=1,
                limit_concurrency=64,
            )
            server = uvicorn.Server(config)
            loop = asyncio.get_running_loop()
            loop.add_reader(sys.stdin.fileno(), _end, server, loop)
            await server.serve(sockets=[listener])


def _end(server: uvicorn.Server, loop: asyncio.AbstractEventLoop) -> None:
    server.should_exit = True
    loop.remove_reader(sys.stdin.fileno())


def _listening(place: TcpAddress) -> socket.socket:
    family = socket.AF_INET6 if place.host.startswith("[") else socket.AF_INET
    try:
        return socket.create_server((place.host.strip("[]"), place.port), family=family)
    except OSError as error:
        raise AddressInUse(
            f"web address {place.host}:{place.port} cannot be listened at: {error.strerror}; take another"
        ) from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
