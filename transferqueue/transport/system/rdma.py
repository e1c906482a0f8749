"""The RDMA devices of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Final

DEVICES: Final = Path("/sys/class/infiniband")
"""Where the kernel lists RDMA devices, RoCE included."""


def rdma_devices(directory: Path = DEVICES) -> list[str]:
    """The RDMA devices of this machine that have an active port, by name."""
    if not directory.is_dir():
        return []
    return sorted(device.name for device in directory.iterdir() if _is_active(device))


def _is_active(device: Path) -> bool:
    try:
        return any("ACTIVE" in state.read_text() for state in device.glob("ports/*/state"))
    except OSError:  # the device has just gone, or this user may not look
        return False
