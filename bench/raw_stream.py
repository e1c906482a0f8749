"""One raw TCP stream over loopback, which scenarios of bytes between machines are compared with."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np

from bench.limits import child


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    found = work()
    return time.perf_counter() - began, found


def _send(control: Connection, port: int, size: int) -> None:
    data = memoryview(np.random.default_rng(1).integers(0, 255, size, dtype=np.uint8))
    with socket.create_connection(("127.0.0.1", port)) as stream:
        while control.recv() == "send":
            stream.sendall(data)


class Raw(Protocol):
    """A raw stream from elsewhere."""

    def once(self) -> None:
        """Receive as many bytes as a workload has."""


class Stream:
    """Another process that sends `size` bytes when asked; `once` receives them."""

    def __init__(self, size: int, opened: ExitStack) -> None:
        self.buffer = memoryview(bytearray(size))
        listener = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.control = opened.enter_context(child(_send, listener.getsockname()[1], size))
        self.stream = opened.enter_context(listener.accept()[0])

    def once(self) -> None:
        self.control.send("send")
        at = 0
        while at < len(self.buffer):
            at += self.stream.recv_into(self.buffer[at:])
