"""What carries columns between this machine and others: a TCP stream, or one-sided reads over RDMA."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path
from typing import Final

from transferqueue.observe.machine.result import Check, fail, ok

BYTES_VARIABLE: Final = "TRANSFERQUEUE_BYTES"
"""Names and devices are repeated from `transport.bulk.one_sided`: `doctor` must work where a library that transport needs is missing."""
DEVICES: Final = Path("/sys/class/infiniband")
_STREAM: Final = "stream"
_TRANSPORTS: Final = {"nixl:tcp": "TCP, for tests", "nixl:cma": "CMA on one host, for tests"}
_USE_STREAM: Final = f"unset {BYTES_VARIABLE}, or set it to stream"


def network_checks(devices: Path = DEVICES) -> list[Check]:
    """The RDMA devices of this machine, and what a server or client with this environment would use."""
    active = rdma_devices(devices)
    listed = ", ".join(active) or "none: columns cross over TCP"
    return [ok("RDMA devices", listed), carrier(os.environ.get(BYTES_VARIABLE) or _STREAM, active)]


def rdma_devices(directory: Path) -> list[str]:
    """Devices that have an active port."""
    if not directory.is_dir():
        return []
    return sorted(device.name for device in directory.iterdir() if _is_active(device))


def _is_active(device: Path) -> bool:
    try:
        return any("ACTIVE" in state.read_text() for state in device.glob("ports/*/state"))
    except OSError:  # the device has just gone, or this user may not look
        return False


def carrier(name: str, active: list[str]) -> Check:
    """What the setting `name` means on a machine with these active RDMA devices."""
    subject = "columns cross by"
    if name == _STREAM:
        return ok(subject, "stream")
    if name != "nixl" and name not in _TRANSPORTS:
        return fail(subject, f"{BYTES_VARIABLE}={name}, which is no carrier", _USE_STREAM)
    version = _nixl()
    if version is None:
        return fail(subject, f"{name}, and the package nixl is not installed", f"install it, or {_USE_STREAM}")
    if name == "nixl" and not active:
        return fail(subject, "nixl, and there is no RDMA device with an active port", _USE_STREAM)
    return ok(subject, f"nixl {version} over {_TRANSPORTS.get(name) or ', '.join(active)}")


def _nixl() -> str | None:
    try:
        return metadata.version("nixl")
    except metadata.PackageNotFoundError:
        return None
