"""Reads registered memory of another process: NIXL over UCX (docs/decisions/one-sided.md). The bulk protocol says
which bytes.

1. Each process has one *agent*. Memory that peers may read is registered with it first, and `metadata` describes it. A
   peer that has loaded the metadata can read **and write** all of that memory, unchecked. So metadata goes only to
   peers that showed a ticket, and only where columns may cross unencrypted.
2. ``nixl`` needs an RDMA device: over TCP its reads are twice as slow as a stream. ``nixl:tcp`` and ``nixl:cma``
   (between processes of one host) are for tests.
3. No thread of NIXL runs: its progress thread takes a core. A reader makes progress while it waits, and the other end
   while transfers are under way (`MemoryAgent.progress`).
4. A read has no deadline of its own: a stopped peer leaves it pending for ever. Its reader has one, and abandons the
   read. Nothing else may use memory that a read which did not succeed could still write. It is not freed before the
   agent that began the read is gone (`MemoryAgent.close`), or the process ends
   (`transport.system.threads.keep_for_good`).
5. A read writes memory of the process that began it, by that process's own means: its socket, its system call, or a
   queue of its network card. All of these belong to its agent and end with it. So nothing that an agent began to read
   writes anything once it is gone, whatever its peers do then (docs/decisions/one-sided.md).
6. UCX emulates a read that no transport can do by itself: the process that is read answers. It is ended by a signal if
   the reader has gone meanwhile, whatever the options. So reads are emulated with ``nixl:tcp`` alone; else one that
   would be fails, and the stream carries its bytes.

Metadata is NIXL's own format, which NIXL checks. Nothing here uses `deserialize_descs`, which is pickle.
"""

from __future__ import annotations

import ctypes
import enum
import os
import secrets
import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from transferqueue.errors import Unreachable, UsageError
from transferqueue.lazy import install_line
from transferqueue.transport.system.rdma import DEVICES, rdma_devices

INSTALL: Final = "pip install --no-deps nixl==1.5.1 nixl-cu12==1.5.1"
"""Without the wheels' dependencies, torch and a second build, which are not used here."""
_BUILDS: Final = ("nixl_cu12", "nixl_cu13", "nixl_rocm")
_DONE: Final = "DONE"
_PENDING: Final = "PROC"


class Transports(enum.StrEnum):
    """What NIXL may use, by the setting that says so."""

    RDMA = "nixl"
    TCP = "nixl:tcp"
    CMA = "nixl:cma"


_UCX_TLS: Final = {Transports.RDMA: "^tcp", Transports.TCP: "tcp,self", Transports.CMA: "cma,tcp,self"}
"""What UCX may use, unless `UCX_TLS` says it. CMA needs TCP for the first contact."""


def check_machine(transports: Transports, directory: Path = DEVICES) -> None:
    """`UsageError` if this machine lacks the package, or an RDMA device where one is needed."""
    if find_spec("nixl") is None:
        raise UsageError(
            f"bytes={str(transports)!r} needs the package nixl, which is not installed here: {install_line('nixl')}, "
            f"or without torch and a second build {INSTALL}; or serve and connect with bytes 'stream'"
        )
    if transports is Transports.RDMA and not rdma_devices(directory):
        raise UsageError(
            "bytes='nixl' reads memory over RDMA, and this machine has no RDMA device with an active port "
            f"({directory}): over TCP such reads are twice as slow as a stream, so use bytes 'stream' here; tests may "
            "use 'nixl:tcp' or 'nixl:cma'"
        )


class CopiedRange(NamedTuple):
    """`nbytes` bytes that are read from address `remote` of a peer to address `local` of this process."""

    local: int
    remote: int
    nbytes: int


class PendingRead(Protocol):
    """A read under way."""

    def done(self) -> bool:
        """Make progress. Whether all bytes are there. `Unreachable` if the peer is lost."""

    def abandon(self) -> None:
        """Give the read up, also after an error. Its memory may still be written."""


