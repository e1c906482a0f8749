"""Rows of data files by position: Arrow and Parquet by record batches, JSON Lines by the offsets of its lines.

An Arrow file is memory-mapped, and a row is decoded when it is read. A JSON Lines file is decoded once when it is
opened, which finds a broken line before anything starts; 16 bytes a line stay in memory, and a row is read from the
file again. Parquet cannot be read by rows: the columns that are asked for are decoded into memory, at most
`PARQUET_BYTES_MAX`. A CSV file is decoded whole, and each of its values is a text.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute
import pyarrow.csv
import pyarrow.parquet

from transferqueue.errors import Impossible, NotFound, UsageError, listing
from transferqueue.limits import GIB, MIB

LINE_BYTES_MAX: Final = 64 * MIB
"""Bytes of one line: a row is decoded as a whole."""
JSON_BYTES_MAX: Final = GIB
"""Bytes of a file that is one JSON array, or of a CSV file, which is decoded as a whole."""
PARQUET_BYTES_MAX: Final = 8 * GIB
"""Decoded bytes of the columns that a job reads from Parquet files, which are kept in memory."""
COLUMNS_MAX: Final = 4096
"""Columns of a data set: more are data that ended up as names."""

_TEXTS: Final = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_string, pa.types.is_large_string)
"""Kinds of Arrow's values that have bytes of their own."""

_decode = msgspec.json.Decoder().decode


class DataRows(Protocol):
    """Rows of one or several files by position."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns, in the order of the file."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def row(self, at: int) -> dict[str, Any]:
        """Return the row at this position as plain Python values; None where the file has no value."""

    def place(self, at: int) -> str:
        """Return where the row lies, for messages: ``train.jsonl, line 17``."""

    def first_missing(self, column: str) -> int | None:
        """Return the first position without a value of `column`; None: every row has one."""

    def select(self, columns: Sequence[str]) -> DataRows:
        """Return the same rows with these columns only, ready to be read."""


def known_columns(path: Path, wanted: Sequence[str], has: Sequence[str]) -> list[str]:
    """Return `wanted`. Raises `NotFound` for a column that the file lacks."""
    for name in wanted:
        if name not in has:
            raise NotFound(f'{path} has no column "{name}"; it has {listing(has)}')
    return list(wanted)


# ---------------------------------------------------------------- Arrow and Parquet


class ArrowRows:
    """Rows of record batches. Memory-mapped batches stay on the disk until a row of them is read."""

    def __init__(self, path: Path, schema: pa.Schema, batches: Sequence[pa.RecordBatch]) -> None:
        self._path, self._schema, self._batches = path, schema, batches
        self._ends = np.cumsum([len(batch) for batch in batches], dtype=np.int64)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns."""
        return tuple(self._schema.names)

    def __len__(self) -> int:
        """Return the number of rows."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def row(self, at: int) -> dict[str, Any]:
        """Decode one row."""
        number = int(np.searchsorted(self._ends, at, "right"))
        batch = self._batches[number]
        values: dict[str, Any] = batch.slice(at - int(self._ends[number]) + len(batch), 1).to_pylist()[0]
        return values

    def place(self, at: int) -> str:
        """Return file and row, counted from 0."""
        return f"{self._path}, row {at}"

    def first_missing(self, column: str) -> int | None:
        """Return the first null of the column."""
        start = 0
        for batch in self._batches:
            values = batch.column(column)
            if values.null_count:
                return start + int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
            start += len(batch)
        return None

    def value_bytes(self, column: str) -> npt.NDArray[np.int64]:
        """Return the bytes of texts and files in the column's value of each row, which are not read."""
        return np.concatenate([_bytes_of(batch.column(column)) for batch in self._batches])

    def select(self, columns: Sequence[str]) -> ArrowRows:
        """Return the same batches with fewer columns; nothing is copied."""
        names = known_columns(self._path, columns, self.columns)
        schema = pa.schema([self._schema.field(name) for name in names])
        return ArrowRows(self._path, schema, [batch.select(names) for batch in self._batches])


def _bytes_of(values: Any) -> npt.NDArray[np.int64]:
    kind, sizes = values.type, np.zeros(len(values), np.int64)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        ends = np.cumsum(values.value_lengths().fill_null(0).to_numpy(zero_copy_only=False), dtype=np.int64)
        inside = np.cumsum(np.append(0, _bytes_of(values.flatten())))
        sizes += np.diff(inside[np.append(0, ends)])
    elif pa.types.is_struct(kind):
        for field in values.flatten():
            sizes += _bytes_of(field)
    elif any(of_kind(kind) for of_kind in _TEXTS):
        sizes += pyarrow.compute.binary_length(values).fill_null(0).to_numpy(zero_copy_only=False)
    return sizes


