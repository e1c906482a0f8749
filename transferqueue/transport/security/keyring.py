"""The key file of a server: its own key pair, and the clients that it accepts, each with a name and a role.

- It is one file, 0600 in a directory 0700, replaced whole by a rename. A reader sees either the old content or the new.
- A process that changes it holds the lock beside it.
- A running server reads the file again when it was replaced (`refresh`). If the file is missing or cannot be read, the
  server accepts no client.
- It also has the clients' secret keys, so that their tokens can be shown again. A person who reads the file can act as
  any client.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from transferqueue.errors import AlreadyExists, Full, NotFound, UsageError, listing
from transferqueue.limits import KEYS_MAX, MIB, check_name
from transferqueue.transport.address import TcpAddress, parse_address
from transferqueue.transport.security.keys import ClientKeys, JoinToken, KeyPair
from transferqueue.transport.system.file_lock import FileLock
from transferqueue.transport.system.private_files import private_directory, read_private, write_private
from transferqueue.wire.roles import ROLES, Role

_log: Final = logging.getLogger("transferqueue.server")
FILE_BYTES_MAX: Final = 4 * MIB
KEYS_VARIABLE: Final = "TRANSFERQUEUE_KEYS"
_NAME: Final = "keys.json"


class KeyOwner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A client that the server accepts. `made`: when the key was made, ISO 8601 in UTC."""

    name: str
    role: Role
    pair: KeyPair
    made: str


class KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of the key file."""

    server: KeyPair
    clients: list[KeyOwner] = []


_decoder: Final = msgspec.json.Decoder(KeyFile)
Stamp = tuple[int, int, int, int] | None


def default_directory() -> Path:
    """The directory of this user's keys: ``$TRANSFERQUEUE_KEYS``, else in ``$XDG_CONFIG_HOME``, else
    ``~/.config/transferqueue``."""
    if named := os.environ.get(KEYS_VARIABLE):
        return Path(named).absolute()
    config = os.environ.get("XDG_CONFIG_HOME")
    return (Path(config) if config else Path.home() / ".config") / "transferqueue"


def key_file(directory: Path) -> Path:
    """The key file in a directory of keys."""
    return directory / _NAME


def load(directory: Path) -> KeyFile:
    """Read the keys in a directory. `UsageError` if there are none, or if other users could read them."""
    path = key_file(private_directory(directory, "key directory"))
    try:
        return _decoder.decode(read_private(path, FILE_BYTES_MAX))
    except FileNotFoundError:
        raise UsageError(f"key file {path} does not exist; make keys with: transferqueue keys new NAME") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UsageError(f"key file {path} cannot be decoded: {error}; restore it, or make new keys") from error


def add(directory: Path, name: str, role: str) -> KeyOwner:
    """Make a key for a new client, and return it. Makes the file with the server's pair if there is none.

    Args:
        directory: of the key file.
        name: of the client.
        role: of the client.

    Raises:
        AlreadyExists: the name is in use.
        UsageError: the name is invalid, or the role unknown.
        Full: there are `KEYS_MAX` clients.
    """
    check_name("key", name)
    known: Role | None = next((role_name for role_name in ROLES if role_name == role), None)
    if known is None:
        raise UsageError(f"role {role!r} of key {name!r} is unknown; give one of {listing(ROLES)}")
    with _changing(directory) as before:
        keys = before or KeyFile(KeyPair.new())
        if any(owner.name == name for owner in keys.clients):
            raise AlreadyExists(f"key {name!r} exists; revoke it first, or take another name")
        if len(keys.clients) >= KEYS_MAX:
            raise Full(f"key {name!r} refused: {KEYS_MAX} keys exist, the most that a file holds; revoke some")
        made = KeyOwner(name, known, KeyPair.new(), datetime.now(UTC).isoformat(timespec="seconds"))
        _write(directory, KeyFile(keys.server, [*keys.clients, made]))
    return made


def revoke(directory: Path, name: str) -> KeyOwner:
    """Remove this client's key, and return it. A running server ends the client's sessions. `NotFound` lists the
    existing names."""
    with _changing(directory) as before:
        keys = before or load(directory)
        gone = _owner(keys, name)
        _write(directory, KeyFile(keys.server, [owner for owner in keys.clients if owner is not gone]))
    return gone


def token_of(directory: Path, name: str, address: str) -> JoinToken:
    """The join token of a client for a server at `address` (tcp). `NotFound` lists the existing names."""
    place = parse_address(address)
    if not isinstance(place, TcpAddress) or place.port == 0 or place.host == "*":
        raise UsageError(f"address {address!r} does not take keys; give tcp://host:port as clients see it")
    keys = load(directory)
    owner = _owner(keys, name)
    return JoinToken(address, ClientKeys(keys.server.public, owner.pair), owner.name, owner.role)


class Keyring:
    """The keys of a running server, kept current with the file. `UsageError` if the file does not exist at the
    start."""

    def __init__(self, directory: Path) -> None:
        self.directory: Final = directory
        self._stamp = self._stamp_now()
        keys = load(directory)
        self.server: Final = keys.server
        self._owners = _by_public(keys)

    def owner(self, public: str) -> KeyOwner | None:
        """The client with this public key; None if the server does not accept it."""
        return self._owners.get(public)

    def refresh(self) -> bool:
        """Read the file again if it was replaced, and return whether it was. Costs one `stat`, about 1.5 µs."""
        stamp = self._stamp_now()
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            keys = load(self.directory)
        except UsageError as error:
            _log.error("the server refuses every key from now on: %s", error)
            self._owners = {}
        else:
            if keys.server.public != self.server.public:
                _log.warning("the server's own key changed in its file; the server uses the old one until a restart")
            self._owners = _by_public(keys)
        return True

    def _stamp_now(self) -> Stamp:
        try:
            status = os.stat(key_file(self.directory))
        except OSError:
            return None
        return status.st_ino, status.st_size, status.st_mtime_ns, status.st_mode


def _by_public(keys: KeyFile) -> dict[str, KeyOwner]:
    return {owner.pair.public: owner for owner in keys.clients}


def _owner(keys: KeyFile, name: str) -> KeyOwner:
    named = next((owner for owner in keys.clients if owner.name == name), None)
    if named is None:
        raise NotFound(
            f"key {str(name)[:40]!r} does not exist; there are {listing(owner.name for owner in keys.clients)}"
        )
    return named


@contextmanager
def _changing(directory: Path) -> Iterator[KeyFile | None]:
    """Hold the lock of the file, and yield its content; None if there is no file yet."""
    private_directory(directory, "key directory")
    lock = FileLock(directory / f"{_NAME}.lock", inherited=False)
    if not lock.take():
        raise UsageError(f"key file {key_file(directory)} is being changed by another process; try again")
    try:
        yield load(directory) if (key_file(directory)).exists() else None
    finally:
        lock.release()


def _write(directory: Path, keys: KeyFile) -> None:
    write_private(key_file(directory), msgspec.json.format(msgspec.json.encode(keys), indent=2) + b"\n")
