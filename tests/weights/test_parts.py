"""Parts of tensors: what the workers of a tensor-parallel engine pull, along any dimension. Between hosts no other byte
crosses, and none that is damaged."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import transferqueue as tq
from tests.client.deployments import Served, served
from tests.client.test_remote import Between
from tests.weights.relays import GENEROUS_S, Crossed, until
from transferqueue.client.memory.mapped import MappedMemory
from transferqueue.client.sync.weight_channel import WeightChannel

TP = 4
SHAPES = {"columns": (256, 320), "rows": (256, 320), "experts": (6, 64, 96), "bias": (320,)}
MODEL = {
    name: np.random.default_rng(at).random(shape, np.float32) for at, (name, shape) in enumerate(SHAPES.items())
} | {"step": np.array(7)}


def shares(rank: int, of: int = TP) -> dict[str, tq.Slice | None]:
    """What one rank has: a share of the last dimension, of the first, of the middle one, and the bias whole."""
    mine = tq.Share(rank, of)
    return {
        "columns": tq.Slice(None, mine),
        "rows": tq.Slice(mine),
        "experts": tq.Slice(None, mine),
        "bias": None,
    }


def expected(rank: int, of: int = TP) -> dict[str, Any]:
    size = {"columns": 320 // of, "rows": 256 // of, "experts": 64 // of}
    at = {name: slice(rank * each, (rank + 1) * each) for name, each in size.items()}
    return {
        "columns": MODEL["columns"][:, at["columns"]],
        "rows": MODEL["rows"][at["rows"]],
        "experts": MODEL["experts"][:, at["experts"]],
        "bias": MODEL["bias"],
    }


def until_unpinned(queue: tq.Queue) -> None:
    """A client returns pins within 20 ms, or with a call after that."""
    until(lambda: sum(each.pins for each in queue.sessions().values()) == 0)


def publish(channel: WeightChannel, other: WeightChannel, version: int = 1, at: int = 100) -> None:
    """Two ranks publish: the matrices in two slices, the rest whole."""
    sliced = ("columns", "rows")
    parts = [
        {name: tq.WeightSlice(MODEL[name][first:last], first, 256) for name in sliced}
        for first, last in ((0, at), (at, 256))
    ]
    pending = channel.begin(version, parts=2)
    other.publish(version, parts[1], pending=pending, part=1)
    channel.publish(version, parts[0] | {name: MODEL[name] for name in MODEL if name not in sliced}, pending=pending)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with (
        served(tmp_path_factory.mktemp("parts")) as server,
        tq.connect(server.ipc) as one,
        tq.connect(server.ipc) as two,
    ):
        publish(one.weights("sliced"), two.weights("sliced"))
        one.weights("whole").publish(1, MODEL)
        yield server


@pytest.fixture(params=["mapped", "remote"])
def queue(request: pytest.FixtureRequest, server: Served) -> Iterator[tq.Queue]:
    with tq.connect(server.tcp, data="remote" if request.param == "remote" else "auto") as queue:
        yield queue


def sent(queue: tq.Queue) -> int:
    return sum(queue.stats().server.bulk_sent_bytes.values())


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("only", "error", "why"),
    [
        ({"rows": tq.Slice(tq.Share(0, 2, zigzag=True))}, tq.UsageError, "is zigzag, which divides sequences"),
        ({"rows": 3}, tq.UsageError, "3 of tensor .rows. is no part of it: give a tq.Slice"),
        ({"rows": slice(0, 3)}, tq.UsageError, "is no part of it"),
        ({"rows": tq.Slice(None, None, (0, 1))}, tq.SchemaError, "has 3 axes, and field .* with 2"),
        ({"rows": tq.Slice(None, (300, 321))}, tq.SchemaError, "stop is at most 320"),
        ({"rows": tq.Slice((0, 257))}, tq.SchemaError, "stop is at most 256"),
        ({"columns": tq.Slice(None, tq.Share(0, 321))}, tq.SchemaError, "is empty: .* take fewer shares"),
        ({"columns": None, "step": tq.Slice((0, 1))}, tq.SchemaError, "one value a row: it cannot be sliced"),
        ({"columns": None, "w": tq.Slice((0, 1))}, tq.NotFound, "has no tensor w"),
        ({"rows": range(250, 257)}, tq.NotFound, "or not these rows of it"),
        ({"columns": tq.Slice(tq.Share(0, 300))}, tq.NotFound, "or not these rows of it"),
    ],
)
@pytest.mark.parametrize("channel", ["sliced", "whole"])
def test_a_part_that_does_not_fit_is_refused_and_pins_nothing(
    queue: tq.Queue, channel: str, only: Any, error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        queue.weights(channel).pull(only=only, timeout_s=GENEROUS_S)
    until_unpinned(queue)


def test_a_part_of_a_version_on_its_way_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with served(tmp_path) as server, tq.connect(server.ipc) as trainer:
        channel = trainer.weights("policy")
        pending = channel.begin(1, parts=2)
        channel.publish(1, {"rows": MODEL["rows"]}, pending=pending, part=1)
        with tq.connect(server.tcp, data="remote") as queue:
            with pytest.raises(tq.SchemaError, match="stop is at most 320"):
                queue.weights("policy").pull(only={"rows": tq.Slice(None, (0, 400))}, timeout_s=GENEROUS_S)
            until_unpinned(queue)


# ---------------------------------------------------------------- what comes


@pytest.mark.parametrize("channel", ["sliced", "whole"])
def test_each_rank_has_its_part_of_each_tensor(queue: tq.Queue, channel: str) -> None:
    for rank in range(TP):
        with queue.weights(channel).pull(only=shares(rank), timeout_s=GENEROUS_S) as weights:
            found, wanted = weights.numpy(), expected(rank)
            assert {name: field.shape for name, field in weights.fields().items()} == {
                name: value.shape for name, value in wanted.items()
            }
            assert found.keys() == wanted.keys()
            assert {name: field.shape for name, field in weights.published().items()} == {
                name: value.shape for name, value in MODEL.items()
            }
            assert all(np.array_equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("channel", ["sliced", "whole"])
def test_any_box_of_a_tensor_is_a_part(queue: tq.Queue, channel: str) -> None:
    rng = np.random.default_rng(3)
    for name in ("columns", "experts"):
        for _ in range(6):
            edges = [sorted(rng.choice(size + 1, 2, replace=False).tolist()) for size in SHAPES[name]]
            with queue.weights(channel).pull(
                only={name: tq.Slice(*map(tuple, edges))}, timeout_s=GENEROUS_S
            ) as weights:
                box = tuple(slice(*edge) for edge in edges)
                assert np.array_equal(weights.numpy()[name], MODEL[name][box])


def test_on_the_servers_host_a_part_of_a_whole_tensor_is_a_view(server: Served) -> None:
    with tq.connect(server.ipc) as queue, queue.weights("whole").pull(only=shares(1)) as part:
        for name, value in part.numpy().items():
            assert value.strides == MODEL[name].strides, "a view of the tensor, and not a copy of the part"


def test_torch_takes_parts_of_any_dtype(queue: tq.Queue) -> None:
    torch = pytest.importorskip("torch", exc_type=ImportError)
    whole = {kind: torch.arange(64).reshape(4, 16).to(getattr(torch, kind)) for kind in ("bfloat16", "float8_e4m3fn")}
    channel = queue.weights(f"dtypes-{id(queue)}")
    channel.publish(1, whole)
    with channel.pull(only={kind: tq.Slice((1, 3), tq.Share(1, 2)) for kind in whole}) as weights:
        for kind, value in weights.torch().items():
            assert value.dtype == whole[kind].dtype
            assert torch.equal(value.float(), whole[kind][1:3, 8:].float())


@pytest.mark.parametrize("channel", ["sliced", "whole"])
def test_between_hosts_each_rank_gets_its_bytes_alone(server: Served, channel: str) -> None:
    with Between(server) as between, tq.connect(between.control.address, data="remote") as queue:
        passed = Crossed()
        between.bulk.meddle = passed
        for rank in range(TP):
            passed.bytes = 0
            wanted = expected(rank)
            with queue.weights(channel).pull(only=shares(rank), timeout_s=GENEROUS_S) as weights:
                assert all(np.array_equal(weights.numpy()[name], wanted[name]) for name in wanted)
            assert passed.bytes == pytest.approx(sum(value.nbytes for value in wanted.values()), rel=0.02)


def test_the_same_part_is_shared_with_weights_before_and_another_is_not(queue: tq.Queue) -> None:
    channel = queue.weights(f"since-{id(queue)}")
    channel.publish(1, MODEL)
    with channel.pull(only=shares(1)) as before:
        channel.publish(2, MODEL | {"rows": MODEL["rows"] + 1})
        with channel.pull(only=shares(1), since=before) as same:
            assert same.changed() == {"rows"}
            assert np.array_equal(same.numpy()["columns"], expected(1)["columns"])
        with channel.pull(only=shares(2), since=before) as other:
            assert other.changed() == {"columns", "rows", "experts"}, "the bias is whole in both"
            assert np.array_equal(other.numpy()["columns"], expected(2)["columns"])
        with channel.pull(since=before) as whole:
            assert whole.published() == whole.fields()
            assert all(np.array_equal(whole.numpy()[name], MODEL[name]) for name in ("columns", "experts", "bias"))


# ---------------------------------------------------------------- what goes wrong


def test_the_parts_of_a_version_on_its_way_come_early_in_part(tmp_path: Path) -> None:
    with served(tmp_path) as server, tq.connect(server.ipc) as trainer, tq.connect(server.ipc) as second:
        channel = trainer.weights("policy")
        pending = channel.begin(1, parts=2)
        late = {name: tq.WeightSlice(MODEL[name][100:], 100, 256) for name in ("columns", "rows")}
        second.weights("policy").publish(1, late, pending=pending, part=1)
        with tq.connect(server.tcp, data="remote") as queue, ThreadPoolExecutor(1) as pool:
            pulled = pool.submit(queue.weights("policy").pull, only=shares(1), timeout_s=GENEROUS_S)
            early = {name: tq.WeightSlice(MODEL[name][:100], 0, 256) for name in ("columns", "rows")}
            rest = {name: MODEL[name] for name in ("experts", "bias")}
            channel.publish(1, early | rest, pending=pending)
            with pulled.result(GENEROUS_S) as weights:
                wanted = expected(1)
                assert all(np.array_equal(weights.numpy()[name], wanted[name]) for name in wanted)
            assert sent(trainer) == pytest.approx(sum(value.nbytes for value in wanted.values()), rel=0.02)


def test_a_version_that_is_retired_during_the_read_is_read_to_its_end(server: Served) -> None:
    with (
        tq.connect(server.ipc) as trainer,
        Between(server) as between,
        tq.connect(between.control.address, data="remote") as queue,
        ThreadPoolExecutor(1) as pool,
    ):
        channel = trainer.weights("retired", keep=1)
        channel.publish(1, MODEL)
        passed = Crossed()
        passed.holds_at = 1000
        between.bulk.meddle = passed
        pulled = pool.submit(queue.weights("retired").pull, only=shares(3), timeout_s=GENEROUS_S)
        assert passed.holding.wait(GENEROUS_S)
        for version in (2, 3):
            channel.publish(version, {name: value + version for name, value in MODEL.items()})
        passed.let_go()
        with pulled.result(GENEROUS_S) as weights:
            assert weights.version == 1
            assert all(np.array_equal(weights.numpy()[name], value) for name, value in expected(3).items())
        until_unpinned(queue)


@pytest.mark.slow
def test_a_reader_of_parts_is_told_when_the_server_dies_and_reads_on_from_the_next(tmp_path: Path) -> None:
    """As a worker whose host's relay, which is a server of its own, is killed: another source has the version."""
    big, mine = np.ones((2048, 4096), np.float32), {"big": tq.Slice(None, tq.Share(1, 2))}
    for host in "ab":
        (tmp_path / host).mkdir(mode=0o700)
    with served(tmp_path / "b") as other, tq.connect(other.ipc) as second:
        second.weights("policy").publish(1, {"big": big})
        server = Served(tmp_path / "a")
        with (
            Between(server) as between,
            tq.connect(server.ipc) as trainer,
            tq.connect(between.control.address, data="remote") as queue,
            ThreadPoolExecutor(1) as pool,
        ):
            trainer.weights("policy").publish(1, {"big": big})
            passed = Crossed()
            passed.holds_at = 1 << 20
            between.bulk.meddle = passed
            pulled = pool.submit(queue.weights("policy").pull, only=mine, timeout_s=10.0)
            assert passed.holding.wait(GENEROUS_S)
            server.process.kill()
            server.process.communicate()
            passed.let_go()
            with pytest.raises((tq.PeerError, tq.DeadlineExceeded)):
                pulled.result(GENEROUS_S)
        with (
            tq.connect(other.tcp, data="remote") as queue,
            queue.weights("policy").pull(only=mine, timeout_s=GENEROUS_S) as weights,
        ):
            assert np.array_equal(weights.numpy()["big"], big[:, 2048:])


