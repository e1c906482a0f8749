"""Factories for the processes of test_flow.py: a source of numbers, and stages that work, hang, raise or die."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import transferqueue as tq
from transferqueue.adapters.protocols import PartialResult
from transferqueue.errors import UsageError
from transferqueue.workflows.flow.reports.audit import audit
from transferqueue.workflows.flow.stage import Context, Produce, Work


@dataclass(frozen=True)
class Settings:
    """How many rows; a folder for marks that outlive a process."""

    total: int = 32
    marks: str = ""


class Numbers:
    """A source of rows x = 0, 1, … that seals the table after the last; goes on where an earlier life ended."""

    def __init__(self, context: Context) -> None:
        self.table = context.table
        self.total = context.settings(Settings).total
        self.next = audit(context.table).put

    def wants(self) -> int:
        """Four at a time."""
        return min(4, self.total - self.next)

    def __call__(self, rows: int) -> Mapping[str, Any]:
        """The next rows."""
        self.next += rows
        return {"x": np.arange(self.next - rows, self.next)}


@contextmanager
def numbers(context: Context) -> Iterator[Produce]:
    """Factory of the source."""
    yield Numbers(context)
    context.table.seal()


@contextmanager
def loop(context: Context) -> Iterator[Callable[[], None]]:
    """Factory of a loop, which leases rows itself."""

    def double_all() -> None:
        for batch in context.table.leases("double", rows=4, at_least=1, timeout_s=30):
            with batch:
                batch.ack(y=2 * batch["x"].numpy())

    yield double_all
    context.figures("finished", directory=str(context.directory))


@contextmanager
def works_only_together(context: Context) -> Iterator[Callable[[], None]]:
    """Factory of a loop of two processes: in their first life the second is killed once the first lives, and the first
    waits for ever."""
    marks, number = Path(context.settings(Settings).marks), context.instance
    life = len(list(marks.glob(f"{number}-*")))
    (marks / f"{number}-{life}").touch()

    def work() -> None:
        context.figures("life", instance=number, life=life)
        until = time.monotonic() + 60
        while number and not (marks / "0-0").exists():
            assert time.monotonic() < until, "process 0 wrote no mark in 60 s"
            time.sleep(0.01)  # a file tells nobody
        if not life and number:
            os.kill(os.getpid(), signal.SIGKILL)
        if not life:
            threading.Event().wait()

    yield work


@contextmanager
def double(context: Context) -> Iterator[Work]:
    """Factory of a stage that works."""
    yield lambda batch: {"y": 2 * batch["x"].numpy()}
    context.figures("finished", pid=os.getpid())


@contextmanager
def dies_after_each_batch(context: Context) -> Iterator[Work]:
    """Factory of a stage that is killed when it is asked for its second batch."""
    context.figures("life", pid=os.getpid())
    done: list[int] = []

    def work(batch: tq.Batch) -> Mapping[str, Any]:
        if done:
            os.kill(os.getpid(), signal.SIGKILL)
        done.append(len(batch))
        return {"y": 2 * batch["x"].numpy()}

    yield work


@contextmanager
def hangs_in_its_first_life(context: Context) -> Iterator[Work]:
    """Factory of a stage that holds its first batch for ever, and works when started again."""
    mark = Path(context.settings(Settings).marks, "lived")

    def work(batch: tq.Batch) -> Mapping[str, Any]:
        if not mark.exists():
            mark.touch()
            context.figures("holding", rows=len(batch))
            threading.Event().wait()
        return {"y": 2 * batch["x"].numpy()}

    yield work


@contextmanager
def hangs_in_the_middle_of_its_first_batch(context: Context) -> Iterator[Work]:
    """Factory of a generator that gives half of its first batch and then nothing, and works when started again."""
    mark = Path(context.settings(Settings).marks, "lived")

    def work(batch: tq.Batch) -> Iterator[PartialResult]:
        numbers = batch["x"].numpy()
        context.figures("batch", numbers=numbers.tolist())
        for at, number in enumerate(numbers):
            if at == len(numbers) // 2 and not mark.exists():
                mark.touch()
                context.figures("unfinished", numbers=numbers[at:].tolist())
                threading.Event().wait()
            yield PartialResult(at=np.array([at]), columns={"y": np.array([2 * number])})

    yield work


@contextmanager
def raises(context: Context) -> Iterator[Work]:
    """Factory of a stage that is broken."""

    def work(batch: tq.Batch) -> Mapping[str, Any]:
        raise RuntimeError(f"cannot double {len(batch)} rows")

    yield work


@contextmanager
def dies(context: Context) -> Iterator[Work]:
    """Factory of a stage whose process dies."""

    def work(batch: tq.Batch) -> Mapping[str, Any]:
        context.figures("dying")
        os.kill(os.getpid(), signal.SIGKILL)
        return {}

    yield work


@contextmanager
def cannot_start(context: Context) -> Iterator[Work]:
    """Factory that fails before its first row."""
    raise RuntimeError("no such model")
    yield  # type: ignore[unreachable]


@contextmanager
def engine_dies(context: Context) -> Iterator[Work]:
    """Factory whose engine, a process of its own, logs why it died; what follows from that are its last words."""
    cause = "engine ERROR Traceback (most recent call last):\\nengine ERROR   File x\\nengine ERROR OSError: no offset"
    subprocess.run([sys.executable, "-c", f'print("{cause}")'], check=True)
    raise TypeError("'NoneType' object is not callable")
    yield  # type: ignore[unreachable]


@contextmanager
def hangs(context: Context) -> Iterator[Work]:
    """Factory of a stage that never finishes a batch."""

    def work(batch: tq.Batch) -> Mapping[str, Any]:
        threading.Event().wait()
        return {}

    yield work


@contextmanager
def refuses(context: Context) -> Iterator[Work]:
    """Factory that refuses a setting."""
    raise UsageError("slots=0:\ngive at least 1")
    yield  # type: ignore[unreachable]


@contextmanager
def leaves_a_child(context: Context) -> Iterator[Work]:
    """Factory of a stage with a process of its own, which it forgets."""
    import subprocess
    import sys

    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    context.figures("child", pid=child.pid)
    yield lambda batch: {"y": 2 * batch["x"].numpy()}


@contextmanager
def waits_for_a_mark(context: Context) -> Iterator[Work]:
    """Factory of a stage that gives half of each batch, and the rest once nobody holds the lock of the file ``go``; it
    says when it holds rows."""
    marks = Path(context.settings(Settings).marks)

    def work(batch: tq.Batch) -> Iterator[PartialResult]:
        numbers = batch["x"].numpy()
        half = np.arange(len(numbers) // 2)
        yield PartialResult(at=half, columns={"y": 2 * numbers[half]})
        context.figures("holding", instance=context.instance, pid=os.getpid())
        wait_for(marks / "go")
        yield PartialResult(at=None, columns={"y": 2 * numbers[len(half) :]})

    yield work
    context.figures("finished", instance=context.instance)


@contextmanager
def starts_at_a_mark(context: Context) -> Iterator[Work]:
    """Factory whose function is there once nobody holds the lock of the file ``go``."""
    context.figures("starting", instance=context.instance)
    wait_for(Path(context.settings(Settings).marks) / "go")
    yield lambda batch: {"y": 2 * batch["x"].numpy()}


def wait_for(mark: Path) -> None:
    """Wait until nobody holds the lock of a file."""
    with mark.open("rb") as opened:
        fcntl.flock(opened, fcntl.LOCK_SH)