class ParquetRows:
    """A Parquet file whose footer was read. `select` decodes columns into memory."""

    def __init__(self, path: Path, file: pyarrow.parquet.ParquetFile) -> None:
        self._path, self._file = path, file

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns."""
        return tuple(self._file.schema_arrow.names)

    def __len__(self) -> int:
        """Return the number of rows."""
        return int(self._file.metadata.num_rows)

    def row(self, at: int) -> dict[str, Any]:
        """Refuse: columns come first."""
        raise UsageError(f"row {at} of {self._path}: Parquet is read by columns; call select(columns) first")

    def place(self, at: int) -> str:
        """Return file and row, counted from 0."""
        return f"{self._path}, row {at}"

    def first_missing(self, column: str) -> int | None:
        """Return the first null of the column, which is decoded for it."""
        return self.select([column]).first_missing(column)

    def select(self, columns: Sequence[str]) -> ArrowRows:
        """Decode these columns. Raises `Impossible` before it reads more than `PARQUET_BYTES_MAX`."""
        names = known_columns(self._path, columns, self.columns)
        nbytes = self.decoded_bytes(columns)
        if nbytes > PARQUET_BYTES_MAX:
            raise Impossible(
                f"{self._path}: columns {listing(columns)} decode to {nbytes / GIB:.1f} GiB, over "
                f"{PARQUET_BYTES_MAX / GIB:.0f} GiB; write the data as Arrow IPC, which is memory-mapped, or read "
                "fewer columns (data.columns)"
            )
        table = read_or_refuse(self._path, partial(self._file.read, columns=names), "a Parquet file").select(names)
        return ArrowRows(self._path, table.schema, table.to_batches())

    def decoded_bytes(self, columns: Sequence[str]) -> int:
        """Return the size of these columns in memory, as the footer says."""
        metadata, wanted = self._file.metadata, set(columns)
        groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
        chunks = (group.column(column) for group in groups for column in range(metadata.num_columns))
        return sum(
            chunk.total_uncompressed_size
            for chunk in chunks
            if chunk.path_in_schema in wanted or chunk.path_in_schema.split(".")[0] in wanted
        )


def parquet_rows(path: Path) -> ParquetRows:
    """Open a Parquet file and read its footer."""
    opened = read_or_refuse(path, lambda: pyarrow.parquet.ParquetFile(path, memory_map=True), "a Parquet file")
    return ParquetRows(path, opened)


def arrow_rows(path: Path) -> ArrowRows:
    """Memory-map an Arrow IPC file or stream (``datasets`` saves streams)."""
    rows: ArrowRows = read_or_refuse(path, lambda: _mapped(path), "an Arrow IPC file or stream")
    return rows


def _mapped(path: Path) -> ArrowRows:
    mapped = pa.memory_map(str(path))
    is_file = mapped.read(6) == b"ARROW1"
    mapped.seek(0)
    if is_file:
        reader = pa.ipc.open_file(mapped)
        return ArrowRows(path, reader.schema, [reader.get_batch(at) for at in range(reader.num_record_batches)])
    stream = pa.ipc.open_stream(mapped)
    return ArrowRows(path, stream.schema, list(stream))


def csv_rows(path: Path) -> ArrowRows:
    """Decode a CSV file with a line of names, or a TSV file. Each value is a text, since the file says no types; an
    empty one is no value."""
    if (size := os.path.getsize(path)) > JSON_BYTES_MAX:
        raise Impossible(
            f"{path} is a CSV file of {size / GIB:.1f} GiB, over {JSON_BYTES_MAX / GIB:.0f}; write it as Parquet"
        )
    parse = pyarrow.csv.ParseOptions(delimiter="\t" if path.suffix.lower() == ".tsv" else ",", newlines_in_values=True)

    alone = pyarrow.csv.ReadOptions(use_threads=False)  # its errors have the number of the row

    def read() -> pa.Table:
        with pyarrow.csv.open_csv(path, read_options=alone, parse_options=parse) as reader:
            names = reader.schema.names
        if len(set(names)) < len(names):
            raise UsageError(f"{path} names a column twice: {listing(names)}; rename one")
        if len(names) == 1 and {";", "\t"} & set(names[0]):
            raise UsageError(
                f"{path} has one column, {names[0]!r}: its values are not separated by commas; write it with commas, "
                "or with tabs as .tsv"
            )
        convert = pyarrow.csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=True, null_values=[""]
        )
        try:
            return pyarrow.csv.read_csv(path, parse_options=parse, convert_options=convert)
        except pa.ArrowInvalid:
            return pyarrow.csv.read_csv(path, read_options=alone, parse_options=parse, convert_options=convert)

    table = read_or_refuse(path, read, "a CSV file")
    return ArrowRows(path, table.schema, table.to_batches())


def read_or_refuse(path: Path, read: Any, kind: str) -> Any:
    """Return what `read` returns; an error of Arrow becomes a `UsageError` that names the file."""
    try:
        return read()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:
        raise UsageError(
            f"{path} cannot be read as {kind}: {error}; correct it, or give it the ending of its kind"
        ) from error


# ---------------------------------------------------------------- JSON


class JsonLinesRows:
    """Rows of a JSON Lines file: one object a line. Blank lines are skipped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._starts, self._numbers = array("q"), array("q")
        self._counts: dict[str, int] = {}
        for start, number, line in _lines(path):
            self._starts.append(start)
            self._numbers.append(number)
            _count(self._counts, _object(line, path, number), path)
        self._selected: tuple[str, ...] | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """Keys of all lines, in the order of their first appearance; or those that were selected."""
        return tuple(self._counts) if self._selected is None else self._selected

    def __len__(self) -> int:
        """Return the number of lines that are not blank."""
        return len(self._starts)

    def row(self, at: int) -> dict[str, Any]:
        """Read and decode one line."""
        with self._path.open("rb") as opened:
            opened.seek(self._starts[at])
            values = _object(opened.readline(LINE_BYTES_MAX), self._path, self._numbers[at])
        return {name: values.get(name) for name in self.columns}

    def place(self, at: int) -> str:
        """Return file and line, counted from 1."""
        return f"{self._path}, line {self._numbers[at]}"

    def first_missing(self, column: str) -> int | None:
        """Return the first line without a value of the column; reads the file only if there is one."""
        if self._counts.get(column, 0) == len(self):
            return None
        return next(at for at in range(len(self)) if self.row(at)[column] is None)

    def select(self, columns: Sequence[str]) -> JsonLinesRows:
        """Return the same lines with fewer columns; the file is not read again."""
        selected = object.__new__(JsonLinesRows)
        names = known_columns(self._path, columns, tuple(self._counts))
        selected.__dict__ |= self.__dict__ | {"_selected": tuple(names)}
        return selected


