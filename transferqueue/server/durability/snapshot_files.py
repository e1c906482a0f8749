"""Writes the snapshot of a ledger as Arrow files, and reads it back. Defines the columns of each file;
`transferqueue docs snapshots` tells users.

Each table has ``tables/N/rows.arrow`` with one row for each resident row, and its groups in ``tables/N/groups.arrow``
and ``tables/N/forming-M.arrow``. ``tables/N/field-M.arrow`` has the values of a field; a value that several rows share
is stored once. The column ``at/<field>`` of the rows file says which value a row has. Values that continue others are
written whole.
``weights/N/V.arrow`` is a version of weights: one row, with a column for each tensor, or each slice of one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from msgspec.structs import replace

from transferqueue.errors import Corruption
from transferqueue.ledger.arrays import AnyArray, IntArray
from transferqueue.ledger.attributes import Attribute, Columns, Count
from transferqueue.ledger.persistence.snapshot import (
    ChannelSnapshot,
    LedgerSnapshot,
    TableCounts,
    TableSnapshot,
    VersionSnapshot,
)
from transferqueue.ledger.persistence.snapshot_checks import check
from transferqueue.ledger.rows import Nodes, forests, groups, row_state
from transferqueue.ledger.tasks import group_task
from transferqueue.ledger.tasks.task_state import STORED
from transferqueue.limits import MIB
from transferqueue.schema import Field
from transferqueue.server.durability.snapshot_directory import SnapshotReader, SnapshotWriter
from transferqueue.storage.columns.column import Column
from transferqueue.storage.columns.export import arrow_type
from transferqueue.storage.columns.joined import along_chains, join
from transferqueue.storage.columns.placement import MappedBlocks, RowPlacement
from transferqueue.storage.elements.dtypes import U8
from transferqueue.wire.messages import BlockLocation, TableTerms

CHUNK_ROWS: Final = 1 << 16
CHUNK_BYTES: Final = 64 * MIB
"""The most rows and bytes of a record batch, unless a single row has more."""
_ROWS: Final = (Attribute("row_id", "i8"), *row_state.ATTRIBUTES)
_INT64_MAX: Final = (1 << 63) - 1
Memory = Callable[[BlockLocation], U8]
"""Returns the bytes of a block. They do not change while the files are written."""


class TableManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table in the manifest. `directory` has its files, `placed` names the fields that have a file, in order, and
    `gatherers` the tasks with groups."""

    name: str
    directory: str
    terms: TableTerms
    counts: TableCounts
    ordinals: list[tuple[int, int]]
    placed: list[str]
    gatherers: list[str]


class LedgerManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The manifest without the list of files. `made_at`: seconds since 1970. `package`: the version that wrote it."""

    made_at: float
    package: str
    tables: list[TableManifest]
    channels: list[ChannelSnapshot]
    dropped_tables: dict[str, Count]


# ---------------------------------------------------------------- writing


def write_contents(
    writer: SnapshotWriter,
    contents: LedgerSnapshot,
    memory: Memory,
    made_at: float,
    package: str,
) -> LedgerManifest:
    """Write all files of a snapshot. Reads every block once."""
    tables = [
        _write_table(writer, contents, table, f"tables/{number}", memory)
        for number, table in enumerate(contents.tables)
    ]
    channels = [
        _write_channel(writer, contents, channel, f"weights/{number}", memory)
        for number, channel in enumerate(contents.channels)
    ]
    return LedgerManifest(made_at, package, tables, channels, contents.dropped_tables)


def _write_table(
    writer: SnapshotWriter, contents: LedgerSnapshot, table: TableSnapshot, directory: str, memory: Memory
) -> TableManifest:
    nodes = forests(table.continued, table.places).nodes
    values = {name: _Values(*place, nodes.get(name), contents) for name, place in table.places.items()}
    fields = {field.name: field for field in table.terms.fields}
    _write_columns(writer, f"{directory}/rows.arrow", _row_columns(table, values))
    _write_columns(writer, f"{directory}/groups.arrow", table.groups)
    for number, columns in enumerate(table.forming.values()):
        _write_columns(writer, f"{directory}/forming-{number}.arrow", columns)
    for number, (name, distinct) in enumerate(values.items()):
        _write_field(writer, f"{directory}/field-{number}.arrow", fields, name, distinct, contents, memory)
    ordinals = [(first, last) for first, last in table.ordinals.tolist()]
    return TableManifest(
        table.terms.name, directory, table.terms, table.counts, ordinals, list(values), list(table.forming)
    )


class _Values:
    """The distinct values of a field: the block and slot of each, its estimated size, and for each row the index of its
    value (-1: none). `nodes`: what they are made of, if some rows continue others; `rows`: a row that has each."""

    def __init__(self, blocks: IntArray, slots: AnyArray, nodes: Nodes | None, contents: LedgerSnapshot) -> None:
        present = np.flatnonzero(blocks > 0)
        pairs = np.stack([blocks[present], slots[present].astype(np.int64)], axis=1)
        nothing = np.empty(0, np.int64)
        distinct, first, index = (
            np.unique(pairs, axis=0, return_index=True, return_inverse=True)
            if len(pairs)
            else (pairs, nothing, nothing)
        )
        self.blocks, self.slots = distinct[:, 0], distinct[:, 1]
        self.of_row = np.full(len(blocks), -1, np.int64)
        self.of_row[present] = index.reshape(-1)
        self.nodes, self.rows = nodes, present[first]
        if nodes is None:
            self.sizes = _sizes_in(self.blocks, contents)
        else:
            self.sizes = along_chains(_sizes_in(nodes.blocks, contents), nodes.parents)[nodes.of_row[self.rows]]


def _row_columns(table: TableSnapshot, values: dict[str, _Values]) -> dict[str, Any]:
    import pyarrow as pa

    ids = table.rows["row_id"].tolist()
    columns = _arrays(_ROWS, table.rows)
    columns["key"] = pa.array([table.keys.get(row) for row in ids], pa.large_string())
    tags = [json.dumps(table.tags[row]) if row in table.tags else None for row in ids]
    columns["tags"] = pa.array(tags, pa.large_string())
    for name, column in table.inline.items():
        columns[f"field/{name}"] = pa.array(_bits(column), mask=~table.has[name])
    for name, distinct in values.items():
        columns[f"at/{name}"] = pa.array(distinct.of_row, mask=distinct.of_row < 0)
    for name, task in table.tasks.items():
        columns |= _arrays(STORED, task, f"task/{name}/")
    columns |= {f"freed/{name}": gone for name, gone in table.freed.items()}
    return columns


def _bits(values: AnyArray) -> AnyArray:
    """The bits of complex numbers, which Arrow lacks; other values unchanged."""
    return values.view(np.int64) if values.dtype.kind == "c" else values


def _arrays(attributes: Iterable[Attribute], columns: Columns, prefix: str = "") -> dict[str, Any]:
    """The columns of attributes as a file has them."""
    import pyarrow as pa

    return {
        prefix + one.name: pa.DictionaryArray.from_arrays(pa.array(columns[one.name].astype(np.int8)), one.codes)
        if one.codes
        else columns[one.name]
        for one in attributes
    }


def _types(attributes: Iterable[Attribute], prefix: str = "") -> dict[str, Any]:
    """The types of the columns of attributes in a file."""
    import pyarrow as pa

    return {
        prefix + one.name: pa.dictionary(pa.int8(), pa.string())
        if one.codes
        else pa.from_numpy_dtype(np.dtype(one.dtype))
        for one in attributes
    }


def _write_columns(writer: SnapshotWriter, name: str, columns: dict[str, Any] | Columns) -> None:
    import pyarrow as pa

    whole = pa.RecordBatch.from_pydict(dict(columns))
    writer.write(name, whole.schema, (whole.slice(at, CHUNK_ROWS) for at in range(0, whole.num_rows, CHUNK_ROWS)))


def _write_field(
    writer: SnapshotWriter,
    file: str,
    fields: dict[str, Field],
    name: str,
    values: _Values,
    contents: LedgerSnapshot,
    memory: Memory,
) -> None:
    import pyarrow as pa

    schema = pa.schema([(name, arrow_type(fields[name]))])

    def batches() -> Iterator[Any]:
        for chunk in _chunks(values.sizes):
            if values.nodes is None:
                placement = _placement(fields, values.blocks[chunk], values.slots[chunk], contents, memory)
            else:
                nodes = values.nodes.of_rows(values.rows[chunk])
                placement = _placement(fields, nodes.blocks, nodes.slots.astype(np.int64), contents, memory)
                placement = join(fields[name], placement, nodes.parents, nodes.of_row)
            yield pa.RecordBatch.from_arrays([Column(fields[name], placement).arrow()], schema=schema)

    writer.write(file, schema, batches())


def _sizes_in(blocks: IntArray, contents: LedgerSnapshot) -> AnyArray:
    """The estimated size of a value in each of these blocks: the mean of the block."""
    numbers, index = np.unique(blocks, return_inverse=True)
    means = [contents.blocks[block].nbytes / contents.blocks[block].rows for block in numbers.tolist()]
    sizes: AnyArray = np.array(means, np.float64)[index.reshape(-1)]
    return sizes


def _chunks(sizes: AnyArray) -> Iterator[slice]:
    """Ranges of values of bounded size."""
    reach = np.cumsum(sizes)
    start = 0
    while start < len(sizes):
        before = float(reach[start - 1]) if start else 0.0
        end = int(np.searchsorted(reach, before + CHUNK_BYTES, "right"))
        end = max(start + 1, min(end, start + CHUNK_ROWS))
        yield slice(start, end)
        start = end


def _placement(
    fields: dict[str, Field], blocks: IntArray, slots: IntArray, contents: LedgerSnapshot, memory: Memory
) -> RowPlacement:
    numbers, index = np.unique(blocks, return_inverse=True)
    at = [contents.blocks[number] for number in numbers.tolist()]
    mapped = MappedBlocks(at, [memory(block) for block in at], fields)
    return RowPlacement(mapped, index.reshape(-1).astype(np.int32), slots.astype(np.int32))


def _write_channel(
    writer: SnapshotWriter, contents: LedgerSnapshot, channel: ChannelSnapshot, directory: str, memory: Memory
) -> ChannelSnapshot:
    import pyarrow as pa

    versions = []
    for version in channel.versions:
        fields = {field.name: field for field in version.fields}
        arrays: dict[str, Any] = {}
        for number in version.blocks:
            numbers = np.array([number], np.int64)
            placement = _placement(fields, numbers, np.zeros(1, np.int64), contents, memory)
            arrays |= {name: Column(fields[name], placement).arrow() for name in contents.blocks[number].fields}
        batch = pa.RecordBatch.from_pydict(arrays)
        writer.write(_version_file(directory, version), batch.schema, [batch])
        versions.append(replace(version, blocks=[]))
    return replace(channel, versions=versions)


def _version_file(directory: str, version: VersionSnapshot) -> str:
    return f"{directory}/{version.version}.arrow"


# ---------------------------------------------------------------- reading


class ValueChunk:
    """A record batch of values that becomes block `number` of the snapshot, read from `file`."""

    def __init__(self, number: int, file: str, fields: list[Field], batch: Any) -> None:
        self.number, self.file, self.fields, self.batch = number, file, fields, batch


def _decode(path: Path, about: bytes) -> LedgerManifest:
    try:
        return msgspec.json.decode(about, type=LedgerManifest)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Corruption(f"snapshot {path}: the manifest has facts that no server writes: {error}") from error


def read_manifest(snapshot: SnapshotReader) -> LedgerManifest:
    """Read the manifest. `Corruption` unless its tables, fields and files are as `write_contents` writes them."""
    manifest = _decode(snapshot.path, snapshot.about)
    wanted = {name for number, table in enumerate(manifest.tables) for name in _files_of_table(snapshot, number, table)}
    for number, channel in enumerate(manifest.channels):
        wanted.update(_version_file(f"weights/{number}", version) for version in channel.versions)
    if wanted != snapshot.files.keys():
        file = min(wanted ^ snapshot.files.keys())
        raise _not_written(snapshot, f"file {file} belongs to no table or channel, or is missing")
    return manifest


def _not_written(snapshot: SnapshotReader, what: str) -> Corruption:
    return Corruption(f"snapshot {snapshot.path}: no server writes such a manifest: {what}; restore another")


def _files_of_table(snapshot: SnapshotReader, number: int, table: TableManifest) -> list[str]:
    fields = [field.name for field in table.terms.fields]
    placed = [field.name for field in table.terms.fields if not field.inline]
    gatherers = [task.name for task in table.terms.tasks if task.groups is not None]
    if (table.name, table.directory) != (table.terms.name, f"tables/{number}"):
        raise _not_written(
            snapshot, f"table {number} is {table.name!r} with terms of {table.terms.name!r} in {table.directory!r}"
        )
    if len(set(fields)) != len(fields) or (table.placed, table.gatherers) != (placed, gatherers):
        raise _not_written(snapshot, f"table {table.name!r} has fields or tasks that differ from its terms")
    if any(not -_INT64_MAX <= ordinal <= _INT64_MAX for span in table.ordinals for ordinal in span):
        raise _not_written(snapshot, f"table {table.name!r} has ordinals beyond 64 bits")
    names = ["rows", "groups", *(f"forming-{at}" for at in range(len(gatherers)))]
    names += [f"field-{at}" for at in range(len(placed))]
    return [f"{table.directory}/{name}.arrow" for name in names]


def chunks(snapshot: SnapshotReader, manifest: LedgerManifest) -> Iterator[ValueChunk]:
    """Read all values as chunks, numbered from 1 in the order that `read_contents` expects."""
    number = 0
    for table in manifest.tables:
        fields = {field.name: field for field in table.terms.fields}
        for at, name in enumerate(table.placed):
            file = f"{table.directory}/field-{at}.arrow"
            for batch in snapshot.batches(file, {name: _type_of(snapshot, file, fields[name])}):
                number += 1
                yield ValueChunk(number, file, [fields[name]], batch)
    for at, channel in enumerate(manifest.channels):
        for version in channel.versions:
            file = _version_file(f"weights/{at}", version)
            types = {field.name: _type_of(snapshot, file, field) for field in version.fields}
            if snapshot.rows(file) != 1:
                raise snapshot.wrong(file, f"{snapshot.rows(file)} rows; a version of weights is one")
            for batch in snapshot.batches(file, types):
                for field in version.fields:
                    number += 1
                    yield ValueChunk(number, file, [field], batch.select([field.name]))


def _type_of(snapshot: SnapshotReader, file: str, field: Field) -> Any:
    with snapshot.reading(file):
        return arrow_type(field)


def read_tables(snapshot: SnapshotReader, manifest: LedgerManifest) -> list[TableSnapshot]:
    """Read the tables, without the locations of their values: `read_contents` adds those."""
    return [_read_table(snapshot, table) for table in manifest.tables]


def read_contents(
    snapshot: SnapshotReader, manifest: LedgerManifest, tables: list[TableSnapshot], blocks: dict[int, BlockLocation]
) -> LedgerSnapshot:
    """Read the snapshot. `tables` come from `read_tables`, and `blocks`, by number, were written from `chunks`."""
    contents = LedgerSnapshot(tables=tables, blocks=blocks, dropped_tables=manifest.dropped_tables)
    numbers = iter(sorted(blocks))
    for listed, table in zip(manifest.tables, tables, strict=True):
        for at, name in enumerate(listed.placed):
            file_blocks = _blocks_of_file(blocks, numbers, snapshot.rows(f"{listed.directory}/field-{at}.arrow"))
            table.places[name] = _locate(table.places[name][0], file_blocks)
    for channel in manifest.channels:
        versions = [replace(version, blocks=[next(numbers) for _ in version.fields]) for version in channel.versions]
        contents.channels.append(replace(channel, versions=versions))
    return contents


def check_contents(manifest: LedgerManifest, tables: list[TableSnapshot]) -> None:
    """`Corruption` unless a ledger can have such tables and channels. Needs no values."""
    check(LedgerSnapshot(tables, manifest.channels, dropped_tables=manifest.dropped_tables))


def _row_types(manifest: TableManifest) -> dict[str, Any]:
    """The columns of a rows file."""
    import pyarrow as pa

    types = _types(_ROWS) | {"key": pa.large_string(), "tags": pa.large_string()}
    for field in manifest.terms.fields:
        if field.inline:
            dtype = np.dtype(field.dtype)
            types[f"field/{field.name}"] = pa.from_numpy_dtype(np.int64 if dtype.kind == "c" else dtype)
        else:
            types[f"at/{field.name}"] = pa.int64()
    for task in manifest.terms.tasks:
        types |= _types(STORED, f"task/{task.name}/")
    return types


def _freed_types(manifest: TableManifest) -> dict[str, Any]:
    """The columns that a rows file has only if values of these fields were freed."""
    import pyarrow as pa

    return {f"freed/{field.name}": pa.bool_() for field in manifest.terms.fields}


def _rows_file(snapshot: SnapshotReader, manifest: TableManifest, file: str) -> Any:
    """The rows file of a table as an Arrow table; None if it has no row."""
    freed = _freed_types(manifest)
    return _whole(snapshot, file, _row_types(manifest) | freed, optional=tuple(freed))


def _read_table(snapshot: SnapshotReader, manifest: TableManifest) -> TableSnapshot:
    file = f"{manifest.directory}/rows.arrow"
    with snapshot.reading(file):
        rows = _Rows(snapshot, file, _rows_file(snapshot, manifest, file))
        inline = {field.name: field for field in manifest.terms.fields if field.inline}
        has = {name: rows.given(f"field/{name}") for name in inline}
        places = {}
        for at, name in enumerate(manifest.placed):
            has[name] = rows.given(f"at/{name}")
            index = np.where(has[name], rows.numbers(f"at/{name}", np.int64, nulls=True), -1)
            places[name] = _check_index(snapshot, file, manifest, at, name, has[name], index), np.empty(0, np.int32)
        tags = rows.texts("tags")
        return TableSnapshot(
            terms=manifest.terms,
            counts=manifest.counts,
            rows=rows.columns(_ROWS),
            keys=rows.texts("key"),
            tags={row: _read_tags(text) for row, text in tags.items()},
            has=has,
            inline={
                name: rows.numbers(f"field/{name}", np.dtype(field.dtype), nulls=True) for name, field in inline.items()
            },
            places=places,
            tasks={task.name: rows.columns(STORED, f"task/{task.name}/") for task in manifest.terms.tasks},
            groups=_read_columns(snapshot, f"{manifest.directory}/groups.arrow", groups.ATTRIBUTES.values()),
            forming={
                name: _read_columns(
                    snapshot, f"{manifest.directory}/forming-{at}.arrow", group_task.ATTRIBUTES.values()
                )
                for at, name in enumerate(manifest.gatherers)
            },
            ordinals=np.array(manifest.ordinals, np.int64).reshape(-1, 2),
            freed=_read_freed(rows, manifest),
        )


def _read_freed(rows: _Rows, manifest: TableManifest) -> dict[str, AnyArray]:
    columns = {field.name: rows.numbers(f"freed/{field.name}", np.bool_, missing=0) for field in manifest.terms.fields}
    return {name: freed for name, freed in columns.items() if freed.any()}


def _check_index(
    snapshot: SnapshotReader, file: str, manifest: TableManifest, at: int, name: str, present: AnyArray, index: IntArray
) -> IntArray:
    """Check the index of each row's value in the field's file: all values exist, and each belongs to some row."""
    count = snapshot.rows(f"{manifest.directory}/field-{at}.arrow")
    wrong = present & ((index < 0) | (index >= count))
    if wrong.any():
        raise snapshot.wrong(file, f"a row has value {index[wrong][0]} of field {name!r}, of {count}")
    if np.unique(index[present]).size != count:
        raise snapshot.wrong(file, f"no row has some of the {count} values of field {name!r}")
    return index


def _blocks_of_file(blocks: dict[int, BlockLocation], numbers: Iterator[int], rows: int) -> list[BlockLocation]:
    """Take the blocks of the next file, which have `rows` rows together."""
    taken: list[BlockLocation] = []
    while rows > 0:
        taken.append(blocks[next(numbers)])
        rows -= taken[-1].rows
    return taken


def _locate(index: IntArray, blocks: list[BlockLocation]) -> tuple[IntArray, AnyArray]:
    """The block and slot of each row's value. `index` counts values through all `blocks` (-1: none)."""
    starts = np.cumsum([0, *(block.rows for block in blocks)])
    which = np.searchsorted(starts, index, "right") - 1
    numbers = np.array([0, *(block.block for block in blocks)], np.int64)
    present = index >= 0
    return np.where(present, numbers[np.where(present, which + 1, 0)], 0), np.where(
        present, index - starts[which], 0
    ).astype(np.int32)


