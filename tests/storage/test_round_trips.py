"""What is put comes back, bit by bit: every dtype, every layout, every kind of input, every way to read it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scale import examples
from tests.storage.shards import opened_shard
from transferqueue.schema import TORCH_ONLY_DTYPES, Field
from transferqueue.storage import Column
from transferqueue.storage.elements.dtypes import NUMPY_DTYPES, STORED_DTYPES
from transferqueue.storage.elements.torch_interop import as_torch

pytestmark = pytest.mark.slow
FEWER = settings(max_examples=examples(30))
Row = np.ndarray[Any, Any]
NUMERIC = sorted(NUMPY_DTYPES)
SHAPES: tuple[tuple[int | None, ...], ...] = (
    (), (3,), (2, 2), (0,), (1,), (None,), (None, 3), (None, 0), (None, None), (2, None), (None, None, 3)
)  # fmt: skip


@dataclass
class Case:
    field: Field
    rows: list[Row]
    """Each in its shape and stored form."""

    def array(self) -> Row:
        return np.stack(self.rows)


@st.composite
def cases(draw: st.DrawFn, dtypes: Sequence[str], shapes: Sequence[tuple[int | None, ...]], plain: bool) -> Case:
    """plain: values that Python numbers tell exactly; otherwise any bits, NaNs included."""
    field = Field("x", draw(st.sampled_from(dtypes)), draw(st.sampled_from(shapes)))
    count, random = draw(st.integers(1, 7)), np.random.default_rng(draw(st.integers(0, 1 << 30)))
    rows = []
    for _ in range(count):
        shape = [size if size is not None else int(random.integers(0, 5)) for size in field.shape]
        rows.append(_values(field.dtype, shape, random, plain))
    return Case(field, rows)


def _values(dtype: str, shape: list[int], random: np.random.Generator, plain: bool) -> Row:
    if dtype == "bool" or (plain and dtype not in TORCH_ONLY_DTYPES):
        return random.integers(0, 2 if dtype == "bool" else 100, shape).astype(STORED_DTYPES[dtype])
    kind = STORED_DTYPES[dtype]
    return np.frombuffer(random.bytes(int(np.prod(shape)) * kind.itemsize), kind).reshape(shape).copy()


def _strided(array: Row) -> Row:
    wide = np.zeros((*array.shape, 2), array.dtype)
    wide[..., 1] = array
    return wide[..., 1]


def _tensor(row: Row, dtype: str) -> torch.Tensor:
    found: torch.Tensor = as_torch(row.copy(), dtype)
    return found


def _jagged(case: Case) -> torch.Tensor:
    rows = [_tensor(row, case.field.dtype) for row in case.rows]
    bits = [row.view(torch.uint8) if case.field.dtype.startswith("float8") else row for row in rows]
    values = torch.cat(bits).view(rows[0].dtype)
    offsets = torch.tensor([0, *itertools.accumulate(len(row) for row in rows)])
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def _arrow_lists(case: Case) -> pa.Array:
    """Lists as Arrow has them: fixed-size where the field says so, with a slice and chunks around them."""
    kind = pa.from_numpy_dtype(STORED_DTYPES[case.field.dtype])
    for size in reversed(case.field.shape):
        kind = pa.large_list(kind) if size is None else pa.list_(kind, size)
    rows = [row.tolist() for row in case.rows]
    padded = pa.array([rows[0], *rows, rows[-1]], kind)[1:-1]
    half = len(rows) // 2
    return pa.chunked_array([padded[:half], padded[half:]])


DENSE_INPUTS: dict[str, Callable[[Case], Any]] = {
    "numpy": Case.array,
    "numpy of the other byte order": lambda c: c.array().astype(c.array().dtype.newbyteorder(">")),
    "numpy strided": lambda c: _strided(c.array()),
    "numpy read-only": lambda c: np.frombuffer(c.array().tobytes(), c.array().dtype).reshape(c.array().shape),
    "buffer": lambda c: memoryview(c.array()) if c.array().size else c.array(),
}
ROW_INPUTS: dict[str, Callable[[Case], Any]] = {
    "list of numpy": lambda c: c.rows,
    "list of strided numpy": lambda c: [_strided(row) for row in c.rows],
    "list of numpy of the other byte order": lambda c: [row.astype(row.dtype.newbyteorder(">")) for row in c.rows],
    "tuple of numpy": lambda c: tuple(c.rows),
}
DENSE_TENSORS: dict[str, Callable[[Case], Any]] = {
    "torch": lambda c: _tensor(c.array(), c.field.dtype),
    "torch strided": lambda c: _tensor(np.stack([c.array(), c.array()], axis=-1), c.field.dtype)[..., 1],
    "torch parameter": lambda c: torch.nn.Parameter(_tensor(c.array(), c.field.dtype), requires_grad=False),
}
ROW_TENSORS: dict[str, Callable[[Case], Any]] = {
    "list of torch": lambda c: [_tensor(row, c.field.dtype) for row in c.rows],
    "list of strided torch": lambda c: [_tensor(np.stack([r, r], axis=-1), c.field.dtype)[..., 0] for r in c.rows],
}
PLAIN_INPUTS: dict[str, Callable[[Case], Any]] = {
    "lists": lambda c: [row.tolist() for row in c.rows],
    "tuples": lambda c: [tuple(row.tolist()) if row.ndim else row.item() for row in c.rows],
}


def check(case: Case, value: Any, declared: bool, data: st.DataObject) -> None:
    """Put the column twice, in blocks of its own; read rows of both in some order, every way."""
    with opened_shard() as shard:
        blocks = [block for _ in range(2) for block in shard.put({"x": value}, [case.field] if declared else ())]
        places = st.tuples(st.integers(0, 1), st.integers(0, len(case.rows) - 1))
        run = [(1, slot) for slot in range(len(case.rows))]
        at = data.draw(st.one_of(st.just(run), st.lists(places, min_size=1, max_size=9)))
        column = shard.column("x", blocks, at)
        wanted = Case(case.field, [case.rows[slot] for _, slot in at])
        assert shard.fields["x"].dtype == case.field.dtype
        check_rows(column, wanted)
        check_slice(column, wanted)
        check_whole(column, wanted)


def check_rows(column: Column, wanted: Case) -> None:
    for found, row in zip(column, wanted.rows, strict=True):
        if not isinstance(found, np.ndarray | torch.Tensor):
            told = as_torch(row.reshape(1), wanted.field.dtype)
            told = (told.float() if wanted.field.dtype in TORCH_ONLY_DTYPES else told).tolist()[0]
            assert repr(found) == repr(told)
            continue
        assert tuple(found.shape) == row.shape
        assert raw(found) == row.tobytes()


def raw(found: Any) -> bytes:
    if isinstance(found, torch.Tensor):
        if not found.numel():
            return b""
        bits = found.contiguous().view(torch.uint8) if found.dim() else found.reshape(1).view(torch.uint8)
        return bits.numpy().tobytes()
    return bytes(found.tobytes())


def check_slice(column: Column, wanted: Case) -> None:
    assert len(column) == len(wanted.rows)
    check_rows(column[1:], Case(wanted.field, wanted.rows[1:]))
    check_rows(column[[-1, 0]], Case(wanted.field, [wanted.rows[-1], wanted.rows[0]]))


def check_whole(column: Column, wanted: Case) -> None:
    field, rows = column.field, wanted.rows
    everything = b"".join(row.tobytes() for row in rows)
    if field.dense:
        assert raw(column.torch()) == everything
        assert column.torch().shape == (len(rows), *rows[0].shape)
        assert field.dtype in TORCH_ONLY_DTYPES or raw(column.numpy()) == everything
    elif field.ragged:
        nested = column.nested()
        assert raw(nested.values()) == everything
        assert nested.offsets().tolist() == [0, *itertools.accumulate(len(row) for row in rows)]
        assert column.lengths.tolist() == [len(row) for row in rows]
    if field.dtype not in TORCH_ONLY_DTYPES:
        check_padded(column, wanted)
        assert repr(column.list()) == repr([row.tolist() for row in rows])
        check_arrow(column, wanted)


def check_padded(column: Column, wanted: Case) -> None:
    found = column.padded(1, multiple_of=2)
    assert len(found) == len(wanted.rows)
    for into, row in zip(found, wanted.rows, strict=True):
        assert into[tuple(slice(size) for size in row.shape)].tobytes() == row.tobytes()
        filled = np.ones(into.shape, bool)
        filled[tuple(slice(size) for size in row.shape)] = False
        assert (into[filled] == 1).all()
    for size, declared in zip(found.shape[1:], wanted.field.shape, strict=True):
        assert declared == size or size % 2 == 0


def check_arrow(column: Column, wanted: Case) -> None:
    found = column.arrow()
    assert len(found) == len(wanted.rows)
    found.validate(full=True)
    rows = found.to_pylist()
    if STORED_DTYPES[column.field.dtype].kind == "c":
        return
    if column.field.varied:
        shapes, rows = [row["shape"] for row in rows], [row["values"] for row in rows]
        assert shapes == [list(row.shape) for row in wanted.rows]
        assert repr(rows) == repr([row.reshape(-1).tolist() for row in wanted.rows])
    else:
        assert repr(rows) == repr([row.tolist() for row in wanted.rows])


DENSE_SHAPES = [shape for shape in SHAPES if None not in shape]
RAGGED_SHAPES = [shape for shape in SHAPES if shape and shape[0] is None and None not in shape[1:]]
LISTED_SHAPES = [shape for shape in SHAPES if shape]
EVERY = sorted({*NUMERIC, *TORCH_ONLY_DTYPES})


@FEWER
@pytest.mark.parametrize("give", DENSE_INPUTS.values(), ids=DENSE_INPUTS)
@given(case=cases(NUMERIC, DENSE_SHAPES, plain=False), declared=st.booleans(), data=st.data())
def test_dense_numpy(give: Callable[[Case], Any], case: Case, declared: bool, data: st.DataObject) -> None:
    check(case, give(case), declared, data)


@FEWER
@pytest.mark.parametrize("give", ROW_INPUTS.values(), ids=ROW_INPUTS)
@given(case=cases(NUMERIC, LISTED_SHAPES, plain=False), data=st.data())
def test_rows_of_numpy(give: Callable[[Case], Any], case: Case, data: st.DataObject) -> None:
    check(case, give(case), True, data)


@FEWER
@pytest.mark.parametrize("give", DENSE_TENSORS.values(), ids=DENSE_TENSORS)
@given(case=cases(EVERY, DENSE_SHAPES, plain=False), declared=st.booleans(), data=st.data())
def test_dense_tensors(give: Callable[[Case], Any], case: Case, declared: bool, data: st.DataObject) -> None:
    check(case, give(case), declared, data)


@FEWER
@pytest.mark.parametrize("give", ROW_TENSORS.values(), ids=ROW_TENSORS)
@given(case=cases(EVERY, LISTED_SHAPES, plain=False), data=st.data())
def test_rows_of_tensors(give: Callable[[Case], Any], case: Case, data: st.DataObject) -> None:
    check(case, give(case), True, data)


@FEWER
@given(case=cases(EVERY, RAGGED_SHAPES, plain=False), declared=st.booleans(), data=st.data())
def test_nested_tensors(case: Case, declared: bool, data: st.DataObject) -> None:
    check(case, _jagged(case), declared, data)


def told_by_lists(case: Case) -> Case:
    """An empty list does not tell what would be in it: dimensions that vary are 0 behind one that is."""
    rows = []
    for row in case.rows:
        empty, shape = False, list(row.shape)
        for at, size in enumerate(row.shape):
            if empty and case.field.shape[at] is None:
                shape[at] = 0
            empty = empty or size == 0
        rows.append(row.reshape(shape) if row.size == 0 else row)
    return Case(case.field, rows)


@FEWER
@pytest.mark.parametrize("give", PLAIN_INPUTS.values(), ids=PLAIN_INPUTS)
@given(case=cases(NUMERIC, SHAPES, plain=True), data=st.data())
def test_lists_of_numbers(give: Callable[[Case], Any], case: Case, data: st.DataObject) -> None:
    check(told_by_lists(case), give(case), True, data)


@FEWER
@given(case=cases([name for name in NUMERIC if "complex" not in name], SHAPES, plain=True), data=st.data())
def test_arrow(case: Case, data: st.DataObject) -> None:
    check(told_by_lists(case), _arrow_lists(case), True, data)


# ---------------------------------------------------------------- text, bytes and plain values

BLOBS = {
    "str": st.text(max_size=20),
    "bytes": st.binary(max_size=20),
    "value": st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(1 << 63), (1 << 64) - 1)
        | st.floats(allow_nan=False)
        | st.text()
        | st.binary(),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.integers(0, 9), inner, max_size=3)
        ),
        max_leaves=8,
    ),
}
ARROW_KINDS = {
    "str": [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())],
    "bytes": [pa.binary(), pa.large_binary(), pa.binary_view()],
}


@FEWER
@pytest.mark.parametrize("dtype", BLOBS)
@given(data=st.data())
def test_blobs(dtype: str, data: st.DataObject) -> None:
    rows = data.draw(st.lists(BLOBS[dtype], min_size=1, max_size=6))
    value: Any = rows
    if dtype in ARROW_KINDS and data.draw(st.booleans()):
        kind = data.draw(st.sampled_from(ARROW_KINDS[dtype]))
        value = pa.chunked_array([pa.array([rows[0], *rows[:1]], kind)[1:], pa.array(rows[1:], kind)])
    with opened_shard() as shard:
        blocks = [block for _ in range(2) for block in shard.put({"x": value}, [Field("x", dtype)])]
        places = st.tuples(st.integers(0, 1), st.integers(0, len(rows) - 1))
        at = data.draw(st.one_of(st.just([(0, s) for s in range(len(rows))]), st.lists(places, min_size=1, max_size=9)))
        column = shard.column("x", blocks, at)
        wanted = [rows[slot] for _, slot in at]
        assert column.list() == list(column) == [column[i] for i in range(len(at))] == wanted
        assert column[1:].list() == wanted[1:]
        found = column.arrow()
        found.validate(full=True)
        if dtype != "value":
            assert found.to_pylist() == wanted
            assert column.lengths.tolist() == [len(row.encode() if dtype == "str" else row) for row in wanted]
