"""The stacks whose processes are killed: what starts them, which process plays which role, and what a person restarts.

`Stack.restart_ended` does what a person would do with a process that has no supervisor, at once.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Final

import msgspec

from bench.crash_cost import process_log
from bench.crash_cost.costs import Response, TrainedStep, response_of
from bench.crash_cost.run_settings import RunSettings
from bench.harness import ROOT
from tests.workflows.job.short_run import children, descendants, pid_of

TRAINER: Final = "trainer"
GENERATOR: Final = "generator"
BUFFER: Final = "buffer"
ALL: Final = "all"
ROLES: Final = (TRAINER, GENERATOR, BUFFER, ALL)
_LAST_BYTES: Final = 3000


class Stack(ABC):
    """A run of one stack in a folder of its own.

    Attributes:
        roles: that are killed.
        same_process: other roles, which the process of the first plays too.
        main: the process whose success is the end of the run.
        by_hand: what a person started again, in order.
    """

    name: ClassVar[str]
    roles: ClassVar[Sequence[str]] = ROLES
    same_process: ClassVar[Sequence[str]] = ()
    main: ClassVar[str]

    def __init__(self, settings: RunSettings) -> None:
        self.settings = settings
        self.by_hand: list[str] = []
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        settings.folder.mkdir(parents=True)

    @abstractmethod
    def commands(self) -> Mapping[str, Sequence[str]]:
        """Return the command of each process that a person starts, in their order."""

    @abstractmethod
    def pid(self, role: str) -> int | None:
        """Return the process that plays a role; None while there is none."""

    @abstractmethod
    def newest_step(self) -> int:
        """Return the step that the run has come to."""

    def taken(self) -> list[TrainedStep]:
        """Return the steps that trainers took, in their order."""
        return process_log.taken(self.settings.log)

    def start(self) -> None:
        """Start all processes."""
        for name in self.commands():
            self._start(name)

    def restart_ended(self) -> None:
        """Start again what ended without success, as a person would who sees it at once."""
        for name, process in self._processes.items():
            if process.poll() not in (None, 0):
                self.by_hand.append(name)
                self._start(name)

    @property
    def is_over(self) -> bool:
        """Whether the run came to its end."""
        return self._processes[self.main].poll() == 0

    def kill(self, role: str) -> None:
        """Kill the process of a role, or all."""
        pids = [self.pid(role)]
        if role == ALL:
            pids = [each for process in self._processes.values() for each in (*descendants(process.pid), process.pid)]
        for pid in pids:
            if pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if role == ALL:
            for process in self._processes.values():
                process.wait(60)

    def stop(self) -> None:
        """End all processes."""
        for process in self._processes.values():
            for pid in (*descendants(process.pid), process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait(60)

    def last_words(self) -> str:
        """Return the end of what each process said."""
        return "\n".join(
            f"--- {name}: {self._output(name).read_text(errors='replace')[-_LAST_BYTES:]}" for name in self._processes
        )

    def _output(self, name: str) -> Path:
        return self.settings.folder / f"{name}.txt"

    def _start(self, name: str) -> None:
        with self._output(name).open("ab") as out:
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", *self.commands()[name]],
                cwd=self.settings.place,
                env=os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )


JOB: Final = """
name = "crash"
steps = {steps}
model = {{ path = "model", dtype = "float32" }}
data = {{ path = "data", template = "{{question}}", prompt_tokens_max = 40 }}
sampling = {{ group_size = {group}, tokens_max = {tokens} }}
reward = [{{ function = "even_reward:even" }}]
algorithm = {{ kind = "grpo" }}
trainer = {{ prompts_per_step = {prompts}, lr = 1e-4 }}
pacing = {{ mode = "async" }}
weights = {{ dtype = "float32" }}
checkpoint = {{ every = {checkpoint_every} }}
queue = {{ memory_gib = 0.25, record = "on" }}

[[engine]]
kind = "factory"
factory = "bench.crash_cost.counting_engine:engine"
slots = {rows}
options = {{ log = "{log}" }}
"""
REWARD: Final = """
def even(completion_ids, **columns):
    return [sum(token % 2 == 0 for token in ids) / max(1, len(ids)) for ids in completion_ids]
