"""The loop that watches the processes of a run. It sleeps until a process ends, a descriptor can be read, or a call is
due."""

from __future__ import annotations

import heapq
import itertools
import selectors
import time
from collections.abc import Callable
from typing import Final

from tests.chaos.processes import ManagedProcess


class ProcessLoop:
    """Watched processes, watched descriptors, and calls that are due. Used by one thread."""

    def __init__(self) -> None:
        self._selector: Final = selectors.DefaultSelector()
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()
        self.processes: Final[dict[str, ManagedProcess]] = {}

    def watch(self, process: ManagedProcess, ended: Callable[[ManagedProcess, int], object]) -> None:
        """Have `ended` called once with the exit code of `process`."""
        self.processes[process.role] = process
        self._selector.register(process.pidfd, selectors.EVENT_READ, lambda: self._ended(process, ended))

    def watch_descriptor(self, descriptor: int, readable: Callable[[], object]) -> None:
        """Call `readable` whenever `descriptor` can be read."""
        self._selector.register(descriptor, selectors.EVENT_READ, readable)

    def ignore_descriptor(self, descriptor: int) -> None:
        """Stop watching a descriptor. Call it before the descriptor is closed."""
        self._selector.unregister(descriptor)

    def at(self, when: float, call: Callable[[], object]) -> None:
        """Call `call` at a time of the monotonic clock, or soon after."""
        heapq.heappush(self._due, (when, next(self._order), call))

    def run_until(self, reached: Callable[[], bool], deadline: float) -> bool:
        """Run until `reached()` is true; False if it is not at `deadline`."""
        while not reached():
            now = time.monotonic()
            if now >= deadline:
                return False
            while self._due and self._due[0][0] <= now:
                heapq.heappop(self._due)[2]()
            next_at = min(deadline, self._due[0][0]) if self._due else deadline
            for key, _ in self._selector.select(max(0.0, next_at - time.monotonic())):
                key.data()
        return True

    def _ended(self, process: ManagedProcess, ended: Callable[[ManagedProcess, int], object]) -> None:
        self._selector.unregister(process.pidfd)
        if self.processes.get(process.role) is process:
            del self.processes[process.role]
        ended(process, process.wait())

    def close(self) -> None:
        """Stop watching. Processes go on."""
        self._selector.close()
