"""JSON files with a format and a checksum, and directories that are written completely or not at all.

A checksummed file is one JSON object with ``format`` (kind and version), ``xxh3`` (XXH3-64 of the rest, in compact
JSON) and the rest. Another format is `UsageError`, a wrong checksum `Corruption`; both name the file.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import xxhash

from transferqueue.errors import Corruption, UsageError
from transferqueue.transport.system.private_files import sync_path, write_durably

METADATA: Final = "metadata.json"
"""The file at the top of a checkpoint, as documented."""
_ABOUT: Final = frozenset({"format", "xxh3"})
_AT_ONCE: Final = 1 << 20
T = TypeVar("T")


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Size and checksum of a file as it was written."""

    bytes: int
    xxh3: str


def write(path: Path, kind: str, content: Mapping[str, Any]) -> FileRecord:
    """Write a checksummed file and sync it to the disk. It replaces an earlier one atomically."""
    content = json.loads(json.dumps(content))  # as a reader will have it: keys are text
    text = json.dumps({"format": kind, "xxh3": _seal(content), **content}, indent=1).encode()
    write_durably(path, text)
    return FileRecord(len(text), xxhash.xxh3_64_hexdigest(text))


def read(path: Path, kind: str, into: type[T]) -> T:
    """Return the content of a checksummed file. Raises `FileNotFoundError` with the name of a missing file."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} not found; name what save_checkpoint wrote")
    try:
        document = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise Corruption(
            f"{path} is not as it was written: it is not JSON ({error}); take another checkpoint"
        ) from error
    if not isinstance(document, dict) or document.get("format") != kind:
        kind_of_file = document.get("format") if isinstance(document, dict) else None
        raise UsageError(
            f"{path} has format {kind_of_file!r}, this reads {kind!r}: name a checkpoint that this drop-in wrote"
        )
    content = {name: value for name, value in document.items() if name not in _ABOUT}
    if document.get("xxh3") != _seal(content):
        raise Corruption(f"{path} is not as it was written: its checksum differs; take another checkpoint")
    try:
        return msgspec.convert(content, into)
    except msgspec.ValidationError as error:
        raise Corruption(f"{path} has another content than {kind!r} has: {error}; take another checkpoint") from error


def part(path: Path) -> FileRecord:
    """Return the record of a file as it is now."""
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while piece := file.read(_AT_ONCE):
            digest.update(piece)
    return FileRecord(path.stat().st_size, digest.hexdigest())


def compare(path: Path, entry: FileRecord) -> None:
    """Raise `Corruption` unless the file is as it was written."""
    if not path.is_file():
        raise Corruption(f"{path} is missing, and its checkpoint names it; take another checkpoint")
    actual = part(path)
    if actual != entry:
        raise Corruption(
            f"{path} has {actual.bytes} bytes with checksum {actual.xxh3}, was written with {entry.bytes} and "
            f"{entry.xxh3}; take another checkpoint"
        )


@contextmanager
def directory(path: Path, mark: str) -> Iterator[Path]:
    """Yield a temporary directory, which is renamed to `path` when the block ends without an error, and removed
    otherwise.

    `mark` is a file that every directory of this kind has. An existing one at `path` is replaced; anything else at
    `path` is `UsageError`.
    """
    if path.exists() and not (path / mark).is_file() and not (path.is_dir() and not any(path.iterdir())):
        raise UsageError(
            f"{path} is there and is no checkpoint: it has no {mark}; name a new directory, or an earlier checkpoint"
        )
    temporary, old = path.with_name(path.name + ".tmp"), path.with_name(path.name + ".old")
    shutil.rmtree(temporary, ignore_errors=True)  # of a writer that died
    temporary.mkdir(parents=True)
    try:
        yield temporary
        sync_path(temporary)
        shutil.rmtree(old, ignore_errors=True)
        if path.exists():
            path.rename(old)
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        if old.exists() and not path.exists():
            old.rename(path)
        raise
    sync_path(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _seal(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(content, separators=(",", ":"), sort_keys=True).encode())
