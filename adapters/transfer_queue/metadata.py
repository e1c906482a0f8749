"""Metadata of samples, by index and by key, which the drop-in's calls take and return. Plain values without a
connection.

Written from the documented behaviour of TransferQueue 0.1.11, in its words: a *sample* is a row, a *partition* a table,
a *global index* a row id, *custom meta* the tags of a row.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from transferqueue.adapters.transfer_queue.samples.sample_shapes import SampleShapes

if TYPE_CHECKING:
    from tensordict import TensorDict

Status = npt.NDArray[np.int8]

READY = 1
NOT_READY = 0


class BatchMeta:
    """Metadata of a batch of samples, by column: every list is aligned with `global_indexes`.

    `field_schema` has by field ``{dtype, shape, is_nested, is_non_tensor, per_sample_shapes}``. `production_status` is
    int8 ``[samples]``, 1 if the sample has all fields.
    """

    __slots__ = (
        "_backend",
        "_schema",
        "_tags",
        "extra_info",
        "global_indexes",
        "partition_ids",
        "production_status",
    )

    def __init__(
        self,
        global_indexes: list[int],
        partition_ids: list[str],
        field_schema: dict[str, dict[str, Any]] | None = None,
        production_status: Status | None = None,
        extra_info: dict[str, Any] | None = None,
        custom_meta: list[dict[str, Any]] | None = None,
        _custom_backend_meta: list[dict[str, Any]] | None = None,
    ) -> None:
        size = len(global_indexes)
        if len(partition_ids) != size:
            raise ValueError(
                f"{size} global_indexes and {len(partition_ids)} partition_ids: there must be one for each"
            )
        if custom_meta is not None and len(custom_meta) != size:
            raise ValueError(f"{size} global_indexes and {len(custom_meta)} custom_meta: there must be one for each")
        self.global_indexes = list(global_indexes)
        self.partition_ids = list(partition_ids)
        self._schema = {name: dict(schema) for name, schema in (field_schema or {}).items()}
        self.production_status = _status(production_status, size)
        self.extra_info = dict(extra_info or {})
        self._tags = [dict(tags) for tags in custom_meta] if custom_meta else None
        self._backend = list(_custom_backend_meta) if _custom_backend_meta else None

    def __getstate__(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.__slots__)

    def __setstate__(self, state: Sequence[Any]) -> None:
        for name, value in zip(self.__slots__, state, strict=True):
            object.__setattr__(self, name, value)
        if not self.production_status.flags.writeable:  # Ray gives arrays in memory that others share
            self.production_status = self.production_status.copy()

    def __len__(self) -> int:
        return len(self.global_indexes)

    def __repr__(self) -> str:
        return f"BatchMeta({len(self)} samples of {sorted(set(self.partition_ids))}, fields {self.field_names})"

    @property
    def field_schema(self) -> dict[str, dict[str, Any]]:
        """The schema of each field. The lists of shapes are made on first use: a tuple for each sample and field would
        cost more than the question whose answer this is."""
        for schema in self._schema.values():
            if isinstance(shapes := schema.get("per_sample_shapes"), SampleShapes):
                schema["per_sample_shapes"] = list(shapes)
        return self._schema

    @field_schema.setter
    def field_schema(self, schema: dict[str, dict[str, Any]]) -> None:
        self._schema = schema

    @property
    def custom_meta(self) -> list[dict[str, Any]]:
        """Tags of each sample. Created on first use: thousands of empty dicts would cost more than the rest of a put's
        answer."""
        if self._tags is None:
            self._tags = [{} for _ in self.global_indexes]
        return self._tags

    @custom_meta.setter
    def custom_meta(self, tags: list[dict[str, Any]]) -> None:
        self._tags = tags

    @property
    def _custom_backend_meta(self) -> list[dict[str, Any]]:
        if self._backend is None:
            self._backend = [{} for _ in self.global_indexes]
        return self._backend

    @property
    def size(self) -> int:
        """Number of samples."""
        return len(self.global_indexes)

    @property
    def field_names(self) -> list[str]:
        """Names of the fields."""
        return list(self._schema)

    @property
    def samples(self) -> list[SampleView]:
        """A view of each sample: ``samples[i].fields["a"]``."""
        return [SampleView(self, at) for at in range(len(self))]

    @property
    def is_ready(self) -> bool:
        """Whether there are samples, and all have all fields."""
        return bool(len(self) and (self.production_status == READY).all())

    def get_dtypes(self, field_name: str) -> list[Any]:
        """The dtype of a field, once for each sample."""
        return [self._schema[field_name].get("dtype")] * len(self)

    def get_shapes(self, field_name: str) -> list[Any]:
        """The shape of a field in each sample."""
        schema = self._schema[field_name]
        shapes = schema.get("per_sample_shapes")
        return list(shapes) if shapes else [schema.get("shape")] * len(self)

    # ------------------------------------------------------------ extra info, custom meta

    def get_extra_info(self, key: str, default: Any = None) -> Any:
        """An entry of `extra_info`."""
        return self.extra_info.get(key, default)

    def set_extra_info(self, key: str, value: Any) -> None:
        """Set an entry of `extra_info`."""
        self.extra_info[key] = value

    def update_extra_info(self, info_dict: dict[str, Any]) -> None:
        """Set several entries."""
        self.extra_info.update(info_dict)

    def remove_extra_info(self, key: str) -> Any:
        """Remove an entry and return its value; None if it does not exist."""
        return self.extra_info.pop(key, None)

    def clear_extra_info(self) -> None:
        """Remove all entries."""
        self.extra_info.clear()

    def has_extra_info(self, key: str) -> bool:
        """Whether there is such an entry."""
        return key in self.extra_info

    def get_all_extra_info(self) -> dict[str, Any]:
        """A deep copy of `extra_info`."""
        return copy.deepcopy(self.extra_info)

    def get_all_custom_meta(self) -> list[dict[str, Any]]:
        """A deep copy of `custom_meta`."""
        return copy.deepcopy(self.custom_meta)

    def update_custom_meta(self, custom_meta: list[dict[str, Any]]) -> None:
        """Merge one dict into the custom meta of each sample."""
        if len(custom_meta) != len(self):
            raise ValueError(f"{len(custom_meta)} custom_meta for a batch of {len(self)} samples: give one for each")
        for tags, new in zip(self.custom_meta, custom_meta, strict=True):
            tags.update(new)

    def clear_custom_meta(self) -> None:
        """Remove the custom meta of all samples."""
        self._tags = None

    # ------------------------------------------------------------ fields and samples

    def add_fields(self, tensor_dict: TensorDict, set_all_ready: bool = True) -> BatchMeta:
        """Add the fields of a TensorDict to all samples, in place. With `set_all_ready`, mark the samples as ready."""
        for name, value in tensor_dict.items():
            self._schema[str(name)] = schema_of(value)
        if set_all_ready:
            self.production_status[:] = READY
        return self

    def select_samples(self, sample_indices: Sequence[int]) -> BatchMeta:
        """Return a new batch of some samples, by their position in this one."""
        return self._of([int(at) for at in sample_indices])

    def select_fields(self, field_names: Sequence[str]) -> BatchMeta:
        """Return a new batch with some fields; unknown names are ignored."""
        selected = self.copy()
        selected._schema = {name: selected._schema[name] for name in field_names if name in selected._schema}
        return selected

    def __getitem__(self, item: int | slice | Sequence[int]) -> BatchMeta:
        if isinstance(item, int):
            return self._of([range(len(self))[item]])
        return self._of(list(range(len(self)))[item] if isinstance(item, slice) else list(item))

    def copy(self) -> BatchMeta:
        """A deep copy."""
        return copy.deepcopy(self)

    def chunk(self, chunks: int) -> list[BatchMeta]:
        """Split into `chunks` batches; the first ones are one sample larger if the number does not divide."""
        return [self._of(places) for places in _cut(len(self), chunks)]

    def chunk_by_partition(self) -> list[BatchMeta]:
        """Split into batches of one partition each."""
        places: dict[str, list[int]] = {}
        for at, partition in enumerate(self.partition_ids):
            places.setdefault(partition, []).append(at)
        return [self._of(positions) for positions in places.values()]

    def union(self, other: BatchMeta) -> BatchMeta:
        """Join the fields of two batches of the same samples; `other` wins for common fields. A sample is ready if it
        is ready in both."""
        if not len(other):
            return self.copy()
        if not len(self):
            return other.copy()
        for name in ("global_indexes", "partition_ids"):
            if getattr(self, name) != getattr(other, name):
                raise ValueError(f"{name} do not match: a union is of the same samples")
        union = self.copy()
        union._schema |= copy.deepcopy(other._schema)
        union.production_status = self.production_status & other.production_status
        union.extra_info |= copy.deepcopy(other.extra_info)
        union.update_custom_meta(copy.deepcopy(other.custom_meta))
        return union

    @classmethod
    def concat(cls, data: list[BatchMeta], validate: bool = True) -> BatchMeta:
        """Concatenate the samples of several batches; they must have the same fields."""
        parts = [part for part in data if len(part)]
        if not parts:
            return cls.empty(_agreed([part.extra_info for part in data]))
        if validate and any(set(part.field_names) != set(parts[0].field_names) for part in parts):
            raise ValueError(f"Field names do not match: {[part.field_names for part in parts]}")
        return cls(
            global_indexes=[index for part in parts for index in part.global_indexes],
            partition_ids=[partition for part in parts for partition in part.partition_ids],
            field_schema=_joined_schema(parts),
            production_status=np.concatenate([part.production_status for part in parts]),
            extra_info=_agreed([part.extra_info for part in parts]),
            custom_meta=[tags for part in parts for tags in copy.deepcopy(part.custom_meta)],
        )

    def reorder(self, indices: Sequence[int]) -> None:
        """Reorder the samples in place."""
        reordered = self._of([int(at) for at in indices])
        for name in self.__slots__:
            setattr(self, name, getattr(reordered, name))

    @classmethod
    def empty(cls, extra_info: dict[str, Any] | None = None) -> BatchMeta:
        """Return a batch without samples."""
        return cls(global_indexes=[], partition_ids=[], extra_info=extra_info)

    def _of(self, places: Sequence[int]) -> BatchMeta:
        return BatchMeta(
            global_indexes=[self.global_indexes[at] for at in places],
            partition_ids=[self.partition_ids[at] for at in places],
            field_schema={name: _schema_of_some(schema, places) for name, schema in self._schema.items()},
            production_status=self.production_status[np.asarray(places, np.intp)],
            extra_info=copy.deepcopy(self.extra_info),
            custom_meta=copy.deepcopy([self.custom_meta[at] for at in places]),
            _custom_backend_meta=[self._custom_backend_meta[at] for at in places],
        )


class SampleView:
    """One sample of a batch."""

    def __init__(self, batch: BatchMeta, at: int) -> None:
        self._batch, self._at = batch, at

    @property
    def global_index(self) -> int:
        """Its index."""
        return self._batch.global_indexes[self._at]

    @property
    def partition_id(self) -> str:
        """Its partition."""
        return self._batch.partition_ids[self._at]

    @property
    def fields(self) -> dict[str, dict[str, Any]]:
        """Schema of each of its fields."""
        return {
            name: {**schema, "shape": self._batch.get_shapes(name)[self._at]}
            for name, schema in self._batch.field_schema.items()
        }


@dataclass
class KVBatchMeta:
    """Metadata of samples by key, which the key-value calls return."""

    keys: list[str] = field(default_factory=list)
    tags: list[dict[str, Any]] = field(default_factory=list)
    partition_id: str | None = None
    fields: list[str] | None = None
    extra_info: dict[str, Any] | None = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.tags):
            raise ValueError(f"keys and tags must have same length, got {len(self.keys)} and {len(self.tags)}")
        if len(set(self.keys)) != len(self.keys):
            raise ValueError("Got duplicated keys")
        if self.fields is not None and len(set(self.fields)) != len(self.fields):
            raise ValueError("Got duplicated fields")
        self.keys = list(self.keys)
        self.tags = [copy.deepcopy(tags) if tags else {} for tags in self.tags]  # mostly there are none
        self.fields = None if self.fields is None else list(self.fields)
        self.extra_info = copy.deepcopy(self.extra_info) or {}

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def size(self) -> int:
        """Number of samples."""
        return len(self.keys)

    def select_keys(self, keys_to_select: list[str]) -> KVBatchMeta:
        """Return the samples of some keys, in the order of `keys_to_select`."""
        if len(set(keys_to_select)) != len(keys_to_select):
            raise ValueError("Contain duplicate keys: each may be selected once")
        place = {key: at for at, key in enumerate(self.keys)}
        missing = [key for key in keys_to_select if key not in place]
        if missing:
            raise RuntimeError(f"keys {missing[:5]} not found in current batch")
        return self._of([place[key] for key in keys_to_select])

    def reorder(self, indexes: list[int]) -> None:
        """Reorder the samples in place."""
        if len(indexes) != len(self):
            raise ValueError(f"{len(indexes)} indexes: their number does not match the batch of {len(self)}")
        if len(set(indexes)) != len(indexes):
            raise ValueError("Contain duplicate indexes: each may be named once")
        self.keys = [self.keys[at] for at in indexes]
        self.tags = [self.tags[at] for at in indexes]

    def chunk(self, chunks: int) -> list[KVBatchMeta]:
        """Split into `chunks` batches; the first ones are one sample larger if the number does not divide."""
        return [self._of(places) for places in _cut(len(self), chunks)]

    @classmethod
    def concat(cls, data: list[KVBatchMeta]) -> KVBatchMeta:
        """Concatenate the samples of several batches; they must have the same fields and partition."""
        parts = [part for part in data if len(part)]
        if not parts:
            return cls()
        for part in parts:
            if set(part.fields or ()) != set(parts[0].fields or ()):
                raise ValueError(f"Field names do not match: {part.fields} and {parts[0].fields}")
            if part.partition_id != parts[0].partition_id:
                raise ValueError(f"Partition do not match: {part.partition_id} and {parts[0].partition_id}")
        return cls(
            keys=[key for part in parts for key in part.keys],
            tags=[tags for part in parts for tags in part.tags],
            partition_id=parts[0].partition_id,
            fields=parts[0].fields,
            extra_info=_agreed([part.extra_info or {} for part in parts]),
        )

    def _of(self, places: Iterable[int]) -> Self:
        places = list(places)
        return type(self)(
            keys=[self.keys[at] for at in places],
            tags=[self.tags[at] for at in places],
            partition_id=self.partition_id,
            fields=self.fields,
            extra_info=self.extra_info,
        )


def schema_of(value: Any) -> dict[str, Any]:
    """Return the schema of one column of a TensorDict."""
    if not hasattr(value, "dtype") or not hasattr(value, "is_nested"):
        return {"dtype": None, "shape": (), "is_nested": False, "is_non_tensor": True}
    if value.is_nested:
        return {
            "dtype": value.dtype,
            "shape": None,
            "is_nested": True,
            "is_non_tensor": False,
            "per_sample_shapes": _shapes(value),
        }
    return {"dtype": value.dtype, "shape": tuple(value.shape[1:]), "is_nested": False, "is_non_tensor": False}


def _shapes(value: Any) -> SampleShapes | list[tuple[int, ...]]:
    """Return the shape of each sample of a nested tensor."""
    from transferqueue.adapters.transfer_queue.samples.columns import flat

    if flat(value):
        lengths, trailing = value.offsets().diff().numpy(force=True), value.shape[2:]
        array = np.empty((len(lengths), 1 + len(trailing)), np.int64)
        array[:, 0], array[:, 1:] = lengths, tuple(trailing)
        return SampleShapes(array)
    return [tuple(part.shape) for part in value.unbind()]


def _status(status: Status | None, size: int) -> Status:
    if status is None:
        return np.zeros(size, np.int8)
    if len(status) != size:
        raise ValueError(f"{size} global_indexes and {len(status)} production_status: there must be one for each")
    return np.array(status, np.int8)


def _cut(size: int, chunks: int) -> Iterator[range]:
    if chunks < 1:
        raise ValueError(f"chunk into {chunks}: give at least 1")
    chunk, larger = divmod(size, chunks)
    start = 0
    for number in range(chunks):
        end = start + chunk + (number < larger)
        yield range(start, end)
        start = end


def _schema_of_some(schema: Mapping[str, Any], places: Sequence[int]) -> dict[str, Any]:
    shapes = schema.get("per_sample_shapes")
    if not shapes:
        return dict(schema)
    some = shapes.of(places) if isinstance(shapes, SampleShapes) else [shapes[at] for at in places]
    return {**schema, "per_sample_shapes": some}


def _joined_schema(parts: Sequence[BatchMeta]) -> dict[str, dict[str, Any]]:
    joined: dict[str, dict[str, Any]] = {}
    for name, schema in parts[0]._schema.items():
        joined[name] = dict(schema)
        schemas = [part._schema[name] for part in parts if name in part._schema]
        has_shapes = any(each.get("per_sample_shapes") for each in schemas)
        if has_shapes or len({each.get("shape") for each in schemas}) > 1:
            joined[name] |= {"shape": None, "is_nested": True, "per_sample_shapes": _joined_shapes(parts, name)}
    return joined


def _joined_shapes(parts: Sequence[BatchMeta], name: str) -> SampleShapes | list[Any]:
    held = [part._schema.get(name, {}).get("per_sample_shapes") for part in parts]
    arrays = [shapes.array for shapes in held if isinstance(shapes, SampleShapes)]
    if len(arrays) == len(parts) and len({array.shape[1] for array in arrays}) == 1:
        return SampleShapes(np.concatenate(arrays))
    return [
        shape for part in parts for shape in (part.get_shapes(name) if name in part._schema else [None] * len(part))
    ]


def _agreed(infos: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge mappings; `ValueError` for a key with different values."""
    entries: dict[str, Any] = {}
    for info in infos:
        for key, value in info.items():
            if key in entries and not _same(entries[key], value):
                raise ValueError(
                    f"extra_info {key!r} has conflicting values in the batches: {entries[key]!r}, {value!r}"
                )
            entries[key] = value
    return copy.deepcopy(entries)


def _same(value: Any, other: Any) -> bool:
    if type(value) is not type(other):
        return False
    equal = value == other
    return bool(equal.all()) if hasattr(equal, "all") else bool(equal)
