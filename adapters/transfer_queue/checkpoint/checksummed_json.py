"""JSON that says what it is and whether it is whole, and directories that are there whole or not at all.

A sealed file is one JSON object with ``format`` (what it is, and of which version), ``xxh3`` (XXH3-64 of the rest, in compact JSON)
and the rest. A file that is none of ours is `UsageError`, one of ours that was changed is `Corruption`; both name the file.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import xxhash

from transferqueue.errors import Corruption, UsageError

METADATA: Final = "metadata.json"
"""What a checkpoint has at its top, as documented."""
_ABOUT: Final = frozenset({"format", "xxh3"})
_AT_ONCE: Final = 1 << 20
T = TypeVar("T")


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file as it was written."""

    bytes: int
    xxh3: str


def write(path: Path, kind: str, content: Mapping[str, Any]) -> FileRecord:
    """Write a sealed file; it is on the disk when this returns. An earlier one is replaced by it, or stays."""
    content = json.loads(json.dumps(content))  # as a reader will have it: keys are text
    text = json.dumps({"format": kind, "xxh3": _seal(content), **content}, indent=1).encode()
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync(path.parent)
    return FileRecord(len(text), xxhash.xxh3_64_hexdigest(text))


def read(path: Path, kind: str, into: type[T]) -> T:
    """The content of a sealed file. `FileNotFoundError` names the file that is missing."""
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
    """A file as it is."""
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while piece := file.read(_AT_ONCE):
            digest.update(piece)
    return FileRecord(path.stat().st_size, digest.hexdigest())


def compare(path: Path, entry: FileRecord) -> None:
    """`Corruption` unless the file is as it was written."""
    if not path.is_file():
        raise Corruption(f"{path} is missing, and its checkpoint names it; take another checkpoint")
    actual = part(path)
    if actual != entry:
        raise Corruption(
            f"{path} has {actual.bytes} bytes with checksum {actual.xxh3}, was written with {entry.bytes} and {entry.xxh3}; "
            "take another checkpoint"
        )


@contextmanager
def directory(path: Path, mark: str) -> Iterator[Path]:
    """A directory to write to, which becomes `path` when the block ends well, and is nothing otherwise.

    mark: a file that a directory of this kind has. One at `path` is replaced; anything else there is `UsageError`.
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
        sync(temporary)
        shutil.rmtree(old, ignore_errors=True)
        if path.exists():
            path.rename(old)
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        if old.exists() and not path.exists():
            old.rename(path)
        raise
    sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def sync(path: Path) -> None:
    """A file's bytes, or a directory's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _seal(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(content, separators=(",", ":"), sort_keys=True).encode())
