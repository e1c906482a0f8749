"""Workloads: the same bytes for everybody, as many as they say, and a comparison that sees a single wrong one."""

import numpy as np
import pytest

from bench.workloads import DENSE, WORKLOADS, Workload, columns, picked, same, same_rows

SMALL = {
    "dense": Workload("d", "dense", 16, 4, 4096),
    "ragged": Workload("r", "ragged", 16, 4, 4096),
    "text": Workload("t", "text", 16, 2, 4096, "uint8"),
    "image": Workload("i", "image", 16, 1, 65536, "uint8"),
    "prompt": Workload("p", "prompt", 16, 1, 4096, "uint8", repeats=4),
}


@pytest.mark.parametrize("kind", SMALL)
def test_a_seed_gives_the_same_bytes_and_another_seed_others(kind):
    first, again, other = (columns(SMALL[kind], seed) for seed in (0, 0, 1))
    for name, flat in first.items():
        assert np.array_equal(flat.values, again[name].values)
        assert len(flat.counts) == 16 // flat.repeats
        assert flat.counts.sum() == len(flat.values)
        assert not np.array_equal(flat.values, other[name].values)


@pytest.mark.parametrize("name", ["dense_1", "dense_128", "ragged_1", "ragged_128"])
def test_workloads_of_different_field_counts_carry_equal_bytes(name):
    workload = WORKLOADS[name]
    if workload.fields > 1:
        workload = Workload(name, workload.kind, 1024, workload.fields, DENSE // 8)
    made = sum(len(flat.values) for flat in columns(workload, 0).values())
    assert made == workload.nbytes


def test_one_wrong_byte_is_seen():
    flat = columns(SMALL["ragged"], 0)["field_000"]
    wrong = flat.values.copy()
    wrong[7] ^= 1
    assert same(flat, flat.values.copy(), flat.counts)
    assert not same(flat, wrong, flat.counts)
    assert not same_rows(flat, wrong, flat.counts)
    assert not same(flat, flat.values, np.roll(flat.counts, 1))


def test_rows_in_another_order_are_the_same_rows_only_where_order_is_not_kept():
    flat = columns(SMALL["ragged"], 0)["field_000"]
    turned = flat.pick(np.arange(16)[::-1])
    assert not same(flat, turned.values, turned.counts)
    assert same_rows(flat, turned.values, turned.counts)


def test_a_shared_value_is_compared_for_every_row():
    flat = columns(SMALL["prompt"], 0)["field_000"]
    values = np.repeat(flat.values.reshape(4, -1), 4, axis=0).reshape(-1)
    counts = np.repeat(flat.counts, 4)
    assert same(flat, values, counts)
    values[-1] ^= 1
    assert not same(flat, values, counts)


def test_picked_rows_are_distinct_and_repeatable():
    workload = WORKLOADS["random_dense"]
    rows = picked(workload, 0)
    assert len(set(rows.tolist())) == workload.pick
    assert np.array_equal(rows, picked(workload, 0))
