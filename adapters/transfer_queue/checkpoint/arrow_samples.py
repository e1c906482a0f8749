"""Writes the samples of all partitions to a directory, and reads them: Arrow files, and a checksummed
``manifest.json``.

Samples with the same fields are one file: ``index``, ``key`` (empty: none), ``tags`` (JSON), and ``field.NAME`` for
each field, as `transferqueue.Column.arrow` returns it. Indexes are kept. An index is a row's number in its table, so a
load puts rows without data for all indexes up to the last, deletes those that were cleared before the save, and sets
the fields of the others.

The calling process writes and reads the files, not the controller: paths are those of its machine, and no shared file
system is needed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import torch

import transferqueue as tq
from transferqueue.adapters.transfer_queue.checkpoint import checksummed_json
from transferqueue.adapters.transfer_queue.samples.columns import without_rules
from transferqueue.adapters.transfer_queue.samples.partitions import Partitions, put_at_once, put_stored
from transferqueue.adapters.transfer_queue.samples.tags import given_tags, partition_of, table_of
from transferqueue.errors import Corruption, NotFound, SchemaError, UsageError
from transferqueue.schema import Field
from transferqueue.storage import PlainValues
from transferqueue.storage.columns.export import arrow_type
from transferqueue.storage.elements.dtypes import STORED_DTYPES
from transferqueue.storage.elements.torch_interop import as_torch
from transferqueue.storage.inputs.from_snapshot import columns_from_arrow
from transferqueue.transport.system.private_files import sync_path

FOLDER: Final = "storage"
MANIFEST: Final = "manifest.json"
KIND: Final = "transferqueue drop-in storage 1"
_FILE: Final = re.compile(r"\d{6}\.arrow")
_AT_ONCE: Final = 4096
"""Rows of a record batch, and of a put of rows without data."""
_END_MAX: Final = 1 << 31
"""Bound of an index. A load reaches it by puts of rows without data: half a million puts, minutes. No training has so
many samples."""
_TRIES: Final = 8
"""A save reads a partition again if samples of it are cleared meanwhile, at most so often."""
Rows = np.ndarray[Any, np.dtype[np.int64]]
Have = Callable[[str, str], set[int]]


class SampleFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of samples of one partition that have the same fields."""

    file: str
    rows: int
    fields: list[str]
    part: checksummed_json.FileRecord


class SampleReader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A partition of the manifest. `end` is one more than the last index ever assigned. `fields`: name, dtype,
    shape."""

    partition_id: str
    end: int
    fields: list[tuple[str, str, list[int | None]]]
    groups: list[SampleFile]

    def schema(self) -> dict[str, Field]:
        """Return the fields by name."""
        return {name: Field(name, dtype, tuple(shape)) for name, dtype, shape in self.fields}


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All partitions."""

    partitions: list[SampleReader]


# ---------------------------------------------------------------- writing


def save(
    queue: tq.Queue, have: Have, parent: Path, chosen: Mapping[str, Rows] | None = None
) -> checksummed_json.FileRecord:
    """Write all partitions, or the samples in `chosen`, to ``parent/storage`` and return the record of the manifest.
    Each sample is as it was at one moment of the save.

    `have` returns the samples of a partition that have a field.
    """
    with checksummed_json.directory(parent / FOLDER, MANIFEST) as path:
        names = [name for table in queue.tables() if (name := partition_of(table)) is not None]
        if chosen is not None:
            names = list(chosen)
        numbers = iter(range(1_000_000))
        partitions = [
            _save_partition(queue, name, have, path, numbers, None if chosen is None else chosen[name])
            for name in sorted(names)
        ]
        return checksummed_json.write(path / MANIFEST, KIND, msgspec.to_builtins(Manifest(partitions)))