def read_rows(snapshot: SnapshotReader, manifest: TableManifest) -> Any:
    """Read the rows file of a table as an Arrow table, mapped and checked: each row's value is in its field's file."""
    import pyarrow as pa

    file = f"{manifest.directory}/rows.arrow"
    table = _rows_file(snapshot, manifest, file)
    if table is None:
        return pa.table({name: pa.array([], kind) for name, kind in _row_types(manifest).items()})
    rows = _Rows(snapshot, file, table)
    for at, name in enumerate(manifest.placed):
        present = rows.given(f"at/{name}")
        _check_index(snapshot, file, manifest, at, name, present, rows.numbers(f"at/{name}", np.int64, nulls=True))
    return table


def read_values(snapshot: SnapshotReader, manifest: TableManifest, name: str) -> Any:
    """Read the values of a field that has a file, mapped and checked."""
    import pyarrow as pa

    file = f"{manifest.directory}/field-{manifest.placed.index(name)}.arrow"
    (field,) = (field for field in manifest.terms.fields if field.name == name)
    kind = _type_of(snapshot, file, field)
    table = _whole(snapshot, file, {name: kind})
    return pa.chunked_array([], kind) if table is None else table[name]


_TAGS: Final = msgspec.json.Decoder(dict[str, bool | int | float | str])


