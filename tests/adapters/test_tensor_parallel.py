"""Workers of tensor-parallel engines: what they take of each tensor is what they pull, whichever way their engine
cuts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest

import transferqueue as tq
from tests.client.deployments import Served, served
from tests.weights.relays import until

torch = pytest.importorskip("torch", exc_type=ImportError)

from transferqueue.adapters.protocols import Unsupported  # noqa: E402
from transferqueue.adapters.tensor_parallel import PartsLoader, copy_parts, parts_of  # noqa: E402
from transferqueue.errors import UsageError  # noqa: E402

RANKS = 2


def model(version: int) -> dict[str, Any]:
    torch.manual_seed(version)
    shapes = {"embed": (12, 8), "qkv": (12, 8), "o": (8, 8), "experts": (4, 6, 8), "norm": (8,), "unused": (3, 3)}
    return {name: torch.randn(shape).to(torch.bfloat16) for name, shape in shapes.items()}


class Worker:
    """Cuts as vLLM's layers do. its: what it has after the last load."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.its: dict[str, Any] = {}
        self.also: list[str] = []

    def load_weights(self, tensors: Iterable[tuple[str, Any]]) -> None:
        self.its = {}
        for name, tensor in tensors:
            assert isinstance(tensor, torch.Tensor)
            match name:
                case "embed":
                    self._put(name, tensor.narrow(0, 6 * self.rank, 6))
                case "qkv":  # three projections, of each a share
                    parts = [part.narrow(0, 2 * self.rank, 2) for part in tensor.split([4, 4, 4])]
                    self._put(name, torch.cat(parts))
                case "o":
                    self._put(name, tensor.t()[4 * self.rank : 4 * self.rank + 4])
                case "experts":
                    kept = [tensor[expert].chunk(RANKS)[self.rank] for expert in range(tensor.shape[0])]
                    self._put(name, torch.stack([part.data for part in kept]))
                case "norm":
                    assert tensor.numel() == 8
                    self._put(name, tensor.float())
                case _ if name in self.also:
                    self._put(name, tensor)

    def _put(self, name: str, tensor: Any) -> None:
        place = torch.zeros(tensor.shape, dtype=tensor.dtype)
        place.copy_(tensor)
        self.its[name] = place

    def wanted(self, version: int) -> dict[str, Any]:
        whole, rank = model(version), self.rank
        return {
            "embed": whole["embed"][6 * rank :][:6],
            "qkv": torch.cat([part[2 * rank :][:2] for part in whole["qkv"].split(4)]),
            "o": whole["o"].t()[4 * rank :][:4],
            "experts": whole["experts"][:, 3 * rank :][:, :3],
            "norm": whole["norm"].float(),
        }


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("q")) as server:
        yield server


@pytest.fixture
def queue(server: Served) -> Iterator[tq.Queue]:
    with tq.connect(server.ipc) as queue:
        yield queue


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A channel of the test's own."""
    return f"policy-{abs(hash(request.node.name))}"


@pytest.fixture(params=["mapped", "remote"])
def channel(request: pytest.FixtureRequest, server: Served, name: str) -> Iterator[tq.WeightChannel]:
    with tq.connect(server.tcp, data="remote" if request.param == "remote" else "auto") as queue:
        yield queue.weights(name)


