"""Addresses of servers, as text and as values. Invalid texts are refused here.

::

    ipc:///run/user/1000/transferqueue/control.sock     a socket file, an absolute path
    tcp://host:7070      tcp://[::1]:7070               a host and a port (0: any free one, to listen only)
    inproc:4711-1                                       an embedded server of this process
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

import msgspec

from transferqueue.errors import UsageError
from transferqueue.errors.text import shown

RAY_SCHEME: Final = "ray://"
IPC_PATH_BYTES_MAX: Final = 107
"""The kernel's `sun_path` holds 108 bytes with its terminator."""

_INPROC: Final = re.compile(r"[A-Za-z0-9-]{1,64}")
_HOST: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?|\*|\[[0-9A-Fa-f:.]{2,45}\]")
_COMMA: Final = re.compile(r",(?=\s*(?:ipc://|tcp://|inproc:|ray://|tqjoin_|ray\s*(?:,|$)))")
_KINDS: Final = "ipc:///path/of/socket or tcp://host:port"


class IpcAddress(msgspec.Struct, frozen=True):
    """A socket file on this machine."""

    path: Path

    def __str__(self) -> str:
        return f"ipc://{self.path}"

    @property
    def lock_path(self) -> Path:
        """The file that a server locks while it listens here."""
        return self.path.with_name(self.path.name + ".lock")

    @property
    def note_path(self) -> Path:
        """A server whose disk failed leaves the reason in this file, until the next one listens here."""
        return self.path.with_name(self.path.name + ".note")


class TcpAddress(msgspec.Struct, frozen=True):
    """A host and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"tcp://{self.host}:{self.port}"


class InprocAddress(msgspec.Struct, frozen=True):
    """An embedded server of this process."""

    id: str

    def __str__(self) -> str:
        return f"inproc:{self.id}"


Address = IpcAddress | TcpAddress | InprocAddress


def runtime_directory() -> Path:
    """The directory of this user's sockets and session files: ``$TRANSFERQUEUE_RUNTIME``, else in
    ``$XDG_RUNTIME_DIR``, else ``/tmp/transferqueue-<uid>``."""
    if named := os.environ.get("TRANSFERQUEUE_RUNTIME"):
        return Path(named).absolute()
    if session := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(session, "transferqueue")
    return Path(f"/tmp/transferqueue-{os.getuid()}")  # noqa: S108  (made 0700, and checked to be this user's)


def default_address(runtime: Path | None = None) -> str:
    """The address at which this user's server listens by default."""
    return str(IpcAddress((runtime or runtime_directory()).absolute() / "control.sock"))


def split_addresses(text: str) -> list[str]:
    """The addresses or join tokens of a comma-separated text. A comma separates only if another address follows."""
    return [address.strip() for address in _COMMA.split(text)]


def parse_address(text: object) -> Address:
    """The address that `text` names. `UsageError` names the text, the rule and the remedy."""
    if not isinstance(text, str):
        raise UsageError(f"address {shown(text)} is {type(text).__name__}; an address is text: {_KINDS}")
    if "\x00" in text or len(text) > 1024:
        raise UsageError(f"address {shown(text)} is too long or holds a zero byte; give {_KINDS}")
    for scheme, parse in (("ipc://", _ipc), ("tcp://", _tcp), ("inproc:", _inproc)):
        if text.startswith(scheme):
            return parse(text, text[len(scheme) :])
    raise UsageError(
        f"address {shown(text)} has an unknown form; give {_KINDS} (or, to connect(), a join token, 'embedded' or "
        "'ray')"
    )


def _ipc(text: str, rest: str) -> IpcAddress:
    if rest.startswith("@"):
        raise UsageError(
            f"address {shown(text)} is an abstract socket, which any user may open; give the absolute path of a file, "
            "in a directory of your own"
        )
    if not rest.startswith("/") or rest.endswith("/"):
        raise UsageError(
            f"address {shown(text)} has no absolute path of a socket file; write ipc:///directory/name.sock"
        )
    size = len(rest.encode())
    if size > IPC_PATH_BYTES_MAX:
        raise UsageError(
            f"address {shown(text)} has a path of {size} bytes; the kernel allows {IPC_PATH_BYTES_MAX}: "
            "use a shorter directory (TRANSFERQUEUE_RUNTIME names it)"
        )
    return IpcAddress(Path(rest))


def _tcp(text: str, rest: str) -> TcpAddress:
    host, colon, port = rest.rpartition(":")
    if not colon or not _HOST.fullmatch(host):
        raise UsageError(f"address {shown(text)} has no host and port; write tcp://host:port, or tcp://[ipv6]:port")
    if not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise UsageError(f"address {shown(text)} has port {shown(port)}; a port is a number from 1 to 65535")
    return TcpAddress(host, int(port))


def _inproc(text: str, rest: str) -> InprocAddress:
    if not _INPROC.fullmatch(rest):
        raise UsageError(f"address {shown(text)} names no embedded server; take `inproc_address` of one that runs here")
    return InprocAddress(rest)


def is_ray_address(address: object) -> bool:
    """Whether this address names a deployment on Ray."""
    return isinstance(address, str) and (address == "ray" or address.startswith(RAY_SCHEME))
