"""Serves in the calling process: starts a server, announces its addresses, and stops it at a signal."""

from __future__ import annotations

import gc
import logging
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, Self

from transferqueue.errors import DiskFailed, UsageError
from transferqueue.server.durability_level import Level
from transferqueue.server.event_log import log_event
from transferqueue.server.process.assembly import ServerProcess, first_epoch
from transferqueue.server.runtime_directory import ArenaDirectory, leave_note, served_arena
from transferqueue.transport import IpcAddress, TcpAddress, default_address, parse_address, runtime_directory
from transferqueue.transport.bulk.carriers import Carrier, chosen_carrier
from transferqueue.transport.control.zeromq import is_loopback
from transferqueue.transport.security.keyring import Keyring, default_directory, key_file
from transferqueue.wire.home_coordinator import CoordinatorIndex

if TYPE_CHECKING:
    from transferqueue.server.durability.state_directory import StateDirectory
    from transferqueue.server.spill.spill_file import SpillPolicy

_log: Final = logging.getLogger("transferqueue.server")
_NEVER: Final = (1 << 31) - 1
"""A full garbage collection would need this many collections of the generation before."""

RECORDS_VARIABLE: Final = "TRANSFERQUEUE_RECORDS"
"""The environment variable that names the directory of records, for a server without the option."""


def serve(
    address: str | None = None,
    *,
    tcp: Iterable[str] = (),
    arena_bytes: int | None = None,
    keys: Path | None = None,
    plain_bytes: bool = False,
    carrier: str | None = None,
    durability: Level | str = Level.MEMORY,
    state: Path | None = None,
    accept_loss: bool = False,
    snapshots: Path | None = None,
    records: Path | None = None,
    coordinator: str | None = None,
    spill_dir: Path | None = None,
    spill_bytes: int | None = None,
    on_ready: Callable[[list[str]], object],
) -> None:
    """Serve in the calling thread, which must be the main thread, until SIGINT or SIGTERM. Leaves no file, except in
    `state`.

    Args:
        address: ipc or tcp; None: the user's own. A server at a tcp address also has a socket file in the user's
            runtime directory.
        tcp: more addresses, ``host:port``.
        arena_bytes: the ceiling of the memory for rows; None: the default.
        keys: the directory of keys that every tcp address demands; None: the user's directory if an address is not
            loopback, since such an address is refused without keys.
        plain_bytes: see `ServerProcess`.
        carrier: of columns, see `transport.bulk.carriers.chosen_carrier`; None: the environment decides.
        durability: what outlives this process (see `StateDirectory`).
        state: the directory that contains it.
        accept_loss: if `state` cannot be read completely, move its files aside and start with an empty queue.
        snapshots: see `ServerProcess`.
        records: the directory under which tables record rows; None: `RECORDS_VARIABLE`, else "records" in the working
            directory.
        coordinator: its index among several, ``K/N`` or ``NAME:K/N`` (see `transferqueue.wire.home_coordinator`);
            None: it is the only one.
        spill_dir: a directory on a disk for cold blocks when the arena fills; None: they stay in memory, and producers
            wait.
        spill_bytes: the most bytes in `spill_dir`.
        on_ready: called once with all addresses, when the server listens.
    """
    socket_file, ports = _addresses(address, tcp)
    index = CoordinatorIndex() if coordinator is None else CoordinatorIndex.parse(coordinator)
    level = _level(durability, state, ports)
    chosen = chosen_carrier(carrier)
    if not ports:
        _check_without_tcp(keys, None if carrier is None else chosen)
    spill = None if spill_dir is None and spill_bytes is None else _spill_policy(spill_dir, spill_bytes)
    allow_many_files()
    with Signals() as signals, _noted(socket_file):
        keyring = _keyring(keys, ports)
        if plain_bytes and keyring is None:
            _log.warning("--plain-bytes changes nothing: this server has no keys, so it encrypts nothing")
        storage = _storage(level, state, arena_bytes, accept_loss)
        server = ServerProcess(
            socket_file,
            storage,
            ports,
            keyring=keyring,
            plain_bytes=plain_bytes,
            carrier=chosen,
            snapshots=snapshots,
            records=records or Path(os.environ.get(RECORDS_VARIABLE) or "records").absolute(),
            index=index,
            spill=spill,
        )
        signals.server = server
        addresses = [server.address, *server.tcp_addresses]
        with _no_full_collections():
            log_event("server_started", address=server.address, durability=str(level))
            on_ready(addresses if address is None or not address.startswith("tcp:") else addresses[::-1])
            server.run(woken_by=signals)
        log_event("server_stopped", address=server.address)


@contextmanager
def _noted(address: IpcAddress) -> Iterator[None]:
    """If the disk of the state fails, leave a note for clients."""
    try:
        yield
    except DiskFailed as error:
        leave_note(address, str(error))
        raise


