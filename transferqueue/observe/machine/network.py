"""The carrier of columns between this machine and others: a stream, or RDMA."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from transferqueue.errors import UsageError
from transferqueue.observe.machine.result import Check, fail, ok, warn

_SUBJECT: Final = "columns cross by"


def network_checks(devices: Path | None = None) -> list[Check]:
    """The RDMA devices of this machine, and the carrier of servers and clients in this environment. devices: the
    directory in which the kernel lists them; None: the usual one."""
    try:
        from transferqueue.transport.bulk.carriers import BYTES_VARIABLE, STREAM
        from transferqueue.transport.system.rdma import DEVICES, rdma_devices
    except ImportError as error:  # a library that transport needs is missing, and `doctor` says which under "libraries"
        return [warn(_SUBJECT, f"nothing: {error}", "install the missing libraries, listed under libraries")]
    listed = ", ".join(rdma_devices(devices or DEVICES)) or "none: columns cross over TCP"
    return [ok("RDMA devices", listed), carrier(os.environ.get(BYTES_VARIABLE) or STREAM)]


def carrier(setting: str) -> Check:
    """The effect of this setting of `TRANSFERQUEUE_BYTES` on this machine."""
    from transferqueue.transport.bulk.carriers import BYTES_VARIABLE, STREAM, chosen_carrier

    try:
        chosen = chosen_carrier(setting)
        return ok(_SUBJECT, STREAM if chosen is None else chosen.describe())
    except UsageError as error:
        return fail(_SUBJECT, str(error), f"do as that says, or unset {BYTES_VARIABLE}, or set it to {STREAM}")
