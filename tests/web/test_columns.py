"""Columns over HTTP: what is put and got again is the same to the bit, packed or listed, in JSON and in MessagePack."""

import math
from contextlib import suppress

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import transferqueue as tq
from transferqueue.errors import SchemaError
from transferqueue.web.service.columns import PackedColumn, Values, pack, unpack, unpack_tensors

DTYPES = [
    "bool",
    "int8",
    "uint16",
    "int32",
    "int64",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "bfloat16",
]
SHAPES = [(), (2,), (None,), (None, 2), (2, None), (None, None)]
CODECS = [msgspec.json, msgspec.msgpack]


@st.composite
def columns(draw):
    """Rows of one field, as arrays; their bits are anything at all."""
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(SHAPES))
    item = np.dtype(bool if dtype == "bool" else f"u{tq.Field('x', dtype).item_bytes}")
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        sizes = [draw(st.integers(0, 3)) if size is None else size for size in shape]
        data = draw(st.binary(min_size=(size := math.prod(sizes) * item.itemsize), max_size=size))
        rows.append((sizes, bytes(byte % 2 for byte in data) if dtype == "bool" else data))
    return dtype, shape, rows


def packed_of(dtype, shape, rows):
    sizes = [size for of_row, _ in rows for size, known in zip(of_row, shape, strict=True) if known is None]
    return PackedColumn(dtype=dtype, shape=list(shape), sizes=sizes, data=b"".join(data for _, data in rows))


@pytest.fixture(scope="module")
def queue():
    with tq.connect(arena_bytes="128MiB") as queue:
        yield queue


@pytest.mark.slow
@given(column=columns(), codec=st.sampled_from(CODECS), packed=st.booleans())
def test_what_is_put_comes_back_to_the_bit(queue, column, codec, packed):
    pytest.importorskip("ml_dtypes")
    dtype, shape, _ = column
    given_column = packed_of(*column)
    table = queue.create_table("t", fields=[tq.Field("x", dtype, shape)])
    try:
        sent = codec.decode(codec.encode(given_column), type=PackedColumn)
        read = table.read(table.put(**unpack({"x": sent})))
        back = codec.decode(codec.encode(pack(read["x"], packed=packed)), type=Values)
        assert not packed or isinstance(back, PackedColumn)
        again = table.read(table.put(**unpack({"x": back})))
        assert pack(again["x"], packed=True) == given_column
    finally:
        queue.drop_table("t")


@pytest.mark.slow
@given(
    st.lists(
        st.recursive(
            st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
            max_leaves=8,
        ),
        min_size=1,
        max_size=4,
    )
)
def test_plain_values_come_back_in_json_or_packed(queue, values):
    table = queue.create_table("t", fields=[tq.Field("x", "value")])
    try:
        read = table.read(table.put(x=values))["x"]
        back = msgspec.json.decode(msgspec.json.encode(pack(read, packed=False)), type=Values)
        again = table.read(table.put(**unpack({"x": back})))["x"]
        assert repr(again.list()) == repr(read.list())
    finally:
        queue.drop_table("t")


@given(
    st.builds(
        PackedColumn,
        dtype=st.sampled_from([*DTYPES, "str", "bytes", "value", "object", "<f4"]),
        data=st.binary(max_size=24),
        shape=st.lists(st.none() | st.integers(-1, 2**62), max_size=3),
        sizes=st.lists(st.integers(0, 4) | st.just(2**62), max_size=6),
    )
)
def test_what_is_no_column_is_refused_and_nothing_else_happens(packed):
    for read in (unpack, unpack_tensors):
        with suppress(SchemaError):
            (found,) = read({"x": packed}).values()
            total = found.nbytes if isinstance(found, np.ndarray) else None
            assert total in (None, len(packed.data))