def _save_partition(
    queue: tq.Queue, name: str, have: Have, path: Path, numbers: Iterator[int], chosen: Rows | None
) -> SampleReader:
    for tries_left in reversed(range(_TRIES)):
        table = queue.table(table_of(name))
        try:
            groups = [
                _save_group(table, rows, fields, path, numbers) for rows, fields in _groups(table, name, have, chosen)
            ]
        except NotFound:  # samples were cleared meanwhile
            if not tries_left:
                raise
            continue
        fields = [(field.name, field.dtype, list(field.shape)) for field in table.fields.values()]
        return SampleReader(name, table.audit().rows_put, fields, groups)
    raise NotFound(f"partition {name!r} is gone")


def _groups(table: tq.Table, name: str, have: Have, chosen: Rows | None) -> list[tuple[Rows, list[str]]]:
    """Group samples, all or those `chosen`, by the fields that they have."""
    if chosen is not None and not chosen.size:
        return []
    with table.read(chosen) as read:
        rows, shared = read.rows.copy(), set(read.fields)
    if not rows.size:
        return []
    some = [field for field in table.fields if field not in shared]
    having = np.array([np.isin(rows, list(have(field, name))) for field in some]).reshape(len(some), rows.size)
    kinds, which = np.unique(having, axis=1, return_inverse=True)
    return [
        (
            rows[which.reshape(-1) == at],
            sorted(shared | {field for field, has in zip(some, kinds[:, at], strict=True) if has}),
        )
        for at in range(kinds.shape[1])
    ]


def _save_group(table: tq.Table, rows: Rows, fields: list[str], path: Path, numbers: Iterator[int]) -> SampleFile:
    file = path / f"{next(numbers):06d}.arrow"
    batches = _read(table, rows, fields)
    first = next(batches)
    options = pa.ipc.IpcWriteOptions(allow_64bit=True)  # samples may have more than 2^31 elements together
    with file.open("wb") as sink, pa.ipc.new_file(sink, first.schema, options=options) as out:
        out.write_batch(first)
        for batch in batches:
            out.write_batch(batch)
    sync_path(file)
    return SampleFile(file.name, rows.size, fields, checksummed_json.part(file))


def _read(table: tq.Table, rows: Rows, fields: list[str]) -> Iterator[pa.RecordBatch]:
    """Yield record batches over the table's own memory: write each before requesting the next."""
    for at in range(0, rows.size, _AT_ONCE):
        with table.read(rows[at : at + _AT_ONCE], fields=fields) as read:
            columns = {
                "index": pa.array(read.rows),
                "key": pa.array(read.keys, pa.string()),
                "tags": pa.array([json.dumps(tags) for tags in read.tags], pa.string()),
                **{f"field.{name}": read[name].arrow() for name in fields},
            }
            yield pa.RecordBatch.from_pydict(columns)


# ---------------------------------------------------------------- reading


def verified(parent: Path) -> Manifest:
    """Return the manifest of ``parent/storage`` after a full check of every file: files are foreign input. Changes
    nothing.

    Raises `Corruption` with the file and its defect, even where the checksum is right.
    """
    path = parent / FOLDER
    manifest = checksummed_json.read(path / MANIFEST, KIND, Manifest)
    names = [partition.partition_id for partition in manifest.partitions]
    if len(set(names)) != len(names):
        raise _wrong(path / MANIFEST, "a partition is there twice")
    for partition in manifest.partitions:
        schema = _schema(partition, path / MANIFEST)
        for group in partition.groups:
            if not _FILE.fullmatch(group.file) or not set(group.fields) <= schema.keys():
                raise _wrong(path / MANIFEST, f"it names file {group.file!r} of {group.fields}, which no save writes")
            checksummed_json.compare(path / group.file, group.part)
        _check_indexes(
            partition, [_check_group(path / group.file, partition, group, schema) for group in partition.groups], path
        )
    return manifest


def _wrong(path: Path, what: str) -> Corruption:
    return Corruption(f"{path}: {what}; take another checkpoint")


