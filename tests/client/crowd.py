"""Rounds of a server and two clients that are all killed at a moment of chance; then what is left.

    python -m tests.client.crowd DIRECTORY LEVEL ROUNDS

Prints one line of JSON. Everything lies in DIRECTORY, the shared memory too.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import transferqueue as tq
from transferqueue.server import runtime_directory
from transferqueue.server.durability.state_directory import StateDirectory
from transferqueue.server.durability_level import Level
from transferqueue.server.process.assembly import ServerProcess, first_epoch
from transferqueue.server.process.serve import Signals
from transferqueue.transport import IpcAddress

ARENA_BYTES = 64 << 20
ROUND_S = 90


class Crowd:
    """The processes of one round. Each writes a byte to a pipe for what it was told; the parent kills after a few."""

    def __init__(self, directory: Path, level: str) -> None:
        self.place = IpcAddress(directory / "run" / "q.sock")
        self.state, self.shared, self.level = directory / "state", directory / "shm", Level(level)
        self.told = {"r": 0, "p": 0, "a": 0}

    def foundation(self) -> Any:
        if self.level is Level.MEMORY:
            return runtime_directory.served_arena(ARENA_BYTES, self.shared)
        return StateDirectory(
            self.state, self.level, first_epoch=first_epoch(), arena_bytes=ARENA_BYTES, shared=self.shared
        )

    def serve(self, tell: Callable[[bytes], object]) -> None:
        with Signals() as signals:  # a handler alone is too late for a loop that is just about to sleep
            signals.server = ServerProcess(self.place, self.foundation())
            tell(b"r")
            signals.server.run(woken_by=signals)

    def work(self, tell: Callable[[bytes], object]) -> None:
        queue = tq.connect(str(self.place), timeout_s=60)
        table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])], exist_ok=True)
        while True:
            table.put(x=[np.arange(100)])
            tell(b"p")
            with table.lease("train", rows=8, at_least=1, timeout_s=60) as batch:
                batch["x"].list()
            tell(b"a")

    def round(self, steps: int) -> None:
        here, there = os.pipe()
        children = [_fork(self.serve, there), _fork(self.work, there), _fork(self.work, there)]
        os.close(there)
        while steps and (byte := os.read(here, 1)):
            self.told[byte.decode()] += 1
            steps -= 1
        for child in random.sample(children, len(children)):
            os.kill(child, signal.SIGKILL)
        while byte := os.read(here, 1):
            self.told[byte.decode()] += 1
        os.close(here)
        for child in children:
            _, status = os.waitpid(child, 0)
            if not os.WIFSIGNALED(status):
                raise RuntimeError("a process of the round ended by itself; it told why")

    def account(self) -> dict[str, int]:
        """The rows, as a last server and its client see them; both end in order."""
        here, there = os.pipe()
        child = _fork(self.serve, there)
        os.close(there)
        os.read(here, 1)
        with tq.connect(str(self.place), timeout_s=60) as queue:
            audit = queue.audit().tables.get("t")
        os.kill(child, signal.SIGTERM)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            raise RuntimeError("the last server did not end in order")
        os.close(here)
        return {name: getattr(audit, name, 0) for name in ("rows_put", "rows_done", "rows_live", "rows_dropped")}


def _fork(work: Callable[[Callable[[bytes], object]], None], pipe: int) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    faulthandler.dump_traceback_later(ROUND_S, exit=True)  # nothing here may wait for ever, and what does says where
    try:
        work(lambda byte: os.write(pipe, byte))
        code = 0
    except BaseException:  # noqa: BLE001  (told, and an exit code)
        traceback.print_exc()
    finally:
        os._exit(code)


def left_in(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.name != "shm")


def main(directory: Path, level: str, rounds: int) -> dict[str, Any]:
    random.seed(rounds)
    crowd = Crowd(directory, level)
    for _ in range(rounds):
        crowd.round(random.randint(0, 25))
    rows = crowd.account()
    left = left_in(directory)
    shutil.rmtree(directory / "state", ignore_errors=True)
    crowd.level = Level.MEMORY
    crowd.account()
    shutil.rmtree(directory / "run")
    return {
        "rounds": rounds, "rows_told": crowd.told["p"], **rows, "left": left,
        "left_without_state": left_in(directory),
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))))
