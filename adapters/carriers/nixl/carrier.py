"""The carrier of the settings ``nixl``, ``nixl:tcp`` and ``nixl:cma`` (`transport.bulk.carriers.Carrier`)."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from typing import Final

from transferqueue.adapters.carriers.nixl.agent import NixlAgent, Transports, check_machine
from transferqueue.adapters.carriers.nixl.client.carrier import OneSidedSession
from transferqueue.adapters.carriers.nixl.client.one_sided import OneSidedMemory
from transferqueue.adapters.carriers.nixl.shard.carrier import OneSidedShard
from transferqueue.adapters.carriers.nixl.shard.client_memory import ClientMemory
from transferqueue.adapters.carriers.nixl.shard.registered_arena import RegisteredArena
from transferqueue.errors import UsageError
from transferqueue.storage.memory.backing import ArenaBacking
from transferqueue.transport.system.rdma import rdma_devices

_SHOWN: Final = {Transports.TCP: "TCP, for tests", Transports.CMA: "CMA on one host, for tests"}
LOAD_S: Final = 60.0
_LOAD: Final = """
import os, sys
from transferqueue.adapters.carriers.nixl.agent import load_nixl
try:
    load_nixl()
except ImportError as error:
    print(*str(error).splitlines(), file=sys.stderr, flush=True)
    os._exit(1)
os._exit(0)  # what NIXL brings may crash when it is unloaded
"""


class NixlCarrier:
    """Memory that is read one-sided by NIXL over UCX (docs/decisions/one-sided.md)."""

    def __init__(self, setting: str) -> None:
        if setting not in list(Transports):
            raise UsageError(f"bytes={setting!r} is no carrier of columns; those by NIXL are {', '.join(Transports)}")
        self._transports: Final = Transports(setting)

    def __str__(self) -> str:
        return str(self._transports)

    def describe(self) -> str:
        """See `Carrier`. Loads NIXL in a process of its own, which takes seconds."""
        check_machine(self._transports)
        version = metadata.version("nixl")
        if failure := _load_failure():
            raise UsageError(f"{self}: nixl {version} cannot be loaded: {failure}")
        return f"nixl {version} over {_SHOWN.get(self._transports) or ', '.join(rdma_devices())}"

    def open_client(self) -> OneSidedSession:
        """See `Carrier`. An agent is opened at the first read, and another one at the first large put."""

        def memory() -> OneSidedMemory:
            return OneSidedMemory(lambda: NixlAgent(self._transports))

        return OneSidedSession(memory, lambda: check_machine(self._transports))

    def open_shard(self, backing: ArenaBacking) -> OneSidedShard:
        """See `Carrier`."""
        registered = RegisteredArena(backing, NixlAgent(self._transports))
        return OneSidedShard(registered, ClientMemory(lambda: NixlAgent(self._transports)))


def _load_failure() -> str:
    """Why a process cannot load NIXL; "" if it can. In a process of its own, since a loaded NIXL stays."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _LOAD], check=False, capture_output=True, text=True, timeout=LOAD_S
        )
    except subprocess.TimeoutExpired:
        return f"it took longer than {LOAD_S:g} s"
    said = done.stderr.strip().splitlines()
    return "" if done.returncode == 0 else said[-1] if said else f"the process ended with code {done.returncode}"
