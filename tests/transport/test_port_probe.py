"""Whether a process listens at a tcp address of a server that was lost, as its host says."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack

import pytest

from transferqueue.transport import TcpAddress
from transferqueue.transport.control.port_probe import PortProbe


def probe(port: int, host: str = "127.0.0.1") -> PortProbe:
    return PortProbe(TcpAddress(host, port))


def answer(asked: PortProbe) -> bool | None:
    """The answer, also if this machine is busy: it comes within a second, or there is none."""
    while (refused := asked.is_refused()) is None and asked._asking is not None:
        asked._asking.join(20)
    return refused


def test_a_port_where_nobody_listens_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        asked = probe(port)
        assert answer(asked) is False, "it listens, though it accepts nothing"
    assert answer(asked) is True, "each answer is a new one"
    assert answer(probe(port, "localhost")) is True


def test_without_a_thread_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        asked = probe(listening.getsockname()[1])

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as system:
        system.setattr(threading.Thread, "start", refuse)
        assert asked.is_refused() is None
    assert answer(asked) is True


def test_a_host_that_does_not_answer_refuses_nothing() -> None:
    """As of a network that is cut. The kernel drops what is over the backlog of a socket."""
    with ExitStack() as stack:
        listening = stack.enter_context(socket.socket())
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        for _ in range(2):
            filling = stack.enter_context(socket.socket())
            filling.setblocking(False)
            filling.connect_ex(listening.getsockname())
        assert answer(probe(listening.getsockname()[1])) is None
