"""Converts a TensorDict to columns of a table, and back.

A tensor with one number a sample is a scalar field. Any other tensor is ragged in its first dimension, even if all
samples of one put have one length: the next put may differ, and reads return jagged tensors, as documented. Anything
else is a value of the queue, which comes back as it was given (`transferqueue.register_value`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from transferqueue.adapters.transfer_queue.samples.sample_shapes import SampleShapes, Shape
from transferqueue.client.operations.name_suggestions import RESERVED
from transferqueue.errors import UsageError
from transferqueue.schema import Field
from transferqueue.storage import PlainValues, RowsOf
from transferqueue.storage.elements.torch_interop import as_jagged

TORCH_DTYPE = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}

_field: Final = lru_cache(1 << 12)(Field)
"""Cached fields: computing a field's dtype and shape costs time, and every partition is a new table with the same
fields."""


def columns_of(data: TensorDict, known: Mapping[str, Field]) -> tuple[list[Field], dict[str, Any]]:
    """Return the fields that `known` lacks, and all columns as `Table.put` takes them."""
    new: list[Field] = []
    columns: dict[str, Any] = {}
    for name in data.keys():  # noqa: SIM118  (a TensorDict is no mapping)
        if name in RESERVED:
            raise UsageError(
                f"field {name!r} has the name of a fact of rows, and cannot be a column; give it another name"
            )
        field, value = _column(str(name), data.get(name), known.get(str(name)))
        columns[field.name] = value
        if field.name not in known:
            new.append(without_rules(field))
    return new, columns


def without_rules(field: Field) -> Field:
    """The field without the rules that it has by its name alone: TransferQueue takes any values and lengths, and its
    callers declare no fields."""
    return msgspec.structs.replace(field, like="", finite=False) if field.has_lengths_of or field.is_finite else field


def tensordict_of(rows: Any, names: Sequence[str], samples: int | None = None) -> TensorDict:
    """Convert columns of `transferqueue.Rows`, or columns by name, to a TensorDict ``[samples]``. `samples` is their
    number, if not ``len(rows)``.

    Scalars are dense, other tensors jagged (strided if more than the first dimension varies), the rest is non-tensor
    data. Columns that lie together in memory are not copied.
    """
    columns: dict[str, Any] = {}
    for name in names:
        column = rows[name]
        if column.field.blob:
            columns[name] = NonTensorStack(*column.list())
        elif column.field.dense:
            columns[name] = column.torch()
        elif column.field.ragged:
            columns[name] = column.nested()
        else:
            columns[name] = torch.nested.as_nested_tensor([torch.as_tensor(part) for part in column])
    return TensorDict(columns, batch_size=[len(rows) if samples is None else samples])


def single(fields: TensorDict | Mapping[str, Any]) -> TensorDict:
    """Convert the fields of one sample to a TensorDict ``[1]``; values of a dict get a batch dimension."""
    if isinstance(fields, TensorDict):
        return fields
    columns: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, Tensor):
            if value.is_nested:
                raise ValueError(f"field {name!r} is a nested tensor: kv_put takes one sample; use kv_batch_put")
            columns[name] = value.unsqueeze(0)
        else:
            columns[name] = NonTensorStack(value)
    return TensorDict(columns, batch_size=[1])


def rows_of_tensordict(data: TensorDict, places: range) -> TensorDict:
    """Return a range of samples."""
    columns: dict[str, Any] = {}
    for name in data.keys():  # noqa: SIM118
        value = data.get(name)
        if isinstance(value, Tensor) and not value.is_nested:
            columns[str(name)] = value[places.start : places.stop]
        elif isinstance(value, Tensor):
            parts = value.unbind()[places.start : places.stop]
            columns[str(name)] = torch.nested.as_nested_tensor(list(parts), layout=value.layout)
        else:
            columns[str(name)] = NonTensorStack(*value.tolist()[places.start : places.stop])
    return TensorDict(columns, batch_size=[len(places)])


def stacked(values: Any) -> Any:
    """Make a column of a TensorDict from one value for each sample, or from a tensor of all."""
    if isinstance(values, Tensor):
        return values
    if all(isinstance(value, Tensor) for value in values):
        return torch.nested.as_nested_tensor(list(values))
    return NonTensorStack(*values)


def interleaved(parts: Sequence[TensorDict], order: npt.NDArray[np.intp], names: Sequence[str]) -> TensorDict:
    """Join samples of several partitions, which all have these fields. ``order[i]`` is the place of sample i in all
    parts one after the other; each place is there once."""
    columns: dict[str, Any] = {}
    for name in names:
        held = [part.get(name) for part in parts]
        if all(isinstance(column, Tensor) and not column.is_nested for column in held):
            columns[name] = torch.cat(held)[torch.from_numpy(order)]
            continue
        if all(isinstance(column, Tensor) and flat(column) for column in held) and _are_alike(held):
            columns[name] = _interleaved_jagged(held, order)
            continue
        values = [value for column in held for value in values_of(column)]
        values = [values[at] for at in order.tolist()]
        if all(isinstance(column, Tensor) for column in held):
            jagged = all(column.layout == torch.jagged for column in held)
            layout = torch.jagged if jagged else torch.strided
            columns[name] = torch.nested.as_nested_tensor(values, layout=layout)
        else:
            columns[name] = NonTensorStack(*values)
    return TensorDict(columns, batch_size=[len(order)])


def _are_alike(held: Sequence[Any]) -> bool:
    return len({(column.dtype, tuple(column.values().shape[1:])) for column in held}) == 1


def _interleaved_jagged(held: Sequence[Any], order: npt.NDArray[np.intp]) -> Tensor:
    """Rows of jagged tensors, picked from their values at once."""
    lengths = np.concatenate([column.offsets().diff().numpy() for column in held])
    offsets = np.zeros(len(order) + 1, np.int64)
    np.cumsum(lengths[order], out=offsets[1:])
    values = torch.cat([column.values() for column in held])
    if (np.diff(order) < 0).any():  # else the parts, one after the other, are in this order
        starts = np.cumsum(lengths) - lengths
        places = np.repeat(starts[order] - offsets[:-1], lengths[order]) + np.arange(offsets[-1])
        values = values[torch.from_numpy(places)]
    jagged: Tensor = as_jagged(values, offsets)
    return jagged


def values_of(column: Any) -> list[Any]:
    """Return the value of each sample of a column of a TensorDict: a tensor, or an element of a plain column."""
    return list(column.unbind()) if isinstance(column, Tensor) else _each(column)


def schema_of_field(field: Field, shapes: SampleShapes | Sequence[Shape | None] = ()) -> dict[str, Any]:
    """Return a field as an entry of ``BatchMeta.field_schema``.

    `shapes` are of the samples that the metadata describes, None for one without the field; not needed for a field of
    one shape. Samples of one shape are not nested, although a read returns them jagged: so the original says it.
    """
    if field.blob:
        return {"dtype": None, "shape": (), "is_nested": False, "is_non_tensor": True}
    schema = {"dtype": TORCH_DTYPE[field.dtype], "is_non_tensor": False}
    if field.dense:
        return {**schema, "shape": field.shape, "is_nested": False}
    if (common := _common(shapes)) is not None:
        return {**schema, "shape": common, "is_nested": False}
    has_any = bool(len(shapes)) if isinstance(shapes, SampleShapes) else any(shape is not None for shape in shapes)
    return {**schema, "shape": None, "is_nested": True, **({"per_sample_shapes": shapes} if has_any else {})}


def _common(shapes: SampleShapes | Sequence[Shape | None]) -> Shape | None:
    if isinstance(shapes, SampleShapes):
        return shapes.common
    different = set(shapes) - {None}
    return different.pop() if len(different) == 1 else None


def _column(name: str, value: Any, known: Field | None) -> tuple[Field, Any]:
    if not isinstance(value, Tensor):
        return known or _field(name, "value"), PlainValues(_each(value))
    if value.is_nested:
        return _nested(name, value, known)
    if value.ndim == 1:
        return known or _field(name, _dtype(value)), value
    return known or _field(name, _dtype(value), (None, *value.shape[2:])), RowsOf(value)


def _nested(name: str, value: Tensor, known: Field | None) -> tuple[Field, Any]:
    if flat(value):
        field = known or _field(name, _dtype(value), (None, *value.shape[2:]))
        return field, value if field.ragged else list(value.unbind())
    parts = list(value.unbind())
    trailing = {tuple(part.shape[1:]) for part in parts}
    shape = (None, *trailing.pop()) if len(trailing) == 1 else (None,) * parts[0].ndim
    return known or _field(name, _dtype(value), shape), parts


def flat(value: Any) -> bool:
    """Whether a nested tensor stores all values in one tensor, row after row, ragged in its first dimension."""
    return value.layout == torch.jagged and value._ragged_idx == 1 and value.lengths() is None


def _dtype(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _each(value: Any) -> list[Any]:
    """Return non-tensor values, one for each sample. An array or list with one element a sample is split."""
    if isinstance(value, NonTensorStack):
        return list(value.tolist())
    if isinstance(value, NonTensorData):
        samples = value.batch_size[0] if value.batch_size else 1
        shared = value.data
        return list(shared) if isinstance(shared, np.ndarray | list) and len(shared) == samples else [shared] * samples
    return list(value)
