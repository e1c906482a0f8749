"""One run of the short job that loses processes by SIGKILL, each in a given phase, and is resumed until it is finished.

The phases of a task's process, and where it is killed in them:

- ``starts``: before its first row. It stops at a point for it (`stops`): when the interpreter begins, or when it is
  connected to the queue.
- ``works``: it holds rows, or the source room for them. It stops when it has them, or when it is about to give its
  results.
- ``waits``: for rows, room or weights. It is stopped by SIGSTOP, and killed if its request still waits at the server.
- of the trainers also ``publishes`` (the version is visible, the step not acked), ``acks`` (the step is acked) and
  ``saves`` (the checkpoint is on the disk, and the queue does not know).

The queue's own processes, the run and all at once have ``starts`` (the run has no table yet, or no trainer) and
``runs``, and are killed at a random moment; the server that starts stops when it has been forked.
"""

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import transferqueue as tq
from tests.markdown import ROOT
from tests.workflows.job import short_run, stops
from transferqueue.errors import TransferQueueError
from transferqueue.wire.answers.stats import Stats
from transferqueue.workflows.job import names

STARTS, WORKS, WAITS, RUNS = "starts", "works", "waits", "runs"
PUBLISHES, ACKS, SAVES = "publishes", "acks", "saves"
SERVING = ("server", "supervisor", "run", "all")
TRAINERS = (names.TRAIN, names.TRAIN_CRITIC)
POINTS = {
    STARTS: (stops.START, stops.CONNECTED),
    WORKS: (stops.LEASED, stops.ACKING),
    PUBLISHES: (stops.PUBLISHED,),
    ACKS: (stops.ACKED,),
    SAVES: (stops.SAVED,),
}
"""Where a process stops to be killed in a phase: at one of these points."""
LATER_S = {STARTS: 0.3, RUNS: 1.0}
"""The queue's own processes, and the run, are killed within so long."""


def phases_of(what: str) -> tuple[str, ...]:
    """The phases of a process."""
    if what in SERVING:
        return (STARTS, RUNS)
    return (STARTS, WORKS, WAITS, PUBLISHES, ACKS, SAVES) if what in TRAINERS else (STARTS, WORKS, WAITS)


@dataclass
class Kill:
    """One planned death: of what, in which phase, after how many steps; at which point, or how long after that; and
    after which step it came, -1 if it did not."""

    what: str
    phase: str
    after: int = 0
    point: str = ""
    later_s: float = 0.0
    step: int = -1

    def __str__(self) -> str:
        where = f" ({self.point})" if self.point else ""
        return f"{self.what} {self.phase}{where} {'@' + str(self.step) if self.step >= 0 else '(not met)'}"


def kill_of(what: str, phase: str, draws: random.Random) -> Kill:
    """Draw a kill. Each phase but the first comes again with each step; what a checkpoint needs comes with every second
    one."""
    after = 0 if phase == STARTS else draws.randrange(short_run.STEPS - 2)
    if (what, phase) == (stops.SERVER, STARTS):
        return Kill(what, phase, point=stops.START)
    if what in SERVING:
        return Kill(what, phase, after, later_s=draws.uniform(0, LATER_S[phase]))
    return Kill(what, phase, after, draws.choice(POINTS[phase]) if phase in POINTS else "")


