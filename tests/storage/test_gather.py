"""Rows brought together: every way of doing it gives the same bytes, and no offset is followed unchecked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.storage.shards import Shard
from transferqueue.errors import Corruption
from transferqueue.schema import Field, layout
from transferqueue.storage import Column, MappedBlocks, Repeat, RowPlacement
from transferqueue.storage.columns import gather, ranges
from transferqueue.storage.columns.placement import layouts
from transferqueue.storage.columns.ranges import copy_ranges

MEMORY = np.random.default_rng(0).integers(0, 255, 1 << 16, dtype=np.uint8)
RANGES = st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 40)), max_size=30)


def whole(starts: Any, ends: Any) -> bytes:
    return b"".join(MEMORY[start:end].tobytes() for start, end in zip(starts, ends, strict=True))


@pytest.mark.parametrize(("few", "placed"), [(0, 0), (1000, 0), (0, 1000)], ids=["by Arrow", "one by one", "placed"])
@given(found=RANGES, disjoint=st.booleans(), inside=st.booleans())
def test_ranges_are_copied_in_order(
    few: int, placed: int, found: list[tuple[int, int]], disjoint: bool, inside: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranges, "FEW_RANGES", few)
        patch.setattr(ranges, "PLACED_RANGES_MAX", placed)
        scale = 41 if disjoint else 1
        starts = np.array([start * scale for start, _ in found], np.int64)
        sizes = dict(found)  # a range that repeats is the same range
        ends = starts + np.array([sizes[start] if disjoint else size for start, size in found], np.int64)
        out = np.zeros(int((ends - starts).sum()), np.uint8) if inside else None
        copied = copy_ranges(MEMORY, starts, ends, out)
        assert copied.tobytes() == whole(starts, ends)
        assert out is None or len(out) == 0 or copied is out
        copied[:] = 0
        assert MEMORY.any(), "the copy is of its own memory"


def test_ranges_far_apart_are_not_given_to_arrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "FEW_RANGES", 0)
    monkeypatch.setattr(ranges, "SPARSE_BYTES_MAX", 100)
    monkeypatch.setattr(ranges, "take_rows", lambda *_: pytest.fail("Arrow would reserve for the gaps"))
    starts = np.array([60000, 10, 30000], np.int64)
    assert copy_ranges(MEMORY, starts, starts + 5).tobytes() == whole(starts, starts + 5)


def scattered(shard: Shard, rows: int) -> tuple[Column, list[list[int]]]:
    values = [list(range(at, at + at % 5)) for at in range(rows)]
    blocks = shard.put({"x": values}, [Field("x", "int32", (None,))])
    order = np.random.default_rng(1).permutation(rows)
    return shard.column("x", blocks, [(0, int(at)) for at in order]), [values[at] for at in order]


def test_many_rows_of_one_block_are_taken_by_arrow(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    column, wanted = scattered(shard, 1000)
    taken: list[int] = []
    take = gather.take_rows
    monkeypatch.setattr(
        gather, "take_rows", lambda memory, edges, rows: taken.append(len(rows)) or take(memory, edges, rows)
    )
    assert column.list() == wanted
    assert taken == [1000]
    values, _ = column.ragged()
    values[:] = 0
    assert values.sum() == 0, "what was gathered may be changed"


def test_rows_of_many_blocks(shard: Shard) -> None:
    blocks = [
        block
        for at in range(40)
        for block in shard.put({"x": [[at, at], [at]], "y": np.full((2, 3), at), "z": [str(at), "z"]})
    ]
    at = [(int(block), int(slot)) for block, slot in np.random.default_rng(2).integers(0, (40, 2), (300, 2))]
    assert shard.column("x", blocks, at).list() == [[block] * (2 - slot) for block, slot in at]
    assert shard.column("y", blocks, at).numpy()[:, 1].tolist() == [block for block, _ in at]
    assert shard.column("z", blocks, at).list() == ["z" if slot else str(block) for block, slot in at]


def test_blocks_of_different_field_orders(shard: Shard) -> None:
    blocks = [*shard.put({"a": [[1]], "b": ["x"]}), *shard.put({"b": ["y"], "a": [[2, 3]]})]
    assert shard.column("a", blocks, [(1, 0), (0, 0)]).list() == [[2, 3], [1]]
    assert shard.column("b", blocks, [(1, 0), (0, 0)]).list() == ["y", "x"]


def test_repeated_rows(shard: Shard) -> None:
    prompts = [[at] * (at % 3) for at in range(100)]
    blocks = shard.put({"x": Repeat(prompts, 8)}, [Field("x", "int64", (None,))])
    assert shard.column("x", blocks).list() == [prompt for prompt in prompts for _ in range(8)]


def test_blocks_that_came_unaligned_are_set_right(shard: Shard) -> None:
    (block,) = shard.put({"x": [[1, 2], [3]]})
    room = np.zeros(block.nbytes + 1, np.uint8)
    room[1:] = shard.mapping.pin([block])[block.block]
    blocks = MappedBlocks([block], [room[1:]], shard.fields)
    column = Column(shard.fields["x"], RowPlacement(blocks, np.zeros(2, np.int32), np.arange(2, dtype=np.int32)))
    assert column.list() == [[1, 2], [3]]


def test_a_run_told_by_its_first_row_is_what_its_rows_are(shard: Shard) -> None:
    blocks = shard.put({"x": np.arange(24.0).reshape(8, 3), "y": [[at] * at for at in range(8)], "z": ["a"] * 8})
    held = shard.lease(blocks)
    told = RowPlacement.of_run(held, 0, 2, 5)
    named = RowPlacement(held, np.zeros(5, np.int32), np.arange(2, 7, dtype=np.int32))
    assert told.run == named.run == (0, 2)
    assert len(told) == len(named) == 5
    assert (told.block_of_row == named.block_of_row).all()
    assert (told.slot_of_row == named.slot_of_row).all()
    for field in shard.fields.values():
        one, other = Column(field, told), Column(field, named)
        assert one.list() == other.list()
        assert one[1:4].list() == other.list()[1:4]


@pytest.mark.parametrize("run", [(1, 0, 1), (-1, 0, 1), (0, -1, 2), (0, 4, 5), (0, 9, 1)])
def test_a_run_outside_its_block_is_refused(shard: Shard, run: tuple[int, int, int]) -> None:
    held = shard.lease(shard.put({"x": np.arange(8.0)}))
    with pytest.raises(Corruption, match=r"a row is (in block|beyond)"):
        RowPlacement.of_run(held, *run)


FIELDS = st.lists(
    st.tuples(
        st.sampled_from(["int8", "float64", "str"]), st.sampled_from([(), (3,), (None,), (None, 2), (None, None)])
    ),
    min_size=1,
    max_size=5,
)


@given(kinds=FIELDS, blocks=st.integers(1, 9), seed=st.integers(0, 1 << 20))
def test_layouts_of_many_blocks_are_those_of_each(kinds: list[Any], blocks: int, seed: int) -> None:
    fields = [Field(f"f{at}", kind, () if kind == "str" else shape) for at, (kind, shape) in enumerate(kinds)]
    random = np.random.default_rng(seed)
    rows = random.integers(1, 20, blocks)
    counts = np.array([[0 if field.dense else int(random.integers(0, 99)) for field in fields] for _ in rows])
    spans, sizes = layouts(fields, rows, counts)
    for at in range(blocks):
        wanted, size = layout(fields, int(rows[at]), counts[at].tolist())
        assert size == sizes[at]
        assert [(s.values, s.offsets, s.shapes) for s in wanted] == [
            (s.values[at], s.offsets[at], s.shapes[at]) for s in spans
        ]


# ---------------------------------------------------------------- what others wrote is not trusted


def corrupt(shard: Shard, block: Any, number: int, at: int) -> None:
    """Overwrite an int64 of a block, as a defective writer could."""
    np.frombuffer(shard.mapping.writable(block.offset, block.nbytes), np.int64)[at] = number


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [0, 2, 1] * 100], ids=["run", "few", "many"])
@pytest.mark.parametrize(("number", "at"), [(1 << 40, 3), (-1, 0), (-8, 1), (1 << 40, 1)])
def test_offsets_outside_their_block_are_corruption(shard: Shard, order: list[int], number: int, at: int) -> None:
    blocks = shard.put({"x": [[1, 2], [3], [4, 5]]})
    corrupt(shard, blocks[0], number, at)
    column = shard.column("x", blocks, [(0, slot) for slot in order])
    for read in (column.list, column.nested, column.arrow, lambda: column[0]):
        with pytest.raises(Corruption, match='field "x": offsets of a block point outside it'):
            read()


@pytest.mark.parametrize("order", [[0, 1], [1, 0]], ids=["run", "gathered"])
@pytest.mark.parametrize("number", [1 << 40, -2, 3])
def test_shapes_that_do_not_match_are_corruption(shard: Shard, order: list[int], number: int) -> None:
    blocks = shard.put({"x": [np.ones((1, 2)), np.ones((2, 2))]}, [Field("x", "float64", (None, None))])
    corrupt(shard, blocks[0], number, 0)
    with pytest.raises(Corruption, match="shapes of a block do not match its offsets"):
        shard.column("x", blocks, [(0, slot) for slot in order]).list()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 1 << 40}, "a block claims 1099511627776 to 1099511627776 rows"),
        ({"rows": 100}, "a block with x is smaller than its layout"),
        ({"counts": [1 << 61]}, "a block with x is smaller than its layout"),
        ({"counts": [1 << 40]}, "a block with x is smaller than its layout"),
        ({"counts": [-1]}, "counts down to -1"),
        ({"fields": ["y"]}, 'a block lacks field "x"'),
    ],
)
def test_a_block_that_is_not_as_told_is_corruption(shard: Shard, change: dict[str, Any], message: str) -> None:
    (block,) = shard.put({"x": [[1, 2], [3]]})
    shard.fields["y"] = Field("y", "int64", (None,))
    for name, value in change.items():
        setattr(block, name, value)
    with pytest.raises(Corruption, match=message):
        shard.column("x", [block], [(0, 0)]).list()


@pytest.mark.parametrize(
    ("at", "message"),
    [
        ([(1, 0)], "a row is in block 1 of 1"),
        ([(-1, 0)], "a row is in block -1 of 1"),
        ([(0, 2)], "beyond the rows"),
        ([(0, -1)], "beyond"),
    ],
)
def test_places_that_are_none_are_corruption(shard: Shard, at: list[tuple[int, int]], message: str) -> None:
    with pytest.raises(Corruption, match=message):
        shard.column("x", shard.put({"x": [[1, 2], [3]]}), at)


@pytest.mark.parametrize(
    ("dtype", "written", "message"),
    [("str", b"\xff\xfe", "stored text is not UTF-8"), ("value", b"\xc1\xff", "a stored value is not MessagePack")],
)
def test_bytes_that_are_not_what_they_should_be_are_corruption(
    shard: Shard, dtype: str, written: bytes, message: str
) -> None:
    blocks = shard.put({"x": ["a"] if dtype == "str" else [200]}, [Field("x", dtype)])
    shard.mapping.writable(blocks[0].offset, blocks[0].nbytes)[64 : 64 + len(written)] = written
    with pytest.raises(Corruption, match=f'field "x": {message}'):
        shard.column("x", blocks).list()
