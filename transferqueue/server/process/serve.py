"""A server that is the whole process: started, announced, stopped by a signal."""

from __future__ import annotations

import gc
import logging
import resource
import signal
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final, Self

from transferqueue.errors import UsageError
from transferqueue.server.durability.journal import Level
from transferqueue.server.durability.state_directory import StateDirectory
from transferqueue.server.files import ArenaDirectory, served_arena
from transferqueue.server.process.assembly import ServerProcess, first_epoch
from transferqueue.transport import IpcAddress, TcpAddress, default_address, parse_address, runtime_directory
from transferqueue.transport.control.zeromq import is_loopback
from transferqueue.transport.security.keyring import Keyring, default_directory, key_file
from transferqueue.wire.home_coordinator import CoordinatorIndex

_log: Final = logging.getLogger("transferqueue.server")


def serve(
    address: str | None = None,
    *,
    tcp: Iterable[str] = (),
    arena_bytes: int | None = None,
    keys: Path | None = None,
    plain_bytes: bool = False,
    durability: Level | str = Level.MEMORY,
    state: Path | None = None,
    accept_loss: bool = False,
    snapshots: Path | None = None,
    coordinator: str | None = None,
    on_ready: Callable[[list[str]], object],
) -> None:
    """Serve in the calling thread, which must be the main one, until SIGINT or SIGTERM; leaves no file, except in `state`.

    address: ipc or tcp; None: the user's own. A server at a tcp address has a socket file in the user's runtime
    directory too. tcp: more addresses, ``host:port``. keys: directory of the keys that every tcp address then asks for;
    None: the user's, where an address is not loopback, which is refused without keys. plain_bytes: see `ServerProcess`. durability, state: what outlives this
    process, and the directory that keeps it (see `durable`). accept_loss: what `state` held and cannot be read whole is kept
    aside there, and a new life begins. snapshots: see `ServerProcess`.
    coordinator: its seat among several, ``K/N`` or ``NAME:K/N`` (see `transferqueue.wire.home_coordinator`); None: it is the only one. on_ready: called once with all addresses, when it listens.
    """
    place, ports = _places(address, tcp)
    index = CoordinatorIndex() if coordinator is None else CoordinatorIndex.parse(coordinator)
    level = _level(durability, state, ports)
    allow_many_files()
    with Signals() as signals:
        keyring = _keyring(keys, ports)
        foundation = _foundation(level, state, arena_bytes, accept_loss)
        server = ServerProcess(
            place, foundation, ports, keyring=keyring, plain_bytes=plain_bytes, snapshots=snapshots, index=index
        )
        signals.server = server
        addresses = [server.address, *server.tcp_addresses]
        _keep_what_is_loaded()
        on_ready(addresses if address is None or not address.startswith("tcp:") else addresses[::-1])
        server.run(woken_by=signals)


def _keep_what_is_loaded() -> None:
    """The garbage collector need not look at modules again, which stay: it did for 25 ms in the turn of some request."""
    gc.collect()
    gc.freeze()


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


def _level(durability: Level | str, state: Path | None, ports: Iterable[TcpAddress]) -> Level:
    if durability not in list(Level):
        raise UsageError(f"durability {str(durability)!r} is none; there are {', '.join(Level)}")
    level = Level(durability)
    if (state is None) != (level is Level.MEMORY):
        raise UsageError(
            f"durability {level} and state {state and str(state)!r} do not go together: memory keeps nothing, and process and "
            "disk need a directory to keep it in; give both --durability and --state, or neither"
        )
    if level is not Level.MEMORY and any(port.port == 0 for port in ports):
        raise UsageError(
            f"a server of durability {level} cannot listen at port 0: its clients come back to it; name a port"
        )
    return level


def _foundation(
    level: Level, state: Path | None, arena_bytes: int | None, accept_loss: bool
) -> ArenaDirectory | StateDirectory:
    if state is None:
        if accept_loss:
            raise UsageError("accept_loss is about what a state directory held; give --durability and --state with it")
        return served_arena(arena_bytes)
    return StateDirectory(state, level, first_epoch=first_epoch(), arena_bytes=arena_bytes, accept_loss=accept_loss)


def _keyring(directory: Path | None, ports: Iterable[TcpAddress]) -> Keyring | None:
    if directory is None and not all(is_loopback(port.host) for port in ports):
        directory = default_directory()
        if not key_file(directory).exists():
            return None  # and the port says what to do
    return Keyring(directory) if directory is not None else None


class Signals:
    """While entered, SIGINT and SIGTERM stop the server (one that is only being made is unmade), and SIGHUP has it look
    at its keys at once."""

    def __init__(self) -> None:
        self.server: ServerProcess | None = None
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
        self._before[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._look)
        return self

    def __exit__(self, *_: object) -> None:
        for number, old in self._before.items():
            signal.signal(number, old)
        signal.set_wakeup_fd(-1)
        self._here.close()
        self._there.close()

    def _look(self, _signal: int, _frame: FrameType | None) -> None:
        """The signal has ended the loop's sleep; with nothing left to read here, it may sleep again."""
        with suppress(BlockingIOError):
            self._here.recv(4096, socket.MSG_DONTWAIT)

    def _stop(self, _signal: int, _frame: FrameType | None) -> None:
        if self.server is None:
            raise SystemExit(0)
        self.server.stop()


def allow_many_files() -> None:
    """Each local session takes three descriptors; many shells allow 1024 where the system allows more."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
