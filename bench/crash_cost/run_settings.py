"""The settings of a run that loses a process."""

from __future__ import annotations

from pathlib import Path

import msgspec


class RunSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The same for every stack.

    Args:
        at: folder of model and data.
        out: folder of what the run writes.
        steps: of the run; there are as many prompts as they need.
        prompts: of a step.
        group: responses to each.
        tokens: of the longest response.
        checkpoint_every: steps between two checkpoints.
        kill_after: steps after which a process is killed.
        address: of the queue; default "": the stack has none, or one of its own.
    """

    at: str
    out: str
    steps: int
    prompts: int
    group: int
    tokens: int
    checkpoint_every: int
    kill_after: int
    address: str = ""

    @property
    def place(self) -> Path:
        """Folder of model and data."""
        return Path(self.at)

    @property
    def folder(self) -> Path:
        """Folder of what the run writes."""
        return Path(self.out)

    @property
    def rows(self) -> int:
        """Rows of a step."""
        return self.prompts * self.group

    @property
    def log(self) -> Path:
        """Folder of the files that processes write themselves."""
        return self.folder / "processes"
