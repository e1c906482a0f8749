"""Stops a process of a run at a point, where it waits to be killed. A test plants this in the processes of a run, which
know nothing of it.

`environment` makes a folder with a ``sitecustomize.py`` that imports this module in each Python process of the run. A
process that is named in the folder by a file ``NAME.stop`` stops at the first point that the file lists, removes the
file, and says in a file ``NAME.here`` that it is there: its process id. It never goes on: without being killed, it
exits after `STOP_S`. The names are those of the tasks, and `SERVER`, the child of the supervisor that serves the queue.
"""

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = "TRANSFERQUEUE_TEST_STOPS"
STOP_S = 300.0
SERVER = "server"
START, CONNECTED = "start", "connected"
LEASED, ACKING, ACKED = "leased", "acking", "acked"
PUBLISHED, SAVED = "published", "saved"


class Stops:
    """The stops of one run, as its test sees them, in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "sitecustomize.py").write_text(
            "import tests.workflows.job.stops\n\ntests.workflows.job.stops.plant()\n"
        )

    def environment(self, paths: str) -> dict[str, str]:
        """Variables of the run's processes. paths: where they find modules."""
        return {"PYTHONPATH": f"{self.folder}{os.pathsep}{paths}", FOLDER: str(self.folder)}

    def ask(self, name: str, *points: str) -> None:
        """Ask the process `name` to stop at the first of these points."""
        _replace(self.folder / f"{name}.stop", " ".join(points))

    def stopped(self, name: str) -> int | None:
        """Return the process id of the process that has stopped as asked, once. None: none has yet."""
        here = self.folder / f"{name}.here"
        if not here.exists():
            return None
        pid = int(here.read_text())
        here.unlink()
        return pid

    def forget(self) -> None:
        """Ask for nothing any more."""
        for path in self.folder.glob("*.stop"):
            path.unlink(missing_ok=True)


def _replace(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(path)


# ---------------------------------------------------------------- in a process of the run


def plant() -> None:
    """Make this process stop where it is asked to, if it is the first one of a task; of a supervisor, the server that
    it forks."""
    if FOLDER not in os.environ:
        return
    folder = Path(os.environ[FOLDER])
    if {"serve", "--supervise"} <= set(sys.orig_argv):
        os.register_at_fork(after_in_child=lambda: _stop(folder, SERVER, START))
    name = _name(sys.orig_argv)
    if name is None:
        return

    def at(point: str) -> None:
        _stop(folder, name, point)

    at(START)
    import transferqueue
    from transferqueue.client import Batch, Table, WeightChannel

    _around(transferqueue, "connect", at, after=CONNECTED)
    _around(Table, "lease", at, after=LEASED)
    _around(Table, "reserve", at, after=LEASED)
    _around(Table, "put", at, before=ACKING)
    _around(Batch, "ack", at, before=ACKING)
    _around(Table, "ack", at, before=ACKING, after=ACKED)
    _around(WeightChannel, "publish", at, after=PUBLISHED)
    _around(Table, "checkpointed", at, before=SAVED)


def _name(words: list[str]) -> str | None:
    """The name of a stage's process, of which these are the command's words."""
    if "--job" not in words[:-1]:
        return None
    job = json.loads(words[words.index("--job") + 1])
    return str(job["name"]) if job["instance"] == 0 else None


def _around(owner: Any, verb: str, at: Callable[[str], None], *, before: str = "", after: str = "") -> None:
    whole = getattr(owner, verb)

    def stopping(*arguments: Any, **options: Any) -> Any:
        at(before)
        result = whole(*arguments, **options)
        at(after)
        return result

    setattr(owner, verb, stopping)


def _stop(folder: Path, name: str, point: str) -> None:
    try:
        points = (folder / f"{name}.stop").read_text().split()
    except FileNotFoundError:
        return
    if point in points:
        (folder / f"{name}.stop").unlink(missing_ok=True)
        _replace(folder / f"{name}.here", str(os.getpid()))
        threading.Event().wait(STOP_S)
        os._exit(70)
