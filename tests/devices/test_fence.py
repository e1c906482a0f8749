"""No batch on a device has bytes of another: memory under a copy is neither reused nor returned, however late the
device copies.

The arena grows, is reused and trimmed under a device whose copies come several batches late; each batch is compared by
a hash of what the device has. The same job with the fence taken out finds wrong bytes, so the test would find a missing
one.
"""

from __future__ import annotations

import gc
import threading
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

import transferqueue as tq
from tests.devices.late import LateDevice, LateEvent
from tests.scale import sizes
from transferqueue.storage.devices.in_flight import InFlight, in_flight
from transferqueue.storage.devices.registered import give_up_idle

BEHIND = 3
"""Batches that the device is late."""


Row = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


def digest(ids: Any, scores: Any) -> str:
    seen = xxhash.xxh3_128()
    for values in (ids, scores):
        seen.update(np.ascontiguousarray(values).view(np.uint8))
    return seen.hexdigest()


class Job:
    """Puts rows of random lengths, leases them to a device that is late, and compares what the device has in the
    end."""

    def __init__(self, seed: int, order: Any) -> None:
        self.random, self.order = np.random.default_rng(seed), order
        self.device: Any = LateDevice()
        self.wrong = 0
        self.late: deque[tuple[int, str, Any, Any]] = deque()

    def run(self, steps: int) -> int:
        """How many batches were not what was put."""
        fields = [tq.Field("ids", "int64", (None,)), tq.Field("scores", "float32", (None,))]
        tasks = [tq.Task("train", needs=["ids", "scores"], selector=self.order)]
        with tq.connect(arena_bytes="256MiB") as queue:
            table = queue.create_table("t", fields=fields, tasks=tasks)
            for step in range(steps):
                self._step(table)
                if step % 7 == 3:
                    give_up_idle(0)
            while self.late:
                self._check()
            assert in_flight(self.device).drain(60)
        return self.wrong

    def _rows(self) -> list[Row]:
        lengths = self.random.integers(0, 20_000, int(self.random.integers(1, 150))).tolist()
        return [
            (self.random.integers(0, 1 << 31, size, np.int64), self.random.random(size // 3).astype(np.float32))
            for size in lengths
        ]

    def _step(self, table: tq.Table) -> None:
        rows = self._rows()
        ids = table.put(ids=[row[0] for row in rows], scores=[row[1] for row in rows]).tolist()
        known, before = dict(zip(ids, rows, strict=True)), self.asked()
        with table.lease("train", rows=len(rows), device=self.device) as batch:
            put = [np.concatenate([known[row][at] for row in batch.rows.tolist()]) for at in range(2)]
            tensors = batch["ids"].nested().values(), batch["scores"].nested().values()
        self.late.append((self.asked() - before, digest(*put), *tensors))
        if len(self.late) > BEHIND:
            self._check()

    def _check(self) -> None:
        asked, hashed, *tensors = self.late.popleft()
        self.device.finish(asked)
        self.wrong += digest(*[tensor.cpu().numpy() for tensor in tensors]) != hashed

    def asked(self) -> int:
        """How much the device has still to do."""
        return len(self.device.due)


@pytest.fixture
def trims(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arena returns free pages at once."""
    monkeypatch.setattr("transferqueue.storage.memory.arena.surplus", lambda backed, used: max(0, backed - used))
    monkeypatch.setattr("transferqueue.server.memory.own_memory.TRIM_AFTER_S", 0)


@pytest.mark.parametrize("order", [tq.Fifo(), tq.LongestFirst()], ids=["runs", "gathered"])
@pytest.mark.parametrize("steps", sizes(20, 300))
def test_every_batch_on_the_device_is_what_was_put(trims: None, steps: int, order: Any) -> None:
    job = Job(1, order)
    assert job.run(steps) == 0
    assert job.device.direct > (job.device.staged if isinstance(order, tq.Fifo) else 0), (
        "bytes come straight from the arena"
    )


def test_without_the_fence_wrong_bytes_are_found(trims: None, monkeypatch: pytest.MonkeyPatch) -> None:
    hold = InFlight.hold

    def forgets(self: InFlight, event: Any, memory: list[object], ended: Any = ()) -> None:
        memory.clear()
        hold(self, event, memory, ended)

    monkeypatch.setattr(InFlight, "hold", forgets)
    assert Job(1, tq.Fifo()).run(20) > 10


def test_a_pin_lasts_until_the_late_event_and_no_longer() -> None:
    device = LateDevice()
    with tq.connect() as queue:
        table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
        table.put(x=np.arange(1 << 18).reshape(64, -1))
        with table.lease("train", rows=64, device=device) as batch:
            tensor = batch["x"].torch()
        del batch
        for _ in range(3):  # whoever lets go, and whenever
            gc.collect()
            assert queue.stats().bytes.blocks_pinned == 1
        assert in_flight(device).held == 1
        device.finish()
        assert in_flight(device).drain(60)
        assert queue.stats().bytes.blocks_pinned == 0
        assert queue.stats().server.used_bytes == 0
    assert torch.equal(tensor, torch.arange(1 << 18).reshape(64, -1))


def test_a_lease_that_fails_half_way_keeps_what_its_copies_read_and_gives_the_rows_back() -> None:
    device = LateDevice(room=1 << 20)
    with tq.connect() as queue:
        table = queue.create_table("t", tasks=[tq.Task("train", needs=["a", "b"])])
        table.put(a=np.zeros((8, 1 << 13)), b=np.zeros((8, 1 << 15)))
        with pytest.raises(tq.OutOfMemory, match="late:0 has no room for a column of 2097152 bytes"):
            table.lease("train", rows=8, device=device)
        assert queue.stats().bytes.blocks_pinned == 1, "the copy of a is under way"
        device.finish()
        assert in_flight(device).drain(60)
        gc.collect()
        assert queue.stats().bytes.blocks_pinned == 0
        assert len(table.lease("train", rows=8, timeout_s=10)) == 8


def test_a_device_that_cannot_record_an_event_fails_the_lease_and_nothing_stays() -> None:
    def fails() -> Any:
        raise RuntimeError("CUDA error: device lost")

    device = LateDevice(at_once=True)
    device.record = fails  # type: ignore[method-assign]
    with tq.connect() as queue:
        table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
        table.put(x=np.arange(1 << 18).reshape(64, -1))
        with pytest.raises(RuntimeError, match="device lost"):
            table.lease("train", rows=64, device=device)
        gc.collect()
        assert queue.stats().bytes.blocks_pinned == 0
        give_up_idle(0)
        assert not device.regions
        assert len(table.lease("train", rows=64, timeout_s=10)) == 64


def test_a_device_that_fails_ends_its_holds(caplog: pytest.LogCaptureFixture) -> None:
    class Failing:
        def done(self) -> bool:
            return False

        def wait(self) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    ended: list[int] = []
    copies, memory = InFlight("cuda:9", lambda: None), [object()]
    copies.hold(Failing(), memory, [lambda: ended.append(1)])
    assert copies.drain(60)
    assert ended == [1]
    assert memory == []
    assert "device cuda:9 failed while it copied: CUDA error" in caplog.text


def test_an_idle_device_gives_up_and_its_thread_ends_and_starts_again() -> None:
    idle = threading.Event()
    copies = InFlight("late:0", idle.set, idle_s=0.01)
    for _ in range(2):
        event = LateEvent()
        idle.clear()
        copies.hold(event, [])
        assert not copies.drain(0.05)
        event.passed.set()
        assert copies.drain(60)
        assert idle.wait(60)


class Passed:
    """An event of a copy that has ended, or has failed with `error`."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        if self.error is not None:
            raise self.error


def raises() -> None:
    raise KeyError("no such region")


def test_an_error_of_any_type_is_logged_and_ends_the_holds_of_its_copy_alone(caplog: pytest.LogCaptureFixture) -> None:
    ended: list[int] = []
    copies, memory = InFlight("npu:0", lambda: None), [[object()], [object()], [object()]]
    copies.hold(Passed(ValueError("code 507899")), memory[0], [lambda: ended.append(1)])
    copies.hold(Passed(), memory[1], [raises, lambda: ended.append(2)])
    copies.hold(Passed(), memory[2], [lambda: ended.append(3)])
    assert copies.drain(60)
    assert ended == [1, 2, 3]
    assert memory == [[], [], []]
    assert "device npu:0 failed while it copied: code 507899" in caplog.text
    assert "device npu:0 cannot end the use of registered pages: 'no such region'" in caplog.text


def test_an_idle_device_that_cannot_give_up_says_so_and_copies_again(caplog: pytest.LogCaptureFixture) -> None:
    copies = InFlight("late:0", raises, idle_s=0.01)
    for _ in range(2):
        copies.hold(Passed(), [])
        assert copies.drain(60)
        thread = copies._thread
        if thread is not None:
            thread.join(60)
        assert copies._thread is None
    assert caplog.text.count("device late:0 cannot give up its registered pages") == 2


def test_memory_is_kept_until_a_thread_can_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    copies, memory = InFlight("late:0", lambda: None), [object()]
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fails)
        copies.hold(Passed(), memory)
    assert "stays until the next copy: can't start new thread" in caplog.text
    assert len(memory) == copies.held == 1
    copies.hold(Passed(), [])
    assert copies.drain(60)
    assert memory == []