class MemoryAgent(Protocol):
    """Registers memory of this process, and reads what others have registered. Safe from any thread."""

    name: str
    """Unique: no other agent ever has it."""

    def register(self, address: int, nbytes: int) -> object:
        """Let peers read these bytes, or reads of this process write them. They keep their pages until `deregister`."""

    def deregister(self, registration: object) -> None:
        """Undo `register`."""

    def metadata(self) -> bytes:
        """Metadata that a peer loads to read the registered memory."""

    def load(self, metadata: bytes) -> str:
        """Load the metadata of a peer; returns its name. Regions that were loaded before stay. `Unreachable` if that
        fails."""

    def unload(self, peer: str) -> None:
        """Forget a peer, whose reads must have ended; an unknown one is ignored."""

    def read(self, peer: str, ranges: Sequence[CopiedRange]) -> PendingRead:
        """Begin to read from a loaded peer. `Unreachable` if that fails."""

    def progress(self) -> None:
        """Serve peers that are connecting, or that read over a transport which needs this process."""

    def close(self) -> bool:
        """End all reads, and forget all peers and registrations; no other method but this may be called afterwards.
        Whether it is gone (rule 5): until something lets a read of it go, it may not be. Call it again then."""


class NixlAgent:
    """An agent of NIXL. `UsageError` as of `check_machine`; takes up to half a second."""

    def __init__(self, transports: Transports) -> None:
        check_machine(transports)
        self._nixl = _nixl(transports)
        self.name: str = f"tq-{os.getpid()}-{secrets.token_hex(8)}"
        sync = self._nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW
        settings = self._nixl.nixl_agent_config(backends=["UCX"], enable_prog_thread=False, sync_mode=sync)
        try:
            self._opened: Any = self._nixl.nixl_agent(self.name, settings)
        except Exception as error:
            raise UsageError(
                f"bytes={str(transports)!r}: NIXL made no agent on this machine ({error}); use bytes 'stream', or look "
                "with `ucx_info -d`"
            ) from error
        self._gone: Final = weakref.ref(self._opened.agent)
        self._loaded: set[str] = set()

    @property
    def _agent(self) -> Any:
        if self._opened is None:
            raise Unreachable("this process has closed its way to read memory one-sided, and opens another one")
        return self._opened

    def register(self, address: int, nbytes: int) -> object:
        """See `MemoryAgent`."""
        try:
            return self._agent.register_memory([(address, nbytes, 0, "")], "DRAM")
        except Exception as error:
            raise Unreachable(
                f"{nbytes:,} bytes could not be registered with NIXL: {error}; see `ulimit -l`"
            ) from error

    def deregister(self, registration: object) -> None:
        """See `MemoryAgent`."""
        try:
            self._agent.deregister_memory(registration)
        except Exception as error:
            raise Unreachable(f"NIXL could not deregister memory: {error}") from error

    def metadata(self) -> bytes:
        """See `MemoryAgent`."""
        try:
            return bytes(self._agent.get_agent_metadata())
        except Exception as error:
            raise Unreachable(f"NIXL gives no metadata of the registered memory: {error}") from error

    def load(self, metadata: bytes) -> str:
        """See `MemoryAgent`."""
        try:
            name = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise Unreachable(f"the metadata of a shard's memory could not be loaded: {error}") from error
        peer = name.decode() if isinstance(name, bytes) else str(name)
        self._loaded.add(peer)
        return peer

    def unload(self, peer: str) -> None:
        """See `MemoryAgent`."""
        self._loaded.discard(peer)
        try:
            self._agent.remove_remote_agent(peer)
        except self._nixl.nixlBind.nixlNotFoundError:
            return

    def read(self, peer: str, ranges: Sequence[CopiedRange]) -> PendingRead:
        """See `MemoryAgent`."""
        table = np.array(ranges, np.uint64).reshape(-1, 3)
        local, remote = np.zeros_like(table), np.zeros_like(table)
        local[:, 0], local[:, 1] = table[:, 0], table[:, 2]
        remote[:, 0], remote[:, 1] = table[:, 1], table[:, 2]
        try:  # no name for the agent here: an error keeps the names of all frames that it passed through
            return _NixlRead(
                self._agent,
                self._agent.initialize_xfer("READ", _descs(self._agent, local), _descs(self._agent, remote), peer),
            )
        except Exception as error:
            raise _failed(error) from error

    def progress(self) -> None:
        """See `MemoryAgent`."""
        try:
            self._agent.get_new_notifs()
        except Exception as error:
            raise Unreachable(f"NIXL made no progress: {error}") from error

    def close(self) -> bool:
        """See `MemoryAgent`. What NIXL holds of it is gone when its last reference is: its destructor waits for
        nothing. Peers are unloaded before: UCX ends a process by a signal that serves a read over TCP whose reader went
        without a word."""
        if self._opened is not None:
            for peer in [*self._loaded]:
                with suppress(Exception):  # it is gone in any case
                    self.unload(peer)
        self._opened = None
        return self._gone() is None


