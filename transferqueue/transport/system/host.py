"""Identifies this machine's boot and this process's pid namespace: pids can be compared only within both."""

from __future__ import annotations

import functools
import os
import socket
from pathlib import Path


@functools.cache
def this_boot() -> str:
    """The id of this boot of the machine; it differs after each reboot. "" if the kernel does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


@functools.cache
def this_host() -> str:
    """A text that is equal in two processes exactly if they run on one kernel and in one pid namespace.

    A host name is not enough: containers may share names but not pids, or pids but not names.
    """
    try:
        pids = os.readlink("/proc/self/ns/pid")
    except OSError:
        pids = ""
    if not (this_boot() and pids):  # without /proc only the name is known
        return socket.gethostname()
    return f"{this_boot()}/{pids}"