@contextmanager
def _no_full_collections() -> Iterator[None]:
    """Have Python collect garbage among young objects only. A full collection looks at every block in the ledger, 0.45
    s for 400,000 of them, while all clients wait. It finds nothing: the server's long-lived objects have no cycles
    (`tests.cycles`)."""
    gc.collect()
    gc.freeze()
    before = gc.get_threshold()
    gc.set_threshold(*before[:2], _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _addresses(address: str | None, tcp: Iterable[str]) -> tuple[IpcAddress, list[TcpAddress]]:
    parsed = parse_address(address or default_address())
    ports = [_tcp(text) for text in tcp]
    if isinstance(parsed, TcpAddress):
        ports.append(parsed)
        parsed = parse_address(f"ipc://{runtime_directory()}/tcp-{parsed.port}.sock")
    if not isinstance(parsed, IpcAddress):
        raise UsageError(f"address {address!r} is inside a process; serve at ipc:///path or tcp://host:port")
    return parsed, ports


def _tcp(text: str) -> TcpAddress:
    place = parse_address(text if "://" in text else f"tcp://{text}")
    if not isinstance(place, TcpAddress):
        raise UsageError(f"tcp address {text!r} is invalid; write host:port")
    return place


def _level(durability: Level | str, state: Path | None, ports: Iterable[TcpAddress]) -> Level:
    if durability not in list(Level):
        raise UsageError(f"durability {str(durability)!r} is unknown; choose one of {', '.join(Level)}")
    level = Level(durability)
    if (state is not None) != level.survives_crash:
        raise UsageError(
            f"durability {level} and state {state and str(state)!r} do not go together: memory keeps nothing, and "
            "process and disk need a directory to keep it in; give both --durability and --state, or neither"
        )
    if level.survives_crash and any(port.port == 0 for port in ports):
        raise UsageError(
            f"a server of durability {level} cannot listen at port 0: its clients come back to it; name a port"
        )
    return level


def _spill_policy(directory: Path | None, nbytes: int | None) -> SpillPolicy | None:
    from transferqueue.server.spill.spill_file import spill_policy

    return spill_policy(directory, nbytes)


def _storage(
    level: Level, state: Path | None, arena_bytes: int | None, accept_loss: bool
) -> ArenaDirectory | StateDirectory:
    if state is None:
        if accept_loss:
            raise UsageError("accept_loss is for a state directory; give --durability and --state with it")
        return served_arena(arena_bytes)
    from transferqueue.server.durability.state_directory import StateDirectory

    return StateDirectory(state, level, first_epoch=first_epoch(), arena_bytes=arena_bytes, accept_loss=accept_loss)


def _check_without_tcp(keys: Path | None, carrier: Carrier | None) -> None:
    """Refuse options that only tcp addresses use."""
    if keys is not None:
        raise UsageError(
            f"keys {str(keys)!r} refused: clients at tcp addresses need them, and this server has none (its socket "
            "file is for its user alone); give --tcp too, or leave --keys out"
        )
    if carrier is not None:
        raise UsageError(
            f"bytes={str(carrier)!r} refused: clients at tcp addresses use it, and this server has none (clients at "
            "its socket file map its memory); give --tcp too, or leave --bytes out"
        )


def _keyring(directory: Path | None, ports: Iterable[TcpAddress]) -> Keyring | None:
    if directory is None and not all(is_loopback(port.host) for port in ports):
        directory = default_directory()
        if not key_file(directory).exists():
            return None  # ZmqServer refuses to listen, and names the remedy
    return Keyring(directory) if directory is not None else None


class Signals:
    """While entered, SIGINT and SIGTERM stop the server, or undo its unfinished start. SIGHUP wakes the server, so that
    it reads its keys again at once."""

    def __init__(self) -> None:
        self.server: ServerProcess | None = None
        self._previous: dict[int, Any] = {}
        self._read_end, self._write_end = socket.socketpair()

    def fileno(self) -> int:
        """Readable once a signal arrived. A handler alone would not wake a loop that is about to sleep: the interpreter
        runs handlers between bytecodes, so only after the system call."""
        return self._read_end.fileno()

    def __enter__(self) -> Self:
        self._write_end.setblocking(False)
        signal.set_wakeup_fd(self._write_end.fileno(), warn_on_full_buffer=False)
        self._previous = {number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)}
        self._previous[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._wake)
        return self

    def __exit__(self, *_: object) -> None:
        for number, old in self._previous.items():
            signal.signal(number, old)
        signal.set_wakeup_fd(-1)
        self._read_end.close()
        self._write_end.close()

    def _wake(self, _signal: int, _frame: FrameType | None) -> None:
        """Empty the socket that the signal wrote to, so that the loop can sleep again."""
        with suppress(BlockingIOError):
            self._read_end.recv(4096, socket.MSG_DONTWAIT)

    def _stop(self, _signal: int, _frame: FrameType | None) -> None:
        if self.server is None:
            raise SystemExit(0)
        self.server.stop()


def allow_many_files() -> None:
    """Raise the limit of open files to the maximum: a local session takes three, and many shells allow 1024 in all."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
