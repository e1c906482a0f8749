"""Asks the kernel whether a process listens at an address: of this machine before a connection, since clients retry
until their timeout, and of the host of a lost tcp server, since ZeroMQ retries for ever and reports no cause."""

from __future__ import annotations

import socket
import threading
from typing import Final

from transferqueue.transport.address import Address, IpcAddress, TcpAddress

ANSWER_S: Final = 0.05
"""`is_refused` waits this long. A host of the same network answers in less."""
CONNECT_S: Final = 1.0


def check_listening(place: Address) -> None:
    """Connect to `place` and close. Blocks for at most `CONNECT_S` for each address of its host.

    Raises:
        FileNotFoundError: There is no such socket file.
        ConnectionRefusedError: No process listens there. A server that was killed leaves its socket file.
        OSError: The kernel does not say, in time or to this user: a process may listen.
    """
    if isinstance(place, IpcAddress):
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(CONNECT_S)
            probe.connect(str(place.path))
    elif isinstance(place, TcpAddress):
        socket.create_connection((place.host.strip("[]"), place.port), CONNECT_S).close()


class PortProbe:
    """Connects to `place` in its own thread, since resolving the host name may block. Not thread-safe."""

    def __init__(self, place: TcpAddress) -> None:
        self._place: Final = place
        self._asking: threading.Thread | None = None
        self._refused: bool | None = None

    def is_refused(self) -> bool | None:
        """Whether the host refuses connections. Its kernel does so while no process listens; a paused or busy process
        still listens. None: the host has not answered; ask again in a second. Blocks for at most `ANSWER_S`."""
        if self._asking is None:
            self._refused = None
            asking = threading.Thread(target=self._ask, name=f"transferqueue probe {self._place}", daemon=True)
            try:
                asking.start()
            except RuntimeError:  # the interpreter ends, or the system has no more threads
                return None
            self._asking = asking
        self._asking.join(ANSWER_S)
        if self._asking.is_alive():
            return None
        self._asking = None
        return self._refused

    def _ask(self) -> None:
        """Try each address of the name: it is refused if all of them refuse."""
        host = self._place.host.strip("[]")
        family = socket.AF_INET6 if self._place.host.startswith("[") else socket.AF_INET
        try:
            for _, _, _, _, place in socket.getaddrinfo(host, self._place.port, family, socket.SOCK_STREAM):
                with socket.socket(family, socket.SOCK_STREAM) as trial:
                    trial.settimeout(CONNECT_S)
                    try:
                        trial.connect(place)
                    except ConnectionRefusedError:
                        continue
                self._refused = False
                return
        except OSError:
            return
        self._refused = True
