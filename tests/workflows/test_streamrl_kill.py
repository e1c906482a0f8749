"""The trainer's loop of docs/how-to/service.md, killed before each of its lines and started again: every sample is
trained once."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("torch", exc_type=ImportError)

import transferqueue as tq
from tests.scale import only_long
from tests.workflows.stream_engine import SAMPLING, Countdown, count_down
from tests.workflows.stream_trainer import STEPS, columns_of, prompts_of
from transferqueue.workflows.service import Service, serve, stream_engines

ROOT = Path(__file__).resolve().parents[2]
ROWS = sum(prompt.samples for prompt in prompts_of(1))
LINES = 50
"""More than the loop runs in all its steps."""


def run(queue: tq.Queue, state: Path, line: int) -> int:
    command = [sys.executable, "-m", "tests.workflows.stream_trainer", queue.address, str(state), str(line)]
    return subprocess.run(command, cwd=ROOT, timeout=100, check=False).returncode


def generate(address: str) -> None:
    with tq.connect(address, label="generator") as queue:
        serve(queue, Countdown(), SAMPLING, rows=1)


@pytest.mark.slow
@pytest.mark.parametrize("every", [25, *only_long(1)])
def test_a_trainer_that_is_killed_loses_no_sample_and_trains_none_twice(every: int, tmp_path: Path) -> None:
    finished = 0
    for line in range(every // 3, LINES, every):
        state = tmp_path / f"{line}.json"
        with tq.connect() as queue:
            service = Service.init_engines(
                queue, stream_engines(groups=True, batch_rows=ROWS, depth=1, max_staleness=1)
            )
            thread = threading.Thread(target=generate, args=(queue.address,))
            thread.start()
            code = run(queue, state, line)
            assert code in (0, -signal.SIGKILL), line
            finished += code == 0
            assert run(queue, state, -1) == 0, line
            service.seal()
            thread.join(60)
            audit = service.table.audit()
            assert (audit.rows_put, audit.rows_done, audit.balanced) == (STEPS * ROWS, STEPS * ROWS, True), line
        trained = json.loads(state.read_text())["trained"]
        assert set(trained.values()) == {1}, line
        assert len(trained) == STEPS * ROWS
    assert finished < LINES // every


def test_a_numbered_request_is_put_once(tmp_path: Path) -> None:
    with tq.connect() as queue:
        service = Service.init_engines(queue, stream_engines())
        assert service.generate(prompts_of(1), number=1).left == ROWS
        assert service.generate(prompts_of(1), number=1).left == ROWS
        assert service.table.audit().rows_put == ROWS


def test_batches_of_a_stream_may_be_held_to_its_end() -> None:
    with tq.connect() as queue:
        service = Service.init_engines(queue, stream_engines())
        service.update(count_down(1))
        stream = service.generate(prompts_of(1), number=1)
        service.seal()
        serve(queue, Countdown(), SAMPLING)
        batches = list(stream.batches(1))
        assert sorted(name for batch in batches for name in columns_of(batch)) == ["1/0/0", "1/0/1", "1/1/0", "1/1/1"]
        batches.pop().release()
        batches += stream.batches(1)
        assert service.table.ack(batches) == ROWS
