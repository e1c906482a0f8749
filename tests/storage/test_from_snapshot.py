"""What a column gives to Arrow comes back as the same block, for every dtype and raggedness."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from transferqueue.errors import Corruption
from transferqueue.schema import BLOB_DTYPES, ITEM_BYTES, Field
from transferqueue.storage.columns import export
from transferqueue.storage.columns.column import Column
from transferqueue.storage.columns.export import arrow_type
from transferqueue.storage.columns.placement import MappedBlocks, RowPlacement
from transferqueue.storage.elements.dtypes import STORED_DTYPES
from transferqueue.storage.inputs.block_writer import BlockWriter
from transferqueue.storage.inputs.from_snapshot import columns_from_arrow
from transferqueue.storage.inputs.prepare import Prepared, prepare
from transferqueue.storage.inputs.sources import Arrays
from transferqueue.wire.messages import BlockLocation

NUMBERS = [name for name in ITEM_BYTES if name not in BLOB_DTYPES]
ROWS = 5


def column_of(prepared: Prepared) -> tuple[Column, np.ndarray[Any, Any]]:
    draft = BlockWriter([prepared])
    memory = np.zeros(max(draft.nbytes, 1), np.uint8)[: draft.nbytes]
    draft.write(memory)
    at = BlockLocation(1, 0, 1, 0, draft.nbytes, draft.stored_rows, [prepared.field.name], draft.counts)
    blocks = MappedBlocks([at], [memory], {prepared.field.name: prepared.field})
    rows = np.arange(draft.stored_rows, dtype=np.int32)
    return Column(prepared.field, RowPlacement(blocks, np.zeros(len(rows), np.int32), rows)), memory


def numbers(dtype: str, count: int) -> np.ndarray[Any, Any]:
    raw = np.random.default_rng(3).integers(0, 2 if dtype == "bool" else 120, count, np.uint8)
    return (
        raw.astype(STORED_DTYPES[dtype])
        if dtype == "bool"
        else np.resize(raw, count * ITEM_BYTES[dtype]).view(STORED_DTYPES[dtype])
    )


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("shape", [(), (3,), (2, 2), (None,), (None, 2), (None, None), (0,)])
def test_numbers_of_every_dtype_and_shape(dtype: str, shape: tuple[int | None, ...]) -> None:
    field = Field("x", dtype, shape)
    offsets = shapes = None
    count = ROWS * field.step_elements
    if field.ragged:
        offsets = np.array([0, 2, 2, 3, 7, 8], np.int64)
        count = 8 * field.step_elements
    elif field.varied:
        shapes = np.array([[1, 2], [0, 3], [2, 2], [1, 1], [3, 1]], np.int64)
        offsets = np.array([0, 2, 2, 6, 7, 10], np.int64)
        count = 10
    prepared = Prepared(field, ROWS, Arrays([numbers(dtype, count)], dtype), offsets, shapes)
    column, memory = column_of(prepared)
    _, again = column_of(columns_from_arrow(field, column.arrow()))
    np.testing.assert_array_equal(memory, again)
    _, part = column_of(columns_from_arrow(field, column.arrow().slice(1, 3)))
    _, wanted = column_of(columns_from_arrow(field, column[1:4].arrow()))
    np.testing.assert_array_equal(part, wanted)


@pytest.mark.parametrize(
    ("dtype", "values"), [("str", ["a", "", "löng"]), ("bytes", [b"", b"xy", b"z"]), ("value", [{"a": 1}, None, [2]])]
)
def test_text_bytes_and_values(dtype: str, values: list[Any]) -> None:
    field = Field("x", dtype)
    column, memory = column_of(prepare("x", values, field))
    again, copy = column_of(columns_from_arrow(field, column.arrow()))
    np.testing.assert_array_equal(memory, copy)
    assert again.list() == values
    assert columns_from_arrow(field, column.arrow().slice(1, 2)).stored_rows == 2


@pytest.mark.parametrize("field", [Field("x", "int64", (None,)), Field("x", "str"), Field("x", "int64", (None, None))])
def test_an_array_of_another_field_is_corruption(field: Field) -> None:
    with pytest.raises(Corruption, match=r'field "x" is .*, but its file has double'):
        columns_from_arrow(field, pa.array([1.0, 2.0]))


def test_a_dimension_beyond_32_bits_is_a_large_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrow counts the elements of a fixed-size list in an int32. The bytes of such a column are tried by
    ``python -m tests.large``."""
    assert arrow_type(Field("w", "uint8", ((1 << 31) + 8,))) == pa.large_list(pa.uint8())
    assert arrow_type(Field("w", "uint8", (2, 1 << 31))) == pa.list_(pa.large_list(pa.uint8()), 2)
    assert arrow_type(Field("w", "uint8", (2, 3))) == pa.list_(pa.list_(pa.uint8(), 3), 2)
    monkeypatch.setattr(export, "_FIXED_MAX", 3)
    for shape in [(5,), (2, 5), (5, 2), (None, 4), (4, 4)]:
        field = Field("w", "int16", shape)
        offsets = np.array([0, 1, 3], np.int64) if field.ragged else None
        count = (3 if field.ragged else 2) * field.step_elements
        prepared = Prepared(field, 2, Arrays([numbers("int16", count)], "int16"), offsets, None)
        column, memory = column_of(prepared)
        found = column.arrow()
        found.validate(full=True)
        assert found.type == arrow_type(field)
        _, again = column_of(columns_from_arrow(field, found))
        np.testing.assert_array_equal(memory, again)


def test_values_that_a_put_would_refuse_are_restored() -> None:
    """They were put before the field had the rule, or by a version that had none."""
    column, _ = column_of(columns_from_arrow(Field("rewards", "float32"), pa.array([np.nan, 1.0], pa.float32())))
    assert np.isnan(column.numpy()).tolist() == [True, False]
