"""What carries columns between this machine and others: a TCP stream, or one-sided reads over RDMA."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Final

from transferqueue.observe.machine.result import Check, fail, ok, warn

_STREAM: Final = "stream"
_TRANSPORTS: Final = {"nixl:tcp": "TCP, for tests", "nixl:cma": "CMA on one host, for tests"}
_SUBJECT: Final = "columns cross by"
LOAD_S: Final = 60.0
_LOAD: Final = """
import os, sys
from transferqueue.transport.bulk.one_sided import load_nixl
try:
    load_nixl()
except ImportError as error:
    print(*str(error).splitlines(), file=sys.stderr, flush=True)
    os._exit(1)
os._exit(0)  # what NIXL brings may crash when it is unloaded
"""


def network_checks(devices: Path | None = None) -> list[Check]:
    """The RDMA devices of this machine, and what a server or client with this environment would use. devices: as the kernel lists them;
    None: where it does."""
    try:
        from transferqueue.transport.bulk.one_sided import BYTES_VARIABLE, DEVICES, rdma_devices
    except ImportError as error:  # a library that transport needs is missing, and `doctor` says which under "libraries"
        return [warn(_SUBJECT, f"nothing: {error}", "install what is missing under libraries")]
    active = rdma_devices(devices or DEVICES)
    listed = ", ".join(active) or "none: columns cross over TCP"
    return [ok("RDMA devices", listed), carrier(os.environ.get(BYTES_VARIABLE) or _STREAM, active, BYTES_VARIABLE)]


def carrier(name: str, active: list[str], variable: str = "TRANSFERQUEUE_BYTES") -> Check:
    """What the setting `name` means on a machine with these active RDMA devices."""
    subject, use_stream = _SUBJECT, f"unset {variable}, or set it to stream"
    if name == _STREAM:
        return ok(subject, "stream")
    if name != "nixl" and name not in _TRANSPORTS:
        return fail(subject, f"{variable}={name}, which is no carrier", use_stream)
    version = _nixl()
    if version is None:
        return fail(subject, f"{name}, and the package nixl is not installed", f"install it, or {use_stream}")
    if name == "nixl" and not active:
        return fail(subject, "nixl, and there is no RDMA device with an active port", use_stream)
    if failure := load_failure():
        return fail(
            subject,
            f"{name}, and nixl {version} cannot be loaded: {failure}",
            f"install it as that says, or {use_stream}",
        )
    return ok(subject, f"nixl {version} over {_TRANSPORTS.get(name) or ', '.join(active)}")


def _nixl() -> str | None:
    try:
        return metadata.version("nixl")
    except metadata.PackageNotFoundError:
        return None


def load_failure() -> str:
    """Why a process cannot load NIXL; "" if it can. Takes seconds. In a process of its own, since NIXL and what it brings stay in one."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _LOAD], check=False, capture_output=True, text=True, timeout=LOAD_S
        )
    except subprocess.TimeoutExpired:
        return f"it took longer than {LOAD_S:g} s"
    said = done.stderr.strip().splitlines()
    return "" if done.returncode == 0 else said[-1] if said else f"the process ended with code {done.returncode}"
