"""The promises of the README, one test each, through the public face. Killing servers is tested elsewhere.

Workers are real processes. They tell where they are by lines on their standard output, so nothing here sleeps.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest

import transferqueue as tq
from tests.scale import sizes
from transferqueue.wire.answers.stats import TableAudit


@pytest.fixture
def queue() -> Iterator[tq.Queue]:
    with tq.connect() as opened:
        yield opened


class Worker(AbstractContextManager["Worker"]):
    """A process that runs `program` with `queue` and `table` at hand; `line()` is its next printed line."""

    def __init__(self, address: str, program: str) -> None:
        opening = (
            "import sys, numpy as np, transferqueue as tq\nqueue = tq.connect(sys.argv[1])\ntable = queue.table('t')\n"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", opening + textwrap.dedent(program), address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def audited(table: tq.Table) -> TableAudit:
    """The audit of a table, which must balance."""
    found = table.audit()
    assert found.balanced, found
    return found


def test_1_readiness_a_row_is_seen_when_every_field_is_complete(queue: tq.Queue) -> None:
    table = queue.create_table("t", tasks=[tq.Task("train", needs=["response_ids", "rewards"])])
    rows = table.put(response_ids=[np.arange(3), np.arange(5)])
    table.update(rows[1:], rewards=np.array([1.0]))
    with table.lease("train", rows=2, at_least=1, timeout_s=5) as batch:
        assert batch.rows.tolist() == [rows[1]]
    with pytest.raises(tq.DeadlineExceeded, match="rewards"):
        table.lease("train", rows=1, timeout_s=0.05)


def test_2_atomic_put_all_or_nothing(queue: tq.Queue) -> None:
    table = queue.create_table("t", fields=[tq.Field("score", "float32")], tasks=[tq.Task("a", needs=["text"])])
    with pytest.raises(tq.SchemaError, match="score"):
        table.put(text=["one", "two"], score=["not", "numbers"])
    assert audited(table).rows_put == 0
    rows = table.put(text=["one", "two"], score=[0.5, 1])
    assert [str(text) for text in table.read(rows, fields=["text"])["text"].list()] == ["one", "two"]


def test_3_leased_rows_of_a_killed_worker_are_done_by_another_exactly_once(queue: tq.Queue) -> None:
    table = queue.create_table("t", tasks=[tq.Task("reward", needs=["text"], gives=["rewards"])])
    rows = table.put(text=[f"row {i}" for i in range(8)])
    with Worker(queue.address, "batch = table.lease('reward', rows=8)\nprint('leased')\nsys.stdin.read()") as worker:
        assert worker.line() == "leased"
        worker.process.send_signal(signal.SIGKILL)
        with table.lease("reward", rows=8, timeout_s=10) as batch:  # well before the lease's 60 s
            assert batch.rows.tolist() == rows.tolist()
            batch.ack(rewards=np.ones(8, np.float32))
    found = audited(table)
    assert (found.rows_put, found.rows_live, found.rows_done, found.rows_dropped) == (8, 0, 8, 0)


def test_3_a_worker_frozen_past_its_deadline_is_refused_and_never_sees_foreign_bytes(queue: tq.Queue) -> None:
    table = queue.create_table("t", tasks=[tq.Task("work", needs=["x"], lease_s=0.5)])
    table.put(x=np.full((4, 1 << 16), 7, np.uint8))
    program = """
        batch = table.lease('work', rows=4)
        view = batch['x'].numpy()
        print('leased', int(view.min()), int(view.max()))
        sys.stdin.readline()
        print('bytes', int(view.min()), int(view.max()))
        try:
            batch.ack()
        except tq.LeaseExpired:
            print('refused')
    """
    with Worker(queue.address, program) as worker:
        assert worker.line() == "leased 7 7"
        worker.process.send_signal(signal.SIGSTOP)
        with table.lease("work", rows=4, timeout_s=10):
            pass  # acked here: the rows are done and their memory could be reused, were it not for the frozen view
        for _ in range(8):
            table.put(x=np.full((4, 1 << 16), 9, np.uint8))
            with table.lease("work", rows=4, timeout_s=10):
                pass
        worker.process.send_signal(signal.SIGCONT)
        worker.tell("go on")
        assert worker.line() == "bytes 7 7"
        assert worker.line() == "refused"
    assert audited(table).rows_done == 36


@pytest.mark.slow
def test_3_a_worker_that_hangs_past_its_time_limit_gives_its_rows_back_and_is_refused(queue: tq.Queue) -> None:
    """Its process lives and renews the lease, but not for longer than the task declares."""
    table = queue.create_table("t", tasks=[tq.Task("work", needs=["x"], lease_s=0.8, time_limit_s=2.5)])
    table.put(x=[1, 2])
    program = """
        batch = table.lease('work', rows=2)
        print('leased')
        sys.stdin.readline()
        try:
            batch.ack()
        except tq.LeaseExpired:
            print('refused')
    """
    with Worker(queue.address, program) as worker:
        assert worker.line() == "leased"
        with pytest.raises(tq.DeadlineExceeded, match="2 rows are leased"):
            table.lease("work", rows=2, timeout_s=1.6)  # twice the lease, and the worker has it
        with table.lease("work", rows=2, timeout_s=10):
            worker.tell("go on")
            assert worker.line() == "refused"
    assert audited(table).rows_done == 2
    assert table.stats().tasks["work"].worker_deaths == 2


def test_3_results_and_ack_commit_together(queue: tq.Queue) -> None:
    table = queue.create_table(
        "t",
        fields=[tq.Field("rewards", "float32")],
        tasks=[tq.Task("reward", needs=["text"]), tq.Task("train", needs=["rewards"])],
    )
    table.put(text=["a", "b"])
    batch = table.lease("reward", rows=2)
    with pytest.raises(tq.SchemaError, match="rewards"):
        batch.ack(rewards=["high", "low"])
    with pytest.raises(tq.DeadlineExceeded):
        table.lease("train", rows=1, timeout_s=0)
    batch.ack(rewards=[1.0, 0.0])
    with table.lease("train", rows=2, timeout_s=5) as trained:
        assert trained["rewards"].list() == [1.0, 0.0]


def test_4_nothing_is_lost_silently(queue: tq.Queue) -> None:
    table = queue.create_table("t", tasks=[tq.Task("a", needs=["x"], retry=tq.Retry(attempts=1))])
    rows = table.put(x=np.arange(6))
    table.drop(rows[:1], "filtered")
    with pytest.raises(RuntimeError), table.lease("a", rows=2):
        raise RuntimeError("the worker failed")
    with table.lease("a", rows=2):
        pass
    found = audited(table)
    assert (found.rows_put, found.rows_live, found.rows_done, found.rows_dropped) == (6, 1, 2, 3)
    assert found.dropped == {"attempts": 2, "filtered": 1}


def test_5_groups_are_whole(queue: tq.Queue) -> None:
    table = queue.create_table("t", tasks=[tq.Task("train", needs=["rewards"], groups=tq.Complete())])
    table.put(rewards=np.zeros(3, np.float32), group_id=1, group_size=4)
    table.put(rewards=np.zeros(4, np.float32), group_id=2, group_size=4)
    with table.lease("train", groups=1, timeout_s=5) as batch:
        assert batch.group_id.tolist() == [2] * 4
    with pytest.raises(tq.DeadlineExceeded):
        table.lease("train", groups=1, timeout_s=0)
    table.put(rewards=np.zeros(1, np.float32), group_id=1, group_size=4)
    with table.lease("train", groups=1, timeout_s=5) as batch:
        assert batch.group_id.tolist() == [1] * 4


def test_6_staleness_is_a_hard_bound_at_hand_over(queue: tq.Queue) -> None:
    table = queue.create_table(
        "t", tasks=[tq.Task("train", needs=["x"])], pacing=tq.Pacing("train", batch_rows=2, depth=1, max_staleness=1)
    )
    for version in range(4):
        table.put(x=np.array([version]), policy_version=version)
    table.advance(3)  # time passes while the rows are in the queue
    with table.lease("train", rows=2, timeout_s=5) as batch:
        assert batch.policy_version.tolist() == [2, 3]
    assert audited(table).dropped == {"stale": 2}


def test_7_memory_is_bounded_and_full_means_wait(queue: tq.Queue) -> None:
    table = queue.create_table("t", tasks=[tq.Task("a", needs=["x"])], limits=tq.Limits(rows=4))
    table.put(x=np.arange(4))
    with pytest.raises(tq.DeadlineExceeded, match="4"):
        table.put(x=np.arange(1), timeout_s=0.05)
    done = threading.Event()

    def produce() -> None:
        table.put(x=np.arange(2), timeout_s=30)
        done.set()

    producer = threading.Thread(target=produce)
    producer.start()
    with table.lease("a", rows=2):
        assert not done.is_set()
    assert done.wait(10)
    producer.join()
    assert audited(table).rows_live == 4


def test_8_every_wait_ends_with_what_is_missing_and_who_holds_it(queue: tq.Queue) -> None:
    table = queue.create_table("t", tasks=[tq.Task("a", needs=["x"])])
    table.put(x=np.arange(2))
    held = table.lease("a", rows=2)
    with pytest.raises(tq.DeadlineExceeded, match=r"leased"):
        table.lease("a", rows=1, timeout_s=0.05)
    held.ack()
    table.seal()
    with pytest.raises(tq.EndOfTable):
        table.lease("a", rows=1, timeout_s=30)
    with pytest.raises(tq.Impossible, match=r"batch_rows.*8.*4|8.*rows.*4"):
        queue.create_table(
            "never",
            tasks=[tq.Task("a", needs=["x"])],
            limits=tq.Limits(rows=4),
            pacing=tq.Pacing("a", batch_rows=8, depth=0),
        )


def test_8_who_waits_for_what_a_dead_worker_gives_learns_that_no_worker_leases_it(queue: tq.Queue) -> None:
    tasks = [tq.Task("reward", needs=["x"], gives=["rewards"]), tq.Task("train", needs=["x", "rewards"])]
    table = queue.create_table("t", tasks=tasks)
    table.put(x=[1, 2])
    with Worker(queue.address, "batch = table.lease('reward', rows=2)\nprint('leased')\nsys.stdin.read()") as worker:
        assert worker.line() == "leased"
        worker.process.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, worker.process.pid, os.WEXITED | os.WNOWAIT)
        said = (
            r'2 rows lack "rewards" \(given by "reward": 2 ready and not leased, and no worker of "reward" is '
            r"connected; the last left "
        )
        with pytest.raises(
            tq.DeadlineExceeded, match=said + r"\d s ago \(pid \d+, killed by SIGKILL\); start it again\)"
        ):
            table.lease("train", rows=2, timeout_s=0.2)


def test_8_who_waits_for_what_nobody_gives_any_more_learns_it_at_once(queue: tq.Queue) -> None:
    table = queue.create_table(
        "t", tasks=[tq.Task("reward", needs=["x"], gives=["rewards"]), tq.Task("log", needs=["x"])]
    )
    table.put(x=[1])
    table.lease("reward", rows=1).ack()
    table.add_task(tq.Task("train", needs=["rewards"]))
    table.put(x=[2])
    unrewarded = table.lease("reward", rows=1)
    with pytest.raises(tq.UsageError, match='has no "rewards", which task "reward" gives and task "train" needs'):
        unrewarded.ack()
    table.drop([1], "no_result")
    table.seal()
    with pytest.raises(tq.Impossible, match='task "train" of table "t" can never progress'):
        table.lease("train", rows=1, timeout_s=60)


@pytest.mark.slow
@pytest.mark.parametrize("rounds", sizes(3, 10))
def test_9_workers_may_be_killed_at_any_moment(queue: tq.Queue, rounds: int) -> None:
    """Three workers a round die by SIGKILL while they work; every row is done once."""
    table = queue.create_table("t", tasks=[tq.Task("work", needs=["x"])], limits=tq.Limits(rows=4096))
    rows = table.put(x=np.arange(2000), body=np.zeros((2000, 64), np.uint8))
    program = """
        print('up')
        while True:
            with table.lease('work', rows=4) as batch:
                pass
    """
    for _ in range(rounds):
        workers = [Worker(queue.address, program) for _ in range(3)]
        for worker in workers:
            worker.line()
        for worker in workers:
            worker.process.send_signal(signal.SIGKILL)
            worker.__exit__()
    table.seal()
    for batch in table.leases("work", rows=64, timeout_s=20):
        with batch:
            pass
    found = audited(table)
    assert (found.rows_put, found.rows_live, found.rows_done, found.rows_dropped) == (len(rows), 0, len(rows), 0)


def test_10_nothing_received_is_executed(queue: tq.Queue, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
            return os.system, (f"touch {tmp_path}/exploded",)

    table = queue.create_table("t", tasks=[tq.Task("a", needs=["x"])])
    with pytest.raises(tq.UsageError, match="Bomb"):
        table.put(x=[Bomb()])
    assert audited(table).rows_put == 0
    assert not list(tmp_path.iterdir())


def test_many_dtypes_travel_unchanged_between_processes(queue: tq.Queue) -> None:
    torch = pytest.importorskip("torch", exc_type=ImportError)
    table = queue.create_table("t", tasks=[tq.Task("a", needs=["dense", "ragged", "bf16", "image", "text", "plain"])])
    images = [np.arange(h * w * 3, dtype=np.uint8).reshape(h, w, 3) for h, w in ((2, 3), (4, 1))]
    with Worker(
        queue.address,
        """
        import torch
        with table.lease('a', rows=2) as batch:
            print(batch['dense'].numpy().sum(), [int(x.sum()) for x in batch['ragged']], batch['bf16'].torch().dtype)
            print([x.shape for x in batch['image']], batch['text'].list(), batch['plain'].list())
        """,
    ) as worker:
        table.put(
            dense=np.ones((2, 3), np.float32),
            ragged=[torch.arange(3), torch.arange(5)],
            bf16=torch.ones(2, 4, dtype=torch.bfloat16),
            image=images,
            text=["é", ""],
            plain=[{"a": [1, 2]}, {"b": None}],
        )
        assert worker.line() == "6.0 [3, 10] torch.bfloat16"
        assert worker.line() == "[(2, 3, 3), (4, 1, 3)] ['é', ''] [{'a': [1, 2]}, {'b': None}]"
