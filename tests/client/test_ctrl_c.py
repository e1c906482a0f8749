"""Ctrl-C at random instants of put, lease and ack: no row is lost, doubled or torn, and nothing stays at the server.

The program that is interrupted is `tests.client.ctrl_c`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import transferqueue as tq
from tests.client.deployments import in_this_process
from tests.client.test_interrupted_finalizers import until
from transferqueue.wire.answers.sessions import SessionStats

GRANTS_KEPT = 4
"""Extents that a session keeps open for its next puts."""
ROWS = 1 << 17
FEW, MANY = 100, 2500
"""Interrupts of one run: four modes of many are ten thousand."""


@pytest.mark.parametrize("mode", ["alone", "crowd", "loop", "cancelled"])
def test_interrupts_at_random_lose_nothing(mode: str, tmp_path: Path) -> None:
    interrupted("ipc", mode, FEW, tmp_path)


def test_interrupts_at_random_lose_nothing_over_tcp(tmp_path: Path) -> None:
    interrupted("keyed", "alone", FEW // 2, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["alone", "crowd", "loop", "cancelled"])
def test_ten_thousand_interrupts_lose_nothing(mode: str, tmp_path: Path) -> None:
    interrupted("ipc", mode, MANY, tmp_path)


def interrupted(kind: str, mode: str, interrupts: int, directory: Path, seed: int = 33) -> None:
    """Have the program interrupted so many times, and compare what it says with what the server has."""
    with in_this_process(kind, directory) as address, tq.connect(address) as queue:
        tasks = [tq.Task(name, needs=["n", "x"], lease_s=3600) for name in ("train", "check")]
        table = queue.create_table("t", tasks=tasks, limits=tq.Limits(rows=ROWS))
        queue.create_table("empty", tasks=[tq.Task("train", needs=["n"])])
        with subprocess.Popen(
            [sys.executable, "-m", "tests.client.ctrl_c", mode, address, str(interrupts), str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as program:
            assert program.stdin is not None
            assert program.stdout is not None
            told = json.loads(program.stdout.readline())

            def held() -> SessionStats:
                return next(each for each in queue.sessions().values() if each.label == "interrupted")

            def nothing() -> bool:
                session = held()
                return (session.pins, session.leases, session.reserved, session.waits) == (0, [], 0, 0)

            assert until(nothing), f"after {told['interrupts']} interrupts there stay {held()}"
            assert until(lambda: held().grants <= GRANTS_KEPT), f"{held().grants} grants stay"
            program.stdin.close()
            assert program.wait(20) == 0
        assert told["interrupts"] == interrupts
        rest, rows = drained(table, "train"), drained(table, "check")
        counts = table.stats()
        acked = Counter(told["acked"])
        assert max(rows.values()) == 1, "a row was put twice"
        assert set(told["put"]) <= set(rows), "a row that was put is lost"
        assert max(acked.values()) == 1, "a row was acked twice"
        assert not set(acked) & set(rest), "a row was given out after its ack"
        assert set(acked) | set(rest) | set(told["unsure"]) >= set(rows), "a row was never given out"
        assert counts.tasks["train"].done == counts.tasks["check"].done == len(rows) == counts.rows_put
        assert queue.audit().balanced
        print(f"{mode}: {interrupts} interrupts, {len(rows)} rows, {len(acked)} acks answered, {len(rest)} rows left")
        queue.drop_table("t")
        assert until(lambda: (queue.stats().server.used_bytes, queue.stats().bytes.blocks_pinned) == (0, 0))


def drained(table: tq.Table, task: str) -> Counter[int]:
    """How often each row was given out, all of which are acked now."""
    numbers: Counter[int] = Counter()
    while True:
        try:
            with table.lease(task, rows=256, at_least=1, timeout_s=0.0) as batch:
                numbers.update(batch["n"].list())
                for number, values in zip(batch["n"].list(), batch["x"].list(), strict=True):
                    assert (np.asarray(values) == number).all(), f"row {number} is torn"
        except (tq.DeadlineExceeded, tq.Full):
            return numbers