def arena_of(queue: tq.Queue) -> str:
    memory = queue._client.memory
    assert isinstance(memory, MappedMemory)
    return memory._paths[0]


def flip(path: str, value: float) -> None:
    """Change a bit of the only place where this number lies."""
    number = np.float32(value).tobytes()
    with open(path, "r+b") as arena:
        data = arena.read(64 << 20)
        assert data.count(number) == 1
        arena.seek(data.index(number))
        arena.write(bytes([number[0] ^ 1]))


def test_bytes_that_were_damaged_are_never_given_to_a_reader_of_a_part(tmp_path: Path) -> None:
    """Before the block was ever compared, and after it was compared for others."""
    values = np.arange(1 << 20, dtype=np.float32).reshape(1024, 1024)
    mine = {"w": tq.Slice(None, (512, 1024))}
    with served(tmp_path) as server, tq.connect(server.ipc) as trainer:
        channel = trainer.weights("policy")
        with tq.connect(server.tcp, data="remote") as queue:
            for version, was_read in enumerate((False, True), start=1):
                channel.publish(version, {"w": values + version / 2})
                if was_read:
                    queue.weights("policy").pull(only=mine, timeout_s=GENEROUS_S).release()
                flip(arena_of(trainer), values[1023, 1023] + version / 2)
                with pytest.raises(tq.Corruption, match=r"block \d+ .* does not match its checksum"):
                    queue.weights("policy").pull(only=mine, timeout_s=GENEROUS_S)
                until_unpinned(queue)
            channel.publish(3, {"w": values})
            with queue.weights("policy").pull(only=mine, timeout_s=GENEROUS_S) as part:
                assert np.array_equal(part.numpy()["w"], values[:, 512:])