@dataclass
class KilledRun:
    """One run in `folder`, which is started again until it is finished. longest_s: after that it hangs."""

    place: Path
    folder: Path
    kills: list[Kill]
    longest_s: float
    _queue: tq.Queue | None = None
    _deadline: float = field(init=False)

    def __post_init__(self) -> None:
        self._deadline = time.monotonic() + self.longest_s
        self._stops = stops.Stops(self.folder.with_name(f"{self.folder.name}-stops"))
        for kill in self.kills:
            if kill.phase == STARTS and kill.point:
                self._stops.ask(kill.what, kill.point)
        self.process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        words = ["job.toml", "--out", str(self.folder), "--json"]
        if (self.folder / "job.toml").exists():
            words.append("--resume")
        elif not any(kill.what in (names.EVALUATE, "run", "all") for kill in self.kills):
            words += ["--set", 'evaluation.path=""']
        return short_run.train(self.place, *words, environment=self._stops.environment(str(ROOT)))

    def end(self) -> dict:
        """Kill as planned, and return the summary. Raises `AssertionError` for a run that fails or hangs."""
        try:
            for kill in self.kills:
                self._come_to(kill)
            self._stops.forget()
            try:
                return short_run.finished(self.process, max(1.0, self._deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"the run hangs after step {self.steps}: {self._waiting()}") from None
        finally:
            self._forget()
            for pid in [*short_run.descendants(self.process.pid), self.process.pid]:
                _signal(pid, signal.SIGKILL)
            self.process.communicate(timeout=60)

    @property
    def steps(self) -> int:
        return max((line["step"] for line in short_run.lines(self.folder / "steps.jsonl")), default=0)

    def _come_to(self, kill: Kill) -> None:
        """Wait for a process to be in its phase, and kill it there; or for the run to end."""
        if not self._until(lambda: self.steps >= kill.after):
            return
        if kill.point:
            self._kill_at_point(kill)
        elif kill.phase == WAITS:
            self._until(lambda: self._kill_waiting(kill))
        else:
            self._kill_serving(kill)

    def _until(self, condition: Callable[[], bool]) -> bool:
        """Wait for a condition; False: the run has ended before."""
        while not condition():
            assert time.monotonic() < self._deadline, f"the run hangs after step {self.steps}: {self._waiting()}"
            if short_run.ends_within(self.process, short_run.LOOK_S):
                return False
        return True

    def _kill_at_point(self, kill: Kill) -> None:
        if kill.phase != STARTS:
            self._stops.ask(kill.what, kill.point)
        stopped: list[int] = []

        def is_there() -> bool:
            pid = self._stops.stopped(kill.what)
            stopped.extend([] if pid is None else [pid])
            return bool(stopped)

        if self._until(is_there):
            kill.step = self.steps
            _signal(stopped[0], signal.SIGKILL)

    def _kill_waiting(self, kill: Kill) -> bool:
        """Kill the process if it waits, also when it can no longer go on; return whether it did."""
        pid = short_run.pid_of(self.process.pid, kill.what)
        if pid is None or not self._waits(kill.what):
            return False
        _signal(pid, signal.SIGSTOP)
        waits = self._waits(kill.what)
        if waits:
            kill.step = self.steps
        _signal(pid, signal.SIGKILL if waits else signal.SIGCONT)
        return waits

    def _kill_serving(self, kill: Kill) -> None:
        """Kill a process of the queue, or the run, at its random moment in the phase; not in another phase."""
        ready_at = [0.0]

        def is_time() -> bool:
            ready_at[0] = (
                0.0 if self._serving_phase(kill) != kill.phase else ready_at[0] or time.monotonic() + kill.later_s
            )
            return (bool(ready_at[0]) and time.monotonic() >= ready_at[0]) or self._is_past(kill)

        if not self._until(is_time) or self._is_past(kill):
            return
        pid = short_run.pid_of(self.process.pid, "run" if kill.what == "all" else kill.what)
        if pid is None:
            return
        kill.step = self.steps
        for each in [*(short_run.descendants(pid) if kill.what == "all" else ()), pid]:
            _signal(each, signal.SIGKILL)
        if kill.what in ("run", "all"):
            self._forget()
            self.process.communicate(timeout=60)
            self.process = self._start()

    def _is_past(self, kill: Kill) -> bool:
        return kill.phase == STARTS and self._serving_phase(kill) == RUNS

    # ------------------------------------------------------------ what a process does

    def _serving_phase(self, kill: Kill) -> str:
        if short_run.pid_of(self.process.pid, "run" if kill.what == "all" else kill.what) is None:
            return "gone"
        stats = self._stats()
        serves = stats is not None and names.TABLE in stats.tables
        return RUNS if serves and (kill.what in ("server", "supervisor") or self._has_tasks()) else STARTS

    def _has_tasks(self) -> bool:
        return short_run.pid_of(self.process.pid, names.TRAIN) is not None

    def _waits(self, what: str) -> bool:
        stats, label = self._stats(), f"{what}-0"
        return stats is not None and any(wait.label == label for wait in stats.waiting)

    def _stats(self) -> Stats | None:
        """Ask the run's queue; None while it has none."""
        try:
            if self._queue is None:
                supervisor = short_run.pid_of(self.process.pid, "supervisor")
                words = Path(f"/proc/{supervisor}/cmdline").read_text().split("\0") if supervisor else []
                if "--address" not in words:
                    return None
                address = words[words.index("--address") + 1]
                if not Path(address.removeprefix("ipc://")).exists():
                    return None
                self._queue = tq.connect(address, timeout_s=2, label="kill matrix")
            return self._queue.stats()
        except (TransferQueueError, OSError):
            self._forget()
            return None

    def _forget(self) -> None:
        queue, self._queue = self._queue, None
        if queue is not None:
            with suppress(TransferQueueError):
                queue.close()

    def _waiting(self) -> str:
        stats = self._stats()
        return "its server does not answer" if stats is None else str([wait.why for wait in stats.waiting])


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
