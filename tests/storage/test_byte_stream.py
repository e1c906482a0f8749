"""A column as a stream is the block that a writer of just these rows would have made, however it is cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.storage.shards import Shard
from transferqueue.schema import Field, align, layout
from transferqueue.storage import block_writers
from transferqueue.storage.columns.byte_stream import count_of, stream_pieces
from transferqueue.storage.inputs.prepare import prepare

RNG = np.random.default_rng(3)
COLUMNS: dict[str, tuple[Field, list[Any]]] = {
    "dense": (Field("x", "float32", (3,)), list(RNG.random((40, 3), np.float32))),
    "ragged": (Field("x", "int64", (None, 2)), [RNG.integers(0, 9, (at % 7, 2)) for at in range(40)]),
    "varied": (Field("x", "uint8", (None, None)), [np.full((at % 3, at % 5), at, np.uint8) for at in range(40)]),
    "text": (Field("x", "str"), ["é" * (at % 4) + "long" * 30 * (at == 11) for at in range(40)]),
}
ROWS = {
    "a run": list(range(5, 30)),
    "scattered": [int(at) for at in RNG.permutation(40)],
    "repeated": [7, 7, 3, 7],
    "one": [11],
}


@pytest.mark.parametrize("piece_bytes", [64, 100, 1 << 20])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize(("field", "values"), COLUMNS.values(), ids=COLUMNS)
def test_the_stream_is_a_block_of_these_rows(
    shard: Shard, field: Field, values: list[Any], rows: list[int], piece_bytes: int
) -> None:
    first, second = shard.put({"x": values[:20]}, [field]), shard.put({"x": values[20:]}, [field])
    column = shard.column("x", [*first, *second], [(at // 20, at % 20) for at in rows])
    placement = column._placement
    assert placement is not None
    found = list(stream_pieces(field, placement, piece_bytes))
    (wanted,) = block_writers([prepare("x", [values[at] for at in rows], field)])
    block = np.empty(align(wanted.nbytes) + 64, np.uint8)
    block = block[-block.__array_interface__["data"][0] % 64 :][: wanted.nbytes]
    wanted.write(block)
    assert max(map(len, found), default=0) <= piece_bytes
    assert [count_of(field, placement)] == wanted.counts
    assert b"".join(piece.tobytes() for piece in found) == block.tobytes()
    assert layout([field], len(rows), wanted.counts)[1] == len(block)
