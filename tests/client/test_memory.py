"""Memory comes back as soon as nobody looks at it, and not before."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import numpy as np
import pytest

import transferqueue as tq
from tests.client.deployments import until_someone_waits
from transferqueue.limits import COPIED_BYTES_MAX

MIB = 1 << 20


@pytest.fixture
def queue() -> Iterator[tq.Queue]:
    with tq.connect(arena_bytes="8MiB") as found:
        yield found


@pytest.fixture
def table(queue: tq.Queue) -> tq.Table:
    return queue.create_table("t", tasks=[tq.Task("a", needs=["x"])])


def image(value: int) -> np.ndarray:
    return np.full((2, MIB), value, np.uint8)


def test_memory_is_used_again_and_again(table: tq.Table) -> None:
    for value in range(40):
        table.put(x=image(value), timeout_s=20)
        with table.lease("a", rows=2) as batch:
            assert np.unique(batch["x"].numpy()).tolist() == [value]


def test_small_puts_use_memory_again_too(table: tq.Table) -> None:
    for value in range(120):
        table.put(x=[np.full(100_000, value, np.uint8)] * 2, timeout_s=20)
        with table.lease("a", rows=2) as batch:
            assert [np.unique(row).tolist() for row in batch["x"]] == [[value]] * 2


def test_idle_producers_of_small_puts_leave_a_small_arena_to_others() -> None:
    """Each keeps memory open for its next put, as long as it is connected."""
    with ExitStack() as stack:
        queue = stack.enter_context(tq.connect(arena_bytes="4MiB"))
        table = queue.create_table("t", tasks=[tq.Task("a", needs=["x"])])
        for value in range(8):
            producer = stack.enter_context(tq.connect(queue.address))
            producer.table("t").put(x=[np.full(100, value, np.uint8)], timeout_s=0)
        table.put(x=[*image(1)[:1]], timeout_s=0)
        assert len(table.read(range(9))) == 9


def fill(table: tq.Table, row: np.ndarray) -> int:
    """Put the row until there is no room; how often."""
    put = 0
    with suppress(tq.Full):
        while True:
            table.put(x=row, timeout_s=0)
            put += 1
    return put


@pytest.mark.parametrize("nbytes", [MIB // 2, 20_000])
def test_a_producer_that_fills_all_memory_leaves_room_for_what_is_made_of_its_rows(
    queue: tq.Queue, nbytes: int
) -> None:
    """nbytes: of a row: rows with extents of their own, and ones that share them."""
    table = queue.create_table("t", tasks=[tq.Task("score", needs=["x"], gives=["y"])], limits=tq.Limits(rows=1 << 30))
    row, result = np.zeros((1, nbytes), np.uint8), np.ones((1, nbytes // 2), np.uint8)
    put = fill(table, row)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: [table.put(x=row, timeout_s=20) for _ in range(put // 2)])
        for _ in range(put):
            with table.lease("score", rows=1, timeout_s=20) as batch:
                batch.ack(y=result)
        waiting.result()
    assert table.audit().rows_done >= put


def test_a_view_holds_its_memory_and_a_waiting_put_gets_it_when_it_goes(queue: tq.Queue, table: tq.Table) -> None:
    views = []
    for value in range(3):
        table.put(x=image(value))
        with table.lease("a", rows=2) as batch:
            views.append(batch["x"].numpy())
    with pytest.raises(tq.DeadlineExceeded, match=r"views"):
        table.put(x=np.full((4, MIB), 9, np.uint8), timeout_s=0.05)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(table.put, x=np.full((4, MIB), 9, np.uint8), timeout_s=20)
        until_someone_waits(queue, "")
        for value, view in enumerate(views):
            assert np.unique(view).tolist() == [value]
        del view, views[1:]
        gc.collect()
        assert len(waiting.result(timeout=20)) == 2 * 2
        assert np.unique(views[0]).tolist() == [0]


def test_a_column_is_read_in_pieces_and_any_of_them_holds_it(table: tq.Table) -> None:
    table.put(x=image(5), y=[np.arange(3), np.arange(2)])
    with table.lease("a", rows=2, fields=["x", "y"]) as batch:
        row, tensor = batch["x"][1], batch["x"].torch()[:, ::2]
        ragged = batch["y"].nested()
    del batch
    for value in range(6, 12):
        table.put(x=image(value)[:1], timeout_s=20)
        with table.lease("a", rows=1):
            pass
    assert np.unique(row).tolist() == [5]
    assert tensor.unique().tolist() == [5]
    assert [part.tolist() for part in ragged.unbind()] == [[0, 1, 2], [0, 1]]


def test_reading_without_a_lease_holds_memory_until_it_is_released(queue: tq.Queue, table: tq.Table) -> None:
    rows = table.put(x=image(1))
    found = table.read(rows)
    table.drop(rows, "done")
    assert queue.stats().server.used_bytes >= 2 * MIB
    assert np.unique(found["x"].numpy()).tolist() == [1]
    found.release()
    with pytest.raises(tq.BatchEnded, match="was released"):
        found["x"].numpy()
    queue.tables()  # a call later than the unpin
    assert queue.stats().server.used_bytes < MIB


def test_no_rows_have_facts_of_no_rows(table: tq.Table) -> None:
    table.put(x=[1], tokens=[3])
    rows = table.read(where=tq.Compare("tokens", ">", 3))
    assert [rows.tokens.size, rows.group_size.size, rows.policy_version.size, rows.priority.size] == [0, 0, 0, 0]


def test_views_of_few_bytes_are_copies_that_hold_no_memory() -> None:
    with tq.connect(arena_bytes="4MiB") as queue:
        table = queue.create_table("t", tasks=[tq.Task("a", needs=["x"])])
        views = []
        for value in range(300):  # 4.7 MiB in all
            table.put(x=np.full((1, COPIED_BYTES_MAX), value % 251, np.uint8), timeout_s=20)
            with table.lease("a", rows=1) as batch:
                views.append(batch["x"].numpy())
        assert all((view == value % 251).all() for value, view in enumerate(views))


def test_two_batches_of_one_process_do_not_see_each_others_changes(table: tq.Table) -> None:
    table.add_task(tq.Task("b", needs=["x"]))
    table.put(x=image(1))
    with table.lease("a", rows=2) as first, table.lease("b", rows=2) as second:
        first["x"].numpy()[:] = 7
        assert np.unique(second["x"].numpy()).tolist() == [1]
        assert np.unique(first["x"].numpy()).tolist() == [7]


def test_rows_of_many_puts_are_gathered_once(table: tq.Table) -> None:
    for value in range(20):
        table.put(x=[np.full(value + 1, value)], dense=np.full((1, 3), value, np.float32))
    with table.lease("a", rows=20, fields=["x", "dense"]) as batch:
        assert [row.tolist() for row in batch["x"]] == [[value] * (value + 1) for value in range(20)]
        dense = batch["dense"].numpy()
        assert dense[:, 0].tolist() == list(range(20))
        assert batch["dense"].numpy().__array_interface__["data"] == dense.__array_interface__["data"]
