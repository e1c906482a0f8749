"""The actor of a deployment: a server in a thread of a process that Ray starts and restarts.

- The server and its process end together. A server that fails ends the process, and Ray restarts it. So no actor is
  without its server, and no server is without its actor.
- Each restart listens at the same socket and port, with the same keys, so clients reconnect by themselves.
- If the first start fails, the actor reports the error to the process that deploys. If a restart fails (its port is
  taken, its journal cannot be read), the process exits, and Ray tries again as often as `max_restarts` allows.
- The actor gives keys to any caller: a caller can already do anything in its Ray cluster. The keys travel through Ray
  only.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import threading
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Final

from transferqueue.cluster.on_ray.directories import DirectoryOwner, claim_directory, own_directory, remove_stale
from transferqueue.cluster.on_ray.messages import DEPLOY_SPEC, DeployRefused, Endpoints, read, write
from transferqueue.errors import AddressInUse, Corruption, TransferQueueError, Unreachable
from transferqueue.server.durability_level import Level
from transferqueue.server.process.assembly import ServerProcess, first_epoch
from transferqueue.server.process.serve import allow_many_files
from transferqueue.server.process.supervisor import EXIT_AGAIN, EXIT_DEFECT
from transferqueue.server.runtime_directory import (
    SHARED_MEMORY,
    ArenaDirectory,
    arena_root,
    remove_stale_arenas,
    served_arena,
)
from transferqueue.transport import IpcAddress, TcpAddress, runtime_directory, this_host
from transferqueue.transport.security.keyring import Keyring, add, key_file, load, token_of
from transferqueue.transport.security.keys import write_token
from transferqueue.transport.system.private_files import private_directory, write_private
from transferqueue.wire.roles import ROLES

if TYPE_CHECKING:
    from transferqueue.server.durability.state_directory import StateDirectory
    from transferqueue.server.spill.spill_file import SpillPolicy

_log: Final = logging.getLogger("transferqueue.cluster")
STOP_S: Final = 60.0
"""A server that stops first writes a last image of its state."""


class CoordinatorActorBase:
    """A server in a process that Ray starts. Methods take and return text, see `messages`."""

    def __init__(self, spec_text: str, host: str, cluster: str, again: bool) -> None:
        """Start the server.

        Args:
            spec_text: a `DeploySpec`.
            host: this node's address as other machines see it.
            cluster: the name of the Ray cluster.
            again: whether this is a restart.
        """
        self._deploy = read(spec_text, DEPLOY_SPEC)
        self._directory = Path(self._deploy.state) if self._deploy.state else own_directory(self._deploy)
        self._refused: TransferQueueError | None = None
        try:
            self._serve(host, cluster, again)
        except TransferQueueError as error:
            if again:
                _log.exception("the actor cannot restart the server of %s", self._deploy.named)
                os._exit(EXIT_AGAIN)
            self._refused = error

    def ways(self, role: str = "admin") -> str:
        """The `Endpoints` for a client of this role, or a `DeployRefused`. Clients of other versions call this name
        through Ray."""
        try:
            if self._refused is not None:
                raise self._refused
            token = write_token(token_of(self._directory / "keys", role, self._tcp))
        except TransferQueueError as error:
            return write(DeployRefused(type(error).__name__, str(error)))
        return write(Endpoints(this_host(), self._ipc, token, self._deploy.seat.of))

    def stop(self) -> None:
        """End the server. Remove the state directory and its memory, unless the deployment was given one."""
        if self._refused is None:
            self._refused = Unreachable(f"deployment {self._deploy.named} was closed; make another with deploy_ray")
            self._server.stop()
            self._thread.join(STOP_S)
        if not self._deploy.state:
            shutil.rmtree(self._directory, ignore_errors=True)
            if (root := arena_root(SHARED_MEMORY)) is not None:
                remove_stale_arenas(root)

    def _serve(self, host: str, cluster: str, again: bool) -> None:
        allow_many_files()
        runtime = private_directory(runtime_directory())
        if not self._deploy.state:
            owner = DirectoryOwner.here(cluster, str(self._deploy.named))
            if not again:
                remove_stale(owner, runtime)
            claim_directory(self._directory, owner)
        private_directory(self._directory, "state directory")
        address = TcpAddress(f"[{host}]" if ":" in host else host, self._port(host))
        started: Future[ServerProcess] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(runtime, address, started), name=f"transferqueue {self._deploy.named}", daemon=True
        )
        self._thread.start()
        self._server = started.result()
        self._ipc, (self._tcp,) = self._server.address, self._server.tcp_addresses

    def _run(self, runtime: Path, address: TcpAddress, started: Future[ServerProcess]) -> None:
        """Make the server and run it in this thread: the journal's SQLite connection belongs to one thread."""
        try:
            server = self._make(runtime, address)
        except BaseException as error:  # noqa: BLE001  (raised in the thread that waits for the server)
            started.set_exception(error)
            return
        started.set_result(server)
        try:
            server.run()
        except BaseException as error:  # noqa: BLE001  (logged, and an exit code)
            _log.exception("the server of %s failed; its actor ends, and Ray starts it again", self._deploy.named)
            logging.shutdown()
            os._exit(EXIT_AGAIN if isinstance(error, TransferQueueError) else EXIT_DEFECT)

    def _make(self, runtime: Path, address: TcpAddress) -> ServerProcess:
        return ServerProcess(
            IpcAddress(runtime / f"{self._directory_mark()}.sock"),
            self._foundation(),
            [address],
            keyring=_keyring(self._directory / "keys"),
            snapshots=Path(self._deploy.snapshots) if self._deploy.snapshots else None,
            index=self._deploy.seat,
            spill=self._spill(),
        )

    def _spill(self) -> SpillPolicy | None:
        if not self._deploy.spill_dir:
            return None
        from transferqueue.server.spill.spill_file import spill_policy

        return spill_policy(Path(self._deploy.spill_dir), self._deploy.spill_bytes)

    def _directory_mark(self) -> str:
        """Names the socket after the state directory, so that a later deployment with this directory listens at the
        same path."""
        return f"ray-{self._deploy.named.digest(str(self._directory))}"

    def _foundation(self) -> ArenaDirectory | StateDirectory:
        level, size = Level(self._deploy.durability), self._deploy.arena_bytes or None
        if not level.survives_crash:
            return served_arena(size)
        from transferqueue.server.durability.state_directory import StateDirectory

        return StateDirectory(self._directory, level, first_epoch=first_epoch(), arena_bytes=size)

    def _port(self, host: str) -> int:
        """The port asked for, else the port of earlier starts, else a free one, which is written to a file before it is
        used."""
        if self._deploy.port:
            return self._deploy.port
        file = self._directory / "port"
        if file.exists():
            return _read_port(file)
        port = _free_port(host, self._deploy.named.ports())
        write_private(file, str(port).encode())
        return port


