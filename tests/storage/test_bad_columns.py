"""Every input that is not a column of its field: a typed error that names the subject, the rule and the remedy."""

from __future__ import annotations

import datetime as dt
import decimal
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from transferqueue.errors import SchemaError, UsageError
from transferqueue.limits import ROWS_PER_REQUEST_MAX, VALUE_DEPTH_MAX, VALUE_NODES_MAX
from transferqueue.schema import Field
from transferqueue.storage import Repeat, block_writers
from transferqueue.storage.elements import values
from transferqueue.storage.inputs.prepare import prepare


class Foreign:
    """An array of another library."""

    ndim = 0

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.array(3.0)


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return {"v": value}


class Moment(dt.datetime):
    pass


class Zone(dt.tzinfo):
    pass


def cyclic() -> Any:
    value: dict[str, Any] = {}
    value["self"] = [value]
    return value


def quietly(make: Callable[[], Any]) -> Any:
    """Of these kinds of tensor torch says that they are experimental."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


QUANTISED = quietly(lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8))
SPARSE_ROWS = quietly(lambda: torch.eye(3).to_sparse_csr())
HALF_COMPLEX = quietly(lambda: torch.zeros(2, dtype=torch.complex32))
NESTED = quietly(lambda: torch.nested.nested_tensor([torch.ones(2)]))


def not_utf8(kind: pa.DataType) -> pa.Array:
    """Two texts of an Arrow type, the second of which is none: as whoever gives buffers to Arrow can make it."""
    binary = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}[kind]
    return pa.Array.from_buffers(kind, 2, pa.array([b"ok", b"\xff\xfe"], binary).buffers())


def split_character() -> pa.Array:
    """Bytes that are UTF-8 together, and in no row."""
    return pa.Array.from_buffers(pa.string(), 2, pa.array([b"\xc3", b"\xa4"], pa.binary()).buffers())


def offsets(kind: pa.DataType, edges: list[int], values: pa.Array | None = None) -> pa.Array:
    """An Arrow array of text or lists with these offsets, as a program that gives buffers to Arrow can make it."""
    width = np.int64 if str(kind).startswith("large") else np.int32
    buffers = [None, pa.py_buffer(np.array(edges, width))]
    if values is None:
        return pa.Array.from_buffers(kind, len(edges) - 1, [*buffers, pa.py_buffer(b"abcdef")])
    return pa.Array.from_buffers(kind, len(edges) - 1, buffers, children=[values])


NUMBERS = pa.array([1, 2, 3])
LIST_VIEW = pa.Array.from_buffers(
    pa.list_view(pa.int64()), 2, [None, *(pa.py_buffer(np.array(each, np.int32)) for each in ([0, 5], [2, 50]))],
    children=[NUMBERS],
)  # fmt: skip
FAR_VIEW = pa.Array.from_buffers(
    pa.binary_view(), 1, [None, pa.py_buffer(np.array([100, 0, 0, 0], np.int32)), pa.py_buffer(b"")]
)


def jagged(*edges: int) -> torch.Tensor:
    return torch.nested.nested_tensor_from_jagged(torch.ones(4), torch.tensor(edges))


class Failing:
    """A column of another library that fails when it is read."""

    def __len__(self) -> int:
        return 2

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise RuntimeError("no such file " + "x" * 100_000)


MANY_MEMBERS = np.zeros(2, [(f"member{at}", "i4") for at in range(5_000)])
ENDLESS = [np.lib.stride_tricks.as_strided(np.zeros(1), (1 << 55,), (0,))] * 512

UNDECLARED: dict[str, tuple[Any, str]] = {
    "nothing": (None, "NoneType is not a column; give a list, a numpy array"),
    "a set": ({1, 2}, "set is not a column"),
    "a generator": ((i for i in range(3)), "generator is not a column"),
    "an empty list": ([], "has no rows; a column has at least one"),
    "an empty array": (np.empty((0, 3)), "has no rows"),
    "an empty Arrow array": (pa.array([], pa.int64()), "has no rows"),
    "an empty tensor": (torch.empty(0), "has no rows"),
    "too many rows": (
        np.zeros(ROWS_PER_REQUEST_MAX + 1, np.int8),
        f"one call carries at most {ROWS_PER_REQUEST_MAX}: split it",
    ),
    "object array": (np.array([{}, None]), "numpy dtype object cannot be stored; give a list of arrays"),
    "list of object arrays": ([np.array([{}, None])], "numpy dtype object cannot be stored; give a list of arrays"),
    "masked array": (np.ma.array([1, 2], mask=[0, 1]), "a masked array has no values where it is masked; give .filled"),
    "list of masked arrays": ([np.zeros(2), np.ma.array([1.0, 2.0], mask=[0, 1])], "a masked array has no values"),
    "dates": (
        np.array(["2026-01-01"], "datetime64[D]"),
        "numpy dtype datetime64.D. cannot be stored; convert it to int64",
    ),
    "durations": (np.array([3], "timedelta64[s]"), "cannot be stored; convert it to int64"),
    "list of numpy durations": ([np.timedelta64(3, "s")], "rows of type numpy.timedelta64 are not a column"),
    "long doubles": (np.zeros(2, np.longdouble), "cannot be stored; convert it to one of bool, int8"),
    "structures": (np.zeros(2, [("a", "i4"), ("b", "f4")]), "cannot be stored; give one column per member"),
    "sparse": (torch.eye(3).to_sparse(), "layout torch.sparse_coo is not stored; give .to_dense"),
    "sparse rows": (SPARSE_ROWS, "layout torch.sparse_csr is not stored"),
    "list of sparse": ([torch.ones(3).to_sparse()], "layout torch.sparse_coo is not stored"),
    "quantised": (QUANTISED, "a quantised tensor has scales beside its values; give .dequantize"),
    "list of quantised": ([QUANTISED], "torch.quint8 cannot be stored"),
    "meta tensor": (torch.empty(3, device="meta"), "a meta tensor has no values"),
    "list of meta tensors": ([torch.empty(3, device="meta")], "a meta tensor has no values"),
    "complex32": (HALF_COMPLEX, "torch.complex32 cannot be stored"),
    "list of nested tensors": ([NESTED], "a row is a nested tensor; give one nested tensor"),
    "rows of two dtypes": (
        [np.zeros(2, np.int32), np.zeros(2, np.int64)],
        "rows of dtypes int32, int64; convert them to one",
    ),
    "tensors of two dtypes": (
        [torch.zeros(2), torch.zeros(2).int()],
        "rows of dtypes float32, int32; convert them to one",
    ),
    "rows of two ranks": ([np.zeros(2), np.zeros((2, 2))], "rows of 1, 2 dimensions; all must have the same"),
    "tensors of two ranks": ([torch.zeros(2), torch.zeros(2, 2)], "rows of 1, 2 dimensions; all must have the same"),
    "numbers and text": ([1, "a"], "rows of type int, str are not a column"),
    "numbers and None": ([1.0, None], "row 1 is None; .*mask of True and False"),
    "lists and None": ([[1, 2], None], "row 1 is None; a column has a value in each row"),
    "lists of text and None": ([["a"], None], "row 1 is None"),
    "text and None": (["a", "b", None], "row 2 is None"),
    "bytes and None": ([None, b"a"], "row 0 is None"),
    "arrays and None": ([np.zeros(2), None], "row 1 is None"),
    "tensors and None": ([torch.zeros(2), None], "row 1 is None"),
    "nothing but None": ([None, None], "row 0 is None"),
    "None among numbers": ([[1, 2], [3, None]], "row 1 has None among its numbers; .*mask of True"),
    "None deep among numbers": ([[[1], [2]], [[None], [3]]], "row 1 has None among its numbers"),
    "lists and numbers": ([[1, 2], 3], "rows of type int, list are not a column; .*declare dtype .value."),
    "lists and text": ([[1, 2], "a"], "rows of type list, str are not a column"),
    "arrays and lists": ([np.zeros(2), [1, 2]], "rows of type list, numpy.ndarray are not a column"),
    "lists of arrays": (
        [[np.zeros(2)], [np.zeros(3)]],
        "a row is a list of arrays; stack them into one array for each row",
    ),
    "lists of tensors": ([[torch.zeros(2)], [torch.zeros(3)]], "a row is a list of arrays; stack them"),
    "empty lists": ([[], []], "all rows are empty lists, which tell no dtype; declare the field"),
    "numpy scalars of two dtypes": ([np.int8(1), np.int16(1)], "numpy scalars of int16, int8 in one column"),
    "an integer beyond 64 bits": ([1 << 64], "is beyond 64 bits"),
    "negative and huge": ([-1, 1 << 63], "is beyond 64 bits"),
    "integers beyond int64": (
        [1 << 63],
        "9223372036854775808 is out of the range of -9223372036854775808 to .* of dtype int64",
    ),
    "integers beyond float": ([1.0, 10**400], "an integer of 1,329 bits is beyond 64 bits"),
    "a huge integer": ([10**5000], "an integer of 16,610 bits is beyond 64 bits .*; store it as text"),
    "a huge integer in a list": ([[1], [10**400]], "an integer of 1,329 bits is beyond 64 bits"),
    "integers beyond complex": ([1j, 10**400], "an integer of 1,329 bits is beyond 64 bits"),
    "a structure of many members": (
        MANY_MEMBERS,
        r"numpy dtype \[\('member0', .* of 1\d\d,\d+ characters .*; give one column",
    ),
    "a lazy parameter": ([torch.nn.parameter.UninitializedParameter()], "a lazy module has no values before its first"),
    "a functional tensor": (torch._to_functional_tensor(torch.ones(3)), "torch.func or torch.compile has no memory"),
    "functional tensors": ([torch._to_functional_tensor(torch.ones(3))], "torch.func or torch.compile has no memory"),
    "offsets that descend": (jagged(0, 3, 2, 4), "a nested tensor whose offsets do not ascend from 0 to its 4 steps"),
    "offsets beyond the values": (jagged(0, 3, 9), "a nested tensor whose offsets do not ascend from 0 to its 4 steps"),
    "negative offsets": (jagged(-2, 3, 4), "a nested tensor whose offsets do not ascend from 0 to its 4 steps"),
    "Arrow text that descends": (offsets(pa.string(), [0, 4, 2]), "invalid .its offsets do not ascend within 6 bytes"),
    "large Arrow binary that descends": (offsets(pa.large_binary(), [0, 9, 2]), "the Arrow array is invalid"),
    "Arrow lists that descend": (offsets(pa.list_(pa.int64()), [0, 3, 1], NUMBERS), "invalid .*; make it anew"),
    "large Arrow lists that descend": (offsets(pa.large_list(pa.int64()), [0, 3, 1], NUMBERS), "invalid"),
    "views beyond a list": (LIST_VIEW, "the Arrow array is invalid"),
    "views beyond the bytes": (FAR_VIEW, "the Arrow array is invalid"),
    "indices beyond a dictionary": (
        pa.DictionaryArray.from_arrays(pa.array([0, 5]), pa.array(["a", "b"]), safe=False),
        "the Arrow array is invalid .*; make it anew",
    ),
    "more elements than offsets count": (ENDLESS, r"has 1.84e\+19 elements, over 4611686018427387903"),
    "text that is not Unicode": (["\ud800"], "text that is not Unicode .*; store such data as bytes"),
    "dates in a list": ([dt.date(2026, 1, 1)], "rows of type datetime.date are not a column"),
    "decimals": ([decimal.Decimal(1)], "rows of type decimal.Decimal are not a column"),
    "an object in a value": (
        [{"a": 1}, {"a": object()}],
        "row 1: a value holds builtins.object, which is not stored",
    ),
    "a class in a value": (
        [{"a": [dict]}],
        "a value holds builtins.type, .* register the class by transferqueue",
    ),
    "a subclass of a date": ([{"when": Moment(2026, 1, 1)}], "a value holds .*Moment, which is not stored"),
    "a zone of its own": ([{"when": dt.datetime(2026, 1, 1, tzinfo=Zone())}], "time zone .*Zone; give one of zoneinfo"),
    "a masked array in a value": ([{"a": np.ma.array([1])}], "a value holds numpy.ma.MaskedArray"),
    "a structured array in a value": ([{"a": np.zeros(2, "f4,f4")}], "a value holds numpy dtype void64"),
    "a sparse tensor in a value": ([{"a": torch.ones(2).to_sparse()}], "row 0: a tensor of layout torch.sparse_coo"),
    "a meta tensor in a value": ([{"a": torch.ones(2, device="meta")}], "row 0: a meta tensor has no values"),
    "an object as a key": ([{object(): 1}], "a value holds builtins.object"),
    "a cyclic value": ([cyclic()], "a value contains itself; store a tree"),
    "a deep value": ([deep(VALUE_DEPTH_MAX)], f"a value is nested deeper than {VALUE_DEPTH_MAX}; flatten it"),
    "Arrow text that is not UTF-8": (
        not_utf8(pa.string()),
        "row 1 has text that is not Unicode .*; store such data as bytes",
    ),
    "large Arrow text that is not UTF-8": (not_utf8(pa.large_string()), "row 1 has text that is not Unicode"),
    "views of text that is not UTF-8": (not_utf8(pa.string_view()), "text that is not Unicode .*at string index 1"),
    "chunks of text that is not UTF-8": (
        pa.chunked_array([pa.array(["a", "ä"]), not_utf8(pa.string())]),
        "row 3 has text that is not Unicode",
    ),
    "half a character": (split_character(), "row 0 has text that is not Unicode"),
    "a dictionary of text that is not UTF-8": (
        pa.DictionaryArray.from_arrays(pa.array([0, 1]), not_utf8(pa.string())),
        "text that is not Unicode .*at string index 1",
    ),
    "structures of text that is not UTF-8": (
        pa.StructArray.from_arrays([not_utf8(pa.string())], ["a"]),
        "text that is not Unicode",
    ),
    "maps of text that is not UTF-8": (
        pa.MapArray.from_arrays([0, 1, 2], pa.array(["a", "b"]), not_utf8(pa.string())),
        "text that is not Unicode",
    ),
    "null structures": (pa.array([{"a": 1}, None]), "1 nulls, the first in row 1"),
    "a surrogate in a value": ([{"a": "\ud800"}], "row 0: a value cannot be stored .* text is Unicode"),
    "a surrogate in a key of a value": ([{"\ud800": 1}], "a value cannot be stored"),
    "a surrogate in a list": ([["a", "\ud800"]], "a value cannot be stored"),
    "a surrogate in numpy's text": (np.array(["\ud800"]), "text that is not Unicode"),
    "nulls": (pa.array([1, None]), "1 nulls, the first in row 1; a column has none: fill them"),
    "nulls in text": (pa.array(["a", None]), "1 nulls"),
    "null lists": (pa.array([[1], None]), "1 nulls"),
    "nulls in lists": (pa.array([[1, None]]), "1 nulls, the first in row 0"),
    "nulls in lists of lists, in chunks": (
        pa.chunked_array([[[[1], [2, 3]], []], [[[4]], [[5], [6, None]]]], pa.list_(pa.list_(pa.int64()))),
        "1 nulls, the first in row 3",
    ),
    "null lists in lists": (pa.array([[], [[1]], [[2], None]]), "1 nulls, the first in row 2"),
    "Arrow dates": (pa.array([dt.date(2026, 1, 1)]), "Arrow type date32.day. cannot be stored; cast it"),
    "Arrow decimals": (pa.array([decimal.Decimal("1.5")]), "Arrow type decimal128.* cannot be stored"),
    "Arrow lists of dates": (pa.array([[dt.date(2026, 1, 1)]]), "Arrow type date32.day. cannot be stored"),
    "null lists of text": (pa.array([["a"], None]), "1 nulls, the first in row 1"),
    "an Arrow table": (pa.table({"a": [1]}), "a Table is many columns; give one of them"),
    "ragged lists of lists in Arrow": (pa.array([[[1], [2, 3]]]), "a row is a list of lists of different lengths"),
    "one number": (3, "int is a single value; give a list or array with one value for each row"),
    "one text": ("abc", "str is a single value"),
    "an array of no dimensions": (np.array(3.0), "ndarray is a single value"),
    "a foreign array of no dimensions": (Foreign(), "Foreign is a single value"),
    "a tensor of no dimensions": (torch.tensor(1.0), "Tensor is a single value"),
    "repeat with too many counts": (Repeat([1, 2], [1, 2, 3]), "Repeat of 2 values with 3 counts; give one for each"),
    "repeat of nothing": (Repeat([], 3), "has no rows"),
    "repeat too often": (Repeat([1], ROWS_PER_REQUEST_MAX + 1), "one call carries at most"),
}


@pytest.mark.parametrize(("value", "message"), UNDECLARED.values(), ids=UNDECLARED)
def test_what_is_no_column_is_refused(value: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=f'^field "x".*({message})'):
        prepare("x", value)


DENSE, RAGGED = Field("x", "float32", (3,)), Field("x", "float32", (None,))
DECLARED: dict[str, tuple[Field, Any, str]] = {
    "another dtype": (
        DENSE,
        np.zeros((2, 3)),
        r"is float32\[3\], but the values are float64; convert them, the store never",
    ),
    "another dtype of tensors": (DENSE, torch.zeros(2, 3).half(), "but the values are float16"),
    "another dtype in Arrow": (RAGGED, pa.array([[1.0]]), "but the values are float64"),
    "bf16 for fp16": (Field("x", "float16"), torch.zeros(2).bfloat16(), "is float16, but the values are bfloat16"),
    "another shape": (DENSE, np.zeros((2, 4), np.float32), r"is float32\[3\], but rows of the values have shape \[4\]"),
    "scalars for rows": (DENSE, np.zeros(2, np.float32), r"but rows of the values have shape \[\]"),
    "rows for scalars": (
        Field("x", "float32"),
        [[1.0], [2.0]],
        r"is float32, but rows of the values have 1 dimensions",
    ),
    "dense where ragged": (
        RAGGED,
        np.zeros((2, 3), np.float32),
        r"with rows of different sizes, but the values are one dense",
    ),
    "dense where varied": (Field("x", "float32", (None, None)), torch.zeros(2, 3, 4), "the values are one dense array"),
    "fixed lists where ragged": (
        RAGGED,
        pa.array([[1.0]], pa.list_(pa.float32(), 1)),
        "the values are one dense array",
    ),
    "ragged where dense": (
        DENSE,
        [[1.0, 2.0, 3.0], [1.0]],
        r"row 1 has shape \[1\]; rows of different sizes need a field",
    ),
    "nested where dense": (
        DENSE,
        torch.nested.nested_tensor([torch.ones(3), torch.ones(3)], layout=torch.jagged),
        "but the values are a nested tensor; give a dense one",
    ),
    "another trailing shape": (Field("x", "float32", (None, 2)), [torch.ones(4, 3)], r"but row 0 has shape \[4, 3\]"),
    "another rank": (Field("x", "float32", (None, 2)), [torch.ones(4)], "have 1 dimensions; give rows of 2"),
    "floats for int": (
        Field("x", "int64"),
        [1.5],
        "float values do not fit dtype int64; convert them, or declare another",
    ),
    "floats for int in lists": (Field("x", "int64", (None,)), [[1, 2.0]], "float values do not fit dtype int64"),
    "ints for bool": (Field("x", "bool"), [1, 0], "int values do not fit dtype bool"),
    "ints for bool in lists": (Field("x", "bool", (None,)), [[1, 0]], "int values do not fit dtype bool"),
    "complex for float": (Field("x", "float64"), [1j], "complex values do not fit dtype float64"),
    "out of range": (
        Field("x", "int8"),
        [1, 128],
        "128 is out of the range of -128 to 127 of dtype int8; declare a wider",
    ),
    "out of range in lists": (
        Field("x", "uint16", (None,)),
        [[1], [-1]],
        "-1 is out of the range of 0 to 65535 of dtype uint16",
    ),
    "negative for unsigned": (Field("x", "uint64"), [-1], "-1 is out of the range of 0 to 18446744073709551615"),
    "float overflow": (Field("x", "float32"), [1e39], "1e.39 is out of the range of dtype float32"),
    "int overflow of float": (Field("x", "float16"), [70000], "70000.0 is out of the range of dtype float16"),
    "fp8 overflow": (Field("x", "float8_e5m2"), [1e9], "out of the range of dtype float8_e5m2"),
    "bf16 overflow": (Field("x", "bfloat16"), [1e39], "out of the range of dtype bfloat16"),
    "text for numbers": (Field("x", "int64"), ["a"], "but the values are str"),
    "numbers for text": (Field("x", "str"), [1], "int values do not fit dtype str"),
    "lists for text": (Field("x", "str"), [[1]], 'declare dtype "value" to store plain values'),
    "bytes for text": (Field("x", "str"), [b"a"], "is str, but the values are bytes"),
    "binary Arrow for text": (Field("x", "str"), pa.array([b"a"]), "is str, but the values are bytes"),
    "dicts for numbers": (Field("x", "int64"), [{"a": 1}], "rows of type dict are not a column"),
    "no rectangle": (
        Field("x", "int64", (None, None)),
        [[[1], [2, 3]]],
        "a row is a list that is not a rectangle of numbers",
    ),
    "objects for values": (Field("x", "value"), [object()], "a value holds builtins.object"),
}


@pytest.mark.parametrize(("field", "value", "message"), DECLARED.values(), ids=DECLARED)
def test_what_does_not_fit_its_field_is_refused(field: Field, value: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=f'^field "x".*({message})'):
        prepare("x", value, field)


def test_a_value_shared_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    value: Any = [1]
    for _ in range(VALUE_DEPTH_MAX - 2):
        value = [value, value]
    assert VALUE_NODES_MAX == 1 << 22
    monkeypatch.setattr(values, "VALUE_NODES_MAX", 1000)
    with pytest.raises(SchemaError, match="a value has more than 1000 parts; store arrays as columns"):
        prepare("x", [{"v": value}])


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (0, "count 0 is not positive; leave out values that no row has"),
        ([1, -2], "count -2 is not positive"),
        ([1.5], r"counts \[1.5\] are not whole numbers"),
        ([[1]], "are not whole numbers"),
        (True, "are not whole numbers"),
    ],
)
def test_counts_that_are_none_are_refused(counts: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        Repeat([1, 2], counts)


def test_a_repeat_of_a_repeat_is_refused() -> None:
    with pytest.raises(SchemaError, match="multiply the counts instead"):
        Repeat(Repeat([1], 2), 3)


def test_columns_of_different_rows_are_refused() -> None:
    with pytest.raises(
        SchemaError, match='field "b" has 3 rows, but field "a" has 2; all columns of one call have the same rows'
    ):
        block_writers([prepare("a", [1, 2]), prepare("b", [1, 2, 3])])
    with pytest.raises(SchemaError, match='field "b" has 4 rows, but field "a" has 2'):
        block_writers([prepare("a", [1, 2]), prepare("b", Repeat(["x"], 4))])
    with pytest.raises(SchemaError, match='field "a" has 2 rows, but this call has 3; give one value for each row'):
        prepare("a", [1, 2], rows=3)


def test_only_small_scalars_are_inline() -> None:
    with pytest.raises(UsageError, match=r'field "x" is float32.2.; only small scalars are inline'):
        prepare("x", np.zeros((1, 2), np.float32)).inline()
