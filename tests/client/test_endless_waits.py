"""Waits have no limit unless a caller sets one: they end with a result, with the table, or with the server, and the log
says why they last."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import transferqueue as tq
from tests.client.deployments import LoopThread, Served
from transferqueue.client.session import wait_log
from transferqueue.limits import HEARTBEAT_S, SECONDS_MAX, WAIT_TOLD_S

GENEROUS_S = 60.0
GONE_S = 1.5
"""Within this time a waiting call is told that its server is gone."""
STEP_S = 75.0
"""One step of a trainer, longer than any limit was by default."""

TASKS = [tq.Task("reward", needs=["x"], gives=["r"]), tq.Task("train", needs=["x", "r"])]
PACING = tq.Pacing("train", batch_rows=4, depth=0, max_staleness=0)

Wait = Callable[[tq.Queue, tq.Table], Any]
WAITS: dict[str, Wait] = {
    "Table.lease": lambda queue, table: table.lease("train", rows=4),
    "Table.leases": lambda queue, table: next(table.leases("train", rows=4)),
    "Table.loader": lambda queue, table: next(iter(table.loader("train", rows=4))),
    "Table.reserve": lambda queue, table: table.reserve(4),
    "Table.put": lambda queue, table: table.put(x=[0] * 8),
    "WeightChannel.pull": lambda queue, table: queue.weights("policy").pull(),
    "Queue.table": lambda queue, table: queue.table("later", timeout_s=None),
}


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(len(WAITS)) as threads:
        yield threads


def full_table(queue: tq.Queue) -> tq.Table:
    """A table in which each of `WAITS` waits: its rows lack a reward."""
    table = queue.create_table("t", tasks=TASKS, pacing=PACING, limits=tq.Limits(rows=8))
    with table.reserve(4) as reservation:
        table.put(x=[1, 2, 3, 4], reservation=reservation)
    return table


def begin_all(queue: tq.Queue, table: tq.Table, pool: ThreadPoolExecutor) -> dict[str, Future[Any]]:
    running = {name: pool.submit(wait, queue, table) for name, wait in WAITS.items()}
    deadline = time.monotonic() + GENEROUS_S
    while len(queue.stats().waiting) < len(WAITS) and time.monotonic() < deadline:
        pass
    return running


def test_each_wait_is_logged_with_the_reason_and_who_is_missing(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wait_log, "WAIT_TOLD_S", 0.1)
    with caplog.at_level(logging.WARNING, "transferqueue"), tq.connect("embedded") as queue:
        running = begin_all(queue, full_table(queue), pool)
        deadline = time.monotonic() + GENEROUS_S
        said: set[str] = set()
        while len(said) < 5 and time.monotonic() < deadline:
            said = {record.args[0] for record in caplog.records if isinstance(record.args, tuple) and record.args}
        queue.close()
        for future in running.values():
            with pytest.raises(tq.Disconnected):
                future.result()
    assert said == {"Table.lease", "Table.reserve", "Table.put", "WeightChannel.pull", "Queue.table"}
    missing = 'no worker of "reward" has connected since this server started'
    for verb in ("Table.lease", "Table.reserve", "Table.put"):
        line = next(text for text in caplog.messages if text.startswith(verb))
        assert missing in line
        assert line.startswith(f"{verb} has waited for ")


def test_the_log_is_throttled_to_a_line_a_minute_for_what_waits_for_the_same() -> None:
    assert WAIT_TOLD_S == 60.0
    sent: list[Any] = []
    calls = wait_log.PendingCalls()
    log = wait_log.WaitLog(Standing(), "here", calls, lambda pending, now: sent.append((now, pending.request.call)))  # type: ignore[arg-type]
    for _ in range(3):
        calls.send(wait_log.PendingCall(lease("train"), lambda: None), 0.0)
    calls.send(wait_log.PendingCall(lease("reward"), lambda: None), 30.0)
    calls.send(wait_log.PendingCall(lease("short", wait_s=20.0), lambda: None), 0.0)
    for now in range(0, 200, 3):
        log.look(float(now))
    assert sent == [(60.0, 1), (90.0, 4), (120.0, 1), (150.0, 4), (180.0, 1)]


class Standing:
    """A channel whose connection stands."""

    is_lost = False


def lease(task: str, wait_s: float = SECONDS_MAX) -> Any:
    return wait_log.m.LeaseRequest("t", task, rows=1, wait_s=wait_s)


@pytest.mark.slow  # a server process, which is killed
def test_waits_are_told_when_the_server_is_gone(tmp_path: Any, pool: ThreadPoolExecutor) -> None:
    server = Served(tmp_path, "64MiB")
    with server.process, tq.connect(server.ipc) as queue:
        running = begin_all(queue, full_table(queue), pool)
        server.process.kill()
        server.process.wait()
        killed_at = time.monotonic()
        for future in running.values():
            with pytest.raises(tq.Disconnected, match="is gone; start it"):
                future.result(GENEROUS_S)
        took_s = time.monotonic() - killed_at
    assert took_s < GONE_S + 2.0  # what a busy machine may add


def test_waits_end_with_the_table(pool: ThreadPoolExecutor) -> None:
    with tq.connect("embedded") as queue:
        table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
        waiting = pool.submit(lambda: list(table.leases("train", rows=4)))
        loading = pool.submit(lambda: list(table.loader("train", rows=4)))
        table.seal()
        assert waiting.result(GENEROUS_S) == loading.result(GENEROUS_S) == []


def test_a_put_without_a_limit_waits_for_room(pool: ThreadPoolExecutor) -> None:
    with tq.connect("embedded") as queue:
        table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])], limits=tq.Limits(rows=1))
        table.put(x=[1])
        waiting = pool.submit(table.put, x=[2])
        assert not waiting.done()
        with table.lease("train", rows=1):
            pass
        assert len(waiting.result(GENEROUS_S)) == 1


def test_an_event_loop_waits_without_a_limit_too() -> None:
    with tq.connect("embedded") as queue, LoopThread() as loop:
        there = loop.connect(queue.address)
        table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(lambda: list(there.table("t").leases("train", rows=2)))
            table.seal()
            assert waiting.result(GENEROUS_S) == []
        there.close()


def test_a_deadline_says_who_is_missing_and_how_to_wait_longer() -> None:
    with tq.connect("embedded") as queue:
        table = queue.create_table("t", tasks=TASKS, pacing=PACING)
        with table.reserve(4) as reservation:
            table.put(x=[1, 2, 3, 4], reservation=reservation)
        with tq.connect(queue.address, label="trainer-0") as trainer, pytest.raises(tq.DeadlineExceeded):
            trainer.table("t").lease("train", rows=4, timeout_s=0.01)
        with pytest.raises(tq.DeadlineExceeded) as late:
            table.reserve(4, timeout_s=0.05)
    assert 'no worker of "train" is connected; the last left 0 s ago (trainer-0, said goodbye); start it again' in str(
        late.value
    )
    assert str(late.value).endswith("; timeout_s=None waits until the table ends")


@pytest.mark.slow
def test_a_step_of_75_seconds_ends_no_stage(pool: ThreadPoolExecutor) -> None:
    """Prompts, rollouts, rewards and the trainer of the guide, one step of which takes longer than any stage waited by
    default."""
    tasks = [tq.Task("sample", needs=["prompt"], gives=["answer"]), tq.Task("train", needs=["answer"])]
    pacing = tq.Pacing("train", batch_rows=4, depth=0, max_staleness=4)
    with tq.connect("embedded") as queue:
        table = queue.create_table("rollouts", tasks=tasks, pacing=pacing)

        def prompts() -> None:
            for number in range(4):
                with table.reserve(4) as reservation:
                    table.put(prompt=[str(number)] * 4, reservation=reservation)
            table.seal()

        def sampler() -> int:
            weights = queue.weights("policy").pull()
            return sum(answered(batch, weights.version) for batch in table.leases("sample", rows=4, at_least=1))

        def trainer() -> int:
            queue.weights("policy").publish(0, {"w": np.zeros(1)})
            done = 0
            for step, batch in enumerate(table.loader("train", rows=4), 1):
                with batch:
                    time.sleep(STEP_S if step == 2 else 0.0)  # the step itself
                    done += len(batch)
                table.advance(step)
            return done

        stages = [pool.submit(stage) for stage in (trainer, sampler, prompts)]
        assert [stage.result(STEP_S + GENEROUS_S) for stage in stages] == [16, 16, None]


def answered(batch: tq.Batch, version: int) -> int:
    with batch:
        batch.ack(answer=[1.0] * len(batch), policy_version=version)
    return len(batch)


@pytest.mark.slow  # a heartbeat
def test_a_call_that_blocks_an_event_loop_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wait_log, "BLOCKED_S", 0.0)
    monkeypatch.setattr(wait_log, "_told_of_loop", [])

    async def blocks() -> None:
        for _ in range(2):
            with pytest.raises(tq.DeadlineExceeded):
                table.lease("train", rows=1, timeout_s=HEARTBEAT_S + 1.0)

    with caplog.at_level(logging.WARNING, "transferqueue"), tq.connect("embedded") as queue:
        table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
        with pytest.raises(tq.DeadlineExceeded):
            table.lease("train", rows=1, timeout_s=HEARTBEAT_S + 1.0)
        assert not caplog.messages
        asyncio.run(blocks())
    assert len(caplog.messages) == 1
    assert "Table.lease has waited for " in caplog.messages[0]
    assert "tq.aconnect" in caplog.messages[0]
