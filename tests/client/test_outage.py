"""A service that a stage calls is away for a while, or its function is broken: no row is lost, and everyone is told
why."""

from __future__ import annotations

import http.server
import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

import transferqueue as tq
from tests.ledger.driver import World
from transferqueue.observe.verdict import report
from transferqueue.policies import Retry, Task

ROWS = 1000
AWAY_S = 2.0


class Judge(http.server.BaseHTTPRequestHandler):
    """Scores answers by their length, from a moment on."""

    returns_at = 0.0

    def do_POST(self) -> None:
        answers = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200 if time.monotonic() >= Judge.returns_at else 503)
        self.end_headers()
        self.wfile.write(json.dumps([float(len(answer)) for answer in answers]).encode())

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def judge() -> Iterator[str]:
    """The address of a judge that is away for `AWAY_S`."""
    Judge.returns_at = time.monotonic() + AWAY_S
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def score(url: str, answers: list[str]) -> list[float]:
    request = urllib.request.Request(url, json.dumps(answers).encode())
    with urllib.request.urlopen(request, timeout=30) as reply:
        scores: list[float] = json.load(reply)
        return scores


@pytest.mark.slow
@pytest.mark.parametrize("retry", [tq.Retry(), tq.Retry(attempts=5)])
def test_a_judge_that_is_two_seconds_late_loses_no_row(retry: tq.Retry) -> None:
    task = tq.Task("reward", needs=["answer"], gives=["reward"], retry=retry)
    with judge() as url, tq.connect("embedded") as queue:
        table = queue.create_table("rollouts", tasks=[task])
        table.put(answer=["a"] * ROWS)
        table.seal()

        def work() -> None:
            for batch in table.leases("reward", rows=8, at_least=1):
                with suppress(OSError), batch:
                    batch.ack(reward=score(url, batch["answer"].list()))

        workers = [threading.Thread(target=work) for _ in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        audit = table.audit()
        assert (audit.rows_done, audit.dropped, audit.balanced) == (ROWS, {}, True)
        assert audit.errors["reward"][0].type == "HTTPError"
        assert table.stats().tasks["reward"].paused_s is None


@pytest.mark.parametrize("attempts", [None, 3])
def test_an_outage_of_two_minutes_loses_no_row_and_is_over_when_it_is_over(attempts: int | None) -> None:
    world, back_at, calls = World(), 120.0, 0
    client = world.client("reward-0")
    client.create(tasks=[Task("reward", ["answer"], retry=Retry(attempts=attempts))])
    client.put(ROWS // 5, ["answer"])
    client.seal()
    while world.stats().rows_live:
        try:
            batch = client.lease("reward", rows=8, at_least=1)
        except tq.DeadlineExceeded:
            due = world.ledger.next_deadline()
            assert due is not None
            world.pass_time(due - world.now)
            continue
        calls += 1
        if world.now < back_at:
            client.release(batch, failed=True, reason="HTTPError: HTTP Error 503: Service Unavailable")
        else:
            client.ack(batch)
    assert (world.table().rows_done, world.table().rows_dropped) == (ROWS // 5, {})
    assert world.now <= back_at + 60
    assert calls < 25 + 15  # the judge was left in peace


def test_the_reason_is_in_every_place_where_one_looks() -> None:
    tasks = [tq.Task("reward", needs=["x"], gives=["rewards"]), tq.Task("train", needs=["rewards"])]
    with tq.connect("embedded", label="reward-0") as queue:
        table = queue.create_table("rollouts", tasks=tasks)
        table.put(x=[1, 2, 3, 4])
        for _ in range(3):
            with suppress(KeyError), table.lease("reward", rows=1):
                raise KeyError("answer")
        (error,) = table.stats().tasks["reward"].errors
        assert (error.type, error.text, error.worker, error.count) == (
            "KeyError",
            "'answer'",
            "reward-0",
            3,
        )
        assert table.audit().errors["reward"][0].count == 3
        with pytest.raises(
            tq.DeadlineExceeded, match=r"which fails: KeyError 'answer', 3 times, the last 0 s ago, by reward-0"
        ):
            table.lease("train", rows=4, timeout_s=0)
        said = report(queue.stats(), queue.doctor())
        assert (said.verdict.state, said.verdict.task, said.verdict.trouble) == ("failing", "reward", True)  # at once
        assert "KeyError 'answer', 3 times" in said.verdict.text
