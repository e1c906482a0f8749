"""Rows that repeat a value are found and stored once, whatever way the value is given; the values read are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from transferqueue.errors import SchemaError
from transferqueue.limits import KIB
from transferqueue.schema import Field
from transferqueue.storage import BlockWriter, Column, MappedBlocks, PlainValues, RowPlacement, RowsOf
from transferqueue.storage.inputs import repeats
from transferqueue.storage.inputs.prepare import Prepared, prepare
from transferqueue.storage.inputs.repeats import COMPARED_APART_BYTES, COMPARED_BYTES
from transferqueue.wire.messages import BlockLocation

CHANCE = np.random.default_rng(7)
IMAGE = CHANCE.integers(0, 255, (8, 128, 128), np.uint8)
IDS = [torch.from_numpy(CHANCE.integers(0, 150_000, 700)) for _ in range(4)]
TEXTS = ["a" * 9_000, "b" * 9_000, "c" * 9_000]
PADDED = np.zeros((6, 36 * KIB), np.uint8)
"""Rows that have the same bytes wherever a sample is taken."""
PADDED[:, 1000:2000] = CHANCE.integers(0, 255, (6, 1000), np.uint8)


def read(prepared: Prepared) -> list[Any]:
    """The values of all rows, through a block."""
    writer = BlockWriter([prepared])
    memory = np.zeros(max(writer.nbytes, 1), np.uint8)[: writer.nbytes]
    writer.write(memory)
    at = BlockLocation(1, 0, 1, 0, writer.nbytes, writer.stored_rows, [prepared.field.name], writer.counts)
    blocks = MappedBlocks([at], [memory], {prepared.field.name: prepared.field})
    slots = np.arange(prepared.rows, dtype=np.int32) if prepared.slots is None else prepared.slots
    return Column(prepared.field, RowPlacement(blocks, np.zeros(len(slots), np.int32), slots)).list()


def grouped(values: list[Any], each: int) -> list[Any]:
    return [value for value in values for _ in range(each)]


def copied(rows: list[Any]) -> list[Any]:
    return [row.clone() if isinstance(row, torch.Tensor) else row.copy() for row in rows]


REPEATED: dict[str, tuple[Callable[[], Any], int]] = {
    "an expanded tensor": (lambda: torch.from_numpy(IMAGE[:1].copy()).expand(16, -1, -1), 1),
    "a broadcast array": (lambda: np.broadcast_to(IMAGE[0], (16, 128, 128)), 1),
    "a list of one tensor": (lambda: [torch.from_numpy(IMAGE[0])] * 16, 1),
    "a list of one array": (lambda: [IMAGE[0]] * 16, 1),
    "views of the same memory": (lambda: list(torch.from_numpy(IMAGE[0, :5]).flatten().expand(32, -1)), 1),
    "tensors in any order": (lambda: [IDS[at] for at in (0, 1, 0, 1, 1, 0, 2, 2)], 3),
    "texts in any order": (lambda: [TEXTS[at] for at in (0, 1, 0, 1, 1, 0, 2, 2)], 3),
    "lists in any order": (lambda: grouped([IDS[0].tolist()], 8), 1),
    "a list of one dict": (lambda: [{"prompt": TEXTS[0], "answer": "2"}] * 4, 1),
    "repeat_interleave": (lambda: torch.from_numpy(IMAGE[:4]).repeat_interleave(4, 0), 4),
    "an array indexed": (lambda: IMAGE[[0, 0, 0, 1, 2, 2, 2, 2]], 3),
    "the rows of an array": (lambda: RowsOf(torch.from_numpy(IMAGE[:2]).repeat_interleave(4, 0)), 2),
    "tensors that are equal": (lambda: copied(grouped(IDS, 4)), 4),
    "lists that are equal": (lambda: [row.tolist() for row in grouped(IDS, 4)], 4),
    "a nested tensor": (lambda: torch.nested.as_nested_tensor(grouped(IDS, 4), layout=torch.jagged), 4),
    "arrays that are equal": (lambda: copied(grouped([np.tile(IMAGE[0], (3, 1)), np.tile(IMAGE[1], (3, 1))], 4)), 2),
    "padded rows": (lambda: PADDED.repeat(2, 0), 6),
    "padded rows after one that differs": (lambda: PADDED[:3].repeat(3, 0)[2:], 3),
    "padded tensors": (lambda: copied(list(torch.from_numpy(PADDED.repeat(2, 0)))), 6),
    "padded texts": (lambda: [row.tobytes() for row in PADDED.repeat(2, 0)], 6),
    "texts that are equal": (lambda: grouped(["".join(["ab", "c" * 9_000]), "d" * 9_002], 4), 2),
    "plain values that are equal": (lambda: PlainValues([{"a": "x" * 9_000} for _ in range(6)]), 1),
}


@pytest.mark.parametrize("kind", REPEATED)
def test_a_repeated_value_is_stored_once(kind: str) -> None:
    make, stored = REPEATED[kind]
    found, whole = prepare("x", make(), share=True), prepare("x", make())
    assert (found.stored_rows, found.rows, found.field) == (stored, whole.rows, whole.field)
    assert whole.slots is None
    assert found.nbytes <= whole.nbytes // 2
    assert found.row_lengths().tolist() == whole.row_lengths().tolist()
    assert read(found) == read(whole)


def comparisons(value: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each value that a put of a column compares with its neighbour to the end or to the first difference."""
    sizes: list[int] = []
    same_bytes = repeats._same_bytes

    def counting(one: Any, other: Any) -> bool:
        sizes.append(len(one))
        return same_bytes(one, other)

    monkeypatch.setattr(repeats._is_promising, "__defaults__", (counting,))
    monkeypatch.setattr(repeats._firsts, "__defaults__", (counting,))
    assert prepare("x", value, share=True).slots is None
    return sizes


