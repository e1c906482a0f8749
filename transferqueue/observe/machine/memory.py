"""Check the room for an arena: shared memory, the machine's memory, address space, and overcommit.

An arena's ceiling costs address space only; rows take pages as they arrive. So less room than the ceiling is a warning
(the queue fills before its limit), and no room at all a failure.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Final

from transferqueue.limits import ARENA_BYTES_DEFAULT, ARENA_STEP_BYTES
from transferqueue.observe import units
from transferqueue.observe.machine.result import Check, fail, ok, warn

_CGROUP_LIMITS: Final = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_CGROUP_UNLIMITED: Final = 1 << 60
_OVERCOMMIT_NEVER: Final = 2


def memory_checks(*, arena_bytes: int | None, memory: Path) -> list[Check]:
    """Room for an arena of `arena_bytes` (None: the default) in the directory `memory`."""
    wanted = arena_bytes or ARENA_BYTES_DEFAULT
    return [shared_memory(wanted, memory), machine_memory(wanted), _address_space(wanted), _overcommit()]


def shared_memory(wanted: int, memory: Path) -> Check:
    """Size and free space of the file system that holds served arenas. Without it a server uses a memfd, which
    works, but its pages are invisible in the file system."""
    subject = "shared memory"
    if not (memory.is_dir() and os.access(memory, os.W_OK | os.X_OK)):
        finding = f"{memory} is not a directory that can be written; a server will use a memfd"
        return warn(subject, finding, f"mount a tmpfs at {memory}")
    room = os.statvfs(memory)
    size, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    finding = f"{memory}: {units.size(free)} free of {units.size(size)}"
    if free >= wanted:
        return ok(subject, f"{finding}; an arena may ask for {units.size(wanted)}")
    size_text = units.size(wanted).replace(" ", "").removesuffix("iB")
    return warn(
        subject,
        f"{finding}; an arena may ask for {units.size(wanted)}: it will be smaller, or a memfd",
        f"mount -o remount,size={size_text} {memory}; in Docker: --shm-size={size_text.lower()}",
    )


def machine_memory(wanted: int) -> Check:
    """Memory that is available, or what the cgroup still allows: an arena's pages count against both."""
    size, free = _meminfo("MemTotal"), _meminfo("MemAvailable")
    limit = _cgroup_limit()
    where = "in this cgroup: " if limit is not None and limit < size else ""
    size, free = (size, free) if limit is None else (min(size, limit), min(free, limit))
    return graded_room(where, free=free, size=size, wanted=wanted)


def graded_room(where: str, *, free: int, size: int, wanted: int) -> Check:
    """Free bytes against an arena's ceiling: ok, less than it, or not even one step of growth."""
    subject = "memory"
    finding = f"{where}{units.size(free)} free of {units.size(size)}"
    remedy = "give the machine or container more memory, or serve with a smaller --arena-bytes"
    if free < ARENA_STEP_BYTES:
        return fail(subject, f"{finding}; an arena grows by {units.size(ARENA_STEP_BYTES)} at a time", remedy)
    if free < wanted:
        return warn(subject, f"{finding}; an arena may ask for {units.size(wanted)}", remedy)
    return ok(subject, finding)


def _meminfo(name: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        key, _, amount = line.partition(":")
        if key == name:
            return int(amount.split()[0]) * 1024
    return 0


def _cgroup_limit() -> int | None:
    for path in _CGROUP_LIMITS:
        if path.is_file() and (text := path.read_text().strip()).isdigit() and int(text) < _CGROUP_UNLIMITED:
            return int(text)
    return None


def _address_space(wanted: int) -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    subject = "address space"
    if soft == resource.RLIM_INFINITY:
        return ok(subject, "unlimited")
    needed = 2 * wanted
    if soft < needed:
        finding = f"{units.size(soft)}; each client maps the arena twice, {units.size(needed)}"
        return fail(subject, finding, "ulimit -v unlimited")
    return ok(subject, units.size(soft))


def _overcommit() -> Check:
    path = Path("/proc/sys/vm/overcommit_memory")
    policy = int(path.read_text()) if path.is_file() else 0
    if policy == _OVERCOMMIT_NEVER:
        finding = "vm.overcommit_memory=2: private views of an arena count as used memory"
        return warn("overcommit", finding, "sysctl vm.overcommit_memory=1, or a smaller --arena-bytes")
    return ok("overcommit", f"vm.overcommit_memory={policy}")