def _lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Yield the start, the number (from 1) and the bytes of each line that is not blank."""
    start = 0
    with path.open("rb") as opened:
        if opened.read(3) == b"\xef\xbb\xbf":
            start = 3
        opened.seek(start)
        for number, line in enumerate(iter(lambda: opened.readline(LINE_BYTES_MAX + 1), b""), start=1):
            if len(line) > LINE_BYTES_MAX:
                raise UsageError(
                    f"{path}, line {number}: over {LINE_BYTES_MAX >> 20} MiB; one line is one row, split it or use "
                    "Parquet"
                )
            if line.strip():
                yield start, number, line
            start += len(line)


def _object(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        values = _decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(
            f"{path}, line {number} is not JSON: {error}; a JSON Lines file has one object a line: {_shortened(line)}"
        ) from error
    if not isinstance(values, dict):
        raise UsageError(
            f'{path}, line {number} is {type(values).__name__}; a row is an object, such as {{"prompt": "2+2="}}'
        )
    return values


def _shortened(line: bytes) -> str:
    return repr(line[:80].decode(errors="replace").strip()) + ("…" if len(line) > 80 else "")


def _count(counts: dict[str, int], values: Mapping[str, Any], path: Path) -> None:
    """Count the rows that have a value of each column."""
    for name, value in values.items():
        counts[name] = counts.get(name, 0) + (value is not None)
    if len(counts) > COLUMNS_MAX:
        raise UsageError(f"{path} has over {COLUMNS_MAX} different keys; keep what differs from row to row in values")


class JsonArrayRows:
    """Rows of a file that is one JSON array of objects, decoded as a whole."""

    def __init__(self, path: Path, values: Sequence[dict[str, Any]], columns: tuple[str, ...]) -> None:
        self._path, self._values, self._columns = path, values, columns

    @property
    def columns(self) -> tuple[str, ...]:
        """Keys of all objects."""
        return self._columns

    def __len__(self) -> int:
        """Return the number of objects."""
        return len(self._values)

    def row(self, at: int) -> dict[str, Any]:
        """Return one object."""
        return {name: self._values[at].get(name) for name in self._columns}

    def place(self, at: int) -> str:
        """Return file and place in the array, counted from 0."""
        return f"{self._path}, item {at}"

    def first_missing(self, column: str) -> int | None:
        """Return the first object without a value of the column."""
        return next((at for at, values in enumerate(self._values) if values.get(column) is None), None)

    def select(self, columns: Sequence[str]) -> JsonArrayRows:
        """Return the same objects with fewer columns."""
        return JsonArrayRows(self._path, self._values, tuple(known_columns(self._path, columns, self._columns)))


def json_rows(path: Path) -> JsonLinesRows | JsonArrayRows:
    """Open a file of JSON: one array of objects, or one object a line."""
    with path.open("rb") as opened:
        begins = opened.read(MIB).lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
    return _array(path) if begins == b"[" else JsonLinesRows(path)


def _array(path: Path) -> JsonArrayRows:
    if (size := os.path.getsize(path)) > JSON_BYTES_MAX:
        raise Impossible(
            f"{path} is one JSON array of {size / GIB:.1f} GiB, over {JSON_BYTES_MAX / GIB:.0f}; write one object a "
            "line"
        )
    try:
        values = msgspec.json.decode(path.read_bytes().removeprefix(b"\xef\xbb\xbf"), type=list[dict[str, Any]])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is not a JSON array of objects: {error}") from error
    counts: dict[str, int] = {}
    for row in values:
        _count(counts, row, path)
    return JsonArrayRows(path, values, tuple(counts))


# ---------------------------------------------------------------- several files


class JoinedRows:
    """The rows of several files, one file after the other."""

    def __init__(self, files: Sequence[DataRows]) -> None:
        self._files = files
        self._ends = np.cumsum([len(rows) for rows in files], dtype=np.int64)

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of any of the files."""
        return tuple(dict.fromkeys(name for rows in self._files for name in rows.columns))

    def __len__(self) -> int:
        """Return the number of rows of all files."""
        return int(self._ends[-1])

    def row(self, at: int) -> dict[str, Any]:
        """Return one row."""
        rows, inside = self._locate(at)
        return rows.row(inside)

    def place(self, at: int) -> str:
        """Return the file, and the row in it."""
        rows, inside = self._locate(at)
        return rows.place(inside)

    def first_missing(self, column: str) -> int | None:
        """Return the first row of all files without a value of the column."""
        for rows, end in zip(self._files, self._ends, strict=True):
            if (at := rows.first_missing(column)) is not None:
                return int(end) - len(rows) + at
        return None

    def value_bytes(self, column: str) -> npt.NDArray[np.int64]:
        """See `value_bytes`."""
        return np.concatenate([value_bytes(rows, column) for rows in self._files])

    def select(self, columns: Sequence[str]) -> JoinedRows:
        """Return the same rows with these columns. `NotFound` names a file that lacks one; `Impossible` a sum of
        Parquet that is too large."""
        self._check_bytes(columns)
        return JoinedRows([rows.select(columns) for rows in self._files])

    def _check_bytes(self, columns: Sequence[str]) -> None:
        nbytes = sum(rows.decoded_bytes(columns) for rows in self._files if isinstance(rows, ParquetRows))
        if nbytes > PARQUET_BYTES_MAX:
            raise Impossible(
                f"columns {listing(columns)} of {len(self._files)} Parquet files decode to {nbytes / GIB:.1f} GiB, "
                f"over {PARQUET_BYTES_MAX / GIB:.0f} GiB; write the data as Arrow IPC, which is memory-mapped, or read "
                "fewer columns (data.columns)"
            )

    def _locate(self, at: int) -> tuple[DataRows, int]:
        number = int(np.searchsorted(self._ends, at, "right"))
        rows = self._files[number]
        return rows, at - int(self._ends[number]) + len(rows)


def value_bytes(rows: DataRows, column: str) -> npt.NDArray[np.int64]:
    """Return the bytes of texts and files in a column's value of each row of selected columns: int64 ``[rows]``; of
    JSON, which has no files, 0."""
    if isinstance(rows, ArrowRows | JoinedRows):
        return rows.value_bytes(column)
    return np.zeros(len(rows), np.int64)
