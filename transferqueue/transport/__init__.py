"""Carries frames between a client and a server: in-process, over a socket file (ipc), and over ZeroMQ (tcp).

A frame is bytes; nothing here looks inside one. Client side: `dial` gives a `ClientChannel`, used by one
thread at a time, which sleeps in `channel.wait(wakeup, timeout_s)` and is woken by a frame, by `Wakeup.set`
from any thread, or by the time. Server side: `inproc.Hub`, `local.LocalPort` and
`zeromq.Port`.
"""

from transferqueue.transport.address import (
    Address,
    InprocAddress,
    IpcAddress,
    TcpAddress,
    default_address,
    parse_address,
    runtime_directory,
    split_addresses,
)
from transferqueue.transport.control.channel import ClientChannel, dial, is_served
from transferqueue.transport.system.file_lock import FileLock, LockProbe, is_locked, remove_unlocked
from transferqueue.transport.system.host import this_boot, this_host
from transferqueue.transport.system.wakeup import Wakeup

__all__ = [
    "Address",
    "ClientChannel",
    "FileLock",
    "InprocAddress",
    "IpcAddress",
    "LockProbe",
    "TcpAddress",
    "Wakeup",
    "default_address",
    "dial",
    "is_locked",
    "is_served",
    "parse_address",
    "remove_unlocked",
    "runtime_directory",
    "split_addresses",
    "this_boot",
    "this_host",
]