class CoordinatorActor(CoordinatorActorBase):
    """`CoordinatorActorBase` with what a Ray process knows about itself."""

    def __init__(self, spec_text: str) -> None:
        """Start the server of `spec_text`, a `DeploySpec`."""
        import ray

        context = ray.get_runtime_context()
        host = ray.util.get_node_ip_address()
        with warnings.catch_warnings(
            action="ignore"
        ):  # Ray warns about its own property, in the log of each deployment
            again = context.was_current_actor_reconstructed
        super().__init__(spec_text, host, context.get_session_name(), again)


def _keyring(directory: Path) -> Keyring:
    """The keys in `directory`: the server's, and one for each role. Missing ones are made."""
    existing = {owner.name for owner in load(directory).clients} if key_file(directory).exists() else set()
    for role in ROLES:
        if role not in existing:
            add(directory, role, role)
    return Keyring(directory)


def _read_port(file: Path) -> int:
    try:
        port = int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        port = 0
    if not 0 < port < 1 << 16:
        raise Corruption(
            f"port file {file} holds no port; put it back, or remove it: the deployment then listens at another port, "
            "which those who connect by its name find"
        )
    return port


def _free_port(host: str, ports: list[int]) -> int:
    for port in ports:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise AddressInUse(
        f"none of {len(ports)} ports from {ports[0]} on is free at {host}; give port= to deploy_ray, or free one"
    )