def _schema(partition: SampleReader, manifest: Path) -> dict[str, Field]:
    try:
        schema = partition.schema()
    except UsageError as error:
        raise _wrong(manifest, f"partition {partition.partition_id!r} has a field that is none: {error}") from error
    if len(schema) != len(partition.fields) or not 0 <= partition.end <= _END_MAX:
        raise _wrong(manifest, f"partition {partition.partition_id!r} has a field twice, or ends at {partition.end}")
    return schema


def _check_group(file: Path, partition: SampleReader, group: SampleFile, schema: dict[str, Field]) -> Rows:
    """Return the indexes of a file after checking that its columns, texts and values are as `save` writes them."""
    fields = {f"field.{name}": schema[name] for name in group.fields}
    types = {"index": pa.int64(), "key": pa.string(), "tags": pa.string()}
    indexes = [np.empty(0, np.int64)]
    try:
        types |= {name: arrow_type(field) for name, field in fields.items()}
        for batch in _batches(file):
            batch.validate(full=True)
            if dict(zip(batch.schema.names, batch.schema.types, strict=True)) != types or batch.num_columns != len(
                types
            ):
                raise _wrong(file, f"it has the columns {batch.schema.names}; the manifest tells of {list(types)}")
            if any(batch[name].null_count for name in ("index", "tags")):
                raise _wrong(file, "an index or a tag is null")
            if not all(isinstance(json.loads(tags), dict) for tags in batch["tags"].to_pylist()):
                raise _wrong(file, "tags are no JSON object")
            for name, field in fields.items():
                columns_from_arrow(field, batch[name])
            indexes.append(np.asarray(batch["index"]))
    except Corruption as error:
        raise error if str(file) in str(error) else _wrong(file, str(error)) from error
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError, OSError, MemoryError) as error:
        raise _wrong(file, f"it cannot be read ({type(error).__name__}: {error})") from error
    rows = np.concatenate(indexes)
    if rows.size != group.rows:
        raise _wrong(file, f"it has {rows.size} rows; the manifest tells of {group.rows}")
    return rows


def _check_indexes(partition: SampleReader, indexes: list[Rows], path: Path) -> None:
    every = np.concatenate([np.empty(0, np.int64), *indexes])
    if every.size and (every.min() < 0 or every.max() >= partition.end or np.unique(every).size != every.size):
        raise _wrong(
            path,
            f"samples of partition {partition.partition_id!r} are not each there once, from 0 to {partition.end - 1}",
        )


def admit(manifest: Manifest, rows_max: int) -> None:
    """Raise `UsageError` for a partition with more samples than a partition may have here."""
    for partition in manifest.partitions:
        if (rows := sum(group.rows for group in partition.groups)) > rows_max:
            raise UsageError(
                f"partition {partition.partition_id!r} has {rows} samples, here one may have {rows_max}: set "
                "total_storage_size to that at least"
            )


def load(queue: tq.Queue, manifest: Manifest, parent: Path, rows_max: int) -> None:
    """Create the partitions of a manifest that was `verified`; none of these names may exist."""
    partitions = Partitions(queue, rows_max)
    for partition in manifest.partitions:
        table = partitions.make(partition.partition_id)[0]
        table.add_fields(list(map(without_rules, partition.schema().values())))
        files = [parent / FOLDER / group.file for group in partition.groups]
        indexes = [np.asarray(batch["index"]) for file in files for batch in _batches(file)]
        _plant(table, np.sort(np.concatenate([np.empty(0, np.int64), *indexes])), partition.end, rows_max)
        for file in files:
            for batch in _batches(file):
                _fill(table, partition.schema(), batch)


def keyed_rows(parent: Path, partition: SampleReader) -> dict[str, Any]:
    """Keys, tags and fields of the samples of a partition that was `verified`."""
    found: dict[str, Any] = {"keys": [], "tags": [], "fields": {}}
    for group in partition.groups:
        for batch in _batches(parent / FOLDER / group.file):
            keys = batch["key"].to_pylist()
            found["keys"] += keys
            found["tags"] += map(given_tags, _tags(batch))
            found["fields"] |= {key: list(group.fields) for key in keys}
    return found


