"""The identity of one run of a server."""

from __future__ import annotations

from pathlib import Path

import msgspec


class ServerIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of this run of a server. It removes unlocked session files from `lock_directory`."""

    epoch: int
    address: str
    runtime: str
    version: str
    pid: int
    started_at: float
    lock_directory: Path | None = None