def _read_tags(text: str) -> dict[str, str | int | float | bool]:
    return _TAGS.decode(text)


def _read_columns(snapshot: SnapshotReader, file: str, attributes: Collection[Attribute]) -> Columns:
    with snapshot.reading(file):
        return _Rows(snapshot, file, _whole(snapshot, file, _types(attributes))).columns(attributes)


def _whole(snapshot: SnapshotReader, file: str, types: dict[str, Any], optional: tuple[str, ...] = ()) -> Any:
    """Read all batches of a file as one table; None if it has no row."""
    import pyarrow as pa

    batches = list(snapshot.batches(file, types, optional))
    return pa.Table.from_batches(batches) if batches else None


class _Rows:
    """The columns of a file with numbers, names and texts. `table`: None if the file has no row."""

    def __init__(self, snapshot: SnapshotReader, file: str, table: Any) -> None:
        self._snapshot, self._file = snapshot, file
        self._table = table.combine_chunks() if table is not None else None

    def _column(self, name: str, *, nulls: bool = False) -> Any:
        column = self._table[name].combine_chunks() if self._table is not None else None
        if column is not None and column.null_count and not nulls:
            raise self._snapshot.wrong(self._file, f"column {name!r} has {column.null_count} nulls")
        return column

    def numbers(self, name: str, dtype: Any, *, missing: int | None = None, nulls: bool = False) -> AnyArray:
        """The numbers of a column. With `nulls`, values may be null; null values are arbitrary. `missing` is the value
        of all rows if an older snapshot lacks the column."""
        if missing is not None and self._table is not None and name not in self._table.column_names:
            return np.full(self._table.num_rows, missing, dtype)
        column, dtype = self._column(name, nulls=nulls), np.dtype(dtype)
        if column is None:
            return np.empty(0, dtype)
        if dtype == np.bool_:
            return np.asarray(column.fill_null(False).to_numpy(zero_copy_only=False))
        data = column.buffers()[1]
        return np.frombuffer(data, dtype, len(column), column.offset * dtype.itemsize).copy()

    def given(self, name: str) -> Any:
        """Whether each row has a value."""
        column = self._column(name, nulls=True)
        return np.empty(0, np.bool_) if column is None else column.is_valid().to_numpy(zero_copy_only=False)

    def columns(self, attributes: Iterable[Attribute], prefix: str = "") -> Columns:
        """The columns of attributes."""
        named = {prefix + one.name: one for one in attributes}
        return {
            one.name: self.codes(name, one.codes) if one.codes else self.numbers(name, one.dtype)
            for name, one in named.items()
        }

    def codes(self, name: str, names: tuple[str, ...]) -> AnyArray:
        """The index in `names` of each value of a column of names."""
        column = self._column(name)
        if column is None:
            return np.empty(0, np.uint8)
        index = {name: at for at, name in enumerate(names)}
        unknown = [value for value in column.dictionary.to_pylist() if value not in index]
        if unknown:
            raise self._snapshot.wrong(self._file, f"column {name!r} has {unknown[0]!r}; known are {', '.join(names)}")
        codes = np.array([index[value] for value in column.dictionary.to_pylist()], np.uint8)
        result: AnyArray = codes[column.indices.to_numpy(zero_copy_only=False)]
        return result

    def texts(self, name: str) -> dict[int, str]:
        """The text of each row that has one, by row id."""
        column = self._column(name, nulls=True)
        if column is None or column.null_count == len(column):
            return {}
        ids = self.numbers("row_id", np.int64).tolist()
        return {row: text for row, text in zip(ids, column.to_pylist(), strict=True) if text is not None}
