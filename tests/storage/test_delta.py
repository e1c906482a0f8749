"""Differences of weights: what is applied to the content before is the content after, and damage is refused."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scale import examples
from transferqueue.errors import Corruption
from transferqueue.limits import MIB
from transferqueue.storage.memory.delta import apply_delta, encode_delta, read_delta, section_bytes, undo_delta

KINDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@settings(max_examples=examples(60), deadline=None)
@given(
    size=st.sampled_from([1, 2, 3, 4, 8, 16]),
    words=st.integers(8, 5000),
    share=st.sampled_from([0.0003, 0.01, 0.1, 0.4]),
    seed=st.integers(0, 1 << 30),
    small=st.booleans(),
)
def test_what_is_applied_is_what_was_meant(size: int, words: int, share: float, seed: int, small: bool) -> None:
    rng = np.random.default_rng(seed)
    before = rng.integers(0, 256, words * 8, dtype=np.uint8)
    after = before.copy()
    elements = after.view(KINDS.get(size, np.uint8))
    where = np.flatnonzero(rng.random(len(elements)) < share)
    moves = rng.choice([1, -1], len(where)) if small else rng.integers(-(1 << 62), 1 << 62, len(where))
    elements[where] += moves.astype(elements.dtype)
    content = before.copy()
    delta = encode_delta(content, after, size)
    if delta is None:
        changed = np.count_nonzero(before.view(elements.dtype) != elements)
        assert not changed or changed > 0.05 * len(elements) or words < 100
        return
    assert np.array_equal(content, after), "the search made it so"
    content = before.copy()
    padded = np.concatenate([delta.data, np.zeros(-len(delta.data) % 64, np.uint8)])  # as its block is
    apply_delta(content, padded)
    assert np.array_equal(content, after)
    undo_delta(content, padded)
    assert np.array_equal(content, before)


def test_a_step_of_bf16_takes_about_nine_bits_for_each_weight_that_moved() -> None:
    rng = np.random.default_rng(0)
    before = rng.integers(0, 256, 4 * MIB, dtype=np.uint8)
    after = before.copy()
    weights = after.view(np.uint16)
    moved = np.flatnonzero(rng.random(len(weights)) < 0.02)
    weights[moved] += rng.choice(np.array([1, 0xFFFF], np.uint16), len(moved))
    delta = encode_delta(before, after, 2)
    assert delta is not None
    assert 8 * len(delta.data) < 9.5 * len(moved)


@pytest.mark.parametrize("share", [0.6, 1.0])
def test_nearly_everything_changed_is_no_difference(share: float) -> None:
    rng = np.random.default_rng(1)
    before = rng.integers(0, 256, MIB, dtype=np.uint8)
    after = before.copy()
    after.view(np.uint16)[rng.random(MIB // 2) < share] += 1
    assert encode_delta(before, after, 2) is None


def test_positions_far_apart_are_kept() -> None:
    before = np.zeros(MIB, np.uint8)
    after = before.copy()
    after[[0, 254, 509, 510, 90_000, MIB - 1]] = 7
    delta = encode_delta(before.copy(), after, 1)
    assert delta is not None
    (moves,) = read_delta(delta.data, MIB)
    assert moves.positions.tolist() == [0, 254, 509, 510, 90_000, MIB - 1]


def test_damage_is_refused_or_changes_the_result() -> None:
    rng = np.random.default_rng(2)
    before = rng.integers(0, 256, 64 * 1024, dtype=np.uint8)
    after = before.copy()
    after.view(np.uint16)[rng.random(32 * 1024) < 0.02] += 1
    found = encode_delta(before.copy(), after, 2)
    assert found is not None
    delta = found.data
    with pytest.raises(Corruption, match="is damaged: format 2 of 65536 bytes"):
        list(read_delta(delta, 128))
    with pytest.raises(Corruption, match="it has 3 bytes"):
        list(read_delta(delta[:3], len(before)))
    for at in range(0, len(delta), 7):
        damaged = delta.copy()
        damaged[at] ^= 0x55
        content = before.copy()
        with suppress(Corruption):  # other errors do not come; a result that is wrong has another checksum
            apply_delta(content, damaged)


def test_each_section_leads_to_its_part_of_the_content() -> None:
    rng = np.random.default_rng(3)
    before = rng.integers(0, 256, 5 * MIB + 640, dtype=np.uint8)
    after = before.copy()
    after[[7, MIB - 1, MIB, 3 * MIB + 5, 5 * MIB, 5 * MIB + 639]] += 1
    delta = encode_delta(before.copy(), after, 4)
    assert delta is not None
    assert section_bytes(len(before)) == MIB
    assert len(delta.ends) == 6
    assert delta.ends[-1] == len(delta.data)
    for first in range(6):
        content, begin = before.copy(), delta.ends[first - 1] if first else 0
        for moves in read_delta(delta.data[begin:], len(content), first, first + 1):
            content.view(np.uint32)[moves.positions] += moves.added
        part = slice(first * MIB, (first + 1) * MIB)
        assert np.array_equal(content[part], after[part])
        content[part] = before[part]
        assert np.array_equal(content, before)