class _NixlRead:
    """A read by NIXL."""

    def __init__(self, agent: Any, handle: Any) -> None:
        self._agent, self._handle = agent, handle
        self._posted = False

    def done(self) -> bool:
        try:
            state = self._agent.check_xfer_state(self._handle) if self._posted else self._agent.transfer(self._handle)
            if state == _DONE:
                self._agent.release_xfer_handle(self._handle)
        except Exception as error:
            raise _failed(error) from error
        self._posted = True
        if state not in (_DONE, _PENDING):
            raise Unreachable(f"a read of a shard's memory ended with {state}")
        return bool(state == _DONE)

    def abandon(self) -> None:
        """Cancel. A handle that cannot be released now is released with its agent, which this must not keep."""
        self._handle = self._agent = None


def _descs(agent: Any, table: Any) -> Any:
    return agent.get_xfer_descs(table, "DRAM")


def _failed(error: Exception) -> Unreachable:
    return Unreachable(f"a read of a shard's memory failed: {type(error).__name__}: {error}")


def load_nixl() -> Any:
    """The classes of NIXL. `nixl` has several builds, and looks for the CUDA of torch to choose one. Where torch has
    none it imports it: seconds and 200 MB, in each process with an agent. So where one build is installed, that one is
    loaded. `nixl` chooses among several, if that one fails, and where torch or `nixl` are loaded already. `ImportError`
    says of each that was tried why it failed."""
    builds = [name for name in _BUILDS if _is_installed(name)]
    before = ""
    if len(builds) == 1 and not {"torch", "nixl"} & sys.modules.keys():
        try:
            return import_module(f"{builds[0]}._api")
        except Exception as error:  # noqa: BLE001  (`nixl` may know better; else this is the reason)
            before = f"{builds[0]}: {type(error).__name__}: {error}; "
    try:
        return import_module("nixl._api")
    except Exception as error:
        raise ImportError(f"{before}nixl: {type(error).__name__}: {error}") from error


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ValueError:  # a module that says nothing of where it came from
        return False


def _nixl(transports: Transports) -> Any:
    """Import the package with these transports: UCX reads the environment when its first agent is made."""
    os.environ.setdefault("UCX_TLS", _UCX_TLS[transports])
    if transports is not Transports.TCP:
        os.environ.setdefault("UCX_PROTO_EMULATION_ENABLE", "n")  # rule 6
    # By default both write to standard output, where a server says "ready". UCX warns of each request that ends with
    # its agent.
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    try:
        api = load_nixl()
    except ImportError as error:
        raise UsageError(
            f"bytes={str(transports)!r}: the package nixl cannot be loaded on this machine ({error}); use bytes "
            f"'stream', or install it as it says: {INSTALL}"
        ) from error

    _exit_without_unloading()
    return api


@cache
def _exit_without_unloading() -> None:
    """Have the C library end this process right after the interpreter's own end. The wheel brings a libnl beside the
    system's, and where both are loaded one crashes when it is unloaded: every process with an agent would end by
    SIGSEGV, whatever its exit code."""
    library = ctypes.CDLL(None)
    if hasattr(library, "on_exit"):  # of glibc: calls _exit(code)
        library.on_exit(library._exit, None)
