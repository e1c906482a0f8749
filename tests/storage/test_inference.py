"""What field an undeclared column becomes, and what a declared one makes of Python numbers."""

from __future__ import annotations

from array import array
from collections import deque
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from tests.storage.shards import Shard
from transferqueue.schema import Field
from transferqueue.storage import Repeat, block_writers
from transferqueue.storage.inputs.prepare import prepare
from transferqueue.storage.inputs.sources import DeviceTensors

JAGGED = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged)


@pytest.mark.parametrize(
    ("value", "dtype", "shape"),
    [
        ([1, 2], "int64", ()),
        ([1, 2.5], "float64", ()),
        ([True, False], "bool", ()),
        ([True, 2], "int64", ()),
        ([1j], "complex128", ()),
        ([np.float32(1), np.float32(2)], "float32", ()),
        ([0.0, np.float32(2)], "float32", ()),
        ([1.5, np.int32(2)], "float64", ()),
        ([np.zeros(()), np.zeros(())], "float64", ()),
        ([torch.tensor(1), torch.tensor(2)], "int64", ()),
        (range(3), "int64", ()),
        (array("f", [1, 2]), "float32", ()),
        (deque([1, 2]), "int64", ()),
        ([[1, 2], [3]], "int64", (None,)),
        ([[1, 2], [3, 4]], "int64", (None,)),
        ([(1.0, 2.0), ()], "float64", (None,)),
        ([[[1, 2], [3, 4]], [[5, 6]]], "int64", (None, 2)),
        ([[[1, 2], [3, 4]], [[5]]], "int64", (None, None)),
        ([[[1], [2, 3]]], "value", ()),
        ([["a"], ["b", "c"]], "value", ()),
        ([{"a": 1}, None], "value", ()),
        ([[1, "a"], [2]], "value", ()),
        ([np.zeros(3, np.int16), np.zeros(2, np.int16)], "int16", (None,)),
        ([np.zeros((2, 4)), np.zeros((3, 4))], "float64", (None, 4)),
        ([np.zeros((2, 4, 3), np.uint8), np.zeros((3, 5, 3), np.uint8)], "uint8", (None, None, 3)),
        ([torch.zeros(3).bfloat16(), torch.zeros(2).bfloat16()], "bfloat16", (None,)),
        (JAGGED, "float32", (None, 3)),
        (JAGGED.transpose(1, 2).contiguous().transpose(1, 2), "float32", (None, 3)),
        (torch.zeros(2, 3, dtype=torch.float8_e4m3fn), "float8_e4m3fn", (3,)),
        (torch.ones(2, 3, requires_grad=True) * 2, "float32", (3,)),
        (np.zeros((2, 3), ">i2"), "int16", (3,)),
        (np.array(["a", "bc"]), "str", ()),
        (np.array([b"a", b"bc"]), "bytes", ()),
        (["a", np.str_("bc")], "str", ()),
        ([b"a", bytearray(b"bc"), memoryview(b"d")], "bytes", ()),
        (pa.array([1, 2], pa.int8()), "int8", ()),
        (pa.array([1.0], pa.float16()), "float16", ()),
        (pa.array([[1], []]), "int64", (None,)),
        (pa.array([[1, 2]], pa.list_(pa.int64(), 2)), "int64", (2,)),
        (pa.array([[1, 2]], pa.list_view(pa.int64())), "int64", (None,)),
        (pa.array(["a"]), "str", ()),
        (pa.array([b"ab"], pa.binary(2)), "bytes", ()),
        (pa.array([{"a": 1}]), "value", ()),
        (pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())), "value", ()),
        (pa.FixedShapeTensorArray.from_numpy_ndarray(np.zeros((2, 3, 4), np.float32)), "float32", (3, 4)),
        (pa.chunked_array([["a"], ["b"]]).dictionary_encode(), "str", ()),
    ],
)
def test_what_is_not_declared_is_inferred(value: Any, dtype: str, shape: tuple[int | None, ...]) -> None:
    assert prepare("x", value).field == Field("x", dtype, shape)


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        (Field("x", "float32"), [1, 2], [1.0, 2.0]),
        (Field("x", "float32"), [True, 2.5], [1.0, 2.5]),
        (Field("x", "int8"), [True, -128, 127], [1, -128, 127]),
        (Field("x", "uint64"), [0, (1 << 64) - 1], [0, (1 << 64) - 1]),
        (Field("x", "float64"), [float("inf"), float("nan"), 1e308], [float("inf"), float("nan"), 1e308]),
        (Field("x", "float16"), [0.1, float("-inf")], [float(np.float16(0.1)), float("-inf")]),
        (Field("x", "bfloat16"), [1.5, -2, float("inf")], [1.5, -2.0, float("inf")]),
        (Field("x", "float8_e5m2"), [1.5, -2.0], [1.5, -2.0]),
        (Field("x", "float32"), [np.float64(0.5), 1], [0.5, 1.0]),
        (Field("x", "complex64"), [1, 2.5, 1j], [1 + 0j, 2.5 + 0j, 1j]),
        (Field("x", "int32", (None,)), [[1, 2], []], [[1, 2], []]),
        (Field("x", "int32", (None,)), [[], []], [[], []]),
        (Field("x", "float32", (None,)), [[1, 2], [3]], [[1.0, 2.0], [3.0]]),
        (Field("x", "float32", (2,)), [[1, 2], [3, 4]], [[1.0, 2.0], [3.0, 4.0]]),
        (Field("x", "int64", (None, 3)), [[], [[1, 2, 3]]], [[], [[1, 2, 3]]]),
        (Field("x", "bfloat16", (None,)), [[1, 2], [3]], [[1.0, 2.0], [3.0]]),
        (Field("x", "value"), [1, "a", None, (1, 2)], [1, "a", None, (1, 2)]),
        (Field("x", "value"), [[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_python_values_take_the_dtype_of_their_field(shard: Shard, field: Field, value: Any, wanted: Any) -> None:
    assert repr(shard.round_trip(value, field).list()) == repr(wanted)


@pytest.mark.parametrize(
    ("value", "field", "wanted"),
    [
        (0.5, None, [0.5] * 3),
        (True, None, [True] * 3),
        ("gsm8k", None, ["gsm8k"] * 3),
        (b"x", None, [b"x"] * 3),
        ({"a": [1]}, None, [{"a": [1]}] * 3),
        (np.float32(2), None, [2.0] * 3),
        (np.array(2, np.int8), None, [2] * 3),
        (torch.tensor(2.5), None, [2.5] * 3),
        (1, Field("x", "float32"), [1.0] * 3),
        (None, Field("x", "value"), [None] * 3),
    ],
)
def test_a_single_value_is_for_all_rows_and_stored_once(
    shard: Shard, value: Any, field: Field | None, wanted: Any
) -> None:
    prepared = prepare("x", value, field, rows=3)
    assert (prepared.rows, prepared.stored_rows) == (3, 1)
    assert shard.round_trip(value, field, rows=3).list() == wanted


def test_shared_values_are_stored_once() -> None:
    prompts = [f"prompt {at}" * 100 for at in range(4)]
    (draft,) = block_writers(
        [prepare("prompt", Repeat(prompts, 8)), prepare("image", Repeat([np.zeros(9)] * 4, [8, 8, 8, 8]))]
    )
    assert (draft.rows, draft.stored_rows) == (32, 4)
    assert draft.slots is not None
    assert draft.slots.tolist() == [at // 8 for at in range(32)]
    assert draft.nbytes < 2 * sum(map(len, prompts))


def test_columns_that_share_alike_lie_together(shard: Shard) -> None:
    blocks = shard.put(
        {"a": Repeat(["x", "y"], [1, 2]), "b": [1, 2, 3], "c": Repeat([[1], [2, 3]], [1, 2]), "d": [b"1", b"", b"3"]}
    )
    assert [block.fields for block in blocks] == [["a", "c"], ["b", "d"]]
    assert shard.column("a", blocks[:1]).list() == ["x", "y", "y"]
    assert shard.column("c", blocks[:1]).list() == [[1], [2, 3], [2, 3]]
    assert shard.column("d", blocks[1:]).list() == [b"1", b"", b"3"]


def test_inline_values_are_little_endian_for_every_row() -> None:
    assert prepare("x", [1, 2], Field("x", "int16")).inline() == b"\x01\x00\x02\x00"
    assert prepare("x", np.array([1, 2], ">i4")).inline() == b"\x01\x00\x00\x00\x02\x00\x00\x00"
    assert prepare("x", 1.0, Field("x", "float32"), rows=2).inline() == b"\x00\x00\x80\x3f" * 2
    assert prepare("x", Repeat([1, 2], [1, 2]), Field("x", "uint8")).inline() == b"\x01\x02\x02"


def test_row_lengths() -> None:
    assert prepare("x", [[1, 2], [3], []]).row_lengths().tolist() == [2, 1, 0]
    assert prepare("x", Repeat([[1, 2], [3]], 2)).row_lengths().tolist() == [2, 2, 1, 1]
    assert prepare("x", ["äö", "a"]).row_lengths().tolist() == [4, 1]
    assert prepare("x", np.zeros((2, 7))).row_lengths().tolist() == [7, 7]
    assert prepare("x", [np.zeros((4, 2)), np.zeros((5, 1))]).row_lengths().tolist() == [4, 5]


def test_a_block_depends_on_its_content_alone(shard: Shard) -> None:
    columns = {
        "a": [1, 2, 3],
        "b": [[1.0], [], [2.0, 3.0]],
        "c": ["x", "", "yz"],
        "d": [np.ones((1, 2)), np.ones((2, 1)), np.ones((0, 3))],
    }
    contents = []
    for filling in (0, 255):
        (draft,) = block_writers([prepare(name, value) for name, value in columns.items()])
        out = np.full(draft.nbytes, filling, np.uint8)
        draft.write(out.data)
        contents.append(out.tobytes())
    assert contents[0] == contents[1]
    assert len(contents[0]) % 64 == 0


def test_conjugated_and_negated_tensors_are_stored_as_they_are_seen(shard: Shard) -> None:
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    assert shard.round_trip(numbers.conj()).list() == [1 - 2j, 3 + 4j]
    assert shard.round_trip([numbers.conj(), numbers]).list() == [[1 - 2j, 3 + 4j], [1 + 2j, 3 - 4j]]
    assert shard.round_trip([numbers[:1].conj().imag, numbers[1:].imag]).list() == [[-2.0], [-4.0]]


def test_neighbouring_views_of_one_tensor_are_one_copy(shard: Shard) -> None:
    whole = torch.arange(1000)
    assert shard.round_trip(list(whole.split(10))).list() == [list(range(at, at + 10)) for at in range(0, 1000, 10)]
    many = [torch.arange(at % 7) for at in range(1000)]
    assert shard.round_trip(many).list() == [list(range(at % 7)) for at in range(1000)]


def test_device_tensors_are_written_from_where_they_are() -> None:
    rows = [torch.arange(3.0), torch.ones(2, 2, requires_grad=True)]  # the CPU serves as the device here
    out = np.zeros(28, np.uint8)
    DeviceTensors(rows, "float32").write(out)
    assert out.view("<f4").tolist() == [0.0, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0]
    bits = np.zeros(4, np.uint8)
    DeviceTensors([torch.ones(2).bfloat16()], "bfloat16").write(bits)
    assert bits.view("<u2").tolist() == [0x3F80, 0x3F80]


def test_nested_tensors_of_any_layout(shard: Shard) -> None:
    values, offsets, lengths = torch.arange(10.0), torch.tensor([0, 4, 8, 10]), torch.tensor([2, 4, 1])
    holes = torch.nested.nested_tensor_from_jagged(values, offsets, lengths)
    assert shard.round_trip(holes).list() == [[0.0, 1.0], [4.0, 5.0, 6.0, 7.0], [8.0]]
    turned = torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(1, 3)], layout=torch.jagged).transpose(1, 2)
    assert shard.round_trip(turned, Field("x", "float32", (3, None))).list() == [[[1.0, 1.0]] * 3, [[0.0]] * 3]


def test_a_column_may_be_changed_after_it_was_written(shard: Shard) -> None:
    value = np.zeros((2, 3))
    column = shard.round_trip(value)
    value[:] = 7
    assert column.numpy().sum() == 0