"""


class JobStack(Stack):
    """`transferqueue train`, asynchronous: a job file of this project, with the queue that it starts."""

    name = "transferqueue train"
    main = "train"
    changes: ClassVar[Sequence[str]] = ()
    """Options of the command."""
    _tasks: ClassVar = {TRAINER: "train", GENERATOR: "rollout", BUFFER: "server"}

    def commands(self) -> Mapping[str, Sequence[str]]:
        out = self.settings.folder / "run"
        job = self.settings.folder / "job.toml"
        if not job.exists():
            values = msgspec.structs.asdict(self.settings) | {"rows": self.settings.rows, "log": self.settings.log}
            job.write_text(JOB.format(**values))
            (self.settings.place / "even_reward.py").write_text(REWARD)
        resumed = ["--resume"] if (out / "job.toml").exists() else []
        return {
            "train": [
                "transferqueue.cli",
                "train",
                str(job),
                "--out",
                str(out),
                "--no-page",
                *(resumed or self.changes),
            ]
        }

    def pid(self, role: str) -> int | None:
        run = self._processes["train"].pid
        return run if role == ALL else pid_of(run, self._tasks[role])

    def newest_step(self) -> int:
        return max((line["step"] for line in self._lines("steps.jsonl")), default=0)

    def taken(self) -> list[TrainedStep]:
        """As the run's own files have them: the rows of each step, and what was recorded of each row."""
        import transferqueue as tq

        rows = tq.open_run(self.settings.folder / "run").table("rollouts")
        found = rows.arrow(columns=["_row", "prompt_ids", "response_ids"]).to_pylist()
        of_row: dict[int, Response] = {
            row["_row"]: response_of(row["prompt_ids"], row["response_ids"]) for row in found if row["response_ids"]
        }
        return [
            TrainedStep(line["step"], 0.0, [of_row[row] for part in line["parts"] for row in part])
            for line in self._lines("step_rows.jsonl")
        ]

    def _lines(self, name: str) -> list[dict[str, Any]]:
        path, lines = self.settings.folder / "run" / name, []
        for line in path.read_bytes().splitlines() if path.exists() else ():
            with suppress(msgspec.DecodeError):  # it is being written
                lines.append(msgspec.json.decode(line))
        return lines


class PatientJobStack(JobStack):
    """The same job with a bound on staleness that allows for the versions that a crash takes back."""

    name = "transferqueue train, max_staleness = 8"
    changes = ("--set", "pacing.max_staleness=8")


class TrlStack(Stack):
    """TRL's GRPOTrainer as it is: one process generates and trains in turn."""

    name = "TRL GRPOTrainer"
    main = "trainer"
    roles = (TRAINER, GENERATOR)
    same_process = (BUFFER,)

    def commands(self) -> Mapping[str, Sequence[str]]:
        return {"trainer": self._command("trainer")}

    def pid(self, role: str) -> int | None:
        return self._processes["trainer"].pid

    def newest_step(self) -> int:
        steps = process_log.taken(self.settings.log)
        return steps[-1].step if steps else 0

    def _command(self, what: str) -> Sequence[str]:
        path = self.settings.folder / "settings.json"
        path.write_bytes(msgspec.json.encode(self.settings))
        return ["bench.crash_cost.trl_processes", what, str(path)]


class QueueTrlStack(TrlStack):
    """TRL's GRPOTrainer with `QueueRollouts`, one request ahead: a supervised durable server, and a flow with the
    generating process."""

    name = "TRL GRPOTrainer, this queue"
    roles = ROLES
    same_process = ()

    def __init__(self, settings: RunSettings) -> None:
        self._sockets = tempfile.TemporaryDirectory(prefix="tq-")  # the path of a socket is short
        address = f"ipc://{self._sockets.name}/control.sock"
        super().__init__(msgspec.structs.replace(settings, address=address))

    def commands(self) -> Mapping[str, Sequence[str]]:
        serve = ["transferqueue.cli", "serve", "--address", self.settings.address, "--supervise"]
        serve += ["--durability", "process", "--state", str(self.settings.folder / "state"), "--arena-bytes", "256MiB"]
        return {"server": serve, "generators": self._command("generator"), "trainer": self._command("trainer")}

    def start(self) -> None:
        self._start("server")
        socket, deadline = Path(self.settings.address.removeprefix("ipc://")), time.monotonic() + 60
        while not socket.exists():
            if time.monotonic() > deadline:
                raise SystemExit(f"the server did not start: {self.last_words()}")
            time.sleep(0.05)
        for name in ("generators", "trainer"):
            self._start(name)

    def pid(self, role: str) -> int | None:
        if role == BUFFER:
            return next(iter(children(self._processes["server"].pid)), None)
        return pid_of(self._processes["generators"].pid, "rollout") if role == GENERATOR else super().pid(role)

    def stop(self) -> None:
        super().stop()
        self._sockets.cleanup()


STACKS: Final[Mapping[str, type[Stack]]] = {
    "job": JobStack,
    "job-patient": PatientJobStack,
    "trl": TrlStack,
    "trl-queue": QueueTrlStack,
}