@pytest.mark.parametrize("given", [lambda a: a, torch.from_numpy, lambda a: list(torch.from_numpy(a))])
def test_the_search_of_what_repeats_nothing_is_bounded(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert comparisons(given(different(64, 128 * KIB)), monkeypatch) == []
    dear = comparisons(given(late(16, 512 * KIB)), monkeypatch)  # they differ after 170 KiB
    assert dear == [64 * KIB, 512 * KIB]
    assert comparisons(given(late(64, 40 * KIB)), monkeypatch) == [40 * KIB] * 2
    early = np.zeros((16, 512 * KIB), np.uint8)
    early[:, 1000] = np.arange(16)
    assert comparisons(given(early), monkeypatch) == [64 * KIB] * 2


def different(rows: int, nbytes: int) -> np.ndarray:
    return np.random.default_rng(rows).integers(0, 255, (rows, nbytes), np.uint8)


def late(rows: int, nbytes: int) -> np.ndarray:
    """Rows that differ in one byte that no sample has."""
    array = np.zeros((rows, nbytes), np.uint8)
    array[:, nbytes // 3] = np.arange(rows)
    return array


@pytest.mark.parametrize("make", [different, late])
@pytest.mark.parametrize(
    "given",
    [lambda a: a, list, torch.from_numpy, lambda a: list(torch.from_numpy(a)), lambda a: [row.tobytes() for row in a]],
)
def test_what_differs_anywhere_is_not_shared(make: Any, given: Any) -> None:
    values = make(8, COMPARED_APART_BYTES)
    found = prepare("x", given(values), share=True)
    assert found.slots is None
    assert read(found) == read(prepare("x", given(values)))


@pytest.mark.parametrize(
    "value",
    [
        grouped([np.zeros(COMPARED_BYTES // 8 - 1)], 8),  # compared from 4 KiB
        np.concatenate([different(6, 8 * KIB), different(6, 8 * KIB)[:2]])[
            [0, 0, 1, 2, 3, 4, 5, 6]
        ],  # spares too little
        [1, 1, 1, 1],
        ["gsm8k"] * 64,
        [[1, 2]] * 16,
        np.zeros((0, 5000), np.uint8).reshape(0, 5000).tolist() or np.zeros(64),
        torch.zeros(16).expand(16),
    ],
)
def test_small_savings_are_left_alone(value: Any) -> None:
    value = copied(value) if isinstance(value, list) and isinstance(value[0], np.ndarray) else value
    assert prepare("x", value, share=True).slots is None


def test_tensors_of_other_views_of_one_memory_are_not_mixed_up() -> None:
    square = torch.from_numpy(IMAGE[0].copy()).float()
    rows = [square, square.T] * 8
    found = prepare("x", rows, share=True)
    assert (found.stored_rows, found.rows) == (2, 16)
    flat = square.flatten()
    cut = [flat[:9_000], flat[:9_000], flat[:8_000], flat[:8_000]]
    assert read(prepare("x", cut, share=True)) == [row.tolist() for row in cut]


def test_an_error_names_the_row_of_the_caller() -> None:
    rows: list[Any] = [IMAGE[0]] * 7 + [IMAGE[0][:3]]
    with pytest.raises(SchemaError, match=r"row 7 has shape \[3, 128\]"):
        prepare("x", rows, Field("x", "uint8", (128, 128)), share=True)
