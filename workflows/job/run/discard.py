"""Gives up an interrupted run that will not be resumed: frees its shared memory and its files in the temporary
directory.

1. Nothing is removed while a process of the run lives: the run itself and its server hold locks, which the kernel
   releases when they are gone.
2. Rows, weights and snapshots of its queue go. Checkpoints, figures, samples and logs stay, and ``discarded`` is left
   in the folder: a run without its rows cannot be resumed. A new run begins at its checkpoints with
   ``checkpoint.resume``.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transferqueue.errors import AddressInUse, UsageError
from transferqueue.transport import FileLock
from transferqueue.workflows.job.run.folder import DISCARDED, SUMMARY, RunFolder
from transferqueue.workflows.job.run.queue_snapshots import SNAPSHOTS
from transferqueue.workflows.job.run.server import discard_state, remove_runtime


def discard_run(folder: RunFolder) -> int:
    """Remove the state that `run_job` needs for ``resume``; return the bytes freed.

    Raises `AddressInUse`, and removes nothing, while the run or its server lives; `UsageError` for a run that is
    finished, which keeps nothing.
    """
    with folder.locked(), _without_server(folder.path / "state"):
        if folder.finished:
            raise UsageError(
                f"the run in {folder.path} is finished and keeps no rows: {folder.path / SUMMARY} says how it went; "
                "remove the folder to remove its files"
            )
        # First: a discard that is cut short can be repeated, and the run is not resumed.
        (folder.path / DISCARDED).touch()
        freed = discard_state(folder.path) + _size(folder.path / SNAPSHOTS)
        shutil.rmtree(folder.path / SNAPSHOTS, ignore_errors=True)
        remove_runtime(folder.path)
        return freed


@contextmanager
def _without_server(state: Path) -> Iterator[None]:
    """Keep servers from the state meanwhile. `AddressInUse` while one holds it."""
    if not state.is_dir():
        yield
        return
    lock = FileLock(state / "lock", inherited=False)
    if not lock.take():
        raise AddressInUse(
            f"the server of the run, with its state in {state}, still runs; it ends with the run: try again, or end it "
            "first"
        )
    try:
        yield
    finally:
        lock.release(unlink=False)


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
