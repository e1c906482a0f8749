"""Resident memory of a process, as the kernel counts it."""

from __future__ import annotations

from pathlib import Path

PAGE = 4096


def resident_bytes(pid: int | str = "self") -> int:
    """Bytes of RAM that the process holds, shared memory left out."""
    _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
    return (resident - shared) * PAGE
