"""A server in a thread of this process, whose memory ends with the process.

Clients in this process reach it through `inproc_address`, other processes of the same user through `address`.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Final

from transferqueue.errors import DeadlineExceeded, LedgerTorn
from transferqueue.limits import check_path, parse_bytes
from transferqueue.server.process.assembly import ServerProcess
from transferqueue.server.runtime_directory import private_arena
from transferqueue.transport import IpcAddress, parse_address, runtime_directory
from transferqueue.transport.system.descriptors import CONNECTION_DESCRIPTORS, check_descriptors
from transferqueue.transport.system.threads import STOP_S, still_runs

EMBEDDED_DESCRIPTORS: Final = 2 * CONNECTION_DESCRIPTORS
"""Descriptors of its server, about fourteen, and of the connection to it."""
_numbers: Final = itertools.count(1)
_running: Final[weakref.WeakValueDictionary[tuple[int, str], EmbeddedServer]] = weakref.WeakValueDictionary()
"""By process and address: a forked child has none."""


class EmbeddedServer:
    """A running server. It stops at `stop`, when it is garbage collected, or when the interpreter ends."""

    def __init__(self, server: ServerProcess) -> None:
        self._ledger: Final = server.coordinator.ledger
        self.address: Final = server.address
        """For other processes."""
        self.inproc_address: Final = server.inproc_address
        """For this process."""
        thread = threading.Thread(target=_run, args=(server,), name=f"transferqueue server {self.address}", daemon=True)
        self._end = weakref.finalize(self, _stop, server, thread, os.getpid())
        thread.start()
        _running[os.getpid(), self.address] = self

    def times_ready(self, table: str, task: str) -> tuple[object, int] | None:
        """How often rows became ready to a task, or returned to it; None if table or task do not exist. Callable from
        any thread; sends no request.

        Returns an object that stands for the life of the table, and a number. The number only grows, and counts every
        row that an answered call made ready. So between two equal results no row became ready.
        """
        return self._ledger.times_ready(table, task)

    def stop(self) -> None:
        """Tell all clients, close, and remove all files. Blocks until that is done. Does nothing the second time, or in
        a forked child.

        Raises:
            DeadlineExceeded: the server's thread did not end in one and a half minutes, such as in a call of a file
                system that does not answer. The text says where the thread is.
        """
        self._end()


def start(arena_bytes: int | str | None = None, runtime: str | Path | None = None) -> EmbeddedServer:
    """Start a server in this process. Returns when it listens.

    Args:
        arena_bytes: the ceiling of its memory; None: the default, clipped to the machine's.
        runtime: a private directory for its socket; None: the user's.

    Raises:
        UsageError: the directory cannot be used.
    """
    check_descriptors("an embedded queue", EMBEDDED_DESCRIPTORS)
    directory = Path(check_path("runtime", runtime)).absolute() if runtime is not None else runtime_directory()
    socket = parse_address(f"ipc://{directory}/{os.getpid()}-{next(_numbers)}.sock")
    if not isinstance(socket, IpcAddress):
        raise TypeError(f"{socket} is no ipc address")
    return EmbeddedServer(
        ServerProcess(socket, private_arena(parse_bytes(arena_bytes) if arena_bytes is not None else None))
    )


def running(address: str) -> EmbeddedServer | None:
    """The server that runs in this process at `address`; None if there is none."""
    return _running.get((os.getpid(), address))


def _run(server: ServerProcess) -> None:
    """Serve until the end. A torn ledger ends only this thread: the loop has logged the cause and told the clients."""
    with suppress(LedgerTorn, MemoryError):
        server.run()


def _stop(server: ServerProcess, thread: threading.Thread, pid: int) -> None:
    if os.getpid() == pid:
        server.stop()
        if thread is not threading.current_thread() and (where := still_runs(thread)):
            raise DeadlineExceeded(
                f"the embedded server at {server.address} did not end within {STOP_S:g} s; it ends with this process. "
                f"Its thread is at {where}"
            )
