"""A cut column is the column that a writer of the cut rows would have made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.storage.shards import Shard
from transferqueue.errors import SchemaError, UsageError
from transferqueue.schema import Field, Share, Slice, layout, share_range, sliced_field
from transferqueue.storage import block_writers
from transferqueue.storage.columns.slicing import load_slice, slice_stream
from transferqueue.storage.inputs.prepare import prepare

RNG = np.random.default_rng(4)
RAGGED = Field("x", "uint8", (None, 12, 4))
DENSE = Field("x", "float32", (9, 8))
VALUES: dict[str, tuple[Field, list[Any]]] = {
    "ragged": (RAGGED, [RNG.integers(0, 255, (at % 11, 12, 4), np.uint8) for at in range(40)]),
    "dense": (DENSE, list(RNG.random((40, 9, 8), np.float32))),
}
CUTS = [
    Slice((2, 5)),
    Slice(None, (3, 7)),
    Slice((1, 6), (0, 2)),
    Slice(Share(0, 2)),
    Slice(Share(1, 2)),
    Slice(Share(0, 2, zigzag=True), (4, 8)),
    Slice(Share(1, 2, zigzag=True)),
    Slice(None, Share(1, 3)),
    Slice((1, 3), Share(0, 2)),
    Slice(),
]
ROWS = {"whole": list(range(20)), "a run": list(range(5, 17)), "scattered": [3, 31, 7, 7, 22, 10]}


def sliced(value: Any, cut: Slice) -> Any:
    """By numpy, one row at a time."""
    sizes = value.shape[1:]
    inner = tuple(
        slice(None) if each is None else slice(*(share_range(each, size) if isinstance(each, Share) else each))
        for each, size in zip(cut.inner or (), sizes, strict=False)
    )
    if isinstance(cut.first, Share):
        share, chunks = cut.first, cut.first.of * (2 if cut.first.zigzag else 1)
        size = len(value) // chunks
        wanted = [share.index, chunks - 1 - share.index] if share.zigzag else [share.index]
        parts = [value[at * size : len(value) if at == chunks - 1 else (at + 1) * size] for at in wanted]
        return np.concatenate(parts)[(slice(None), *inner)]
    return value[(slice(*cut.first) if cut.first else slice(None), *inner)]


@pytest.mark.parametrize("piece_bytes", [64, 1 << 20])
@pytest.mark.parametrize("cut", CUTS, ids=repr)
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize(("field", "values"), VALUES.values(), ids=VALUES)
def test_a_cut_is_what_a_writer_of_it_would_have_made(
    shard: Shard, field: Field, values: list[Any], rows: Sequence[int], cut: Slice, piece_bytes: int
) -> None:
    first, second = shard.put({"x": values[:20]}, [field]), shard.put({"x": values[20:]}, [field])
    placement = shard.column("x", [*first, *second], [(at // 20, at % 20) for at in rows])._placement
    assert placement is not None
    expected = [sliced(values[at], cut) for at in rows]
    fewer = sliced_field(field, cut)
    (writer,) = block_writers([prepare("x", expected, fewer)])
    raw = np.empty(writer.nbytes + 64, np.uint8)
    block = raw[-raw.__array_interface__["data"][0] % 64 :][: writer.nbytes]
    writer.write(block)
    count, pieces = slice_stream(field, cut, placement, piece_bytes)
    found = list(pieces)
    assert [count] == writer.counts
    assert b"".join(piece.tobytes() for piece in found) == block.tobytes()
    assert layout([fewer], len(rows), [count])[1] == len(block)
    assert max(map(len, found), default=0) <= piece_bytes
    _, views = slice_stream(field, cut, placement, piece_bytes, ranges_from=1)
    named = list(views)
    assert b"".join(piece.tobytes() for piece in named) == block.tobytes()
    assert max(map(len, named), default=0) <= piece_bytes
    _, roomy = slice_stream(field, cut, placement, piece_bytes, room=lambda nbytes: np.full(nbytes, 7, np.uint8))
    assert b"".join(piece.tobytes() for piece in roomy) == block.tobytes(), "in memory of another"
    loaded = load_slice(field, cut, placement)
    assert loaded.values.tobytes() == b"".join(np.ascontiguousarray(each).tobytes() for each in expected)


def test_no_rows_have_an_empty_cut(shard: Shard) -> None:
    placement = shard.column("x", shard.put({"x": VALUES["ragged"][1]}, [RAGGED]), [])._placement
    assert placement is not None
    assert load_slice(RAGGED, Slice((0, 2)), placement).rows == 0


def test_the_shares_of_all_ranks_are_the_whole() -> None:
    for zigzag in (False, True):
        for size in range(12):
            parts = [sliced(np.arange(size), Slice(Share(rank, 3, zigzag))) for rank in range(3)]
            assert sorted(np.concatenate(parts).tolist()) == list(range(size))
            fields = [sliced_field(Field("x", "int64", (size,)), Slice(Share(rank, 3, zigzag))) for rank in range(3)]
            assert [field.shape for field in fields] == [(len(part),) for part in parts]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Slice((8, 8)),
            r"axis 0 of Slice is \(8, 8\), which is empty, negative or beyond 2\*\*48; give 0 <= start < stop",
        ),
        (lambda: Slice(None, (-1, 3)), r"axis 1 of Slice is \(-1, 3\), which is empty, negative"),
        (lambda: Slice(slice(0, 8, -1)), r"axis 0 of Slice is slice\(0, 8, -1\); give \(start, stop\)"),
        (lambda: Slice(None, Share(0, 2, zigzag=True)), r"axis 1 of Slice .*zigzag divides the first dimension"),
        (lambda: Share(4, 4), r"Share\(4, 4\): .*0 <= index < of"),
        (lambda: Slice((0, True)), r"two whole numbers"),
        (lambda: Slice((0, 1 << 70)), r"beyond 2\*\*48"),
        (lambda: Share(0, 1 << 70), r"0 <= index < of"),
    ],
)
def test_a_slice_that_is_none_is_refused_when_it_is_made(make: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


@pytest.mark.parametrize(
    ("field", "cut", "message"),
    [
        (
            RAGGED,
            Slice(None, (8, 13)),
            r'axis 1 of .* field "x" is uint8\[None, 12, 4\], with 12 there; stop is at most',
        ),
        (DENSE, Slice((0, 10)), r"axis 0 of .* stop is at most 9"),
        (DENSE, Slice(None, Share(0, 9)), r"axis 1 of .* is empty: .*with 8 there; take fewer shares"),
        (DENSE, Slice(None, None, (0, 1)), r"has 3 axes, and field .* with 2; leave axes out"),
        (Field("x", "str"), Slice((0, 1)), r"one value a row: it cannot be sliced; read it whole"),
        (Field("x", "uint8", (None, None)), Slice((0, 1)), r"differ in more than the first dimension"),
    ],
)
def test_a_slice_that_does_not_fit_its_field_is_refused(field: Field, cut: Slice, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        sliced_field(field, cut)


BOXES = [
    Slice(None, (10, 200)),
    Slice((3, 60), Share(1, 4)),
    Slice(None, None, (0, 8)),
    Slice(None, (5, 9), (1, 31)),
    Slice((1, 63)),
    Slice(Share(0, 2, zigzag=True), (1, 255)),
]


@pytest.mark.parametrize("cut", BOXES, ids=repr)
@pytest.mark.parametrize("shape", [(64, 256, 32), (None, 256, 32)], ids=["dense", "ragged"])
def test_long_rows_are_cut_piece_by_piece(shard: Shard, shape: tuple[int | None, ...], cut: Slice) -> None:
    """As tensors of weights: 1 MiB a row, in pieces of 32 KiB."""
    field, piece_bytes = Field("x", "uint16", shape), 32 << 10
    values = [np.random.default_rng(at).integers(0, 1 << 16, (64, 256, 32), np.uint16) for at in range(3)]
    placement = shard.column("x", shard.put({"x": values}, [field]), [(0, 2), (0, 0)])._placement
    assert placement is not None
    expected = b"".join(np.ascontiguousarray(sliced(values[at], cut)).tobytes() for at in (2, 0))
    given: list[int] = []

    def room(nbytes: int) -> Any:
        given.append(nbytes)
        return np.empty(nbytes, np.uint8)

    for ranges_from in (0, 16 << 10):
        _, pieces = slice_stream(field, cut, placement, piece_bytes, ranges_from, room)
        found = list(pieces)
        assert max(map(len, found)) <= piece_bytes
        made = b"".join(piece.tobytes() for piece in found)
        offsets = 64 if field.ragged else 0
        assert made[offsets : offsets + len(expected)] == expected
    assert max(given, default=0) <= piece_bytes, "no more than a piece is gathered at a time"
