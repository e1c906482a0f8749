"""A server that is the whole process: started, announced, stopped by a signal."""

from __future__ import annotations

import logging
import resource
import signal
import socket
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, Final, Self

from transferqueue.errors import UsageError
from transferqueue.server.assembly import Server
from transferqueue.server.runtime import served_arena
from transferqueue.transport import IpcAddress, TcpAddress, default_address, parse_address, runtime_directory

_log: Final = logging.getLogger("transferqueue.server")


def serve(
    address: str | None = None,
    *,
    tcp: Iterable[str] = (),
    arena_bytes: int | None = None,
    on_ready: Callable[[list[str]], object],
) -> None:
    """Serve in the calling thread, which must be the main one, until SIGINT or SIGTERM; leaves no file.

    address: ipc or tcp; None: the user's own. A server at a tcp address has a socket file in the user's runtime
    directory too. tcp: more addresses, ``host:port``. on_ready: called once with all addresses, when it listens.
    """
    place, ports = _places(address, tcp)
    _allow_many_files()
    with _Signals() as signals:
        server = Server(place, served_arena(arena_bytes), ports)
        signals.server = server
        _warn_of_strangers(server.tcp_addresses)
        addresses = [server.address, *server.tcp_addresses]
        on_ready(addresses if address is None or not address.startswith("tcp:") else addresses[::-1])
        server.run(woken_by=signals)


def _places(address: str | None, tcp: Iterable[str]) -> tuple[IpcAddress, list[TcpAddress]]:
    place = parse_address(address or default_address())
    ports = [_tcp(text) for text in tcp]
    if isinstance(place, TcpAddress):
        ports.append(place)
        place = parse_address(f"ipc://{runtime_directory()}/tcp-{place.port}.sock")
    if not isinstance(place, IpcAddress):
        raise UsageError(f"address {address!r} is one inside a process; serve at ipc:///path or tcp://host:port")
    return place, ports


def _tcp(text: str) -> TcpAddress:
    place = parse_address(text if "://" in text else f"tcp://{text}")
    if not isinstance(place, TcpAddress):
        raise UsageError(f"tcp address {text!r} is not one; write host:port")
    return place


def _warn_of_strangers(addresses: Iterable[str]) -> None:
    for address in addresses:
        if not address.startswith(("tcp://127.", "tcp://[::1]:")):
            _log.warning("whoever reaches %s can read and change this queue: it asks nobody who they are", address)


class _Signals:
    """While entered, SIGINT and SIGTERM stop the server; one that is only being made is unmade."""

    def __init__(self) -> None:
        self.server: Server | None = None
        self._before: dict[int, Any] = {}
        self._here, self._there = socket.socketpair()

    def fileno(self) -> int:
        """Readable once a signal came. The handler alone would be too late for a loop that was just about to sleep:
        the interpreter runs handlers between two of its steps, and a system call is one step."""
        return self._here.fileno()

    def __enter__(self) -> Self:
        self._there.setblocking(False)
        signal.set_wakeup_fd(self._there.fileno(), warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, old in self._before.items():
            signal.signal(number, old)
        signal.set_wakeup_fd(-1)
        self._here.close()
        self._there.close()

    def _stop(self, _signal: int, _frame: FrameType | None) -> None:
        if self.server is None:
            raise SystemExit(0)
        self.server.stop()


def _allow_many_files() -> None:
    """Each local session takes three descriptors; many shells allow 1024 where the system allows more."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
