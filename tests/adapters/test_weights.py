"""Engines that follow a channel: what of a version is pulled, and what of it is written into a module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import transferqueue as tq
from transferqueue.adapters.weights import ChannelWeights, ModuleLoader, TensorWeights, WeightUpdater, in_layers_of

torch = pytest.importorskip("torch", exc_type=ImportError)

from transferqueue.adapters.scoring.lora import AdapterWeights, add_lora, published_weights  # noqa: E402
from transferqueue.workflows.job.training.publication import HostCopy  # noqa: E402


@pytest.fixture
def queue() -> Iterator[tq.Queue]:
    with tq.connect("embedded") as opened:
        yield opened


def versions(count: int, dtype: Any = torch.bfloat16) -> list[dict[str, Any]]:
    """Weights whose elements move a little from version to version, but for a bias, which stays."""
    torch.manual_seed(0)
    made = [{"up": torch.randn(96, 64).to(dtype), "down": torch.randn(64, 96).to(dtype), "bias": torch.ones(4)}]
    for number in range(1, count):
        after = {name: tensor.clone() for name, tensor in made[-1].items()}
        for name in ("up", "down"):
            after[name].view(-1)[number::50] *= 1.5
        made.append(after)
    return made


def module(dtype: Any = torch.bfloat16) -> Any:
    made = torch.nn.Module()
    for name, tensor in versions(1)[0].items():
        made.register_parameter(name, torch.nn.Parameter(torch.zeros(tensor.shape, dtype=dtype)))
    return made


def has(module: Any, tensors: dict[str, Any]) -> bool:
    return all(torch.equal(value, tensors[name].to(value.dtype)) for name, value in module.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_module_gets_the_elements_that_moved_and_nothing_else(queue: tq.Queue, dtype: Any) -> None:
    channel, made, published = queue.weights("policy"), module(dtype), versions(4)
    loader = ModuleLoader(made)
    updater = WeightUpdater(queue, "policy", lambda source, version: loader.load(source))
    for number in (0, 1):
        channel.publish(number, published[number])
        assert updater.follow()
        assert has(made, published[number])
    made.up.data.view(-1)[0] = made.bias.data[0] = 7.0  # what no version after this one moves
    for number in (2, 3):
        channel.publish(number, published[number])
    assert updater.follow()
    assert (made.up.data.view(-1)[0], made.bias.data[0]) == (7.0, 7.0)
    made.up.data.view(-1)[0], made.bias.data[0] = published[3]["up"].view(-1)[0], 1.0
    assert has(made, published[3])


def test_weights_from_elsewhere_are_copied_whole_and_so_is_the_version_after_them(queue: tq.Queue) -> None:
    channel, made, published = queue.weights("policy", keep=4), module(), versions(3)
    loader = ModuleLoader(made)
    updater = WeightUpdater(queue, "policy", lambda source, version: loader.load(source))
    channel.publish(0, published[0])
    updater.follow()
    loader.load(TensorWeights({name: torch.zeros_like(tensor) for name, tensor in published[0].items()}))
    channel.publish(1, published[1])
    updater.follow()
    assert has(made, published[1])
    updater.apply(updater.pull(version=0))  # back to an older one, which no difference leads to
    assert (updater.version, has(made, published[0])) == (0, True)
    channel.publish(2, published[2])
    updater.follow()
    assert has(made, published[2])


def test_a_load_that_fails_is_followed_by_a_whole_one(queue: tq.Queue) -> None:
    channel, made, published = queue.weights("policy"), module(), versions(3)
    loader, fails = ModuleLoader(made), [False, True, False]

    def update(source: ChannelWeights, version: int) -> None:
        loader.load(source)
        if fails[version]:
            made.down.data.zero_()
            loader.load(Broken(source))

    updater = WeightUpdater(queue, "policy", update)
    channel.publish(0, published[0])
    updater.follow()
    channel.publish(1, published[1])
    with pytest.raises(OSError, match="no memory"):
        updater.follow()
    channel.publish(2, published[2])
    assert updater.follow()
    assert (updater.version, has(made, published[2])) == (2, True)


class Broken(TensorWeights):
    """Weights that end with an error."""

    def __init__(self, source: ChannelWeights) -> None:
        super().__init__(source._tensors)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        raise OSError("no memory")


def test_for_an_engine_that_reads_the_channel_itself_one_tensor_is_pulled(queue: tq.Queue) -> None:
    channel, published = queue.weights("policy"), versions(2)
    sources: list[ChannelWeights] = []
    updater = WeightUpdater(queue, "policy", lambda source, version: sources.append(source), reads_channel=True)  # type: ignore[arg-type]
    for number in (0, 1):
        channel.publish(number, published[number])
        assert updater.follow()
    assert sources[1].place == (queue.address, "policy", 1)
    assert sources[1].metadata().keys() == published[1].keys()
    with pytest.raises(tq.UsageError, match='version 1 of channel "policy" is here without down, up; pull all of it'):
        dict(sources[1])


def test_an_engine_that_finds_its_version_gone_gets_the_newest(queue: tq.Queue) -> None:
    """As engines that read the channel themselves: the trainer publishes while one is about to."""
    channel, published = queue.weights("policy", keep=1), versions(1)[0]
    asked = list[int]()

    def update(source: Any, version: int) -> None:
        asked.append(version)
        if len(asked) == 1:
            channel.publish(version + 1, published)
        with channel.pull(version=version, timeout_s=0):
            pass

    updater = WeightUpdater(queue, "policy", update, reads_channel=True)
    channel.publish(0, published)
    assert updater.follow()
    assert (asked, updater.version) == ([0, 1], 1)
    assert not updater.newer(timeout_s=0)
    channel.publish(2, published)
    assert updater.newer(timeout_s=0)
    assert updater.version == 1


def test_an_error_that_is_not_of_a_version_that_is_gone_is_raised(queue: tq.Queue) -> None:
    def update(source: Any, version: int) -> None:
        channel.publish(version + 1, versions(1)[0])
        raise RuntimeError("out of memory")

    channel = queue.weights("policy", keep=2)
    updater = WeightUpdater(queue, "policy", update, reads_channel=True)
    channel.publish(0, versions(1)[0])
    with pytest.raises(RuntimeError, match="out of memory"):
        updater.follow()
    assert updater.version == -1


# ---------------------------------------------------------------- adapters


def adapted(rank: int = 2) -> Any:
    """A model of two linear layers, of which one has an adapter that was trained."""
    torch.manual_seed(1)
    made = torch.nn.ModuleDict({"up": torch.nn.Linear(64, 96), "head": torch.nn.Linear(96, 8)}).to(torch.bfloat16)
    add_lora(made, rank=rank, alpha=4.0, targets=["up"], dtype=torch.float32)
    torch.nn.init.normal_(made["up"].lora_b)
    return made


def plain() -> Any:
    return torch.nn.ModuleDict({"up": torch.nn.Linear(64, 96), "head": torch.nn.Linear(96, 8)}).to(torch.bfloat16)


def test_the_adapter_alone_travels_and_is_merged_where_it_is_read(queue: tq.Queue) -> None:
    channel, trained, served = queue.weights("policy"), adapted(), plain()
    loader, copy = ModuleLoader(served), HostCopy(torch.bfloat16)
    changed: list[list[str]] = []

    def update(source: ChannelWeights, version: int) -> None:
        changed.append(source.changed())
        loader.check(source)
        loader.load(source)

    updater = WeightUpdater(queue, "policy", update)
    written = []
    for version in range(3):
        written.append(channel.publish(version, copy.take(AdapterWeights(trained))))
        assert updater.follow()
        assert has(served, dict(published_weights(trained))), "bit by bit what the trainer would have merged"
        trained["up"].lora_a.data += 0.125
    base = sum(tensor.nbytes for tensor in served.state_dict().values())
    adapters = 4 * (2 * 64 + 96 * 2)
    assert written[0] >= base + adapters
    assert 0 < written[1] <= adapters
    assert changed == [[*served.state_dict()], ["up.weight"], ["up.weight"]]


def test_a_layer_that_loses_its_adapter_gets_its_weight_alone_and_one_that_gains_it_the_product(
    queue: tq.Queue,
) -> None:
    channel, both, served = queue.weights("policy"), plain(), plain()
    add_lora(both, rank=2, targets=["up", "head"])
    torch.nn.init.normal_(both["up"].lora_b)
    torch.nn.init.normal_(both["head"].lora_b)
    all_of, changed, loader = dict(AdapterWeights(both)), list[list[str]](), ModuleLoader(served)

    def update(source: ChannelWeights, version: int) -> None:
        changed.append(source.changed())
        loader.load(source)

    updater = WeightUpdater(queue, "policy", update)
    merged = dict(published_weights(both))
    base = {name: all_of[name] for name in merged}
    up_alone = {name: tensor for name, tensor in all_of.items() if not name.startswith("head.lora")}
    for version, tensors, wanted in (
        (0, all_of, merged),
        (1, up_alone, merged | {"head.weight": base["head.weight"]}),
        (2, base, base),
        (3, all_of, merged),
        (4, base, base),
    ):
        channel.publish(version, tensors)
        assert updater.follow()
        assert has(served, wanted), version
    weights = ["up.weight", "head.weight"]
    assert [sorted(names) for names in changed[1:]] == [
        ["head.weight"],
        ["up.weight"],
        sorted(weights),
        sorted(weights),
    ]


def test_two_sizes_of_an_adapter_and_a_scale_are_merged(queue: tq.Queue) -> None:
    channel, trained, served = queue.weights("policy"), adapted(), plain()
    loader = ModuleLoader(served)
    updater = WeightUpdater(queue, "policy", lambda source, version: loader.load(source))
    tensors = dict(AdapterWeights(trained))
    channel.publish(0, tensors)
    updater.follow()
    channel.publish(1, tensors | {"lora_scale": torch.tensor(8.0)})
    updater.follow()
    trained["up"].lora_scale = 8.0
    assert has(served, dict(published_weights(trained)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"up.lora_a": (2, 60)},
            r'layer "up" has A \(2, 60\) and B \(96, 2\); for a weight \(96, 64\) .* \(2, 64\) and',
        ),
        ({"up.lora_b": (96, 3)}, r"A \(2, 64\) and B \(96, 3\); for a weight \(96, 64\) and rank 2 they are"),
        ({"up.lora_b": None}, 'layer "up" has an adapter and no tensor "up.lora_b"'),
        ({"down.lora_a": (2, 4), "down.lora_b": (4, 2)}, 'layer "down" has an adapter and no tensor "down.weight"'),
        ({"lora_scale": None}, 'adapters without tensor "lora_scale"'),
    ],
)
def test_adapters_that_do_not_fit_their_weights_are_refused(
    change: dict[str, Any], words: str, queue: tq.Queue
) -> None:
    channel, served = queue.weights("policy"), plain()
    before = {name: tensor.clone() for name, tensor in served.state_dict().items()}
    tensors: dict[str, Any] = dict(AdapterWeights(adapted()))
    for name, shape in change.items():
        tensors.pop(name, None)
        tensors |= {} if shape is None else {name: torch.zeros(shape)}
    channel.publish(0, tensors)
    updater = WeightUpdater(queue, "policy", lambda source, version: ModuleLoader(served).load(source))
    with pytest.raises(tq.SchemaError, match=words):
        updater.follow()
    assert has(served, before)


def test_layers_are_loaded_whole() -> None:
    names = ["embed.weight", "layers.0.q.weight", "layers.0.k.weight", "layers.10.q.weight", "norm.weight", "norm.bias"]
    assert in_layers_of(["layers.0.k.weight", "norm.bias"], names) == [*names[1:3], *names[4:]]
    assert in_layers_of([], names) == []
