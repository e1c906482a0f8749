"""One run: start everything, inject the planned faults, end them, drain the tables, check the event logs, and clean
up."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Final, Self

import msgspec

from tests.chaos.fault_plan import (
    DRAINERS,
    FLOODERS,
    PRODUCERS,
    PROXY,
    REMOTE,
    SERVER,
    ChaosSettings,
    Fault,
    plan,
    roles,
)
from tests.chaos.log import read_logs
from tests.chaos.probe import Probe
from tests.chaos.process_context import ProcessContext, ServerEndpoint
from tests.chaos.process_loop import ProcessLoop
from tests.chaos.processes import ManagedProcess, Pipe
from tests.chaos.proxy import LoopbackHosts, run_proxy
from tests.chaos.report import Report, report
from tests.chaos.roles import run_role
from tests.chaos.server_process import ServerUnderTest
from transferqueue.transport.bulk.carriers import chosen_carrier
from transferqueue.transport.security import keyring
from transferqueue.transport.security.keys import write_token

START_S: Final = 60.0
DRAIN_S: Final = 150.0
"""Longer than any wait of a role, so that a role that is stuck reports why itself."""
PROGRESS_EVERY_S: Final = 5.0
_UCX_ABORT: Final = "Endpoint timeout"
"""What UCX says when it ends a process over TCP, since the reader of its memory died. No option avoids that (decision
64); the rows are accounted for as after any death."""
_PROBE: Final = "probe"
_SOURCES: Final = {*PRODUCERS, *FLOODERS, *REMOTE[:2]}


def chaos(run: ChaosSettings, say: Callable[[str], object], keep: Path | None = None) -> Report:
    """Run it; blocks until the tables are drained after the last fault.

    It forks, so call it in the main thread of a process without other threads. SIGINT and SIGTERM (`KeyboardInterrupt`)
    end and remove everything too.

    Args:
        run: The settings.
        say: Called with each line of progress.
        keep: Directory for the event logs and the output of all processes. None: they are removed.
    """
    directory = Path(tempfile.mkdtemp(prefix="tq-chaos-"))
    before = signal.getsignal(signal.SIGINT), signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with Chaos(run, directory, say) as chaos_run:
            chaos_run.go()
        # Now that all processes are gone: what one has written must not be read later than what another has.
        return report(run, chaos_run.faults, read_logs(directory / "events"), chaos_run.violations)
    finally:
        if keep is not None:
            shutil.copytree(directory / "events", keep / "events", dirs_exist_ok=True)
            for log in directory.glob("*.log"):
                shutil.copy(log, keep)
        shutil.rmtree(directory)
        for number, old in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(number, old)


class Chaos:
    """The processes of one run under `directory`, while entered."""

    def __init__(self, run: ChaosSettings, directory: Path, say: Callable[[str], object]) -> None:
        self._run, self._directory, self._say = run, directory, say
        self.faults: Final[list[Fault]] = []
        self.violations: Final[list[str]] = []
        self._loop = ProcessLoop()
        self._life = itertools.count(1)
        self._pipes: Final = {name: Pipe(to_child=name != "news") for name in ("commands", "news", "network")}
        self._ready = self._probed = False
        self._died_starting = False
        """Whether a server died since the last one that was ready."""
        self._rows: dict[str, int] = {}
        self._draining = self._server_restarts = False
        (directory / "events").mkdir()
        self._hosts: Final = LoopbackHosts.of_one_run()
        port = _free_port(self._hosts.server) if run.tcp else None
        self._remote = self._token(port) if port is not None else None
        self._server = ServerUnderTest(directory, run, None if port is None else f"{self._hosts.server}:{port}")
        self._local = ServerEndpoint(self._server.address)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):  # the clean-up must not be interrupted
            signal.signal(number, signal.SIG_IGN)
        for process in list(self._loop.processes.values()):
            process.signal(signal.SIGKILL)
            process.wait()
        self._server.remove()
        self._loop.close()
        for pipe in self._pipes.values():
            pipe.close()

    def go(self) -> None:
        """Run from the start to the drained end; stops early at a violation."""
        self._start()
        began = time.monotonic()
        for fault in plan(self._run):
            self._loop.at(began + fault.at, partial(self._do, fault))
        self._loop.at(began + PROGRESS_EVERY_S, partial(self._tell, began))
        if not self._loop.run_until(lambda: bool(self.violations), began + self._run.seconds):
            self._drain()

    # ------------------------------------------------------------ start

    def _token(self, port: int) -> ServerEndpoint:
        keys = self._directory / "keys"
        keyring.add(keys, "remote", "admin")
        address = f"tcp://{self._hosts.proxy}:{port}"
        return ServerEndpoint(address, write_token(keyring.token_of(keys, "remote", address)))

    def _start(self) -> None:
        self._loop.watch_descriptor(self._server.output, self._read_server)
        self._loop.watch_descriptor(self._pipes["news"].parent_end, self._read_probe)
        if self._run.tcp:
            commands = self._pipes["network"].child_end
            self._fork(PROXY, lambda: run_proxy(self._run.seed, self._hosts, commands))
        self._await(lambda: self._ready, "the server did not listen")
        self._start_role(_PROBE)
        self._await(lambda: self._probed, "the probe got no answer")
        for role in roles(self._run):
            self._start_role(role)

    def _await(self, reached: Callable[[], bool], otherwise: str) -> None:
        if (
            not self._loop.run_until(lambda: reached() or bool(self.violations), time.monotonic() + START_S)
            or not reached()
        ):
            raise RuntimeError(f"{otherwise} within {START_S:g} s; {self._log_tail()}")

    def _log_tail(self) -> str:
        logs = sorted(self._directory.glob("*.log"))
        return " | ".join(f"{log.name}: {log.read_text(errors='replace')[-500:]}" for log in logs)

    def _start_role(self, role: str) -> None:
        life = next(self._life)
        self._fork(role, lambda: self._live(role, life))

    def _live(self, role: str, life: int) -> None:
        endpoint = self._remote if role in REMOTE and self._remote is not None else self._local
        context = ProcessContext(self._directory, endpoint, role, life, self._run.seed)
        if role == _PROBE:
            Probe(context, self._pipes["commands"].child_end, self._pipes["news"].child_end).run()
        else:
            run_role(context)

    def _fork(self, role: str, work: Callable[[], object]) -> None:
        self._loop.watch(ManagedProcess(role, self._alone(work), self._directory / f"{role}.log"), self._ended)

    def _alone(self, work: Callable[[], object]) -> Callable[[], object]:
        """`work` for a child, which first closes its copies of the descriptors that only the parent may hold."""
        ends = [pipe.parent_end for pipe in self._pipes.values()]

        def alone() -> None:
            for end in ends:
                os.close(end)
            work()

        return alone

    def _ended(self, process: ManagedProcess, code: int) -> None:
        in_order = code == 0 and (self._draining or process.role == PROXY)
        by_ucx = code == -signal.SIGABRT and _UCX_ABORT in self._why(process.role)
        if by_ucx and str(chosen_carrier()) == "nixl:tcp":
            self.faults.append(Fault(time.monotonic(), "abort of UCX", process.role))
            code = -signal.SIGKILL
        if not in_order and code != -signal.SIGKILL:
            self.violations.append(f"{process.role} ended by itself with exit code {code}; {self._why(process.role)}")
        elif not in_order and not (self._draining and process.role in _SOURCES):
            self._start_role(process.role)

    def _why(self, role: str) -> str:
        lines = (self._directory / f"{role}.log").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    # ------------------------------------------------------------ events

    def _read_server(self) -> None:
        output = os.read(self._server.output, 1 << 16)
        with (self._directory / "server.log").open("ab") as log:
            log.write(output)
        if not output:
            self._server_ended()
        elif b"ready" in output:
            self._ready, self._died_starting = True, False
            if self._run.tcp:
                for port in self._server.ports():
                    self._network("port", port)

    def _server_ended(self) -> None:
        self._loop.ignore_descriptor(self._server.output)
        code = self._server.process.wait()
        if code or not self._server_restarts:
            self.violations.append(f"the server ended with exit code {code}; {self._why(SERVER)}")
        else:
            self._server.close()
            self._server.start()
            self._loop.watch_descriptor(self._server.output, self._read_server)
        self._server_restarts = False

    def _read_probe(self) -> None:
        for line in os.read(self._pipes["news"].parent_end, 1 << 16).splitlines():
            kind, figures = msgspec.json.decode(line, type=tuple[str, dict[str, int]])
            if kind == "ready":
                self._probed = True
            else:
                self._rows = figures

    def _network(self, kind: str, value: float) -> None:
        self._pipes["network"].send(msgspec.json.encode([kind, value]))

    def _tell(self, began: float) -> None:
        now = time.monotonic() - began
        rows = ", ".join(f"{name} {done:,}" for name, done in self._rows.items())
        self._say(f"{now:5.0f} s  {len(self.faults):4} faults  rows done: {rows}")
        if now + PROGRESS_EVERY_S < self._run.seconds:
            self._loop.at(began + now + PROGRESS_EVERY_S, partial(self._tell, began))

    # ------------------------------------------------------------ faults

    def _do(self, fault: Fault) -> None:
        at = time.monotonic()
        if fault.target == SERVER:
            done = self._hurt_server(fault)
        elif fault.target == PROXY:
            self._network(fault.kind, fault.for_s)
            done = True
        elif fault.kind == "kill":
            done = self._kill(fault.target)
        else:
            done = self._freeze((*DRAINERS, REMOTE[-1]) if fault.kind == "fill" else (fault.target,), fault.for_s)
        if done:
            self.faults.append(fault._replace(at=at))

    def _kill(self, role: str) -> bool:
        process = self._loop.processes.get(role)
        if process is not None:
            process.signal(signal.SIGKILL)
        return process is not None

    def _freeze(self, targets: Iterable[str], for_s: float) -> bool:
        processes = [process for role in targets if (process := self._loop.processes.get(role)) is not None]
        for process in processes:
            process.signal(signal.SIGSTOP)
            self._loop.at(time.monotonic() + for_s, partial(process.signal, signal.SIGCONT))
        return bool(processes)

    def _hurt_server(self, fault: Fault) -> bool:
        """A server that is starting dies at most once, since a slow machine needs longer to start one than the pause
        between two faults."""
        if fault.kind == "restart":
            if not self._ready:  # the server has not installed its signal handlers yet
                return False
            self._server_restarts, self._ready = True, False
            self._server.ask_to_stop()
            return True
        if fault.kind == "freeze":
            self._loop.at(time.monotonic() + fault.for_s, partial(self._server.signal, signal.SIGCONT))
            return self._server.signal(signal.SIGSTOP)
        if fault.for_s:  # a disk that is full for some time, which the server survives
            self._loop.at(time.monotonic() + fault.for_s, self._server.empty_disk)
            return self._server.fill_disk()
        if self._died_starting:
            return False
        done = self._server.fill_disk() if fault.kind == "disk_full" else self._server.signal(signal.SIGKILL)
        if done:
            self._ready, self._died_starting = False, not self._ready
        return done

    # ------------------------------------------------------------ the end

    def _drain(self) -> None:
        """End all faults, stop the producers, seal the tables, and wait until all rows are done."""
        self._draining = True
        self._server.signal(signal.SIGCONT)
        self._server.empty_disk()
        for process in self._loop.processes.values():
            process.signal(signal.SIGCONT)
        for role in _SOURCES & self._loop.processes.keys():
            self._loop.processes[role].signal(signal.SIGTERM)
        self._await_end(_SOURCES)
        self._pipes["commands"].send(b"seal")
        self._await_end(set(roles(self._run)))
        self._pipes["commands"].send(b"end")
        self._await_end({_PROBE})
        if not self.violations:
            self._loop.ignore_descriptor(self._server.output)
            if code := self._server.stop():
                self.violations.append(f"the server ended with exit code {code} after SIGTERM")

    def _await_end(self, who: set[str]) -> None:
        def left() -> set[str]:
            return who & self._loop.processes.keys()

        deadline = time.monotonic() + DRAIN_S
        if not self._loop.run_until(lambda: not left() or bool(self.violations), deadline):
            self.violations.append(
                f"stuck: {', '.join(sorted(left()))} had not ended {DRAIN_S:g} s after the last fault"
            )


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as listening:
        return int(listening.getsockname()[1])