def right(worker: Worker, version: int) -> bool:
    wanted = worker.wanted(version)
    return worker.its.keys() == wanted.keys() and all(torch.equal(worker.its[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("rank", range(RANKS))
def test_what_a_worker_takes_is_what_it_pulls_from_then_on(channel: tq.WeightChannel, rank: int) -> None:
    worker, loader = Worker(rank), PartsLoader(channel)
    assert loader.parts == {}
    for version in range(3):
        channel.publish(version, model(version))
        loader.load(worker.load_weights, version=version, timeout_s=20)
        assert right(worker, version)
        assert loader.parts == {
            "embed": tq.Slice((6 * rank, 6 * rank + 6)),
            "qkv": tq.Slice((2 * rank, 2 * rank + 10)),
            "o": tq.Slice(None, (4 * rank, 4 * rank + 4)),
            "experts": tq.Slice(None, (3 * rank, 3 * rank + 3)),
            "norm": None,
        }


def test_a_worker_that_takes_more_gets_it_and_pulls_it_from_then_on(channel: tq.WeightChannel) -> None:
    worker, loader = Worker(0), PartsLoader(channel)
    for version in range(3):
        channel.publish(version, model(version))
        worker.also = ["unused"] if version else []
        loader.load(worker.load_weights, version=version, timeout_s=20)
        if version:
            assert torch.equal(worker.its.pop("unused"), model(version)["unused"])
            assert loader.parts["unused"] is None
        assert right(worker, version)


def test_a_version_that_cannot_be_pulled_touches_no_weights(queue: tq.Queue, name: str) -> None:
    channel, worker = queue.weights(name, keep=1), Worker(0)
    loader, given = PartsLoader(channel), list[str]()

    def load_weights(tensors: Iterable[tuple[str, Any]]) -> None:
        given.append("begun")
        worker.load_weights(tensors)

    channel.publish(0, model(0))
    loader.load(load_weights, version=0, timeout_s=20)
    channel.publish(1, model(1))
    channel.publish(2, model(2))
    with pytest.raises(tq.NotFound, match="version 1"):
        loader.load(load_weights, version=1, timeout_s=20)
    assert given == ["begun"], "nothing was begun for the version that is gone"
    with pytest.raises(UsageError, match="call pull first"):
        loader.load_pulled(load_weights)
    assert right(worker, 0)
    loader.pull(version=2, timeout_s=20)
    assert right(worker, 0)
    loader.load_pulled(load_weights)
    assert right(worker, 2)


def test_another_model_is_pulled_whole_again(queue: tq.Queue, name: str) -> None:
    channel, worker = queue.weights(name), Worker(1)
    loader = PartsLoader(channel)
    channel.publish(0, model(0))
    loader.load(worker.load_weights, version=0, timeout_s=20)
    larger = model(1) | {"embed": torch.randn(14, 8), "added": torch.ones(3)}
    channel.publish(1, larger)
    worker.also = ["added"]
    loader.load(worker.load_weights, version=1, timeout_s=20)
    assert torch.equal(worker.its["embed"], larger["embed"][6:12])
    assert torch.equal(worker.its["added"], torch.ones(3))
    until(lambda: not any(each.pins for each in queue.sessions().values()))  # nothing of a version is held


def test_tensors_that_are_used_after_the_load_are_those_of_its_version(queue: tq.Queue, name: str) -> None:
    """As by an engine that collects the tensors of a layer until it has all."""
    channel, kept = queue.weights(name, keep=1), list[Any]()
    loader = PartsLoader(channel)
    for version in range(2):
        channel.publish(version, model(version))
        loader.load(
            lambda tensors: kept.extend(tensor for name, tensor in tensors if name == "o"),
            version=version,
            timeout_s=20,
        )
        channel.publish(version + 10, model(5)) if version else None
    assert all(torch.equal(tensor.float(), model(version)["o"].float()) for version, tensor in enumerate(kept))


def test_a_version_that_does_not_come_loads_nothing(queue: tq.Queue, name: str) -> None:
    loader = PartsLoader(queue.weights(name))
    with pytest.raises(tq.DeadlineExceeded):
        loader.load(lambda _: pytest.fail("nothing came"), version=1, timeout_s=0)


def test_a_rehearsal_takes_nothing(queue: tq.Queue, name: str) -> None:
    """As vLLM counts what a loader would load."""
    channel = queue.weights(name)
    loader = PartsLoader(channel)
    channel.publish(0, {"t": torch.randn(4, 6)})

    def load(tensors: Iterable[tuple[str, Any]]) -> None:
        ((_, tensor),) = tensors
        torch.empty(2, 6, device="meta").copy_(tensor.narrow(0, 2, 2))

    loader.load(load, version=0, timeout_s=20)
    assert loader.parts == {}


OPERATIONS = {
    "whole": lambda t: t,
    "a row": lambda t: t[1],
    "from the end": lambda t: t[-1],
    "an element": lambda t: t[1, 2, 3],
    "steps": lambda t: t[::2],
    "boxes": lambda t: t[1:3, :, 2:-1],
    "none left": lambda t: t[2:2],
    "transposed": lambda t: t.transpose(0, 2)[1:3, 2],
    "permuted": lambda t: t.permute(2, 0, 1)[:2],
    "mT": lambda t: t[0].t()[3:],
    "chunks": lambda t: t.chunk(3, dim=2)[2],
    "unbound": lambda t: t.unbind(1)[4],
    "reshaped": lambda t: t.reshape(24, 8)[5:7],
    "viewed": lambda t: t.view(4, 48)[1],
    "contiguous": lambda t: t[:, 1:2].contiguous(),
    "added": lambda t: t + 1,
    "by indexes": lambda t: t[torch.tensor([0, 2])],
    "masked": lambda t: t[t > 0],
    "cast": lambda t: t.to(torch.float64),
    "cloned": lambda t: t[1].clone(),
    "split": lambda t: t.split(5, 2)[1],
    "summed": lambda t: t.sum(),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_whatever_an_engine_does_gives_what_it_gives_of_the_tensor(queue: tq.Queue, name: str, operation: Any) -> None:
    whole, channel, found = torch.randn(4, 6, 8), queue.weights(name), list[Any]()
    loader = PartsLoader(channel)
    for version in range(2):
        channel.publish(version, {"t": whole + version})

        def load(tensors: Iterable[tuple[str, Any]]) -> None:
            ((_, tensor),) = tensors
            made = operation(tensor)
            expected = operation(whole + version)  # noqa: B023
            assert made.shape == expected.shape
            found.append(torch.equal(torch.empty_like(expected).copy_(made), expected))

        loader.load(load, version=version, timeout_s=20)
    assert found == [True, True]


# ---------------------------------------------------------------- parameters that know their part


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    """A mesh of 2 by 2, as the last rank sees it. Nobody communicates."""
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    dist.destroy_process_group()


def split(mesh: Any, tensor: Any, *placements: Any) -> Any:
    from torch.distributed.tensor import distribute_tensor

    return torch.nn.Parameter(distribute_tensor(tensor, mesh, placements, src_data_rank=None))


def test_a_rank_pulls_and_copies_what_its_parameters_say(mesh: Any, queue: tq.Queue, name: str) -> None:
    from torch.distributed.tensor import Replicate, Shard

    whole = {name: torch.randn(shape) for name, shape in {"a": (6, 8), "b": (6, 8), "c": (5, 3), "d": (1, 4)}.items()}
    module = torch.nn.Module()
    placed = {
        "a": (Replicate(), Shard(1)),
        "b": (Shard(0), Shard(1)),
        "c": (Shard(0), Shard(0)),
        "d": (Shard(0), Replicate()),
    }
    for each, placements in placed.items():
        module.register_parameter(each, split(mesh, torch.zeros_like(whole[each]), *placements))
    module.register_buffer("plain", torch.zeros(3))
    module.register_parameter("tied", module.a)
    channel = queue.weights(name)
    channel.publish(1, whole | {"plain": torch.ones(3), "other": torch.ones(2)})
    parts = parts_of(module)
    assert parts == {
        "a": tq.Slice(None, (4, 8)),
        "b": tq.Slice((3, 6), (4, 8)),
        "c": tq.Slice((4, 5)),
        "plain": None,
    }, "of d it has nothing, and tied is a"
    with channel.pull(only=parts) as weights:
        copy_parts(weights, module)
        for each, value in weights.torch().items():
            local = getattr(module, each)
            assert torch.equal(getattr(local, "to_local", lambda local=local: local)(), value)
    with channel.pull(only={**parts, "a": None}) as weights, pytest.raises(tq.SchemaError, match='of tensor "a"'):
        copy_parts(weights, module)
    with (
        channel.pull(only={**parts, "other": None}) as weights,
        pytest.raises(tq.SchemaError, match="other: pulled, and"),
    ):
        copy_parts(weights, module)


def test_parameters_that_are_placed_otherwise_are_refused(mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    module = torch.nn.Module()
    module.w = torch.nn.Parameter(
        DTensor.from_local(torch.zeros(2, 2), mesh, (Partial(), Replicate()), run_check=False)
    )
    with pytest.raises(Unsupported, match="is placed as"):
        parts_of(module)
    uneven = DTensor.from_local(
        torch.zeros(1, 2), mesh, (Shard(0), Replicate()), run_check=False, shape=(8, 2), stride=(2, 1)
    )
    module.w = torch.nn.Parameter(uneven)
    with pytest.raises(Unsupported, match="this rank has"):
        parts_of(module)
