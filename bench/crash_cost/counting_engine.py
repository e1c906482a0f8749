"""A transformers engine that notes each token and each finished response in the files of its process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.crash_cost.process_log import ProcessLog
from transferqueue.adapters.engines.running_batch import Row
from transferqueue.adapters.engines.transformers import TransformersGenerator


class CountedRow(Row):
    """A row that notes its tokens."""

    __slots__ = ("log",)

    log: ProcessLog

    def add(self, token: int, logprob: float, version: int) -> str | None:
        self.log.drew()
        reason = super().add(token, logprob, version)
        if reason is not None:
            self.log.responded(self.context, self.ids)
        return reason


class CountingGenerator(TransformersGenerator):
    """A `TransformersGenerator` of counted rows. log: of this process."""

    log: ProcessLog

    def _row(self, *given: Any) -> CountedRow:
        row = CountedRow(*given)
        row.log = self.log
        return row


def engine(directory: str, *, slots: int, log: str) -> CountingGenerator:
    """Make the engine of a job (``kind = "factory"``). log: the folder of `ProcessLog`."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype="float32")
    made = CountingGenerator(model, version=-1, rows_max=slots)
    made.log = ProcessLog(Path(log))
    return made
