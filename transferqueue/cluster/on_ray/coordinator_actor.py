"""The actor of a deployment: a server in a thread of a process that Ray starts, and starts again.

The law:

- The server and its process end together: a server that fails takes the process with it, and Ray makes the next life. So
  there is never an actor without its server, and never a server that nobody looks after.
- Each life listens where the first one did, the socket and the port, with the same keys: clients come back by themselves.
- What makes a first life impossible is told to whoever deploys. A later one that cannot begin (its port is taken, its
  journal cannot be read) ends, and is tried again as often as Ray was told.
- Whoever may call the actor may do anything in its Ray cluster anyway: so it hands out keys, and these cross nothing but Ray.
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
from typing import Final

from transferqueue.cluster.on_ray.directories import DirectoryOwner, claim_directory, own_directory, remove_stale
from transferqueue.cluster.on_ray.messages import DEPLOY, DeployRefused, Endpoints, read, write
from transferqueue.errors import AddressInUse, Corruption, TransferQueueError, Unreachable
from transferqueue.server.durability.journal import Level
from transferqueue.server.durability.state_directory import StateDirectory
from transferqueue.server.files import SHARED_MEMORY, ArenaDirectory, arena_root, served_arena, sweep_arenas
from transferqueue.server.process.assembly import ServerProcess, first_epoch
from transferqueue.server.process.serve import allow_many_files
from transferqueue.server.process.supervisor import EXIT_AGAIN, EXIT_DEFECT
from transferqueue.transport import IpcAddress, TcpAddress, runtime_directory, this_host
from transferqueue.transport.security.keyring import Keyring, add, key_file, load, token_of
from transferqueue.transport.security.keys import ROLES, write_token
from transferqueue.transport.system.private_files import private_directory, write_private

_log: Final = logging.getLogger("transferqueue.cluster")
STOP_S: Final = 60.0
"""A server that is told to stop writes a last image of its state."""


class CoordinatorActorBase:
    """A served deployment. Methods take and give text, see `names`."""

    def __init__(self, told: str, host: str, cluster: str, again: bool) -> None:
        """told: a `Deploy`. host: this node as others see it. cluster: names the Ray cluster. again: not the first life."""
        self._deploy = read(told, DEPLOY)
        self._directory = Path(self._deploy.state) if self._deploy.state else own_directory(self._deploy)
        self._refused: TransferQueueError | None = None
        try:
            self._serve(host, cluster, again)
        except TransferQueueError as error:
            if again:
                _log.exception("the next life of %s cannot begin", self._deploy.named)
                os._exit(EXIT_AGAIN)
            self._refused = error

    def ways(self, role: str = "admin") -> str:
        """`Endpoints` for a client of this role, or `DeployRefused`."""
        try:
            if self._refused is not None:
                raise self._refused
            token = write_token(token_of(self._directory / "keys", role, self._tcp))
        except TransferQueueError as error:
            return write(DeployRefused(type(error).__name__, str(error)))
        return write(Endpoints(this_host(), self._ipc, token, self._deploy.seat.of))

    def stop(self) -> None:
        """End the server, and remove the state directory, with its memory, if nobody named it."""
        if self._refused is None:
            self._refused = Unreachable(f"deployment {self._deploy.named} was closed; make another with deploy_ray")
            self._server.stop()
            self._thread.join(STOP_S)
        if not self._deploy.state:
            shutil.rmtree(self._directory, ignore_errors=True)
            if (root := arena_root(SHARED_MEMORY)) is not None:
                sweep_arenas(root)

    def _serve(self, host: str, cluster: str, again: bool) -> None:
        allow_many_files()
        runtime = private_directory(runtime_directory())
        if not self._deploy.state:
            owner = DirectoryOwner.here(cluster, str(self._deploy.named))
            if not again:
                remove_stale(owner, runtime)
            claim_directory(self._directory, owner)
        private_directory(self._directory, "state directory")
        place = TcpAddress(f"[{host}]" if ":" in host else host, self._port(host))
        made: Future[ServerProcess] = Future()
        self._thread = threading.Thread(
            target=self._live, args=(runtime, place, made), name=f"transferqueue {self._deploy.named}", daemon=True
        )
        self._thread.start()
        self._server = made.result()
        self._ipc, (self._tcp,) = self._server.address, self._server.tcp_addresses

    def _live(self, runtime: Path, place: TcpAddress, made: Future[ServerProcess]) -> None:
        """A whole life of the server, in one thread: its journal asks for that."""
        try:
            server = self._make(runtime, place)
        except BaseException as error:  # noqa: BLE001  (raised where the server is waited for)
            made.set_exception(error)
            return
        made.set_result(server)
        try:
            server.run()
        except BaseException as error:  # noqa: BLE001  (told, and an exit code)
            _log.exception("the server of %s failed; its actor ends, and Ray starts it again", self._deploy.named)
            logging.shutdown()
            os._exit(EXIT_AGAIN if isinstance(error, TransferQueueError) else EXIT_DEFECT)

    def _make(self, runtime: Path, place: TcpAddress) -> ServerProcess:
        return ServerProcess(
            IpcAddress(runtime / f"{self._directory_mark()}.sock"),
            self._foundation(),
            [place],
            keyring=_keyring(self._directory / "keys"),
            snapshots=Path(self._deploy.snapshots) if self._deploy.snapshots else None,
            seat=self._deploy.seat,
        )

    def _directory_mark(self) -> str:
        """One socket for each state directory: who goes on from it is found where the one before was."""
        return f"ray-{self._deploy.named.digest(str(self._directory))}"

    def _foundation(self) -> ArenaDirectory | StateDirectory:
        level, size = Level(self._deploy.durability), self._deploy.arena_bytes or None
        if level is Level.MEMORY:
            return served_arena(size)
        return StateDirectory(self._directory, level, first_epoch=first_epoch(), arena_bytes=size)

    def _port(self, host: str) -> int:
        """The port asked for, else that of the lives before, else a free one; written down before anyone hears of it."""
        if self._deploy.port:
            return self._deploy.port
        kept = self._directory / "port"
        if kept.exists():
            return _kept_port(kept)
        port = _free_port(host, self._deploy.named.ports())
        write_private(kept, str(port).encode())
        return port


class CoordinatorActor(CoordinatorActorBase):
    """`CoordinatorActorBase`, told what a process of Ray knows by itself."""

    def __init__(self, told: str) -> None:
        """told: a `Deploy`."""
        import ray

        life = ray.get_runtime_context()
        host = ray.util.get_node_ip_address()
        with warnings.catch_warnings(action="ignore"):  # Ray's of itself, in every deployment's log
            again = life.was_current_actor_reconstructed
        super().__init__(told, host, life.get_session_name(), again)


def _keyring(directory: Path) -> Keyring:
    """The server's keys and one for each role, made when they are missing."""
    there = {owner.name for owner in load(directory).clients} if key_file(directory).exists() else set()
    for role in ROLES:
        if role not in there:
            add(directory, role, role)
    return Keyring(directory)


def _kept_port(file: Path) -> int:
    try:
        port = int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        port = 0
    if not 0 < port < 1 << 16:
        raise Corruption(
            f"port file {file} holds no port; put it back, or remove it: the deployment then listens at another port, which "
            "those who connect by its name find"
        )
    return port


def _free_port(host: str, ports: list[int]) -> int:
    for port in ports:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as tried:
            try:
                tried.bind((host, port))
            except OSError:
                continue
            return port
    raise AddressInUse(
        f"no port of {len(ports)} from {ports[0]} on is free at {host}; give port= to deploy_ray, or stop what has them"
    )
