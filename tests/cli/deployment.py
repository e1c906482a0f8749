"""A server started by its command in a process of its own, and commands run against it in the process of the test."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from typer.testing import CliRunner

from transferqueue.cli.app import app

PROGRAM = [sys.executable, "-m", "transferqueue.cli"]
ANSWER_S = 30
HIDDEN = ("TRANSFERQUEUE_", "XDG_")


class Done(NamedTuple):
    """How a command ended, and what it printed."""

    returncode: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Served:
    """A running `transferqueue serve`, and where it is."""

    process: subprocess.Popen[str]
    address: str
    runtime: Path

    def run(self, *words: str, columns: int = 80) -> Done:
        """A command in this deployment, by its default address."""
        return run(*words, environment={"TRANSFERQUEUE_RUNTIME": str(self.runtime), "COLUMNS": str(columns)})

    def json(self, *words: str) -> Any:
        """What a command prints with --json."""
        done = self.run(*words, "--json")
        assert done.stderr == ""
        return json.loads(done.stdout)

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """Tell the server to stop; its exit code."""
        self.process.send_signal(how)
        return self.process.wait(ANSWER_S)


def run(*words: str, environment: dict[str, str] | None = None) -> Done:
    """A command in this process, without a terminal and without the variables of the developer's shell."""
    hidden: dict[str, str | None] = dict.fromkeys(name for name in os.environ if name.startswith(HIDDEN))
    found = CliRunner().invoke(
        app, words, prog_name="transferqueue", env=hidden | (environment or {}), catch_exceptions=False
    )
    return Done(found.exit_code, found.stdout, found.stderr)


def run_as_a_program(*words: str) -> Done:
    """A command in a process of its own: costs most of a second, nearly all of it to start Python."""
    found = subprocess.run(
        [*PROGRAM, *words],
        env=_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=ANSWER_S,
        check=False,
    )
    return Done(found.returncode, found.stdout, found.stderr)


@contextmanager
def served(*words: str) -> Iterator[Served]:
    """`transferqueue serve` in a runtime directory of its own (short: a socket's path is), until the end."""
    with tempfile.TemporaryDirectory(prefix="tq-") as directory:
        runtime = Path(directory, "run")
        process = subprocess.Popen(
            [*PROGRAM, "serve", "--runtime", str(runtime), "--arena-bytes", "256MiB", *words],
            env=_environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        with process:
            try:
                ready, *addresses = (process.stdout.readline() if process.stdout else "").split()
                assert ready == "ready"
                yield Served(process, addresses[0], runtime)
            finally:
                process.kill()


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(HIDDEN)}
    return kept | {"PYTHONUNBUFFERED": "1"}
