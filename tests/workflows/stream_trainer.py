"""The trainer of docs/how-to/service.md as a process that SIGKILLs itself before one of its lines:
``python -m tests.workflows.stream_trainer QUEUE STATE KILL``.

Its learner counts how often each sample was trained. KILL: how many lines of the loop are run before the kill (-1:
all). The exit code is 0 when all steps are done.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from tests.markdown import ROOT, blocks
from tests.workflows.stream_engine import count_down
from transferqueue import connect
from transferqueue.adapters.protocols import Prompt
from transferqueue.workflows.service import Service

STEPS = 3


def documented_loop() -> Any:
    """The function ``train`` of the page, as it stands there."""
    page = ROOT / "docs" / "how-to" / "service.md"
    (code,) = [block.code for block in blocks(page) if "def train(service, learner" in block.code]
    names: dict[str, Any] = {}
    exec(compile(code, str(page), "exec"), names)  # noqa: S102
    return names["train"]


class Learner:
    """Its weights are all that it has trained: how often each sample, by ``step/prompt/sample``."""

    def __init__(self) -> None:
        self.trained: Counter[str] = Counter()
        self.pending: Counter[str] = Counter()

    def accumulate(self, samples: list[str]) -> None:
        self.pending.update(samples)

    def step(self) -> None:
        self.trained += self.pending
        self.pending = Counter()

    def weights(self) -> dict[str, Any]:
        return count_down(1)


class Saved:
    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self, learner: Learner) -> int:
        if not self.path.exists():
            return 0
        state = json.loads(self.path.read_text())
        learner.trained = Counter(state["trained"])
        return state["step"]

    def save(self, learner: Learner, step: int) -> None:
        unfinished = self.path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps({"step": step, "trained": learner.trained}))
        os.replace(unfinished, self.path)


def prompts_of(step: int) -> list[Prompt]:
    return [Prompt.of([step, last], 2) for last in (3, 9)]


def columns_of(batch: Any) -> list[str]:
    rows = zip(batch["request"].list(), batch["prompt"].list(), batch["sample"].list(), strict=True)
    return [f"{step}/{prompt}/{sample}" for step, prompt, sample in rows]


def killed_before(line: int, loop: Any) -> Any:
    """A trace function that kills this process before the loop runs that line of its own, counted as they are run."""
    left = [line]

    def each_line(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return each_line

    return lambda frame, event, _: each_line if frame.f_code is loop.__code__ else None


def main(address: str, state: str, line: int) -> None:
    loop = documented_loop()
    with connect(address, label="trainer") as queue:
        service = Service.join(queue)
        if line >= 0:
            sys.settrace(killed_before(line, loop))
        loop(service, Learner(), Saved(Path(state)), prompts_of, columns_of, STEPS)
        sys.settrace(None)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
