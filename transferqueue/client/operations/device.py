"""The argument ``device=`` of leases, reads and weights: where a caller wants the tensors of columns.

The package `storage.devices` is imported only for a caller that names one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from transferqueue.errors import UsageError
from transferqueue.errors.text import shown
from transferqueue.storage.columns.column import Column

Destination = Callable[[Mapping[str, Column]], dict[str, Column]]
"""Begins to copy columns to a device, see `device_copy.land`. Blocks while they are gathered."""


def destination(device: Any, *, values: bool = True) -> Destination | None:
    """The destination that a caller names, see `device_copy.accelerator`; None: views of shared memory. `UsageError`
    for a device that is not here, or if no `values` are wanted."""
    if device is None:
        return None
    if not values:
        raise UsageError(f"device={shown(device)} with values=False: no values are read; leave out one of the two")
    from transferqueue.storage.devices.device_copy import accelerator, land

    return partial(land, device=accelerator(device))
