"""An agent that reads the memory of this process, and two ends of the bulk protocol in it: one-sided reads without
NIXL."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence

from transferqueue.adapters.carriers.nixl.agent import CopiedRange
from transferqueue.errors import Unreachable

_NUMBERS = itertools.count(1)
AGENTS: dict[str, LocalAgent] = {}


class LocalAgent:
    """Its peers are the other agents of this process. Like a device, it copies only what its peer has registered, and
    only to where this one has; and it knows of a peer what was loaded, not what is true now. before: called before each
    read."""

    def __init__(self, before: Callable[[], object] = lambda: None) -> None:
        self.name = f"local-{next(_NUMBERS)}"
        self.regions: dict[int, tuple[int, int]] = {}
        self.loaded: dict[str, dict[int, tuple[int, int]]] = {}
        self.before = before
        self.reads = self.served = 0
        self.closed = self.held = False
        self._keys = itertools.count(1)
        AGENTS[self.name] = self

    def covers(self, address: int, nbytes: int) -> bool:
        return any(low <= address and address + nbytes <= high for low, high in self.regions.values())

    def register(self, address: int, nbytes: int) -> object:
        key = next(self._keys)
        self.regions[key] = address, address + nbytes
        return key

    def deregister(self, registration: object) -> None:
        del self.regions[registration]  # type: ignore[arg-type]

    def metadata(self) -> bytes:
        return f"{self.name} {dict(self.regions)}".encode()

    def load(self, metadata: bytes) -> str:
        name, _, said = metadata.decode().partition(" ")
        if name not in AGENTS:
            raise Unreachable(f"no agent is called {name}")
        known = self.loaded.setdefault(name, {})
        for entry in said.strip("{}").split("), "):
            key, _, ends = entry.partition(": (")
            low, high = (int(end) for end in ends.strip(")").split(", "))
            known.setdefault(int(key), (low, high))
        return name

    def unload(self, peer: str) -> None:
        self.loaded.pop(peer, None)

    def read(self, peer: str, ranges: Sequence[CopiedRange]) -> Copy:
        self.reads += 1
        return Copy(self, peer, ranges)

    def progress(self) -> None:
        self.served += 1

    def close(self) -> bool:
        """Its reads fail from now on. held: a read that somebody keeps."""
        self.closed = True
        self.regions.clear()
        self.loaded.clear()
        return not self.held


class Copy:
    """A read that is carried out when its end is first asked for."""

    def __init__(self, agent: LocalAgent, peer: str, ranges: Sequence[CopiedRange]) -> None:
        self.agent, self.peer, self.ranges = agent, peer, ranges

    def done(self) -> bool:
        self.agent.before()
        for each in self.ranges:
            keys = [
                key
                for key, (low, high) in self.agent.loaded.get(self.peer, {}).items()
                if low <= each.remote and each.remote + each.nbytes <= high
            ]
            if not keys or not all(key in AGENTS[self.peer].regions for key in keys[:1]):
                raise Unreachable("the peer has not registered that, or no longer")
            if not self.agent.covers(each.local, each.nbytes):
                raise Unreachable("this process has not registered that")
            ctypes.memmove(each.local, each.remote, each.nbytes)
        return True

    def abandon(self) -> None:
        self.ranges = []
