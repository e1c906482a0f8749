"""How a column is read."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch

from tests.storage.shards import Shard
from transferqueue.errors import SchemaError, UsageError
from transferqueue.schema import Field
from transferqueue.storage import Column

RAGGED, VARIED = [[1, 2, 3], [], [4]], [np.ones((1, 2)), np.full((2, 1), 2.0)]


@pytest.mark.parametrize(
    ("value", "method", "remedy"),
    [
        (RAGGED, "numpy", r"int64\[None\]; use .nested\(\), .padded\(value\), .ragged\(\) or .list\(\)"),
        (RAGGED, "torch", r"use .nested\(\)"),
        (VARIED, "numpy", r"float64\[None, None\]; use .padded\(value\), .list\(\), or iterate"),
        (VARIED, "nested", r"use .padded\(value\)"),
        (["a"], "numpy", r"str; use .list\(\) or .arrow\(\)"),
        (["a"], "padded", r"use .list\(\) or .arrow\(\)"),
        ([{"a": 1}], "torch", r"value; use .list\(\)"),
        ([1.0], "nested", r"float64; use .numpy\(\), .torch\(\)"),
        ([1.0], "ragged", r"use .numpy\(\), .torch\(\)"),
    ],
)
def test_a_reading_that_does_not_fit_names_those_that_do(shard: Shard, value: Any, method: str, remedy: str) -> None:
    with pytest.raises(UsageError, match=f'.{method}.. does not fit field "x", which is .*{remedy}'):
        getattr(shard.round_trip(value), method)()


def test_padding(shard: Shard) -> None:
    column = shard.round_trip(RAGGED)
    assert column.padded(-1).tolist() == [[1, 2, 3], [-1, -1, -1], [4, -1, -1]]
    assert column.padded(0, multiple_of=4).tolist() == [[1, 2, 3, 0], [0, 0, 0, 0], [4, 0, 0, 0]]
    assert column.padded(0, side="left").tolist() == [[1, 2, 3], [0, 0, 0], [0, 0, 4]]
    assert shard.round_trip(VARIED).padded().tolist() == [[[1, 1], [0, 0]], [[2, 0], [2, 0]]]
    assert shard.round_trip(VARIED).padded(side="left").tolist() == [[[0, 0], [1, 1]], [[2, 0], [2, 0]]]
    pairs = shard.round_trip([np.ones((1, 2), np.int8), np.ones((2, 2), np.int8)])
    assert pairs.padded(5).tolist() == [[[1, 1], [5, 5]], [[1, 1], [1, 1]]]
    assert shard.round_trip([[True], [True, False]]).padded().tolist() == [[True, False], [True, False]]
    assert shard.round_trip(np.ones((2, 3))).padded(9).tolist() == [[1.0] * 3] * 2


def test_padding_that_does_not_fit_is_refused(shard: Shard) -> None:
    column = shard.round_trip(RAGGED)
    with pytest.raises(SchemaError, match='padding of field "x": float values do not fit dtype int64'):
        column.padded(float("nan"))
    with pytest.raises(UsageError, match=r"multiple_of=0.* give a positive multiple, and left or right"):
        column.padded(0, multiple_of=0)
    with pytest.raises(UsageError, match="side='both'"):
        column.padded(0, side="both")  # type: ignore[arg-type]
    assert column.padded(0).tolist() == [[1, 2, 3], [0, 0, 0], [4, 0, 0]]


def test_what_numpy_lacks_is_told_apart(shard: Shard) -> None:
    column = shard.round_trip(torch.ones(2).bfloat16())
    if importlib.util.find_spec("ml_dtypes") is None:
        with pytest.raises(UsageError, match=r"bfloat16 does not exist in numpy; use .torch"):
            column.numpy()
    assert column.list() == [1.0, 1.0]


def test_rows_and_selections(shard: Shard) -> None:
    column = shard.round_trip([["a"], ["b", "c"], ["d"]])
    assert column[0] == ["a"]
    assert column[-1] == ["d"]
    assert column[1:].list() == [["b", "c"], ["d"]]
    assert column[::-1].list() == [["d"], ["b", "c"], ["a"]]
    assert column[[2, 0, 2]].list() == [["d"], ["a"], ["d"]]
    assert column[np.array([True, False, True])].list() == [["a"], ["d"]]
    assert column[[]].list() == []
    for wrong in (3, -4):
        with pytest.raises(IndexError, match=f'row {wrong} of column "x", which has 3'):
            column[wrong]
    assert repr(column).startswith("Column('x', value, shape=(3,), [")


def test_all_readings_show_one_memory(shard: Shard) -> None:
    column = shard.round_trip(np.zeros((3, 2)))
    column.numpy()[1] = 5
    assert column.torch()[1].tolist() == [5.0, 5.0]
    assert column[1].tolist() == [5.0, 5.0]
    scattered = shard.column("x", shard.put({"x": np.zeros((3, 2))}), [(0, 2), (0, 0)])
    scattered.torch()[0] = 7
    assert scattered.numpy()[0].tolist() == [7.0, 7.0]
    ragged = shard.round_trip([[1, 2], [3]])
    ragged.nested().values()[0] = 9
    assert ragged.list() == [[9, 2], [3]]


def test_torch_pads_jagged_rows_to_the_longest(shard: Shard) -> None:
    """A jagged tensor that does not know its longest row is padded by torch to the length of all rows together."""
    jagged = shard.round_trip([[1, 2], [3], [4, 5, 6]]).nested()
    assert torch.nested.to_padded_tensor(jagged, 0).tolist() == [[1, 2, 0], [3, 0, 0], [4, 5, 6]]


def test_inline_columns_are_columns() -> None:
    field = Field("reward", "float32")
    column = Column.of_inline(field, np.array([1, 2, 3], "<f4").tobytes())
    column.numpy()[0] = 9
    assert column.list() == [9.0, 2.0, 3.0]
    assert column.torch().tolist() == [9.0, 2.0, 3.0]
    assert column[1:].numpy().tolist() == [2.0, 3.0]
    assert column[[0, 0]].list() == [9.0, 9.0]
    assert column[0] == 9.0
    assert len(column) == 3
    assert column.lengths.tolist() == [1, 1, 1]
    assert column.arrow().to_pylist() == [9.0, 2.0, 3.0]


def test_arrow_of_a_view_copies_nothing(shard: Shard) -> None:
    column = shard.round_trip([[1, 2], [3]])
    values, offsets = column.ragged()
    found = column.arrow()
    assert found.values.buffers()[1].address == values.ctypes.data
    assert found.buffers()[1].address == offsets.ctypes.data
