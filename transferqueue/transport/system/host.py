"""Which kernel and which process numbers this process shares: what makes a pid comparable."""

from __future__ import annotations

import functools
import os
import socket
from pathlib import Path


@functools.cache
def this_boot() -> str:
    """Another one after each start of the machine: what was in memory only is gone then. "" where it is not told."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


@functools.cache
def this_host() -> str:
    """Equal in two processes exactly when one kernel runs both and a pid means the same to both.

    A host name is not enough: containers share names and not pids, or pids and not names.
    """
    try:
        pids = os.readlink("/proc/self/ns/pid")
    except OSError:
        pids = ""
    if not (this_boot() and pids):  # no /proc: the name is the best there is
        return socket.gethostname()
    return f"{this_boot()}/{pids}"
