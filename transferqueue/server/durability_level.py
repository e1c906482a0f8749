"""The levels of durability: how much of a server's state outlives its process."""

from __future__ import annotations

import enum


class Level(enum.StrEnum):
    """What the state survives: nothing, the crash of any process, or a reboot. Heads store a level's number, so a new
    level goes last."""

    MEMORY = "memory"
    PROCESS = "process"
    DISK = "disk"

    @property
    def survives_crash(self) -> bool:
        """Whether a server that starts again continues from the state."""
        return self is not Level.MEMORY

    @property
    def survives_reboot(self) -> bool:
        """Whether each commit waits for the disk."""
        return self is Level.DISK

    @property
    def in_shared_memory(self) -> bool:
        """Whether the rows of a state directory lie in shared memory, if it has room, and not in a file there."""
        return self is Level.PROCESS