def merge(queue: tq.Queue, manifest: Manifest, parent: Path, rows_max: int) -> int:
    """Put the samples of a manifest that was `verified` by their keys, beside those that are there. Return how many.

    Raises `SchemaError` for a field that the partition has with another type; nothing is put then.
    """
    count = 0
    for partition in manifest.partitions:
        table, schema = Partitions(queue, rows_max).make(partition.partition_id)[0], partition.schema()
        for name, field in schema.items():
            if name in table.fields and table.fields[name].describe() != field.describe():
                raise SchemaError(
                    f'field "{name}" is {field.describe()} in the dump, and {table.fields[name].describe()} in '
                    f"partition {partition.partition_id!r}; load into another partition's name, or clear this one"
                )
        table.add_fields([without_rules(field) for name, field in schema.items() if name not in table.fields])
        for group in partition.groups:
            for batch in _batches(parent / FOLDER / group.file):
                put_stored(table, _columns(schema, batch), batch["key"].to_pylist(), _tags(batch))
                count += batch.num_rows
    return count


def _batches(file: Path) -> Iterator[pa.RecordBatch]:
    with pa.memory_map(str(file)) as source:
        reader = pa.ipc.open_file(source)
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)


def _plant(table: tq.Table, wanted: Rows, end: int, rows_max: int) -> None:
    """Put rows without data at `wanted` (ascending) and at no other index. The next index is `end`, if the room allows
    it."""
    at = 0
    while at < end:
        size = min(_AT_ONCE, end - at, rows_max - int(np.searchsorted(wanted, at)))
        if size <= 0:
            return
        rows = put_at_once(table, {}, priority=np.zeros(size))
        if rows[0] != at or rows[-1] != at + size - 1:
            raise UsageError(
                f"{table.name} was written to while a checkpoint was loaded; stop its writers, then load again"
            )
        gone = rows[~np.isin(rows, wanted)]
        if gone.size:
            table.delete(gone)
        at += size


def _fill(table: tq.Table, schema: dict[str, Field], batch: pa.RecordBatch) -> None:
    rows, keys = np.asarray(batch["index"]), batch["key"].to_pylist()
    table.update(rows, tags=_tags(batch), **_columns(schema, batch))
    keyed = [at for at, key in enumerate(keys) if key]
    if keyed:
        table.update(rows[keyed], key=[keys[at] for at in keyed])


def _tags(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    return [json.loads(tags) for tags in batch["tags"].to_pylist()]


def _columns(schema: dict[str, Field], batch: pa.RecordBatch) -> dict[str, Any]:
    names = [name.removeprefix("field.") for name in batch.schema.names if name.startswith("field.")]
    return {name: _column(schema[name], batch[f"field.{name}"]) for name in names}


def _column(field: Field, array: pa.Array) -> Any:
    """Convert what `Column.arrow` returned into a column for `Table.update`."""
    if field.blob:
        values = array.to_pylist()
        return PlainValues(values, stored=True) if field.dtype == "value" else values
    column = columns_from_arrow(field, array)
    memory = np.empty(column.nbytes, np.uint8)
    column.source.write(memory)
    flat = as_torch(memory.view(STORED_DTYPES[field.dtype]), field.dtype)
    if column.offsets is None:
        return flat.reshape(len(array), *field.shape)
    if column.shapes is None:
        return torch.nested.nested_tensor_from_jagged(
            flat.reshape(-1, *field.shape[1:]), torch.from_numpy(column.offsets.copy())
        )
    edges = column.offsets.tolist()
    return [flat[edges[at] : edges[at + 1]].reshape(shape) for at, shape in enumerate(column.shapes.tolist())]
