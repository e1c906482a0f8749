"""Other processes: they die, they are frozen, they look at the same memory. How soon they wake: `bench/latency.py`."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest

import transferqueue as tq
from tests.client.deployments import Served, Worker


@pytest.fixture(params=["ipc", "tcp"])
def place(request: pytest.FixtureRequest, server: Served) -> str:
    return str(getattr(server, request.param))


@pytest.mark.slow
def test_the_rows_of_a_killed_consumer_are_done_by_another(place: str, name: str) -> None:
    program = """
        table = queue.table(sys.argv[2])
        batch = table.lease('train', rows=8)
        view = batch['x'].numpy()
        print('leased')
        sys.stdin.read()
    """
    with tq.connect(place) as queue:
        table = queue.create_table(name, tasks=[tq.Task("train", needs=["x"])])
        rows = table.put(x=np.arange(8 << 16).reshape(8, -1))
        with Worker(place, program, name) as worker:
            assert worker.line() == "leased"
            worker.send(signal.SIGKILL)
            with table.lease("train", rows=8, timeout_s=20) as batch:  # long before the lease's 60 s
                assert batch.rows.tolist() == rows.tolist()
        assert table.audit().rows_done == 8


@pytest.mark.slow
def test_a_frozen_consumer_is_refused_and_sees_only_its_own_bytes(place: str, name: str) -> None:
    program = """
        table = queue.table(sys.argv[2])
        batch = table.lease('train', rows=4)
        lazy, view = batch['y'], batch['x'].numpy()
        print('leased', view.min(), view.max())
        sys.stdin.readline()
        print('bytes', view.min(), view.max(), lazy.numpy().min(), lazy.numpy().max())
        try:
            batch.ack()
        except tq.LeaseExpired:
            print('refused')
    """
    with tq.connect(place) as queue:
        table = queue.create_table(name, tasks=[tq.Task("train", needs=["x", "y"], lease_s=0.3)])
        columns = {"x": np.full((4, 1 << 16), 7, np.uint8), "y": np.full((4, 1 << 10), 7, np.uint8)}
        table.put(**columns)
        with Worker(place, program, name) as worker:
            assert worker.line() == "leased 7 7"
            worker.send(signal.SIGSTOP)
            with table.lease("train", rows=4, timeout_s=20, lease_s=60):
                pass
            for value in range(20):
                table.put(**{field: np.full_like(column, 100 + value) for field, column in columns.items()})
                with table.lease("train", rows=4, timeout_s=20, lease_s=60):
                    pass
            worker.send(signal.SIGCONT)
            worker.tell("go on")
            assert worker.line() == "bytes 7 7 7 7"
            assert worker.line() == "refused"


@pytest.mark.slow
def test_what_is_changed_in_a_view_is_seen_by_nobody_else(place: str, name: str) -> None:
    program = """
        table = queue.table(sys.argv[2])
        with table.lease('b', rows=2) as batch:
            view = batch["x"].numpy()
            print(int(view.min()), int(view.max()))
            view[:] = 0
            print('changed')
            sys.stdin.readline()
    """
    with tq.connect(place) as queue:
        table = queue.create_table(name, tasks=[tq.Task(task, needs=["x"]) for task in "abc"])
        table.put(x=np.full((2, 1 << 18), 7, np.uint8))
        with table.lease("a", rows=2) as mine:
            mine["x"].numpy()[:] = 3
            with Worker(place, program, name) as worker:
                assert worker.line() == "7 7"
                assert worker.line() == "changed"
                assert np.unique(mine["x"].numpy()).tolist() == [3]
                with table.lease("c", rows=2) as third:  # the same process, while the changed view lives
                    assert np.unique(third["x"].numpy()).tolist() == [7]


@pytest.mark.slow
def test_a_view_that_outlives_its_queue_is_never_overwritten(place: str, name: str) -> None:
    with tq.connect(place) as other:
        table = other.create_table(name, tasks=[tq.Task("train", needs=["x"])])
        table.put(x=np.full((2, 1 << 18), 7, np.uint8))
        with tq.connect(place) as queue, queue.table(name).lease("train", rows=2) as batch:
            view = batch["x"].numpy()
        for value in range(8):
            table.put(x=np.full((2, 1 << 18), 100 + value, np.uint8))
            with table.lease("train", rows=2):
                pass
        assert np.unique(view).tolist() == [7]


@pytest.mark.slow
def test_a_forked_worker_is_told_and_its_parent_goes_on(place: str, name: str) -> None:
    program = """
        import gc, os
        table = queue.create_table(sys.argv[2], tasks=[tq.Task('train', needs=['x'])])
        table.put(x=np.arange(4))
        batch = table.lease('train', rows=2)
        child = os.fork()
        if child == 0:
            for verb in (lambda: table.put(x=np.arange(1)), batch.ack, queue.tables):
                try:
                    verb()
                except tq.Forked as error:
                    print('told', 'connect again' in str(error))
            del batch, table
            gc.collect()
            sys.stdout.flush()
            sys.exit(0)
        os.waitpid(child, 0)
        batch.ack()
        print(table.audit().rows_done, os.path.exists(queue._client.memory._lock_file.path))
    """
    with Worker(place, program, name) as worker:
        assert [worker.line() for _ in range(4)] == ["told True"] * 3 + ["2 True"]
        assert worker.process.wait(timeout=20) == 0


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["return", "raise SystemExit", "raise KeyboardInterrupt", "queue.close(); return"])
def test_a_program_that_ends_anyhow_leaves_nothing(server: Served, name: str, ending: str) -> None:
    """No file, no noise: the rows it held are there for others at once."""
    program = f"""
        def main():
            table = queue.table(sys.argv[2])
            global batch
            batch = table.lease('train', rows=2)
            view = batch['x'].numpy()
            print(queue._client.memory._lock_file.path)
            {ending}
        main()
    """
    with tq.connect(server.ipc) as queue:
        table = queue.create_table(name, tasks=[tq.Task("train", needs=["x"])])
        table.put(x=np.zeros((2, 1 << 18), np.uint8))
        with Worker(server.ipc, program, name) as worker:
            lock = worker.line()
            worker.process.wait(timeout=20)
            with table.lease("train", rows=2, timeout_s=5):
                pass
            by = time.monotonic() + 10  # what dies with a view in its hands is swept up by the server
            while os.path.exists(lock):
                assert time.monotonic() < by
                queue.tables()
