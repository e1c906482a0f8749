"""Long copies are shared by threads: the same bytes, and nobody at work once it is over."""

import os
import signal
import threading
import time
from functools import partial

import numpy as np
import pytest

from transferqueue.limits import MIB
from transferqueue.schema import Field
from transferqueue.storage.inputs.block_writer import BlockWriter
from transferqueue.storage.inputs.prepare import prepare
from transferqueue.storage.memory.parallel_copy import PARALLEL_BYTES, PART_BYTES, parallel_copy


@pytest.fixture(autouse=True)
def four_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))


def columns(rows):
    """Columns of all kinds of sources, long and short, of any layout."""
    numbers = np.random.default_rng(0)
    wide = numbers.integers(0, 1 << 30, (rows, 2048), np.int64)
    return {
        "wide": wide,
        "strided": wide[:, ::-2].astype(np.int32)[::-1],
        "swapped": wide[:, :100].astype(">i8"),
        "one": wide[:, 0],
        "text": ["text"] * rows,
        "ragged": [wide[row, : row % 7] for row in range(rows)],
    }


@pytest.mark.parametrize("rows", [1, 3, 600, 1024])
def test_a_shared_copy_has_the_bytes_of_one_that_is_not(rows, monkeypatch):
    def written():
        draft = BlockWriter([prepare(name, value) for name, value in columns(rows).items()])
        out = np.full(draft.nbytes, 255, np.uint8)
        draft.write(out)
        return out

    shared = written()
    assert (shared.nbytes >= PARALLEL_BYTES) == (rows >= 600)
    monkeypatch.setattr("transferqueue.storage.memory.parallel_copy.COPY_THREADS_MAX", 1)
    assert np.array_equal(shared, written())


def test_a_long_array_is_written_in_parts_that_fill_it_all():
    width = PART_BYTES // 8 // 1024
    values = np.arange((3 * 1024 + 5) * width)
    column = prepare("x", values.reshape(-1, width), Field("x", "int64", (width,)))
    out = np.zeros(values.nbytes, np.uint8)
    jobs = column.source.jobs(out)
    assert len(jobs) == 4
    for job in reversed(jobs):
        job()
    assert np.array_equal(out.view(np.int64), values)


def test_all_jobs_are_done_by_up_to_four_threads_that_end():
    before, who, met = threading.active_count(), set(), threading.Barrier(4)

    def job():
        met.wait(20)  # four are at it at once, or none gets on
        who.add(threading.get_ident())

    parallel_copy([job] * 4, PARALLEL_BYTES)
    assert len(who) == 4
    while threading.active_count() > before:
        time.sleep(0.001)
    who.clear()
    parallel_copy([lambda: who.add(threading.get_ident())] * 4, PARALLEL_BYTES - 1)
    assert who == {threading.get_ident()}
    parallel_copy([], PARALLEL_BYTES)


def test_one_failure_ends_it_and_is_raised_when_nobody_is_at_work():
    busy = set()

    def slow():
        busy.add(threading.get_ident())
        time.sleep(0.05)
        busy.discard(threading.get_ident())

    def fails():
        raise ValueError("damaged")

    with pytest.raises(ValueError, match="damaged"):
        parallel_copy([slow, fails, *[slow] * 1000], 64 * MIB)
    assert not busy


def test_an_interrupt_waits_for_the_helpers():
    busy, released = set(), threading.Event()

    def job(number):
        busy.add(number)
        if threading.current_thread() is threading.main_thread():
            signal.raise_signal(signal.SIGINT)
        released.wait(0.2)
        busy.discard(number)

    with pytest.raises(KeyboardInterrupt):
        parallel_copy([partial(job, number) for number in range(1000)], 64 * MIB)
    assert len(busy) <= 1  # the interrupted one's own


def test_an_interrupt_while_it_waits_for_the_helpers_waits_too():
    """``Thread.join`` would not: an interrupt makes it take its thread for one that has ended."""
    met, busy, interrupted = threading.Barrier(4), set(), []

    def job():
        met.wait(20)
        if threading.current_thread() is threading.main_thread():
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            return
        busy.add(threading.get_ident())
        time.sleep(0.4)
        busy.discard(threading.get_ident())

    def interrupt(*_):
        interrupted.append(True)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            parallel_copy([job] * 4, PARALLEL_BYTES)
        assert interrupted
        assert not busy
    finally:
        signal.signal(signal.SIGALRM, before)


def test_without_a_further_thread_the_caller_does_it_all(monkeypatch):
    def start(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    done = []
    parallel_copy([partial(done.append, number) for number in range(8)], PARALLEL_BYTES)
    assert done == list(range(8))
