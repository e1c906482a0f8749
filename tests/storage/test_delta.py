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
from transferqueue.storage.memory.delta import apply_delta, encode_delta, read_delta

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
    delta = encode_delta(before, after, size)
    if delta is None:
        changed = np.count_nonzero(before.view(elements.dtype) != elements)
        assert not changed or changed > 0.05 * len(elements) or words < 100
        return
    content = before.copy()
    apply_delta(content, np.concatenate([delta, np.zeros(-len(delta) % 64, np.uint8)]))  # as its block is padded
    assert np.array_equal(content, after)


def test_a_step_of_bf16_takes_about_nine_bits_for_each_weight_that_moved() -> None:
    rng = np.random.default_rng(0)
    before = rng.integers(0, 256, 4 * MIB, dtype=np.uint8)
    after = before.copy()
    weights = after.view(np.uint16)
    moved = np.flatnonzero(rng.random(len(weights)) < 0.02)
    weights[moved] += rng.choice(np.array([1, 0xFFFF], np.uint16), len(moved))
    delta = encode_delta(before, after, 2)
    assert delta is not None
    assert 8 * len(delta) < 9.5 * len(moved)


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
    delta = encode_delta(before, after, 1)
    assert delta is not None
    assert read_delta(delta, MIB)[1].tolist() == [0, 254, 509, 510, 90_000, MIB - 1]


def test_damage_is_refused_or_changes_the_result() -> None:
    rng = np.random.default_rng(2)
    before = rng.integers(0, 256, 64 * 1024, dtype=np.uint8)
    after = before.copy()
    after.view(np.uint16)[rng.random(32 * 1024) < 0.02] += 1
    delta = encode_delta(before, after, 2)
    assert delta is not None
    with pytest.raises(Corruption, match="is damaged: format 1 of 65536 bytes"):
        read_delta(delta, 128)
    with pytest.raises(Corruption, match="it has 3 bytes"):
        read_delta(delta[:3], len(before))
    for at in range(0, len(delta), 7):
        damaged = delta.copy()
        damaged[at] ^= 0x55
        content = before.copy()
        with suppress(Corruption):  # other errors do not come; a result that is wrong has another checksum
            apply_delta(content, damaged)
