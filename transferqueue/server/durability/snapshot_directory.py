"""The directory of a snapshot: Arrow files that any program can read, with a manifest that lists and checks them.

- ``PATH/000007/`` is one snapshot: Arrow IPC files, ``MANIFEST.json``, and the manifest's own checksum beside it. The
  manifest contains the size and the xxh3-64 of every file. It is written last.
- A snapshot is written in ``PATH/.new-…``. The writer syncs every file and directory, then renames the directory, so
  the snapshot exists completely or not at all. Only then does it remove older ones, if there are more than `keep`.
- A reader compares all checksums before it reads anything. A difference is `Corruption`, with the name of the file.
- Files are untrusted input. A reader accepts a regular file inside the snapshot, reached over no link, of the size in
  the manifest, with the expected columns. Arrow checks each of its buffers (offsets, lengths, UTF-8, indices) before a
  value is used. Anything else is `Corruption`, with the name of the file and the problem.
- Directories are 0700 and files 0600, whatever the umask; so are parent directories that have to be made.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec
import xxhash

from transferqueue.errors import Corruption, NotFound, OutOfMemory, PeerError, UsageError
from transferqueue.limits import MIB
from transferqueue.storage.memory.room import room
from transferqueue.transport.system.private_files import make_directories, sync_path

MANIFEST: Final = "MANIFEST.json"
DIGEST: Final = "MANIFEST.xxh3"
FORMAT: Final = 3
MANIFEST_BYTES_MAX: Final = 256 * MIB
"""The largest manifest that is read. 4,096 tables with 65,536 spans of ordinals each would need more; no table has so
many."""
_NUMBER: Final = re.compile(r"[0-9]{6,}")
_NAME: Final = re.compile(r"[a-z0-9-]+(?:/[a-z0-9-]+)*\.arrow")
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
    """A file that Arrow writes to. It computes its checksum."""

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
    """Writes a snapshot under `parent`. `publish` completes it, `abandon` removes it.

    Args:
        parent: the directory of numbered snapshots.
        progress: called with the number of bytes just written. An exception that it raises ends the job.

    Raises:
        OutOfMemory: the disk is full. All methods may raise it.
        UsageError: the disk cannot be written to. All methods may raise it.
    """

    def __init__(self, parent: Path, progress: Callable[[int], None]) -> None:
        self._parent, self._progress = parent, progress
        self._files: dict[str, FileEntry] = {}
        with writing_to(parent):
            make_directories(parent)
            for stale in parent.glob(".new-*"):  # a writer that died left it: only one runs at a time
                shutil.rmtree(stale)
            self.directory: Final = parent / f".new-{secrets.token_hex(4)}"
            """Holds the files until `publish`."""
            self.directory.mkdir(mode=0o700)

    def write(self, name: str, schema: Any, batches: Iterable[Any]) -> None:
        """Write an Arrow IPC file of record batches."""
        import pyarrow as pa

        path = self.directory / name
        rows = 0
        with writing_to(self._parent):
            make_directories(path.parent)
            with _private(path) as file:
                hashed, reported = _Hashed(file), 0
                options = pa.ipc.IpcWriteOptions(allow_64bit=True)  # a tensor may have more than 2^31 elements
                with pa.ipc.new_file(pa.PythonFile(hashed, "w"), schema, options=options) as out:
                    for batch in batches:
                        out.write_batch(batch)
                        rows += batch.num_rows
                        # Not in `_Hashed.write`: Arrow would keep an exception that passes through it, with its frames.
                        self._progress(hashed.nbytes - reported)
                        reported = hashed.nbytes
                self._progress(hashed.nbytes - reported)
                file.flush()
                os.fsync(file.fileno())
        self._files[name] = FileEntry(hashed.nbytes, rows, hashed.hexdigest())

    def publish(self, about: msgspec.Struct, keep: int) -> Path:
        """Complete the snapshot, and keep only the newest `keep` of all (0: all). `about` joins the manifest."""
        manifest = msgspec.json.format(
            msgspec.json.encode(_Manifest(FORMAT, msgspec.Raw(msgspec.json.encode(about)), self._files)), indent=1
        )
        with writing_to(self._parent):
            for name, data in ((MANIFEST, manifest), (DIGEST, xxhash.xxh3_64_hexdigest(manifest).encode())):
                with _private(self.directory / name) as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
            for directory in [path for path in self.directory.rglob("*") if path.is_dir()] + [self.directory]:
                sync_path(directory)
            existing = numbered(self._parent)
            path = self._parent / f"{int(existing[-1].name) + 1 if existing else 1:06d}"
            self.directory.rename(path)
            sync_path(self._parent)
        if keep:
            remove_older(path, keep)
        return path

    def abandon(self) -> None:
        """Remove the unfinished snapshot. Does nothing after `publish`."""
        shutil.rmtree(self.directory, ignore_errors=True)


class SnapshotReader:
    """Reads a snapshot. `open` compares every checksum first."""

    def __init__(self, path: Path, about: bytes, files: dict[str, FileEntry]) -> None:
        self.path, self.about, self.files = path, about, files

    @classmethod
    def open(
        cls, path: Path, progress: Callable[[int], None], started: Callable[[int], None] = lambda _: None
    ) -> SnapshotReader:
        """Open the snapshot at `path`, or the newest under it, and compare all checksums.

        Args:
            path: a snapshot, or a directory of them.
            progress: called with the number of bytes just compared.
            started: called with the size of all files, before they are read.

        Raises:
            NotFound: there is none.
            Corruption: a file differs from its manifest; the text names it.
        """
        directory = _chosen(path)
        manifest = _read_manifest(directory)
        started(sum(entry.bytes for entry in manifest.files.values()))
        for name, entry in manifest.files.items():
            _compare(directory, name, entry, progress)
        return cls(directory, bytes(manifest.about), manifest.files)

    def rows(self, name: str) -> int:
        """The number of rows of a file, from the manifest."""
        return self._entry(name).rows

    def batches(self, name: str, types: Mapping[str, Any], optional: Container[str] = ()) -> Iterator[Any]:
        """The record batches of a file, mapped and checked.

        Args:
            name: of the file.
            types: its columns (name -> Arrow type), in any order.
            optional: columns that an older version did not write.
        """
        import pyarrow as pa

        entry = self._entry(name)
        with self.reading(name), pa.memory_map(str(self.path / name)) as source:
            reader = pa.ipc.open_file(source)
            self._check_columns(name, reader.schema, types, optional)
            rows = 0
            for number in range(reader.num_record_batches):
                batch = reader.get_batch(number)
                batch.validate(full=True)
                rows += batch.num_rows
                if not 0 < batch.num_rows <= entry.rows or batch.get_total_buffer_size() > entry.bytes:
                    raise self.wrong(name, f"batch {number} is compressed, or of {batch.num_rows} rows")
                yield batch
            if rows != entry.rows:
                raise self.wrong(name, f"it has {rows} rows; the manifest says {entry.rows}")

    def wrong(self, name: str, what: str) -> Corruption:
        """The error for a file with wrong contents."""
        return Corruption(f"snapshot file {self.path / name}: {what}; restore another snapshot")

    @contextmanager
    def reading(self, name: str) -> Iterator[None]:
        """Turn errors of Arrow and numpy into `Corruption` of this file."""
        try:
            yield
        except (Corruption, GeneratorExit):
            raise
        except (
            ValueError,
            TypeError,
            LookupError,
            ArithmeticError,
            NotImplementedError,
            MemoryError,
            OSError,
        ) as error:
            raise self.wrong(name, f"it cannot be read ({type(error).__name__}: {error})") from error

    def _entry(self, name: str) -> FileEntry:
        if name not in self.files:
            raise Corruption(f"snapshot {self.path}: the manifest names no file {name}; restore another snapshot")
        return self.files[name]

    def _check_columns(self, name: str, schema: Any, types: Mapping[str, Any], optional: Container[str]) -> None:
        if len(set(schema.names)) != len(schema.names):
            raise self.wrong(name, "a column is there twice")
        for column in types.keys() - set(schema.names):
            if column not in optional:
                raise self.wrong(name, f"column {column!r} is missing")
        for field in schema:
            if field.name not in types:
                raise self.wrong(name, f"column {field.name[:200]!r} does not belong there")
            if field.type != types[field.name]:
                raise self.wrong(name, f"column {field.name!r} is {field.type}; it should be {types[field.name]}")


def numbered(parent: Path) -> list[Path]:
    """The snapshots under a directory, oldest first."""
    snapshots = [path for path in parent.iterdir() if is_number(path.name)] if parent.is_dir() else []
    return sorted(snapshots, key=lambda path: int(path.name))


def is_number(name: str) -> bool:
    """Whether this is the name of one snapshot in its directory."""
    return _NUMBER.fullmatch(name) is not None


def remove_older(path: Path, keep: int) -> None:
    """Remove the snapshots older than this one, except the newest `keep` - 1. Raises as `SnapshotWriter`."""
    with writing_to(path.parent):
        older = [other for other in numbered(path.parent) if int(other.name) < int(path.name)]
        for old in older[: max(0, len(older) + 1 - keep)]:
            shutil.rmtree(old)


def snapshots_at(path: Path) -> list[Path]:
    """The snapshot at `path`; else those under it, newest first."""
    if (path / MANIFEST).is_file():
        return [path]
    return [snapshot for snapshot in reversed(numbered(path)) if not snapshot.is_symlink()]


def about(path: Path) -> bytes:
    """The facts in the manifest of the snapshot at `path`, without the list of files. Compares only the manifest's
    checksum."""
    return bytes(_read_manifest(path).about)


def _chosen(path: Path) -> Path:
    existing = snapshots_at(path)
    if not existing:
        raise NotFound(f"there is no snapshot at {path}; name the directory of a snapshot")
    return existing[0]


def _read_manifest(path: Path) -> _Manifest:
    data = _small_file(path, MANIFEST)
    if xxhash.xxh3_64_hexdigest(data).encode() != _small_file(path, DIGEST):
        raise Corruption(f"snapshot {path}: {MANIFEST} changed after it was written; restore an earlier snapshot")
    try:
        manifest = msgspec.json.decode(data, type=_Manifest)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Corruption(f"snapshot {path}: {MANIFEST} cannot be decoded ({error}); restore another") from error
    if manifest.format != FORMAT:
        raise UsageError(
            f"snapshot {path} has format {manifest.format}; this version reads {FORMAT}: restore it with the version "
            "of the package that wrote it, or start with empty tables"
        )
    for name, entry in manifest.files.items():
        if not _NAME.fullmatch(name) or entry.bytes < 0 or entry.rows < 0:
            raise Corruption(
                f"snapshot {path}: {MANIFEST} names a file {name[:200]!r} of {entry.bytes} bytes and {entry.rows} "
                "rows, which is impossible; restore another"
            )
    return manifest


def _small_file(path: Path, name: str) -> bytes:
    with _opened(path, name) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MANIFEST_BYTES_MAX:
            raise Corruption(
                f"snapshot {path}: {name} has {size:,} bytes, more than {MANIFEST_BYTES_MAX:,}; restore another"
            )
        return file.read(size)


@contextmanager
def _opened(path: Path, name: str) -> Iterator[BinaryIO]:
    """Open a file of the snapshot for reading. `Corruption` if it is no regular file, or outside of the snapshot."""
    where = path / name
    try:
        if Path(os.path.realpath(where)) != Path(os.path.realpath(path)) / name:
            raise Corruption(
                f"snapshot file {where} is reached over a link, which may lead out of the snapshot: restore another"
            )
        fd = os.open(
            where, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        )  # O_NONBLOCK: opening a pipe would block
        with os.fdopen(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise Corruption(f"snapshot file {where} is not a regular file; restore another")
            yield file
    except PeerError:
        raise  # an OSError itself, or raised by `progress`
    except OSError as error:
        raise Corruption(f"snapshot file {where} cannot be read: {error.strerror}; restore another") from error


def _compare(snapshot: Path, name: str, entry: FileEntry, progress: Callable[[int], None]) -> None:
    digest, path = xxhash.xxh3_64(), snapshot / name
    with _opened(snapshot, name) as file:
        size = os.fstat(file.fileno()).st_size
        if size != entry.bytes:
            raise Corruption(
                f"snapshot file {path} changed after it was written: it has {size} bytes instead of {entry.bytes}; "
                "restore an earlier snapshot"
            )
        while data := file.read(_CHUNK):
            digest.update(data)
            progress(len(data))
    if digest.hexdigest() != entry.xxh3:
        raise Corruption(
            f"snapshot file {path} changed after it was written: its checksum is {digest.hexdigest()} instead of "
            f"{entry.xxh3}; restore an earlier snapshot"
        )


def _private(path: Path) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")


@contextmanager
def writing_to(path: Path) -> Iterator[None]:
    """Turn errors of a full disk into `OutOfMemory`, and of an unwritable one into `UsageError`."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise OutOfMemory(
                f"snapshot in {path} does not fit its disk ({error.strerror}): {room(path)}; earlier snapshots are "
                "unharmed: free some space"
            ) from error
        if error.errno is None:
            raise
        raise UsageError(f"snapshot in {path} cannot be written: {error.strerror}; name another directory") from error
