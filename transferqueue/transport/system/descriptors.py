"""Checks whether this process may open more descriptors. Without any left, ZeroMQ ends the process instead of
failing."""

from __future__ import annotations

import os
from typing import Final

import zmq

from transferqueue.errors import UsageError

CONNECTION_DESCRIPTORS: Final = 16
"""The descriptors of a connection (over tcp ten, eight of them of ZeroMQ), and a reserve for files that other threads
open meanwhile."""


def check_descriptors(purpose: str, count: int = CONNECTION_DESCRIPTORS) -> None:
    """Raise `UsageError` unless this process may open `count` more descriptors for `purpose`."""
    opened = list[int]()
    try:
        opened.extend(os.eventfd(0, os.EFD_CLOEXEC) for _ in range(count))
    except OSError as error:
        raise UsageError(
            f"{purpose} needs up to {count} file descriptors, and this process may open fewer: {error.strerror}. Raise "
            "its limit (ulimit -n), or close queues that are not used"
        ) from error
    finally:
        for descriptor in opened:
            os.close(descriptor)


def zeromq_context() -> zmq.Context[zmq.Socket[bytes]]:
    """A new ZeroMQ context, if there are descriptors enough for it and its sockets."""
    check_descriptors("a connection over tcp")
    return zmq.Context()
