"""A connection for the length of one command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from transferqueue.client import Queue

CONNECT_S: Final = 5.0
"""A person waits at the prompt: a server that answers does so in milliseconds."""


@contextmanager
def connected(address: str, *, label: str) -> Iterator[Queue]:
    """The queue at `address`; `Unreachable` when nothing answers within `CONNECT_S`."""
    import transferqueue

    with transferqueue.connect(address, timeout_s=CONNECT_S, label=label) as queue:
        yield queue
