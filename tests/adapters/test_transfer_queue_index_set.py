"""Sets of indexes in pages of bits, against sets and lists of Python."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

pytest.importorskip("tensordict", reason="the drop-in's package imports it: make test-shim")

from tests.scale import examples
from transferqueue.adapters.transfer_queue.samples.index_set import PAGE, IndexSet, WaitingSamples

EDGES = [0, 1, PAGE - 2, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE - 1, 2 * PAGE, 5 * PAGE, (1 << 40) - 1, 1 << 40]
spans = st.tuples(st.sampled_from(EDGES), st.integers(0, 12)).map(lambda span: range(span[0], span[0] + span[1]))
members = st.lists(spans, max_size=5).map(lambda parts: {index for part in parts for index in part})


@given(added=members, removed=members, asked=members)
@settings(max_examples=examples(100))
def test_it_is_a_set(added: set[int], removed: set[int], asked: set[int]) -> None:
    found, model = IndexSet(), set[int]()
    for few in (added, asked):
        found.add(np.array(list(few), np.int64))
        model |= few
    found.discard(removed)
    model -= removed
    assert list(found) == sorted(model)
    assert len(found) == len(model)
    assert found.contains(sorted(asked | removed)).tolist() == [index in model for index in sorted(asked | removed)]
    assert all(index in found for index in model)
    assert not any(index in found for index in removed - model)
    assert "7" not in found


def groups(waiting: list[int], size: int, count: int) -> list[list[int]]:
    """The first `count` groups of consecutive indexes, by the words of the sampler."""
    found: list[list[int]] = []
    run: list[int] = []
    for index in waiting:
        run = [*run, index] if run and index == run[-1] + 1 else [index]
        if len(run) == size:
            found.append(run)
            run = []
    return found[:count] if len(found) >= count else []


@given(
    ready=members,
    consumed=members,
    bound=st.none() | st.sampled_from(EDGES),
    size=st.integers(1, 9),
    count=st.integers(0, 6),
)
@settings(max_examples=examples(200))
def test_what_waits_is_what_lists_would_say(
    ready: set[int], consumed: set[int], bound: int | None, size: int, count: int
) -> None:
    waiting = WaitingSamples(IndexSet(ready), IndexSet(consumed), bound)
    model = [index for index in sorted(ready - consumed) if bound is None or index <= bound]
    assert (len(waiting), list(waiting), waiting.to_list()) == (len(model), model, model)
    assert waiting.first(count) == waiting[:count] == model[:count]
    assert (waiting[1:3], waiting[::2], waiting[:-1]) == (model[1:3], model[::2], model[:-1])
    assert waiting.runs(size, count) == groups(model, size, count)


@pytest.mark.parametrize("size", [PAGE, PAGE + 1, 2 * PAGE + 3])
def test_a_run_may_be_longer_than_a_page(size: int) -> None:
    start = PAGE - 7
    waiting = WaitingSamples(IndexSet(range(start, start + 2 * size + 1)), IndexSet([start]))
    assert waiting.runs(size, 2) == [
        list(range(start + 1, start + 1 + size)),
        list(range(start + 1 + size, start + 1 + 2 * size)),
    ]
    assert waiting.runs(size, 3) == []
