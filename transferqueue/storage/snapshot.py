"""Snapshots on disk: a directory of Arrow files that anything can read, named and checked by a manifest.

The law:

- ``PATH/000007/`` is one snapshot: Arrow IPC files, ``MANIFEST.json``, and the manifest's own checksum beside it. The manifest
  has the size and the xxh3-64 of every file; it is written last.
- A snapshot is made in ``PATH/.new-…``, every file and directory synced, and then renamed: it is there whole or not at
  all, and those before it are touched only after that, when more than `keep` are there.
- Nothing is read before all checksums have been compared. A difference is `Corruption`, naming the file.
- Directories are 0700 and files 0600.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec
import xxhash

from transferqueue.errors import Corruption, NotFound, OutOfMemory, UsageError
from transferqueue.limits import MIB

MANIFEST: Final = "MANIFEST.json"
DIGEST: Final = "MANIFEST.xxh3"
FORMAT: Final = 1
_NUMBER: Final = re.compile(r"\d{6,}")
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CHUNK: Final = 4 * MIB


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of a snapshot."""

    bytes: int
    rows: int
    xxh3: str


class _Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    about: msgspec.Raw
    files: dict[str, FileEntry]


class _Hashed:
    """A file that Arrow writes to, while its checksum is taken."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = xxhash.xxh3_64()
        self.nbytes = 0
        self.closed = False

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self._hash.update(view)
        self._file.write(view)
        self.nbytes += view.nbytes
        return view.nbytes

    def flush(self) -> None:
        self._file.flush()

    def tell(self) -> int:
        return self.nbytes

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def close(self) -> None:
        self.closed = True

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


class SnapshotWriter:
    """A snapshot that is being made under `parent`. `publish` makes it one; `abandon` removes it.

    progress: told how many bytes were just written; what it raises ends the work. All methods raise `OutOfMemory` where the
    disk is full, and `UsageError` where it cannot be written to.
    """

    def __init__(self, parent: Path, progress: Callable[[int], None]) -> None:
        self._parent, self._progress = parent, progress
        self._files: dict[str, FileEntry] = {}
        with _disk(parent):
            parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            for left in parent.glob(".new-*"):  # of a writer that died: there is one at a time
                shutil.rmtree(left)
            self._made = parent / f".new-{secrets.token_hex(4)}"
            self._made.mkdir(mode=0o700)

    def write(self, name: str, schema: Any, batches: Iterable[Any]) -> None:
        """One Arrow IPC file of record batches."""
        import pyarrow as pa

        path = self._made / name
        rows = 0
        with _disk(self._parent):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _private(path) as file:
                hashed, told = _Hashed(file), 0
                with pa.ipc.new_file(pa.PythonFile(hashed, "w"), schema) as out:
                    for batch in batches:
                        out.write_batch(batch)
                        rows += batch.num_rows
                        # Here, not in `_Hashed.write`: Arrow keeps an error that passes through it, and the frames with it.
                        self._progress(hashed.nbytes - told)
                        told = hashed.nbytes
                self._progress(hashed.nbytes - told)
                file.flush()
                os.fsync(file.fileno())
        self._files[name] = FileEntry(hashed.nbytes, rows, hashed.hexdigest())

    def publish(self, about: msgspec.Struct, keep: int) -> Path:
        """The snapshot is there, and of all the newest `keep` stay. about: what the manifest says beside the files."""
        manifest = msgspec.json.format(
            msgspec.json.encode(_Manifest(FORMAT, msgspec.Raw(msgspec.json.encode(about)), self._files)), indent=1
        )
        with _disk(self._parent):
            for name, data in ((MANIFEST, manifest), (DIGEST, xxhash.xxh3_64_hexdigest(manifest).encode())):
                with _private(self._made / name) as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
            for directory in [one for one in self._made.rglob("*") if one.is_dir()] + [self._made]:
                _sync(directory)
            there = numbered(self._parent)
            path = self._parent / f"{int(there[-1].name) + 1 if there else 1:06d}"
            self._made.rename(path)
            _sync(self._parent)
            for old in there[: max(0, len(there) + 1 - keep)]:
                shutil.rmtree(old)
        return path

    def abandon(self) -> None:
        """Leave nothing. After `publish`: nothing."""
        shutil.rmtree(self._made, ignore_errors=True)


class Snapshot:
    """A snapshot that was found whole: `open` compares every checksum first."""

    def __init__(self, path: Path, about: bytes, files: dict[str, FileEntry]) -> None:
        self.path, self.about, self.files = path, about, files

    @classmethod
    def open(cls, path: Path, progress: Callable[[int], None]) -> Snapshot:
        """The snapshot at `path`, or the newest under it. progress: told how many bytes were just compared.

        `NotFound` if there is none; `Corruption` names the file that is not as it was written.
        """
        found = _chosen(path)
        manifest = _read_manifest(found)
        for name, entry in manifest.files.items():
            _compare(found / name, entry, progress)
        return cls(found, bytes(manifest.about), manifest.files)

    def batches(self, name: str) -> Iterator[Any]:
        """The record batches of a file, mapped."""
        import pyarrow as pa

        if name not in self.files:
            raise Corruption(f"snapshot {self.path}: the manifest names no file {name}")
        with pa.memory_map(str(self.path / name)) as source:
            reader = pa.ipc.open_file(source)
            for number in range(reader.num_record_batches):
                yield reader.get_batch(number)


def numbered(parent: Path) -> list[Path]:
    """The snapshots under a directory, oldest first."""
    found = [one for one in parent.iterdir() if _NUMBER.fullmatch(one.name)] if parent.is_dir() else []
    return sorted(found, key=lambda one: int(one.name))


def _chosen(path: Path) -> Path:
    if (path / MANIFEST).is_file():
        return path
    there = numbered(path)
    if not there:
        raise NotFound(f"there is no snapshot at {path}; name the directory that one was written to")
    return there[-1]


def _read_manifest(path: Path) -> _Manifest:
    try:
        data, digest = (path / MANIFEST).read_bytes(), (path / DIGEST).read_bytes()
    except OSError as error:
        raise Corruption(
            f"snapshot {path}: {Path(error.filename or MANIFEST).name} cannot be read: {error.strerror}"
        ) from error
    if xxhash.xxh3_64_hexdigest(data).encode() != digest:
        raise Corruption(f"snapshot {path}: {MANIFEST} is not as it was written; restore the one before")
    try:
        manifest = msgspec.json.decode(data, type=_Manifest)
    except msgspec.MsgspecError as error:
        raise Corruption(f"snapshot {path}: {MANIFEST} is none ({error}); restore another") from error
    if manifest.format != FORMAT:
        raise UsageError(f"snapshot {path} has format {manifest.format}; this version reads {FORMAT}")
    return manifest


def _compare(path: Path, entry: FileEntry, progress: Callable[[int], None]) -> None:
    found = xxhash.xxh3_64()
    try:
        with path.open("rb") as file:
            while data := file.read(_CHUNK):
                found.update(data)
                progress(len(data))
            size = file.tell()
    except OSError as error:
        raise Corruption(f"snapshot file {path} cannot be read: {error.strerror}; restore another") from error
    if size != entry.bytes or found.hexdigest() != entry.xxh3:
        raise Corruption(
            f"snapshot file {path} is not as it was written: {size} bytes with checksum {found.hexdigest()} instead of "
            f"{entry.bytes} with {entry.xxh3}; restore the snapshot before it"
        )


def _private(path: Path) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _disk(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise OutOfMemory(
                f"snapshot in {path} does not fit its disk ({error.strerror}); those before it are whole: free some space"
            ) from error
        if error.errno is None:
            raise
        raise UsageError(f"snapshot in {path} cannot be written: {error.strerror}; name another directory") from error
