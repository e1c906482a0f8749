"""Numbers of rows in their shortest form: what comes out is what went in, and what is not of so many rows is
refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transferqueue.errors import ProtocolError
from transferqueue.wire import codec as short

NUMBERS = st.lists(st.integers(-3, 3) | st.integers(-(2**63), 2**63 - 1), max_size=6)


@given(NUMBERS)
def test_integers_come_out_as_they_went_in(numbers: list[int]) -> None:
    values = np.array(numbers, np.int64)
    assert short.decode_constant(short.encode_constant(values), "<i8", values.size).tolist() == numbers
    assert short.decode_ascending(short.encode_ascending(values), "<i8", values.size).tolist() == numbers


@given(st.lists(st.sampled_from([0.0, -0.0, float("nan"), 1.5]), max_size=4))
def test_floats_come_out_bit_by_bit(numbers: list[float]) -> None:
    values = np.array(numbers, np.float64)
    assert short.decode_constant(short.encode_constant(values), "<f8", values.size).tobytes() == values.tobytes()


@pytest.mark.parametrize("rows", [2, 1000])
def test_what_is_alike_or_ascends_takes_one_item(rows: int) -> None:
    assert len(short.encode_constant(np.full(rows, 7, np.int32))) == 4
    assert len(short.encode_ascending(np.arange(-1, rows - 1, dtype=np.int32))) == 4
    assert len(short.encode_constant(np.arange(rows))) == 8 * rows
    assert len(short.encode_ascending(np.full(rows, 7))) == 8 * rows


@given(st.integers(1, 2**31 - 1), st.integers(2, 9))
def test_a_run_may_begin_anywhere(first: int, rows: int) -> None:
    values = np.arange(first, first + rows, dtype=np.int64)
    assert short.decode_ascending(short.encode_ascending(values), "<i8", rows).tolist() == values.tolist()


def test_what_is_read_may_be_changed() -> None:
    data = np.arange(4).tobytes()
    short.decode_constant(data, "<i8", 4)[:] = 0
    assert short.decode_constant(data, "<i8", 4).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(("data", "rows"), [(b"", 1), (bytes(8), 0), (bytes(4), 1), (bytes(16), 3), (bytes(12), 2)])
def test_other_lengths_are_refused(data: bytes, rows: int) -> None:
    for read in (short.decode_constant, short.decode_ascending):
        with pytest.raises(ProtocolError, match=rf"{len(data)} bytes are not the <i8 of {rows} rows; send 8"):
            read(data, "<i8", rows)
