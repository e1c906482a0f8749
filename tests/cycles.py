"""Finds what a server would leak: it makes no full garbage collections (`server.process.serve`), so what lives long
must refer to itself nowhere."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

OF_A_SERVER = ("transferqueue.ledger.", "transferqueue.server.")


@contextmanager
def none_of_a_server() -> Iterator[None]:
    """What the server's code leaves unreachable within the block is freed by reference counts alone; else
    AssertionError with its classes."""
    gc.collect()
    gc.collect()  # of generators that an earlier test left in the middle of a `try`, the rest
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield
        gc.collect()
        kinds = Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    leaked = {kind: count for kind, count in kinds.items() if kind.startswith(OF_A_SERVER)}
    assert not leaked, leaked
