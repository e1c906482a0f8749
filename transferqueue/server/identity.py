"""Who and where one run of a server is."""

from __future__ import annotations

from pathlib import Path

import msgspec


class ServerIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Who and where this run of a server is. lock_directory: the directory from which it removes unlocked session
    files."""

    epoch: int
    address: str
    runtime: str
    version: str
    pid: int
    started_at: float
    lock_directory: Path | None = None
