"""Parts of rows: views on the server's host, and only these bytes from another one; what does not fit is refused and
changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import transferqueue as tq
from tests.client.deployments import Served
from tests.client.test_remote import Between

LAYERS, TOP_K, GROUPS = 48, 4, 4
LENGTHS = np.random.default_rng(1).integers(1, 400, 64)
EXPERTS = [
    np.random.default_rng(at).integers(0, 128, (size, LAYERS, TOP_K), np.uint8) for at, size in enumerate(LENGTHS)
]
TEACHER = np.random.default_rng(2).random((64, 16, 32), np.float32)
FIELDS = [
    tq.Field("experts", "uint8", (None, LAYERS, TOP_K)),
    tq.Field("teacher", "float32", (16, 32)),
    tq.Field("reward", "float32"),
    tq.Field("image", "uint8", (None, None, 3)),
]


def filled(queue: tq.Queue, name: str, puts: int = 1) -> tq.Table:
    table = queue.create_table(name, fields=FIELDS, tasks=[tq.Task("train", needs=["experts", "teacher", "reward"])])
    for part in np.array_split(np.arange(64), puts):
        table.put(
            experts=[EXPERTS[at] for at in part], teacher=TEACHER[part], reward=np.arange(len(part), dtype=np.float32)
        )
    return table


@pytest.fixture(params=["local", "remote"])
def queue(request: pytest.FixtureRequest, server: Served) -> Iterator[tq.Queue]:
    how: dict[str, Any] = {"data": "remote"} if request.param == "remote" else {}
    with tq.connect(server.tcp if how else server.ipc, **how) as found:
        yield found


@pytest.mark.parametrize("puts", [1, 3])
def test_a_lease_and_a_read_bring_the_parts_that_they_ask_for(queue: tq.Queue, name: str, puts: int) -> None:
    table = filled(queue, name, puts)
    wanted = {"experts": tq.Slice(None, (12, 24)), "teacher": tq.Slice(None, (0, 8)), "reward": None}
    with table.lease("train", rows=64, fields=wanted) as batch:
        assert batch["experts"].shape == (64, None, 12, TOP_K)
        assert np.array_equal(batch["teacher"].numpy(), TEACHER[:, :, :8])
        values, offsets = batch["experts"].ragged()
        assert np.array_equal(values, np.concatenate(EXPERTS)[:, 12:24])
        assert offsets.tolist() == [0, *np.cumsum(LENGTHS)]
        assert all(np.array_equal(row, whole[:, 12:24]) for row, whole in zip(batch["experts"], EXPERTS, strict=True))
    rows = np.random.default_rng(3).permutation(len(EXPERTS))
    with filled(queue, f"{name}-read", puts).read(rows, fields={"experts": tq.Slice((5, 50))}) as found:
        assert all(np.array_equal(row, EXPERTS[at][5:50]) for row, at in zip(found["experts"], rows, strict=True))
        assert np.array_equal(found["experts"][3:5][1], EXPERTS[rows[4]][5:50])
        assert found["experts"].padded().shape[0] == 64


def test_shares_of_all_ranks_are_the_whole(queue: tq.Queue, name: str) -> None:
    table = filled(queue, name)
    parts = [
        table.read(limit=8, fields={"experts": tq.Slice(tq.Share(rank, 3, zigzag=True))})["experts"].list()
        for rank in range(3)
    ]
    for whole, *found in zip(EXPERTS[:8], *parts, strict=True):
        assert sorted(map(str, [step for part in found for step in part])) == sorted(map(str, whole.tolist()))


def test_torch_takes_a_slice(queue: tq.Queue, name: str) -> None:
    torch = pytest.importorskip("torch")
    found = filled(queue, name).read(fields={"experts": tq.Slice(None, (0, 2)), "teacher": tq.Slice((0, 4), (8, 9))})
    assert torch.equal(found["teacher"].torch(), torch.from_numpy(TEACHER)[:, :4, 8:9])
    nested = found["experts"].nested()
    assert all(np.array_equal(row, whole[:, :2]) for row, whole in zip(nested.unbind(), EXPERTS, strict=True))


def test_on_the_servers_host_a_slice_is_a_view(server: Served, name: str) -> None:
    with tq.connect(server.ipc) as queue:
        table = filled(queue, name)
        whole = table.read(fields=["experts", "teacher"])
        part = table.read(fields={"experts": tq.Slice(None, (12, 24)), "teacher": tq.Slice(tq.Share(1, 2), (0, 8))})
        for got, all_of_it in (
            (part["teacher"].numpy(), whole["teacher"].numpy()),
            (part["experts"].ragged()[0], whole["experts"].ragged()[0]),
        ):
            assert got.base is not None
            assert got.strides[1:] == all_of_it.strides[1:], "a view of the rows, and not a copy of the part"


def test_only_the_slice_crosses(server: Served, name: str) -> None:
    with Between(server) as between, tq.connect(between.control.address, data="remote") as queue:
        table = filled(queue, name)
        passed = [0]

        def count(_passed: int, data: bytes, up: bool) -> bytes:
            passed[0] += 0 if up else len(data)
            return data

        between.bulk.meddle = count
        crossed = []
        for part in [None, *(tq.Slice(None, (at * 12, at * 12 + 12)) for at in range(GROUPS))]:
            passed[0] = 0
            with table.read(fields={"experts": part}) as found:
                found["experts"].load()
            crossed.append(passed[0])
        whole, *parts = crossed
        assert whole == pytest.approx(sum(each.nbytes for each in EXPERTS), rel=0.02)
        assert parts == [pytest.approx(whole / GROUPS, rel=0.02)] * GROUPS


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"experts": 3}, tq.UsageError, r"fields\['experts'\] is int, 3; give a tq.Slice"),
        ({"experts": tq.Slice(None, (40, 60))}, tq.SchemaError, r"axis 1 of .* with 48 there; stop is at most 48"),
        ({"reward": tq.Slice((0, 1))}, tq.SchemaError, r"one value a row: it cannot be sliced; read it whole"),
        ({"image": tq.Slice((0, 1))}, tq.SchemaError, r"differ in more than the first dimension"),
        ({"expert": tq.Slice((0, 1))}, tq.TransferQueueError, r"expert"),
    ],
)
def test_a_slice_that_does_not_fit_is_refused_and_takes_no_row(
    queue: tq.Queue, name: str, fields: Any, kind: type[Exception], message: str
) -> None:
    table = filled(queue, name)
    for call in (lambda: table.lease("train", rows=64, fields=fields, timeout_s=5), lambda: table.read(fields=fields)):
        with pytest.raises(kind, match=message):
            call()
    with table.lease("train", rows=64, timeout_s=5) as batch:
        assert len(batch) == 64


def test_a_client_that_does_not_know_a_field_gives_its_rows_back(server: Served, name: str) -> None:
    with tq.connect(server.ipc) as first, tq.connect(server.ipc) as second:
        table = first.create_table(name, tasks=[tq.Task("train", needs=["x"])])
        late = second.table(name)
        table.put(x=np.zeros((2, 3), np.int64))
        with pytest.raises(tq.SchemaError, match=r"stop is at most 3"):
            late.lease("train", rows=2, fields={"x": tq.Slice((0, 9))}, timeout_s=5)
        with late.lease("train", rows=2, fields={"x": tq.Slice((0, 2))}, timeout_s=5) as batch:
            assert batch["x"].numpy().shape == (2, 2)
