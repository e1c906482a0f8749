"""All checks of this machine, in the order in which a person would mend them."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Final

import msgspec

from transferqueue.observe.machine.kernel import kernel_checks
from transferqueue.observe.machine.libraries import library_checks
from transferqueue.observe.machine.memory import memory_checks
from transferqueue.observe.machine.network import network_checks
from transferqueue.observe.machine.result import Check
from transferqueue.observe.machine.runtime import runtime_checks

SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108  (the kernel's shared memory, by its name)


class Section(msgspec.Struct, frozen=True):
    """Related checks under a title."""

    title: str
    checks: list[Check]


def check_machine(*, runtime: Path, arena_bytes: int | None = None, memory: Path = SHARED_MEMORY) -> list[Section]:
    """Run all checks. Takes about a tenth of a second, seconds with NIXL. Leaves nothing behind, and raises nothing.

    arena_bytes: the wanted ceiling of an arena; None for the default."""
    if platform.system() != "Linux":
        return [
            Section("kernel", kernel_checks(memory=memory, runtime=runtime)),
            Section("libraries", library_checks()),
        ]
    return [
        Section("memory", memory_checks(arena_bytes=arena_bytes, memory=memory)),
        Section("kernel", kernel_checks(memory=memory, runtime=runtime)),
        Section("runtime", runtime_checks(runtime)),
        Section("network", network_checks()),
        Section("libraries", library_checks()),
    ]
