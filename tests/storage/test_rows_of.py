"""An array given as its rows, and values given as plain ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.storage.shards import Shard
from transferqueue.errors import SchemaError
from transferqueue.schema import Field
from transferqueue.storage import PlainValues, RowsOf
from transferqueue.storage.inputs.prepare import prepare


@pytest.mark.parametrize("value", [[[1, 2], [3, 4]], ["a"], np.arange(3), torch.arange(3), {"a": 1}, 7])
def test_what_is_no_array_of_rows_is_refused(value: Any) -> None:
    with pytest.raises(SchemaError, match='field "x"'):
        prepare("x", RowsOf(value))


@pytest.mark.parametrize(
    ("values", "shape"),
    [
        (np.arange(12, dtype=np.int16).reshape(3, 4), (None,)),
        (torch.arange(24, dtype=torch.bfloat16).reshape(3, 4, 2), (None, 2)),
        (np.arange(12).reshape(4, 3).T, (None,)),
        (np.empty((3, 0), np.float32), (None,)),
    ],
)
def test_it_is_what_its_list_of_rows_is(shard: Shard, values: Any, shape: tuple[int | None, ...]) -> None:
    each, listed = shard.round_trip(RowsOf(values)), shard.round_trip(list(values))
    assert each.field == listed.field == Field("x", str(values.dtype).removeprefix("torch."), shape)
    assert each.list() == listed.list() == [row.tolist() for row in values]


def test_it_fits_fields_that_its_rows_fit(shard: Shard) -> None:
    values = np.arange(6).reshape(2, 3)
    for shape in ((3,), (None,)):
        assert shard.round_trip(RowsOf(values), Field("x", "int64", shape)).list() == values.tolist()
    with pytest.raises(SchemaError, match=r"row 0 has shape \[3\]"):
        prepare("x", RowsOf(values), Field("x", "int64", (4,)))
    with pytest.raises(SchemaError, match="1 dimensions; give rows of 2"):
        prepare("x", RowsOf(values), Field("x", "int64", (None, None)))


@pytest.mark.parametrize("values", [["a", "b"], [1, 2], [[1], [2.5]], [None, {"a": 1}], [b"x", True]])
def test_plain_values_stay_plain(shard: Shard, values: list[Any]) -> None:
    for field in (None, Field("x", "value")):
        column = shard.round_trip(PlainValues(values), field)
        assert column.field == Field("x", "value")
        assert column.list() == values


@pytest.mark.parametrize("values", [[object()], [{object()}], []])
def test_what_is_not_plain_is_refused(values: list[Any]) -> None:
    with pytest.raises(SchemaError, match='field "x"'):
        prepare("x", PlainValues(values))
    with pytest.raises(SchemaError, match='field "x" is str'):
        prepare("x", PlainValues(["a"]), Field("x", "str"))
