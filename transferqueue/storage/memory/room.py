"""How full a file system is, in words, for the error of a full one."""

from __future__ import annotations

import os
from pathlib import Path


def free_bytes(path: Path | str) -> tuple[int, int]:
    """The bytes that are free for this user in the file system of `path`, which must exist, and all bytes of that file
    system."""
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize


def room(path: Path | str) -> str:
    """For an error text: ``/dev/shm has 4,096 of 67,108,864 bytes free``, or that the machine's memory holds it. Of a
    file: its directory."""
    place = Path(path)
    if place.is_relative_to("/proc"):  # a memfd
        free, most = (os.sysconf(name) * os.sysconf("SC_PAGE_SIZE") for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"))
        return f"the machine has {free:,} of {most:,} bytes of memory free"
    if not place.is_dir():
        place = place.parent
    try:
        free, most = free_bytes(place)
    except OSError as error:
        return f"how much is free in {place} is not known ({error.strerror})"
    return f"{place} has {free:,} of {most:,} bytes free"
