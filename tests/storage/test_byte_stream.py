"""Columns as a stream are the block that a writer of just these rows would have made, however it is cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.storage.shards import Shard
from transferqueue.errors import Corruption
from transferqueue.schema import Field, align, layout
from transferqueue.storage import block_writers
from transferqueue.storage.columns import byte_stream
from transferqueue.storage.columns.byte_stream import column_stream
from transferqueue.storage.inputs.prepare import prepare

RNG = np.random.default_rng(3)
COLUMNS: dict[str, tuple[Field, list[Any]]] = {
    "dense": (Field("x", "float32", (3,)), list(RNG.random((40, 3), np.float32))),
    "ragged": (Field("x", "int64", (None, 2)), [RNG.integers(0, 9, (at % 7, 2)) for at in range(40)]),
    "varied": (Field("x", "uint8", (None, None)), [np.full((at % 3, at % 5), at, np.uint8) for at in range(40)]),
    "text": (Field("x", "str"), ["é" * (at % 4) + "long" * 30 * (at == 11) for at in range(40)]),
}
ROWS = {
    "a run": list(range(5, 19)),
    "a run from the start": list(range(7)),
    "a whole block": list(range(20)),
    "a run of two blocks": list(range(5, 30)),
    "scattered": [int(at) for at in RNG.permutation(40)],
    "repeated": [7, 7, 3, 7],
    "one": [11],
}


@pytest.mark.parametrize(
    ("piece_bytes", "ranges_from"), [(64, 0), (100, 0), (1 << 20, 0), (100, 1), (1 << 20, 12), (64, 999)]
)
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize(("field", "values"), COLUMNS.values(), ids=COLUMNS)
def test_the_stream_is_a_block_of_these_rows(
    shard: Shard, field: Field, values: list[Any], rows: list[int], piece_bytes: int, ranges_from: int
) -> None:
    first, second = shard.put({"x": values[:20]}, [field]), shard.put({"x": values[20:]}, [field])
    column = shard.column("x", [*first, *second], [(at // 20, at % 20) for at in rows])
    placement = column._placement
    assert placement is not None
    counts, pieces = column_stream([field], placement, piece_bytes, ranges_from)
    found = list(pieces)
    block = _block({"x": [values[at] for at in rows]}, [field])
    assert max(map(len, found), default=0) <= piece_bytes
    assert b"".join(piece.tobytes() for piece in found) == block.tobytes()
    assert layout([field], len(rows), counts)[1] == len(block)
    _, roomy = column_stream([field], placement, piece_bytes, ranges_from, lambda nbytes: np.full(nbytes, 7, np.uint8))
    assert b"".join(piece.tobytes() for piece in roomy) == block.tobytes(), "in memory of another"


@pytest.mark.parametrize("edges_kept", [0, 20, 1 << 18])
@pytest.mark.parametrize("wanted", [("a", "b", "c", "d"), ("b", "c"), ("d", "a"), ("c",)])
@pytest.mark.parametrize("rows", [range(20), range(3, 9), (4, 11, 2)], ids=["whole", "a run", "scattered"])
def test_several_columns_are_one_block(
    shard: Shard, monkeypatch: pytest.MonkeyPatch, rows: Sequence[int], wanted: tuple[str, ...], edges_kept: int
) -> None:
    monkeypatch.setattr(byte_stream, "EDGES_KEPT", edges_kept)
    named = dict(zip("abcd", COLUMNS.values(), strict=True))
    fields = {name: Field(name, field.dtype, field.shape) for name, (field, _) in named.items()}
    put = shard.put({name: values[:20] for name, (_, values) in named.items()}, list(fields.values()))
    placement = shard.column("a", put, [(0, at) for at in rows])._placement
    assert placement is not None
    asked = [fields[name] for name in wanted]
    _, pieces = column_stream(asked, placement, 1 << 20)
    found = [piece.tobytes() for piece in pieces]
    columns = {name: [named[name][1][at] for at in rows] for name in wanted}
    assert b"".join(found) == _block(columns, asked).tobytes()
    if len(rows) == 20:
        assert len(found) == (1 if wanted in (("a", "b", "c", "d"), ("b", "c"), ("c",)) else 2), (
            "neighbours leave together"
        )


def test_damaged_offsets_name_their_column(shard: Shard) -> None:
    field, values = COLUMNS["ragged"]
    fields = [Field(name, field.dtype, field.shape) for name in "abc"]
    put = shard.put({one.name: values for one in fields}, fields)
    placement = shard.column("a", put, [(0, at) for at in (4, 11, 2)])._placement
    assert placement is not None
    at = int(placement.blocks.spans(fields[1]).offsets[0])
    offsets = placement.blocks.live_memory()[0][at : at + 8 * 41].view(np.int64)
    for place, wrong in ((11, -1), (5, 1 << 40), (3, int(offsets[2]) - 1)):
        kept, offsets[place] = int(offsets[place]), wrong
        with pytest.raises(Corruption, match='field "b": offsets of a block point outside it'):
            column_stream(fields, placement, 1 << 20)
        offsets[place] = kept


@pytest.mark.parametrize(("shape", "views"), [((300,), True), ((None,), True), ((20,), False)])
def test_long_rows_that_lie_apart_are_named_where_they_lie(
    shard: Shard, shape: tuple[int | None, ...], views: bool
) -> None:
    field = Field("x", "uint8", shape)
    values = [np.full(shape[0] or 250 + at, at, np.uint8) for at in range(20)]
    placement = shard.column("x", shard.put({"x": values}, [field]), [(0, at) for at in (4, 11, 2, 3)])._placement
    assert placement is not None
    low, stretch = placement.blocks.stretch()
    _, pieces = column_stream([field], placement, 1 << 20, 200)
    inside = [len(piece) for piece in pieces if 0 <= piece.__array_interface__["data"][0] - low < len(stretch)]
    assert inside == ([len(values[4]), len(values[11]), len(values[2]) + len(values[3])] if views else [])


def _block(columns: dict[str, list[Any]], fields: Sequence[Field]) -> Any:
    (wanted,) = block_writers([prepare(field.name, columns[field.name], field) for field in fields])
    block = np.empty(align(wanted.nbytes) + 64, np.uint8)
    block = block[-block.__array_interface__["data"][0] % 64 :][: wanted.nbytes]
    wanted.write(block)
    return block
