"""Names of the files that contain ended rows, and how one appears and goes.

    DIRECTORY/TABLE/LIFE-NUMBER-FOOTER-BODY.parquet

- A file is written under another name, synchronised, and renamed: under this name it is whole.
- `LIFE` and `NUMBER` say which file of which life of the table it is.
- `FOOTER` and `BODY` are digests of the file's footer and of all before it. Each reader compares the first, and the
  pages with checksums of their own; `RecordedRows.check` compares both.
- A file has the rows that ended in some time, in the order of their steps.
"""

from __future__ import annotations

import os
import re
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple
from urllib.parse import quote, unquote

import xxhash

from transferqueue.errors import Corruption

ASIDE: Final = ".aside"
"""The directory of files that are being written."""
ASIDE_S: Final = 3600.0
"""A file there of another life that was not written to for so long is left of a server that was killed."""
_NAME: Final = re.compile(r"([0-9a-f]{16})-(\d{8,})-([0-9a-f]{16})-([0-9a-f]{16})\.parquet")
_TAIL: Final = struct.Struct("<I4s")
_MAGIC: Final = b"PAR1"
_PIECE_BYTES: Final = 1 << 20


class RecordedFile(NamedTuple):
    """A file, by its name."""

    life: str
    number: int
    footer: str
    body: str
    path: Path


class Digests(NamedTuple):
    """Of a file's footer, and of all before it; "": not computed."""

    footer: str
    body: str


def directory_of(root: Path, table: str) -> Path:
    """The directory of a table's files."""
    return root / quote(table, safe="")


def tables_in(root: Path) -> list[str]:
    """The tables that have files, had some, or will."""
    found = (each for each in root.iterdir() if (each / ASIDE).is_dir() or files_in(each))
    return sorted(unquote(each.name) for each in found)


def files_in(directory: Path) -> list[RecordedFile]:
    """The whole files of a table, in the order in which they were written; also those that an earlier version wrote
    into a folder for each step."""
    return sorted(
        RecordedFile(match[1], int(match[2]), match[3], match[4], path)
        for pattern in ("*.parquet", "step-*/*.parquet")
        for path in directory.glob(pattern)
        if (match := _NAME.fullmatch(path.name))
    )


def digests_of(path: Path, *, whole: bool = True) -> Digests:
    """The digests of a file; `whole`: that of its body, too. `Corruption` if the file was cut."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL.size))
        tail = file.read()
        length, magic = _TAIL.unpack(tail) if len(tail) == _TAIL.size else (0, b"")
        if magic != _MAGIC or length + 2 * _TAIL.size > size:
            raise Corruption(
                f"{path} was cut or overwritten: it does not end as a Parquet file; restore it from a copy"
            )
        start = size - _TAIL.size - length
        file.seek(start)
        footer = xxhash.xxh3_64_hexdigest(file.read())
        return Digests(footer, _digest(file, start) if whole else "")


def _digest(file: BinaryIO, nbytes: int) -> str:
    """The digest of the first bytes of a file."""
    digest, left = xxhash.xxh3_64(), nbytes
    file.seek(0)
    while left and (piece := file.read(min(left, _PIECE_BYTES))):
        digest.update(piece)
        left -= len(piece)
    return digest.hexdigest()


def check_footer(file: RecordedFile) -> None:
    """`Corruption` unless the footer is as it was written."""
    if digests_of(file.path, whole=False).footer != file.footer:
        raise Corruption(f"{file.path} was changed: its footer does not match its name; restore it from a copy")


def aside(directory: Path, life: str, number: int) -> Path:
    """Where file `number` is written before it appears. Makes the directory."""
    _make(directory / ASIDE)
    return directory / ASIDE / f"{life}-{number:08d}"


def publish(written: Path, directory: Path) -> Path:
    """Have a synchronised file appear under its name; durable when this returns."""
    digests = digests_of(written)
    path = directory / f"{written.name}-{digests.footer}-{digests.body}.parquet"
    written.rename(path)
    try:
        for changed in (directory, directory.parent):
            _synchronise_directory(changed)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return path


def _make(directory: Path) -> None:
    """Make a directory for this user alone, and those above it."""
    if not directory.is_dir():
        _make(directory.parent)
        directory.mkdir(mode=0o700, exist_ok=True)


def probe(directory: Path) -> None:
    """`OSError` unless files can be made in this directory, which is made if it is missing."""
    path = aside(directory, f"probe-{os.getpid()}", 0)
    try:
        path.write_bytes(b"")
    finally:
        path.unlink(missing_ok=True)


def synchronise(fd: int) -> None:
    """Return when the file is on the disk."""
    os.fsync(fd)


def _synchronise_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove_unfinished(directory: Path, life: str) -> None:
    """Remove what a killed server of this life was writing, and what others have left long ago."""
    for path in (directory / ASIDE).glob("*-*"):
        with suppress(FileNotFoundError):  # another server removes what is old, too
            if path.name.startswith(life) or time.time() - path.stat().st_mtime > ASIDE_S:
                path.unlink()


def remove_old(directory: Path, bytes_max: int | None, age_s: float | None) -> int:
    """Remove the oldest files beyond these bounds. The newest may be larger than `bytes_max`. Returns the number."""
    if bytes_max is None and age_s is None:
        return 0
    found = []
    for one in files_in(directory):
        with suppress(FileNotFoundError):  # users remove files too
            found.append((one.path.stat(), one.path))
    found.sort(key=lambda each: each[0].st_mtime_ns)
    total, removed = sum(about.st_size for about, _ in found), 0
    for about, path in found:
        over = bytes_max is not None and total > bytes_max and path != found[-1][1]
        if over or (age_s is not None and time.time() - about.st_mtime > age_s):
            path.unlink(missing_ok=True)
            total, removed = total - about.st_size, removed + 1
    return removed
