"""One run: everything started, hurt by plan, healed, drained, judged and removed."""

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

from transferqueue.testing.chaos import log as diary
from transferqueue.testing.chaos import proxy
from transferqueue.testing.chaos.crew_loop import CrewLoop
from transferqueue.testing.chaos.fault_plan import (
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
from transferqueue.testing.chaos.probe import Probe
from transferqueue.testing.chaos.process_context import ProcessContext, ServerEndpoint
from transferqueue.testing.chaos.processes import ManagedProcess, Pipe
from transferqueue.testing.chaos.report import Report, report
from transferqueue.testing.chaos.roles import live
from transferqueue.testing.chaos.server_process import ServerUnderTest
from transferqueue.transport.security import keyring
from transferqueue.transport.security.keys import write_token

START_S: Final = 60.0
DRAIN_S: Final = 150.0
"""More than a wait of a role, so that one that is stuck says itself why."""
TOLD_EVERY_S: Final = 5.0
_PROBE: Final = "probe"
_SOURCES: Final = {*PRODUCERS, *FLOODERS, REMOTE[0]}


def chaos(run: ChaosSettings, say: Callable[[str], object], keep: Path | None = None) -> Report:
    """Run it; blocks for its time and that of the drain after it. say: told of the progress in lines.

    keep: a directory that gets the diaries and the logs; None: nothing is left. To be called in the main thread of a process that has no other
    thread: it forks. `KeyboardInterrupt`, by SIGINT or
    SIGTERM, ends and removes everything too.
    """
    directory = Path(tempfile.mkdtemp(prefix="tq-chaos-"))
    before = signal.getsignal(signal.SIGINT), signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with Chaos(run, directory, say) as going:
            going.go()
            return report(run, going.faults, diary.read(directory / "diaries"), going.violations)
    finally:
        if keep is not None:
            shutil.copytree(directory / "diaries", keep / "diaries", dirs_exist_ok=True)
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
        self._stage = CrewLoop()
        self._life = itertools.count(1)
        self._pipes: Final = {name: Pipe(to_member=name != "news") for name in ("commands", "news", "network")}
        self._ready = self._probed = False
        self._rows: dict[str, int] = {}
        self._draining = self._server_leaves = False
        (directory / "diaries").mkdir()
        self._port = _free_port() if run.tcp else None
        self._remote = self._token() if run.tcp else None
        self._served = ServerUnderTest(directory, run, self._port)
        self._local = ServerEndpoint(self._served.address)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):  # what is left takes a moment, and is to be done whole
            signal.signal(number, signal.SIG_IGN)
        for member in list(self._stage.members.values()):
            member.signal(signal.SIGKILL)
            member.ended()
        self._served.remove()
        self._stage.close()
        for pipe in self._pipes.values():
            pipe.close()

    def go(self) -> None:
        """From the start to the end in order of everything."""
        self._start()
        began = time.monotonic()
        for fault in plan(self._run):
            self._stage.at(began + fault.at, partial(self._do, fault))
        self._stage.at(began + TOLD_EVERY_S, partial(self._tell, began))
        if not self._stage.until(lambda: bool(self.violations), began + self._run.seconds):
            self._drain()

    # ------------------------------------------------------------ start

    def _token(self) -> ServerEndpoint:
        keys = self._directory / "keys"
        keyring.add(keys, "remote", "admin")
        address = f"tcp://{proxy.HERE}:{self._port}"
        return ServerEndpoint(address, write_token(keyring.token_of(keys, "remote", address)))

    def _start(self) -> None:
        self._stage.hear(self._served.said, self._hear_server)
        self._stage.hear(self._pipes["news"].here, self._hear_probe)
        if self._run.tcp:
            self._fork(PROXY, lambda: proxy.carry(self._run.seed, self._pipes["network"].there))
        self._await(lambda: self._ready, "the server did not listen")
        self._member(_PROBE)
        self._await(lambda: self._probed, "the probe got no answer")
        for role in roles(self._run):
            self._member(role)

    def _await(self, reached: Callable[[], bool], otherwise: str) -> None:
        if (
            not self._stage.until(lambda: reached() or bool(self.violations), time.monotonic() + START_S)
            or not reached()
        ):
            raise RuntimeError(f"{otherwise} within {START_S:g} s; {self._log_tail()}")

    def _log_tail(self) -> str:
        logs = sorted(self._directory.glob("*.log"))
        return " | ".join(f"{log.name}: {log.read_text(errors='replace')[-500:]}" for log in logs)

    def _member(self, role: str) -> None:
        life = next(self._life)
        self._fork(role, lambda: self._live(role, life))

    def _live(self, role: str, life: int) -> None:
        way = self._remote if role in REMOTE and self._remote is not None else self._local
        post = ProcessContext(self._directory, way, role, life, self._run.seed)
        if role == _PROBE:
            Probe(post, self._pipes["commands"].there, self._pipes["news"].there).run()
        else:
            live(post)

    def _fork(self, role: str, work: Callable[[], object]) -> None:
        self._stage.watch(ManagedProcess(role, self._alone(work), self._directory / f"{role}.log"), self._ended)

    def _alone(self, work: Callable[[], object]) -> Callable[[], object]:
        """`work` of a child, which closes its copies of what only this process may hold open."""
        ends = [pipe.here for pipe in self._pipes.values()]

        def alone() -> None:
            for end in ends:
                os.close(end)
            work()

        return alone

    def _ended(self, member: ManagedProcess, code: int) -> None:
        in_order = code == 0 and (self._draining or member.role == PROXY)
        if not in_order and code != -signal.SIGKILL:
            self.violations.append(f"{member.role} ended by itself with exit code {code}; {self._why(member.role)}")
        elif not in_order and not (self._draining and member.role in _SOURCES):
            self._member(member.role)

    def _why(self, role: str) -> str:
        lines = (self._directory / f"{role}.log").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    # ------------------------------------------------------------ what is heard

    def _hear_server(self) -> None:
        said = os.read(self._served.said, 1 << 16)
        with (self._directory / "server.log").open("ab") as log:
            log.write(said)
        if not said:
            self._server_ended()
        elif b"ready" in said:
            self._ready = True
            if self._run.tcp:
                for port in self._served.ports():
                    self._network("port", port)

    def _server_ended(self) -> None:
        self._stage.ignore(self._served.said)
        code = self._served.process.wait()
        if code or not self._server_leaves:
            self.violations.append(f"the server ended with exit code {code}; {self._why(SERVER)}")
        else:
            self._served.close()
            self._served.start()
            self._stage.hear(self._served.said, self._hear_server)
        self._server_leaves = False

    def _hear_probe(self) -> None:
        for line in os.read(self._pipes["news"].here, 1 << 16).splitlines():
            kind, told = msgspec.json.decode(line, type=tuple[str, dict[str, int]])
            if kind == "ready":
                self._probed = True
            else:
                self._rows = told

    def _network(self, kind: str, value: float) -> None:
        self._pipes["network"].say(msgspec.json.encode([kind, value]))

    def _tell(self, began: float) -> None:
        now = time.monotonic() - began
        rows = ", ".join(f"{name} {done:,}" for name, done in self._rows.items())
        self._say(f"{now:5.0f} s  {len(self.faults):4} faults  rows done: {rows}")
        if now + TOLD_EVERY_S < self._run.seconds:
            self._stage.at(began + now + TOLD_EVERY_S, partial(self._tell, began))

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
            done = self._freeze(DRAINERS if fault.kind == "fill" else (fault.target,), fault.for_s)
        if done:
            self.faults.append(fault._replace(at=at))

    def _kill(self, role: str) -> bool:
        member = self._stage.members.get(role)
        if member is not None:
            member.signal(signal.SIGKILL)
        return member is not None

    def _freeze(self, targets: Iterable[str], for_s: float) -> bool:
        members = [member for role in targets if (member := self._stage.members.get(role)) is not None]
        for member in members:
            member.signal(signal.SIGSTOP)
            self._stage.at(time.monotonic() + for_s, partial(member.signal, signal.SIGCONT))
        return bool(members)

    def _hurt_server(self, fault: Fault) -> bool:
        if fault.kind == "restart":
            if not self._ready:  # it only begins, and has not said yet what a signal is to it
                return False
            self._server_leaves, self._ready = True, False
            self._served.ask_to_stop()
            return True
        if fault.kind == "disk_full":
            return self._served.fill_disk()
        if fault.kind == "freeze":
            self._stage.at(time.monotonic() + fault.for_s, partial(self._served.signal, signal.SIGCONT))
        return self._served.signal(signal.SIGSTOP if fault.kind == "freeze" else signal.SIGKILL)

    # ------------------------------------------------------------ the end

    def _drain(self) -> None:
        """Heal everything, end the sources, seal, and wait until all have done what there is."""
        self._draining = True
        self._served.signal(signal.SIGCONT)
        for member in self._stage.members.values():
            member.signal(signal.SIGCONT)
        for role in _SOURCES & self._stage.members.keys():
            self._stage.members[role].signal(signal.SIGTERM)
        self._await_end(_SOURCES)
        self._pipes["commands"].say(b"seal")
        self._await_end(set(roles(self._run)))
        self._pipes["commands"].say(b"end")
        self._await_end({_PROBE})
        if not self.violations:
            self._stage.ignore(self._served.said)
            if code := self._served.stop():
                self.violations.append(f"the server was told to stop and ended with exit code {code}")

    def _await_end(self, who: set[str]) -> None:
        def left() -> set[str]:
            return who & self._stage.members.keys()

        deadline = time.monotonic() + DRAIN_S
        if not self._stage.until(lambda: not left() or bool(self.violations), deadline):
            self.violations.append(
                f"stuck: {', '.join(sorted(left()))} had not ended {DRAIN_S:g} s after the last fault"
            )


def _free_port() -> int:
    with socket.create_server((proxy.THERE, 0)) as listening:
        return int(listening.getsockname()[1])
