"""Columns whose rows lie here and there: split by place, brought together at once, joined again. No server."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transferqueue.client.memory.mapped import placement_of
from transferqueue.client.memory.shard_clients import _one, _slice_here, _split, run_concurrently
from transferqueue.client.session.operation_runner import BlockingWork
from transferqueue.errors import Unreachable
from transferqueue.schema import Slice, sliced_fields
from transferqueue.storage.columns.column import Column
from transferqueue.storage.columns.placement import MappedBlocks
from transferqueue.storage.inputs.block_writer import BlockWriter
from transferqueue.storage.inputs.prepare import prepare
from transferqueue.wire import messages as m

GENEROUS_S = 60.0


def block_of(number, shard, rows):
    """A block of `rows` rows of one field, its memory, and its values."""
    draft = BlockWriter([prepare("x", np.arange(rows * 2).reshape(rows, 2) + 1000 * number, None, rows)])
    memory = np.zeros(draft.nbytes, np.uint8)
    draft.write(memory.data)
    at = m.BlockLocation(number, shard, number, 0, draft.nbytes, rows, ["x"], list(draft.counts))
    return at, memory, draft.fields[0]


@given(st.data())
def test_what_is_split_by_place_and_joined_is_what_it_was(data):
    shards = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
    made = [block_of(number, shard, 5) for number, shard in enumerate(shards)]
    fields = {"x": made[0][2]}
    memory = {at.block: bytes_ for at, bytes_, _ in made}
    rows = data.draw(st.integers(1, 12))
    block_of_row = np.array(data.draw(st.lists(st.integers(0, len(made) - 1), min_size=rows, max_size=rows)), "<i4")
    slot_of_row = np.array(data.draw(st.lists(st.integers(0, 4), min_size=rows, max_size=rows)), "<i4")
    whole = m.ReplyColumns(["x"], [at for at, _, _ in made], block_of_row.tobytes(), slot_of_row.tobytes())
    pieces = []
    for place, which, some in _split(whole, rows, lambda shard: shard):
        assert {at.shard for at in some.blocks} == {place}
        blocks = MappedBlocks(some.blocks, [memory[at.block] for at in some.blocks], fields)
        pieces.append((which, blocks, placement_of(some, blocks, rows if which is None else len(which))))
    _, placement = _one(pieces, fields, rows)
    expected = np.stack(
        [np.arange(2) + 2 * slot + 1000 * block for block, slot in zip(block_of_row, slot_of_row, strict=True)]
    )
    np.testing.assert_array_equal(Column(fields["x"], placement).numpy(), expected)


def test_mapped_rows_that_are_cut_join_with_rows_of_other_shards():
    made = [block_of(number, number, 5) for number in range(2)]
    fields, slices = {"x": made[0][2]}, {"x": Slice((1, 2))}
    order = np.array([0, 1, 1, 0, 1], "<i4")
    slots = np.array([4, 0, 3, 1, 1], "<i4")
    whole = m.ReplyColumns(["x"], [at for at, _, _ in made], order.tobytes(), slots.tobytes())
    pieces = []
    for place, which, some in _split(whole, 5, lambda shard: shard):
        blocks = MappedBlocks(some.blocks, [made[place][1]], fields)
        cut = _slice_here(some.fields, placement_of(some, blocks, len(which)), fields, slices)
        pieces.append((which, *cut))
    _, placement = _one(pieces, sliced_fields(fields, slices), 5)
    found = Column(sliced_fields(fields, slices)["x"], placement).numpy()
    assert found.tolist() == [[1 + 2 * slot + 1000 * block] for block, slot in zip(order, slots, strict=True)]


def asking(run, result=None, abandon=None):
    yield BlockingWork(1, run, abandon)
    return result


def nothing():
    yield from ()
    return "nothing"


def finish(operation):
    """Drive it; its result."""
    work = next(operation)
    try:
        work.run()
    except BaseException as error:
        operation.throw(error)
        raise
    with pytest.raises(StopIteration) as ended:
        operation.send(None)
    return ended.value.value


def test_works_run_at_once_and_results_keep_their_order():
    meet = threading.Barrier(3, timeout=GENEROUS_S)
    operations = [asking(meet.wait, "a"), nothing(), asking(meet.wait, "b"), asking(meet.wait, "c")]
    assert finish(run_concurrently(operations)) == ["a", "nothing", "b", "c"]


def test_if_one_fails_the_others_are_told_to_end():
    told = threading.Event()

    def fail():
        raise Unreachable("the shard is gone")

    operations = [asking(fail), asking(lambda: told.wait(GENEROUS_S), abandon=told.set)]
    with pytest.raises(Unreachable, match="the shard is gone"):
        finish(run_concurrently(operations))
    assert told.is_set()


def test_operations_that_ask_for_nothing_need_no_work():
    with pytest.raises(StopIteration) as ended:
        next(run_concurrently([nothing(), nothing()]))
    assert ended.value.value == ["nothing", "nothing"]
