"""`lease(device=)` and what gives tensors as it does: values, dtypes, who stays on the host, and what is refused."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import transferqueue as tq
from tests.client.deployments import served
from tests.devices.late import LateDevice
from tests.scale import only_long
from transferqueue.adapters.trainers.torch_data import QueueDataset, QueueLoader, tensors
from transferqueue.schema import ITEM_BYTES
from transferqueue.storage.devices.torch_device import TorchDevice
from transferqueue.storage.elements.dtypes import BLOB_DTYPES

DEVICES = {
    "the host": lambda: "cpu",
    "registered": lambda: LateDevice(at_once=True),
    "staged": lambda: LateDevice(at_once=True, registers=False),
}


@pytest.fixture(params=list(DEVICES))
def device(request: pytest.FixtureRequest) -> Any:
    return DEVICES[request.param]()


@pytest.fixture(scope="module")
def queue():
    with tq.connect() as connected:
        yield connected


NUMBERS = itertools.count()


def table_of(queue: Any, rows: dict[str, Any], **options: Any) -> Any:
    table = queue.create_table(f"t{next(NUMBERS)}", tasks=[tq.Task("train", needs=[*rows], **options)])
    table.put(**rows)
    return table


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


TORCH_DTYPES = [name for name in ITEM_BYTES if name not in BLOB_DTYPES and hasattr(torch, name)]


@pytest.mark.parametrize("kind", ["registered", *only_long("the host", "staged")])
@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_every_dtype_lands_bit_by_bit(queue: tq.Queue, kind: str, dtype: str) -> None:
    device = DEVICES[kind]()
    size = 24 * 4096 // ITEM_BYTES[dtype]
    raw = torch.from_numpy(np.random.default_rng(0).integers(0, 2, 24 * 4096).astype(np.uint8))
    values = raw.view(getattr(torch, dtype)).reshape(8, size // 8)
    jagged = torch.nested.nested_tensor_from_jagged(values.reshape(-1), torch.tensor([0, 0, 5, 7, size - 3, size]))
    table = table_of(queue, {"dense": values[:5].contiguous(), "ragged": jagged})
    with table.lease("train", rows=5, fields=["dense", "ragged"], device=device) as batch:
        dense, ragged = batch["dense"].torch(), batch["ragged"].nested()
        assert (dense.dtype, dense.shape) == (values.dtype, (5, size // 8))
        assert bits(dense) == bits(values[:5])
        assert ragged.dtype == values.dtype
        assert ragged.offsets().tolist() == [0, 0, 5, 7, size - 3, size]
        assert bits(ragged.values()) == bits(values)


@pytest.mark.parametrize("order", [tq.Fifo(), tq.LongestFirst()], ids=["a run", "scattered"])
@pytest.mark.parametrize("count", [3, 40, 200])
def test_values_are_those_of_the_host(queue: tq.Queue, device: Any, order: Any, count: int) -> None:
    random = np.random.default_rng(3)
    ids = [random.integers(0, 99, int(size)) for size in random.integers(0, 300, count)]
    rows = {
        "input_ids": ids,
        "x": random.random((count, 7, 3)),
        "scalar": list(range(count)),
        "empty": np.zeros((count, 0), np.int32),
    }
    table = table_of(queue, rows, selector=order)
    with table.lease("train", rows=count, fields=[*rows], device=device) as batch:
        assert torch.equal(batch["x"].torch(), torch.from_numpy(batch["x"].numpy()))
        assert batch["scalar"].torch().tolist() == batch["scalar"].list()
        assert batch["empty"].torch().shape == (count, 0)
        assert [row.tolist() for row in batch["input_ids"].nested().unbind()] == batch["input_ids"].list()
        assert batch["input_ids"].nested()._max_seqlen == max(map(len, ids))
        host = batch["x"].numpy()
        host[:] = -1  # a view of the host's may be changed; the device has what was put
        assert (batch["x"].torch() >= 0).all()


def test_parts_of_rows_land(queue: tq.Queue, device: Any) -> None:
    table = table_of(
        queue, {"ids": [np.arange(n) for n in (5, 9, 3)], "e": np.arange(3 * 4096 * 2).reshape(3, 4096, 2)}
    )
    wanted = {"ids": tq.Slice((0, 2)), "e": tq.Slice(None, (0, 1))}
    with table.lease("train", rows=3, fields=wanted, device=device) as batch:
        assert [row.tolist() for row in batch["ids"].nested().unbind()] == batch["ids"].list()
        assert torch.equal(batch["e"].torch(), torch.from_numpy(batch["e"].numpy()))


def test_what_is_no_tensor_stays_on_the_host_and_says_so(queue: tq.Queue) -> None:
    rows = {
        "text": ["a", "b"],
        "raw": [b"1", b"2"],
        "value": [{"a": 1}, [2]],
        "varied": [np.zeros((2, 3)), np.zeros((1, 5))],
        "x": [1.0, 2.0],
    }
    table = table_of(queue, rows)
    device = LateDevice(at_once=True)
    with table.lease("train", rows=2, fields=[*rows], device=device) as batch:
        assert {name: batch[name].device for name in rows} == dict.fromkeys(rows, "cpu") | {"x": "late:0"}
        assert (batch["text"].list(), batch["raw"].list(), batch["value"].list()) == (
            ["a", "b"],
            [b"1", b"2"],
            [{"a": 1}, [2]],
        )
        with pytest.raises(tq.UsageError, match=r'field "text".*list'):
            batch["text"].torch()
        with pytest.raises(tq.UsageError, match="does not fit"):
            batch["x"].nested()
        assert batch["x"][1:].device == "cpu"
        assert batch["x"][1:].torch().tolist() == [2.0]


def test_a_tensordict_has_its_tensors_on_the_device(queue: tq.Queue, device: Any) -> None:
    pytest.importorskip("tensordict")
    table = table_of(queue, {"x": np.arange(8).reshape(2, 4), "r": [np.arange(2), np.arange(3)], "text": ["a", "b"]})
    with table.lease("train", rows=2, device=device) as batch:
        found = batch.tensordict()
        assert found["x"].data_ptr() == batch["x"].torch().data_ptr()
        assert found["r"].offsets().tolist() == [0, 2, 5]
        assert found["text"] == ["a", "b"]


@pytest.mark.parametrize(
    ("device", "text"),
    [
        ("gpu0", "device='gpu0' is no device of torch .*; give 'cpu'"),
        ("cuda:99", r"device='cuda:99' is not here: there are \d+ cuda devices"),
        (-1, "device=-1 is no device of torch|is not here"),
        ("meta", "device='meta' holds no values"),
        (3.5, "device=3.5 is no device of torch"),
        (object(), "is no device of torch"),
    ],
)
def test_a_device_that_is_not_here_is_refused_before_rows_are_leased(queue: tq.Queue, device: Any, text: str) -> None:
    table = table_of(queue, {"x": [1, 2]})
    for call in (
        lambda: table.lease("train", rows=2, device=device),
        lambda: next(table.leases("train", rows=2, device=device)),
        lambda: table.loader("train", rows=2, device=device),
        lambda: QueueLoader(QueueDataset(queue.address, table.name, "train", rows=2, device=device), num_workers=1),
    ):
        with pytest.raises(tq.UsageError, match=f"{text}|num_workers=1"):
            call()
    assert len(table.lease("train", rows=2, timeout_s=0)) == 2


def test_tensors_outlive_the_batch_and_columns_end_with_it(queue: tq.Queue, device: Any) -> None:
    table = table_of(queue, {"x": np.arange(1 << 16).reshape(4, -1)})
    with table.lease("train", rows=4, device=device) as batch:
        column = batch["x"]
        taken = column.torch()
    with pytest.raises(tq.BatchEnded, match="was acked"):
        column.torch()
    assert torch.equal(taken, torch.arange(1 << 16).reshape(4, -1))


def test_leases_loaders_and_torch_loaders_take_the_same_argument(queue: tq.Queue, device: Any) -> None:
    table = table_of(queue, {"x": np.arange(1 << 16).reshape(16, -1)})
    seen = []
    for batch in table.leases("train", rows=4, device=device):
        with batch:
            seen.append(batch["x"].torch())
        if len(seen) == 2:
            break
    table.seal()
    with table.loader("train", rows=4, device=device) as batches:
        for batch in batches:
            seen.append(batch["x"].torch())
            batch.release() if len(seen) == 4 else batch.ack()
            if len(seen) == 4:
                break
    loader = QueueLoader(QueueDataset(queue.address, table.name, "train", rows=4, device=device, form=tensors))
    seen += [part["x"] for part in loader]
    assert torch.equal(torch.cat([seen[0], seen[1], seen[2], seen[4]]), torch.arange(1 << 16).reshape(16, -1))


def test_an_event_loop_leases_to_a_device(queue: tq.Queue, device: Any) -> None:
    name = table_of(queue, {"x": np.arange(1 << 16).reshape(4, -1)}).name

    async def lease() -> torch.Tensor:
        async with tq.aconnect(queue.address) as other:
            table = await other.table(name)
            async with table.lease("train", rows=4, device=device) as batch:
                return batch["x"].torch()

    assert torch.equal(asyncio.run(lease()), torch.arange(1 << 16).reshape(4, -1))


@pytest.mark.parametrize("kind", ["registered", *only_long("the host", "staged")])
def test_what_came_over_the_network_lands_too(kind: str, tmp_path: Path) -> None:
    device = DEVICES[kind]()
    with served(tmp_path) as server, tq.connect(server.tcp, data="remote") as far:
        table = table_of(far, {"x": np.arange(1 << 18).reshape(4, -1), "r": [np.arange(n) for n in (1, 2, 0, 5000)]})
        with table.lease("train", rows=4, device=device) as batch:
            assert torch.equal(batch["x"].torch(), torch.arange(1 << 18).reshape(4, -1))
            assert [len(row) for row in batch["r"].nested().unbind()] == [1, 2, 0, 5000]


def test_weights_land(queue: tq.Queue, device: Any) -> None:
    weights = queue.weights(f"policy{next(NUMBERS)}")
    model = {"a": torch.randn(300, 200), "b": torch.randn(7).to(torch.bfloat16), "s": torch.tensor(3)}
    weights.publish(1, model)
    pulled = weights.pull()
    landed = pulled.torch(device=device)
    pulled.release()
    assert {name: (value.dtype, value.shape) for name, value in landed.items()} == {
        name: (value.dtype, value.shape) for name, value in model.items()
    }
    assert all(torch.equal(landed[name], value) for name, value in model.items())
    with pytest.raises(tq.UsageError, match="holds no values"):
        weights.pull().torch(device="meta")


def test_weights_in_slices_are_put_together_on_the_device(queue: tq.Queue, device: Any) -> None:
    whole = torch.arange(40_000.0).reshape(100, 400)
    weights = queue.weights(f"policy{next(NUMBERS)}")
    pending = weights.begin(1, parts=2)
    threads = [
        threading.Thread(
            target=weights.publish,
            args=(1, {"w": tq.WeightSlice(whole[at : at + 50], at, 100)}),
            kwargs={"pending": pending, "part": at // 50},
        )
        for at in (50, 0)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert torch.equal(weights.pull().torch(device=device)["w"], whole)
    part = weights.pull(only={"w": range(20, 70)})
    assert torch.equal(part.torch(device=device)["w"], whole[20:70])


def test_rows_that_are_read_land(queue: tq.Queue, device: Any) -> None:
    x, lengths = torch.randn(6, 3000), [1, 5000, 0, 2, 7, 3]
    table = table_of(queue, {"x": x, "r": [torch.arange(n) for n in lengths], "t": list("abcdef")})
    rows = table.read().rows
    with table.read(rows[[4, 1]], device=device) as read:
        assert torch.equal(read["x"].torch(), x[[4, 1]])
        assert [len(row) for row in read["r"].nested().unbind()] == [7, 5000]
        assert read["t"].list() == ["e", "b"]


def test_a_read_refuses_devices_that_do_not_fit(queue: tq.Queue) -> None:
    table = table_of(queue, {"x": torch.randn(6, 3000)})
    with pytest.raises(tq.UsageError, match="no values are read"):
        table.read(values=False, device="cpu")
    with pytest.raises(tq.UsageError, match="nothing:0"):
        table.read(device="nothing:0")
    full = LateDevice(at_once=True, room=100)
    for _ in range(3):
        with pytest.raises(tq.OutOfMemory, match="no room"):
            table.read(device=full)
    with table.read() as read:
        table.drop(read.rows, "read")
    assert table.stats().rows_live == 0


@pytest.mark.parametrize("registers", [True, False], ids=["registered", "staged"])
@pytest.mark.parametrize("far", [False, True], ids=["mapped", "remote"])
def test_a_device_is_given_the_wanted_part_of_a_weight_alone(tmp_path: Path, registers: bool, far: bool) -> None:
    """As to four engine workers: each a quarter of the rows of `w`, of the columns of `o` and of those of each expert,
    all of `b`, and of `e`, which has no bytes, nothing."""
    model = {
        "w": torch.randn(512, 64, 3),
        "o": torch.randn(300, 256).to(torch.bfloat16),
        "experts": torch.randn(8, 64, 96),
        "b": torch.randn(40),
        "e": torch.empty(8, 0),
    }
    with served(tmp_path) as server, tq.connect(server.tcp, data="remote" if far else "auto") as queue:
        weights = queue.weights("policy")
        weights.publish(1, model)
        device = LateDevice(at_once=True, registers=registers)
        for rank in range(4):
            device.direct = device.staged = 0
            rows = range(rank * 128, (rank + 1) * 128)
            columns = tq.Slice(None, tq.Share(rank, 4))
            only = {"w": rows, "o": columns, "experts": columns, "b": None, "e": range(2, 4)}
            with weights.pull(only=only) as pulled:
                landed = pulled.torch(device=device)
            assert torch.equal(landed["w"], model["w"][rows.start : rows.stop])
            assert torch.equal(landed["o"], model["o"][:, rank * 64 :][:, :64])
            assert torch.equal(landed["experts"], model["experts"][:, rank * 16 :][:, :16])
            assert torch.equal(landed["b"], model["b"])
            assert landed["e"].shape == (2, 0)
            sharded = sum(model[name].nbytes for name in ("w", "o", "experts"))
            assert device.direct + device.staged == sharded // 4 + model["b"].nbytes
            if registers and not far:
                assert device.staged == model["o"].nbytes // 4, "300 runs are gathered; those of `experts` are 8"


def test_without_page_locked_memory_a_copy_is_made_from_other_memory(caplog: pytest.LogCaptureFixture) -> None:
    """As where the machine has no more of it; here there is no accelerator to lock pages for."""
    if torch.accelerator.is_available():
        pytest.skip("this machine can lock pages")
    device = TorchDevice.__new__(TorchDevice)
    device._torch, device.name = torch, "xpu:0"  # type: ignore[misc]
    staged = device.staging(12)
    assert staged is not None
    assert len(staged) == 12
    assert "no 12 bytes can be page-locked for xpu:0" in caplog.text


def test_without_a_device_nothing_of_devices_is_imported() -> None:
    script = """
import sys, transferqueue as tq
with tq.connect() as queue:
    table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
    table.put(x=__import__("numpy").ones((4, 4096)))
    with table.lease("train", rows=4) as batch:
        batch["x"].numpy()
print([name for name in sys.modules if name == "torch" or ".devices" in name])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
