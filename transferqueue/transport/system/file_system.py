"""Whether a directory lies on a disk or in memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_IN_MEMORY: Final = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
_MOUNTS: Final = Path("/proc/self/mountinfo")


def memory_file_system(directory: Path) -> str:
    """The kind of the file system that `directory` is in, such as tmpfs, if it keeps its files in memory; "" for any
    other."""
    stat = directory.stat()
    number = f"{os.major(stat.st_dev)}:{os.minor(stat.st_dev)}"
    for mount in _MOUNTS.read_text().splitlines():
        place, _, source = mount.partition(" - ")
        if place.split()[2] == number:
            kind = source.split()[0]
            return kind if kind in _IN_MEMORY else ""
    return ""
