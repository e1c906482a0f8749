"""What only a GPU can show: ``make test-gpu``. Skipped where there is none. All figures are ratios or bounds within one
run.

G1 pages that the arena returned · G2 registering · G3 one copy · G4 a lease · G5 scattered rows · G6 puts · G7 late
events · G8 a killed reader · G9 dtypes · G10 growth and reuse under late copies · G11 a refused registration · G12 a
quarter of a weight.
"""

from __future__ import annotations

import gc
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import transferqueue as tq
from tests.client.deployments import served
from tests.devices.late import LateDevice
from tests.devices.test_fence import Job
from tests.devices.test_registered import Opened
from transferqueue.adapters.trainers.torch_data import tensors
from transferqueue.limits import MIB
from transferqueue.storage.devices import registered
from transferqueue.storage.devices.device_copy import accelerator, land
from transferqueue.storage.devices.in_flight import in_flight
from transferqueue.storage.devices.packing import pack, store
from transferqueue.storage.inputs.sources import DeviceTensors
from transferqueue.storage.memory.private_pages import array_at

RUN = 256 * MIB


@pytest.fixture
def dry(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--dry", default=False))


@pytest.fixture
def device(dry: bool, request: pytest.FixtureRequest) -> Any:
    if dry:
        return LateDevice(at_once=True)
    request.getfixturevalue("cuda")
    return accelerator("cuda:0")


@pytest.fixture
def run_bytes(dry: bool) -> int:
    return 4 * MIB if dry else RUN


def place(device: Any) -> str:
    return "cpu" if isinstance(device, LateDevice) else device.name


def synchronise(device: Any) -> None:
    if not isinstance(device, LateDevice):
        torch.cuda.synchronize()


def seconds(work: Callable[[], object], device: Any, repeats: int = 7) -> float:
    """The median time until the device has done it, after two rounds to warm up."""
    times = []
    for _ in range(repeats + 2):
        synchronise(device)
        start = time.perf_counter()
        work()
        synchronise(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def at_least(name: str, ratio: float, bound: float, dry: bool) -> None:
    sys.stdout.write(f"\n{name}: {ratio:.2f} (at least {bound})\n")
    assert dry or ratio >= bound


def seen(opened: Opened, device: Any) -> bytes:
    used = opened.pages.range(device, 0, 8)
    assert used is not None
    into = device.empty(8)
    device.load(into, array_at(*used.pieces[0]))
    device.record().wait()
    used.end()
    return bytes(into.cpu().numpy())


@pytest.mark.parametrize("holds", [False, True], ids=["without a hold: stale", "with a hold: fresh"])
def test_g1_pages_that_the_arena_returned(device: Any, dry: bool, holds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not holds:
        monkeypatch.setattr(registered, "hold", lambda *_: True)
    opened = Opened()
    opened.write(0, b"A" * MIB)
    assert seen(opened, device) == b"A" * 8
    opened.arena.punch(0, MIB)
    opened.write(0, b"B" * MIB)
    assert seen(opened, device) == (b"B" if holds or dry else b"A") * 8
    opened.pages.give_up()
    assert seen(opened, device) == b"B" * 8
    opened.pages.close()
    opened.arena.close()


def test_g2_a_slice_is_registered_in_10_ms(device: Any, dry: bool) -> None:
    opened, times = Opened(), []
    opened.write(0, b"A" * (64 * MIB))
    for _ in range(5):
        start = time.perf_counter()
        used = opened.pages.range(device, 0, 64 * MIB)
        times.append(time.perf_counter() - start)
        assert used is not None
        used.end()
        opened.pages.give_up()
    sys.stdout.write(f"\nG2: 64 MiB registered in {1e3 * min(times):.1f} ms (less than 10)\n")
    assert dry or min(times) < 0.010
    opened.pages.close()
    opened.arena.close()


def filled(queue: Any, nbytes: int, puts: int = 1, **task: Any) -> Any:
    table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"], **task)])
    values = np.arange(nbytes // 4, dtype=np.int32).reshape(256, -1)
    for _ in range(puts):
        table.put(x=values)
    return table


def test_g3_one_copy_of_a_run(device: Any, dry: bool, run_bytes: int) -> None:
    with tq.connect() as queue:
        batch = filled(queue, run_bytes).lease("train", rows=256)
        column = batch["x"]
        pageable = torch.arange(run_bytes // 4, dtype=torch.int32)
        pinned = pageable if dry else pageable.pin_memory()
        into = torch.empty(run_bytes // 4, dtype=torch.int32, device=place(device))
        ours = seconds(lambda: land({"x": column}, device), device)
        theirs = seconds(lambda: into.copy_(pinned, non_blocking=True), device)
        slow = seconds(lambda: into.copy_(pageable), device)
        landed = land({"x": column}, device)["x"].torch()
        assert torch.equal(landed.reshape(-1).cpu(), pageable)
        at_least("G3 of torch's pinned copy", theirs / ours, 0.9, dry)
        at_least("G3 of a pageable copy", slow / ours, 3, dry)


def test_g4_a_lease_to_the_device(device: Any, dry: bool, run_bytes: int) -> None:
    with tq.connect() as queue:
        table = filled(queue, run_bytes // 4, puts=40)

        def leased() -> None:
            with table.lease("train", rows=256, device=device) as batch:
                batch["x"].torch()

        ours = seconds(leased, device)

        def through_pinned_memory() -> None:
            with table.lease("train", rows=256) as batch:
                rows = tensors(batch)["x"]
                (rows if dry else rows.pin_memory()).to(place(device), non_blocking=True)

        at_least("G4 of a copy by way of pinned memory", seconds(through_pinned_memory, device) / ours, 1.5, dry)


def test_g5_scattered_rows(device: Any, dry: bool) -> None:
    random, rows = np.random.default_rng(0), 64 if dry else 1024
    with tq.connect() as queue:
        table = queue.create_table("t", tasks=[tq.Task("train", needs=["r", "p"], selector=tq.Priority())])
        table.put(
            r=[np.full(8192, n, np.int32) for n in range(rows)], p=[0] * rows, priority=random.random(rows).tolist()
        )
        batch = table.lease("train", rows=rows)
        column, pinned = batch["r"], torch.zeros(rows * 8192, dtype=torch.int32)
        pinned = pinned if dry else pinned.pin_memory()
        into = torch.empty_like(pinned, device=place(device))
        ours = seconds(lambda: land({"r": column}, device), device)
        one = seconds(lambda: into.copy_(pinned, non_blocking=True), device)
        landed = land({"r": column}, device)["r"].nested()
        assert landed.values().reshape(rows, -1)[:, 0].cpu().tolist() == [row[0] for row in column.list()]
        at_least("G5 of one copy", one / ours, 0.3, dry)


def test_g6_a_put_of_rows_on_the_device(device: Any, dry: bool, run_bytes: int) -> None:
    opened = Opened()
    opened.arena.ensure(0, run_bytes)
    out = np.frombuffer(opened.mapping.writable(0, run_bytes), np.uint8)
    rows = list(torch.arange(run_bytes // 4, dtype=torch.int32, device=place(device)).reshape(1024, -1))
    pinned = torch.empty(run_bytes, dtype=torch.uint8, pin_memory=not dry)
    packed = pack(rows)
    ours = seconds(lambda: store(device, pack(rows), out), device)
    assert out.tobytes() == packed.cpu().numpy().tobytes()
    one = seconds(lambda: pinned.copy_(packed, non_blocking=True), device)
    before = seconds(lambda: DeviceTensors(rows, "int32")._write_each(out), device, 3)
    at_least("G6 of one copy to the host", one / ours, 0.8, dry)
    at_least("G6 of row by row", before / ours, 5, dry)
    if not dry:
        with tq.connect() as queue:
            table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
            table.put(x=rows)
            with table.lease("train", rows=1024) as batch:
                assert batch["x"].ragged()[0].tobytes() == packed.cpu().numpy().tobytes()


def slow_down(device: Any, milliseconds: int) -> None:
    """Let the device's copies begin that much later."""
    if not isinstance(device, LateDevice):
        with torch.cuda.stream(device._stream):
            torch.cuda._sleep(milliseconds * 1_500_000)


def test_g7_a_pin_lasts_until_a_late_event_and_5_ms(device: Any, dry: bool, run_bytes: int) -> None:
    with tq.connect() as queue:
        table = filled(queue, run_bytes)
        slow_down(device, 1000)
        with table.lease("train", rows=256, device=device) as batch:
            batch["x"].torch()
        del batch
        gc.collect()
        pinned = lambda: queue.stats().bytes.blocks_pinned  # noqa: E731
        assert dry or pinned() == 1
        event = device.record()
        event.wait()
        passed = time.perf_counter()
        while pinned():
            assert time.perf_counter() - passed < 60
        late = time.perf_counter() - passed
        sys.stdout.write(f"\nG7: gone {1e3 * late:.1f} ms after the event, with the question for it (at most 5)\n")
        assert dry or late < 0.005


READER = """
import sys, torch, transferqueue as tq
from tests.devices.late import LateDevice
device = "cuda:0" if torch.cuda.is_available() else LateDevice(at_once=True)
with tq.connect(sys.argv[1]) as queue:
    table = queue.table("t")
    while True:
        batch = table.lease("train", rows=256, device=device)
        batch["x"].torch()
        print("copying", flush=True)
        batch.release()
"""


def test_g8_a_reader_that_is_killed_in_a_copy(device: Any, run_bytes: int, tmp_path: Any) -> None:
    with served(tmp_path, "2GiB") as server, tq.connect(server.ipc) as queue:
        table = filled(queue, run_bytes)
        for _ in range(3):
            with subprocess.Popen(
                [sys.executable, "-c", READER, server.ipc], stdout=subprocess.PIPE, text=True
            ) as reader:
                assert reader.stdout is not None
                assert reader.stdout.readline() == "copying\n"
                reader.send_signal(signal.SIGKILL)
                reader.wait(60)
        with table.lease("train", rows=256, device=device, timeout_s=60) as batch:
            assert torch.equal(batch["x"].torch().reshape(-1).cpu(), torch.arange(run_bytes // 4, dtype=torch.int32))
        assert in_flight(device).drain(60)
        del batch
        registered.give_up_idle(0)
        table.put(x=np.full((256, run_bytes // 1024), 7, np.int32))
        with table.lease("train", rows=256, device=device) as batch:
            assert bool((batch["x"].torch() == 7).all())


WRITER = """
import sys, torch, transferqueue as tq
place = "cuda:0" if torch.cuda.is_available() else "cpu"
with tq.connect(sys.argv[1]) as queue:
    table = queue.table("t")
    values = torch.full((256, int(sys.argv[2]) // 1024), -1, dtype=torch.int32, device=place)
    print("writing", flush=True)
    while True:
        table.put(x=values, timeout_s=0.5)
"""


def test_g8_a_writer_that_is_killed_in_a_copy(device: Any, run_bytes: int, tmp_path: Any) -> None:
    with served(tmp_path, "2GiB") as server, tq.connect(server.ipc) as queue:
        table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
        rng = np.random.default_rng(0)
        for _ in range(5):
            command = [sys.executable, "-c", WRITER, server.ipc, str(run_bytes)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as writer:
                assert writer.stdout is not None
                assert writer.stdout.readline() == "writing\n"
                time.sleep(float(rng.uniform(0, 0.05)))  # anywhere in a copy
                writer.send_signal(signal.SIGKILL)
                values = rng.integers(0, 1 << 30, (256, run_bytes // 1024)).astype(np.int32)
                rows = table.put(x=values)
                writer.wait(60)
            with table.read(rows) as found:
                assert np.array_equal(found["x"].numpy(), values)
            table.delete(table.read(fields=[]).rows)


@pytest.mark.parametrize("dtype", ["bool", "int64", "float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64"])
def test_g9_dtypes_and_no_rows(device: Any, dtype: str) -> None:
    raw = torch.from_numpy(np.random.default_rng(0).integers(0, 2, 1 << 16).astype(np.uint8))
    values = raw.view(getattr(torch, dtype)).reshape(8, -1)
    with tq.connect() as queue:
        table = queue.create_table("t", tasks=[tq.Task("train", needs=["x", "none"])])
        table.put(x=values.to(place(device)), none=torch.zeros(8, 0, dtype=torch.float32, device=place(device)))
        with table.lease("train", rows=8, device=device) as batch:
            landed = batch["x"].torch()
            assert landed.device.type == place(device).partition(":")[0]
            assert torch.equal(landed.cpu().view(torch.uint8), values.view(torch.uint8))
            assert batch["none"].torch().shape == (8, 0)


class LateJob(Job):
    """The job of `tests/devices`, on a device whose copies are made late."""

    def asked(self) -> int:
        """Nothing is asked of the test: the device goes on by itself."""
        slow_down(self.device, 3)
        return 0

    def _check(self) -> None:
        if not isinstance(self.device, LateDevice):
            self.device.finish = lambda _: torch.cuda.synchronize()
        super()._check()


def test_g10_growth_and_reuse_under_late_copies(device: Any, dry: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transferqueue.storage.memory.arena.surplus", lambda backed, used: max(0, backed - used))
    monkeypatch.setattr("transferqueue.server.memory.own_memory.TRIM_AFTER_S", 0)
    for order in (tq.Fifo(), tq.LongestFirst()):
        job = LateJob(1, order)
        job.device = device
        assert job.run(10 if dry else 200) == 0


def test_g11_a_refused_registration_leaves_the_device_usable(device: Any, dry: bool) -> None:
    if dry:
        pytest.skip("the stand-in refuses by an assertion")
    memory = np.empty(3 * 4096, np.uint8)
    address = memory.__array_interface__["data"][0]
    start = address + -address % 4096
    assert device.register(start, 4096)
    assert not device.register(start, 4096)
    assert torch.ones(4, device=place(device)).sum().item() == 4
    device.unregister(start, 4096)
    device.unregister(start, 4096)
    assert torch.ones(4, device=place(device)).sum().item() == 4


def test_g12_a_quarter_of_a_weight_takes_a_quarter_of_the_device(device: Any, dry: bool, run_bytes: int) -> None:
    whole = torch.arange(run_bytes // 4, dtype=torch.int32).reshape(1024, -1)
    with tq.connect() as queue:
        weights = queue.weights("policy")
        weights.publish(1, {"w": whole})
        for rank in range(4):
            rows = range(rank * 256, (rank + 1) * 256)
            if not dry:
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            with weights.pull(only={"w": rows}) as pulled:
                landed = pulled.torch(device=device)["w"]
            assert torch.equal(landed.cpu(), whole[rows.start : rows.stop])
            if not dry:
                assert torch.cuda.max_memory_allocated() - before <= run_bytes // 4 + MIB
            del landed
