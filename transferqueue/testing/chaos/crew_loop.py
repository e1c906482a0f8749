"""The loop that runs a crew: it sleeps until a process ends, says something, or a moment has come."""

from __future__ import annotations

import heapq
import itertools
import selectors
import time
from collections.abc import Callable
from typing import Final

from transferqueue.testing.chaos.processes import ManagedProcess


class CrewLoop:
    """Members that are watched, descriptors that are heard, and deeds that are due. One thread."""

    def __init__(self) -> None:
        self._selector: Final = selectors.DefaultSelector()
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()
        self.members: Final[dict[str, ManagedProcess]] = {}

    def watch(self, member: ManagedProcess, ended: Callable[[ManagedProcess, int], object]) -> None:
        """Have `ended` called once with the exit code of `member`."""
        self.members[member.role] = member
        self._selector.register(member.pidfd, selectors.EVENT_READ, lambda: self._ended(member, ended))

    def hear(self, source: int, heard: Callable[[], object]) -> None:
        """Call `heard` whenever `source` can be read."""
        self._selector.register(source, selectors.EVENT_READ, heard)

    def ignore(self, source: int) -> None:
        """Hear it no more; before it is closed."""
        self._selector.unregister(source)

    def at(self, when: float, deed: Callable[[], object]) -> None:
        """Do this at a time of the monotonic clock, or soon after."""
        heapq.heappush(self._due, (when, next(self._order), deed))

    def until(self, reached: Callable[[], bool], deadline: float) -> bool:
        """Go on until something is so; False if it is not at `deadline`."""
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

    def _ended(self, member: ManagedProcess, ended: Callable[[ManagedProcess, int], object]) -> None:
        self._selector.unregister(member.pidfd)
        if self.members.get(member.role) is member:
            del self.members[member.role]
        ended(member, member.ended())

    def close(self) -> None:
        """Forget all; nothing is ended by that."""
        self._selector.close()
