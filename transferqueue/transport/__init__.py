"""Carries frames between a client and a server: in-process, over a socket file (ipc), and over ZeroMQ (tcp).

A frame is bytes; this package does not look inside it. A client calls `dial` for a `ClientChannel`, which one thread at
a time uses. The thread sleeps in `channel.wait(wakeup, timeout_s)` until a frame arrives, another thread calls
`Wakeup.set`, or the timeout passes. A server uses `control.inproc.InprocServer`, `control.unix_socket.UnixServer` and
`control.zeromq.ZmqServer`.
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
from transferqueue.transport.control.port_probe import check_listening
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
    "check_listening",
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
