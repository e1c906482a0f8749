"""Versions that are forwarded in parts: what a relay publishes, what a reader gets, and what remains when a version is
given up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from typing import Any, Final

import numpy as np
import pytest

import transferqueue as tq
from tests.client.deployments import served
from tests.client.test_remote import Between
from tests.scale import only_long
from tests.weights.relays import GENEROUS_S, MIB, TENSORS, Crossed, channel_bytes, model, until
from tests.weights.republished import republish
from transferqueue.client.operations.publish import begin_open_version
from transferqueue.client.session.operation_runner import run_sync
from transferqueue.weights import RelayProcess, WeightRelay, relay, relay_publish
from transferqueue.weights.relay_publish import ComingVersion, RelayPublisher
from transferqueue.wire import messages as m

COUNTER: Final = count()
NAMES: Final = [f"w{at}" for at in range(TENSORS)]


class Sender:
    """A session that publishes a version part by part, as a relay does."""

    def __init__(self, queue: tq.Queue, version: int, name: str = "policy", **changed: int) -> None:
        self.channel, self.version, self.tensors, self.parts = queue.weights(name), version, model(**changed), 0
        begin = begin_open_version(name, version, GENEROUS_S)
        self.pending = run_sync(self.channel._client.connection, begin)

    def part(self, *names: str) -> None:
        """Publish these tensors."""
        self.parts += 1
        self._publish(names, self.parts)

    def last(self, *names: str) -> None:
        """Publish these tensors, and with them the version."""
        self._publish(names, 0)

    def _publish(self, names: tuple[str, ...], part: int) -> None:
        tensors = {name: self.tensors[name] for name in names}
        self.channel.publish(self.version, tensors, pending=self.pending, part=part)


def right(weights: tq.Weights, **changed: int) -> bool:
    sent = model(**changed)
    return weights.keys() == sent.keys() and all(np.array_equal(weights.numpy()[name], sent[name]) for name in sent)


def written(weights: tq.Weights) -> set[int]:
    """Numbers of the blocks, which a server counts from 1."""
    return {tensor.block.block for tensor in weights._tensors.values()}


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture
def hosts() -> Iterator[tuple[tq.Queue, tq.Queue]]:
    with tq.connect() as source, tq.connect(arena_bytes="64MiB") as here:
        yield source, here


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize("part_bytes", [0, -1, 1.5, "4MiB"])
def test_what_is_no_number_of_bytes_is_refused(part_bytes: Any, hosts: tuple[tq.Queue, tq.Queue]) -> None:
    with pytest.raises(tq.UsageError, match="part_bytes="):
        WeightRelay(*hosts, "policy", part_bytes=part_bytes)
    with pytest.raises(tq.UsageError, match="part_bytes="):
        RelayProcess(["ipc:///a"], "ipc:///b", "policy", part_bytes=part_bytes, tell=print)


# ---------------------------------------------------------------- what a relay publishes


@pytest.mark.parametrize("part_bytes", [1, 3 * MIB, *only_long(MIB, 1 << 40)])
def test_a_version_arrives_whole_in_parts_of_any_size(part_bytes: int, hosts: tuple[tq.Queue, tq.Queue]) -> None:
    source, here = hosts
    channel = source.weights("policy")
    with WeightRelay(source, here, "policy", part_bytes=part_bytes) as carrier:
        for version, changed in enumerate(({}, {"w3": 100}, {}, {f"w{at}": 200 + at for at in range(TENSORS)})):
            channel.publish(version, model(**changed))
            assert carrier.carry() == version
            with here.weights("policy").pull(timeout_s=0) as weights:
                assert weights.version == version
                assert right(weights, **changed)
    assert here.stats().channels["policy"].kept == [2, 3]


def test_slices_and_adapters_are_forwarded(hosts: tuple[tq.Queue, tq.Queue]) -> None:
    source, here = hosts
    whole, channel = np.arange(4096, dtype=np.float32).reshape(64, 64), source.weights("policy")
    with tq.connect(source.address) as other, WeightRelay(source, here, "policy", part_bytes=1) as carrier:
        pending = channel.begin(1, parts=2)
        other.weights("policy").publish(1, {"w": tq.WeightSlice(whole[40:], 40, 64)}, pending=pending, part=1)
        channel.publish(1, {"w": tq.WeightSlice(whole[:40], 0, 64), "v": whole}, pending=pending)
        channel.publish(2, {"a": whole[:2]}, adapter="style")
        assert carrier.carry() == 2
    with here.weights("policy").pull(timeout_s=0) as weights:
        np.testing.assert_array_equal(weights.numpy()["w"], whole)
        np.testing.assert_array_equal(weights.numpy("style")["a"], whole[:2])
    with here.weights("policy").pull(only={"w": range(42, 50)}, timeout_s=0) as weights:
        np.testing.assert_array_equal(weights.numpy()["w"], whole[42:50])


def test_what_is_left_when_there_may_be_no_more_parts_comes_with_the_last(
    monkeypatch: pytest.MonkeyPatch, hosts: tuple[tq.Queue, tq.Queue], pool: ThreadPoolExecutor
) -> None:
    monkeypatch.setattr(relay_publish, "VERSION_PARTS_MAX", 4)
    source, here = hosts
    source.weights("policy").publish(1, model())
    with tq.connect(source.address) as sending, WeightRelay(source, here, "policy", part_bytes=1) as carrier:
        assert carrier.carry() == 1
        sender = Sender(sending, 2, **dict.fromkeys(NAMES, 9))
        carried = pool.submit(carrier.carry)
        for name in NAMES[:-1]:
            sender.part(name)
        sender.last(NAMES[-1])
        assert carried.result(GENEROUS_S) == 2
    with here.weights("policy").pull(timeout_s=0) as weights:
        assert right(weights, **dict.fromkeys(NAMES, 9))


def test_parts_grow_with_what_has_come(hosts: tuple[tq.Queue, tq.Queue]) -> None:
    blocks = [m.BlockLocation(number, 0, 1, 0, 1, 1, ["w"], [0]) for number in range(100_000)]
    lengths = [len(part) for part in RelayPublisher(hosts[1].weights("policy"), 4)._cut(ComingVersion(1), blocks)]
    assert lengths[:100] == [4] * 100
    assert sum(lengths) == len(blocks)
    assert len(lengths) < 1000
    assert all(length <= 4 + sum(lengths[:at]) // 128 for at, length in enumerate(lengths))


# ---------------------------------------------------------------- a source that publishes in parts


def test_a_part_is_published_here_before_the_next_has_come(
    hosts: tuple[tq.Queue, tq.Queue], pool: ThreadPoolExecutor
) -> None:
    source, here = hosts
    with tq.connect(source.address) as sending, WeightRelay(source, here, "policy") as carrier:
        sender = Sender(sending, 1)
        carried = pool.submit(carrier.carry)
        for parts, name in enumerate(NAMES[:-1], 1):
            sender.part(name)
            until(lambda parts=parts: channel_bytes(here) >= parts * MIB)
            assert not carried.done()
            with pytest.raises(
                tq.DeadlineExceeded, match=rf"version 1 .* is on its way: parts that have come: {parts}"
            ):
                here.weights("policy").pull(timeout_s=0)
        sender.last(NAMES[-1])
        assert carried.result(GENEROUS_S) == 1
    with here.weights("policy").pull(timeout_s=0) as weights:
        assert right(weights)


def test_a_version_that_the_source_gives_up_frees_its_memory_and_the_next_comes(
    hosts: tuple[tq.Queue, tq.Queue], pool: ThreadPoolExecutor
) -> None:
    source, here = hosts
    with WeightRelay(source, here, "policy") as carrier:
        with tq.connect(source.address, label="trainer") as sending:
            carried = pool.submit(carrier.carry)
            Sender(sending, 1).part("w0", "w1")
            until(lambda: channel_bytes(here) == 2 * MIB)
        with pytest.raises(tq.VersionGivenUp, match="trainer, which began it, is gone"):
            carried.result(GENEROUS_S)
        source.weights("policy").publish(2, model(w0=50))
        assert carrier.carry() == 2
        assert channel_bytes(here) == TENSORS * MIB
    with here.weights("policy").pull(timeout_s=0) as weights:
        assert right(weights, w0=50)


def test_what_came_from_one_source_is_not_fetched_from_the_next(
    monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor
) -> None:
    monkeypatch.setattr(relay, "AGAIN_S", 0.01)
    lines: list[str] = []
    told = threading.Event()

    def tell(line: str) -> None:
        lines.append(line)
        if "version 1 is here" in line:
            told.set()

    with tq.connect() as first, tq.connect() as second, tq.connect(arena_bytes="64MiB") as here:
        process = RelayProcess([first.address, second.address], here.address, "policy", tell=tell)
        running = pool.submit(process.run)
        with tq.connect(first.address) as sending:
            Sender(sending, 1).part(*NAMES[:5])
            until(lambda: channel_bytes(here) == 5 * MIB)
            second.weights("policy").publish(1, model())
        assert told.wait(GENEROUS_S)
        assert "was given up" in lines[0]
        with here.weights("policy").pull(timeout_s=0) as weights:
            assert right(weights)
            assert written(weights) == set(range(1, TENSORS + 1)), "each tensor was written once"
        process.stop()
        running.result(GENEROUS_S)


def test_other_bytes_under_the_same_number_end_what_was_on_its_way(
    hosts: tuple[tq.Queue, tq.Queue], pool: ThreadPoolExecutor
) -> None:
    source, here = hosts
    with WeightRelay(source, here, "policy") as carrier:
        with tq.connect(source.address) as sending:
            carried = pool.submit(carrier.carry)
            Sender(sending, 1, w0=77).part("w0", "w1")
            until(lambda: channel_bytes(here) == 2 * MIB)
        with pytest.raises(tq.VersionGivenUp):
            carried.result(GENEROUS_S)
        source.weights("policy").publish(1, model())
        assert carrier.carry() == 1
    with here.weights("policy").pull(timeout_s=0) as weights:
        assert right(weights)
    assert channel_bytes(here) == TENSORS * MIB


def test_a_relay_that_is_closed_leaves_nothing_of_what_was_on_its_way(hosts: tuple[tq.Queue, tq.Queue]) -> None:
    source, here = hosts
    Sender(source, 1).part("w0")
    with WeightRelay(source, here, "policy") as carrier:
        with pytest.raises(tq.DeadlineExceeded, match=r"version 1 .* is on its way"):
            carrier.carry(wait_s=0.05)
        assert channel_bytes(here) == MIB
    until(lambda: channel_bytes(here) == 0)


def test_a_relay_goes_on_after_its_deadline_with_what_has_come(hosts: tuple[tq.Queue, tq.Queue]) -> None:
    source, here = hosts
    sender = Sender(source, 1)
    sender.part("w0", "w1")
    with WeightRelay(source, here, "policy") as carrier:
        with pytest.raises(tq.DeadlineExceeded, match=r"version 1 .* is on its way"):
            carrier.carry(wait_s=0.05)
        assert channel_bytes(here) == 2 * MIB
        sender.last(*NAMES[2:])
        assert carrier.carry() == 1
        with here.weights("policy").pull(timeout_s=0) as weights:
            assert right(weights)
            assert written(weights) == set(range(1, TENSORS + 1)), "each tensor was written once"


def test_what_was_damaged_is_not_published_here(hosts: tuple[tq.Queue, tq.Queue]) -> None:
    source, here = hosts
    source.weights("policy").publish(1, model())
    with tq.connect() as between:
        with source.weights("policy").pull() as weights:
            weights.numpy()["w7"][3] ^= 1  # a view of this process alone
            republish(between.weights("policy"), weights)
        with WeightRelay(between, here, "policy", part_bytes=1) as carrier:
            with pytest.raises(tq.Corruption, match='tensor "_w7" of version 1'):
                carrier.carry()
            assert channel_bytes(here) == (TENSORS - 1) * MIB, "the others are here, and the version is not"
            with pytest.raises(tq.DeadlineExceeded, match="nothing was published yet"):
                here.weights("policy").pull(timeout_s=0)
            between.weights("policy").publish(2, model(w7=70))
            assert carrier.carry() == 2
    with here.weights("policy").pull(timeout_s=0) as weights:
        assert right(weights, w7=70)


def test_a_version_for_which_there_is_no_memory_leaves_nothing() -> None:
    with tq.connect() as source, tq.connect(arena_bytes="5MiB") as here:
        source.weights("policy").publish(1, model())
        with WeightRelay(source, here, "policy", part_bytes=MIB) as carrier:
            with pytest.raises(tq.DeadlineExceeded, match="no extent of 1,048,576 bytes is free"):
                carrier.carry(timeout_s=0.05)
            until(lambda: channel_bytes(here) == 0)
            source.weights("policy").publish(2, {"w": np.zeros(MIB, np.uint8)})
            assert carrier.carry(timeout_s=GENEROUS_S) == 2


# ---------------------------------------------------------------- a reader across a network


class Far:
    """A channel of a server, and `reader`, whose bytes cross a link that counts them."""

    def __init__(self, near: tq.Queue, between: Between) -> None:
        self.crossed = between.control.meddle = between.bulk.meddle = Crossed()
        self.near, self.name = near, f"policy{next(COUNTER)}"
        self.reader = tq.connect(between.control.address, data="remote")

    def send(self, version: int, **changed: int) -> Sender:
        """Begin a version."""
        return Sender(self.near, version, self.name, **changed)


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[tq.Queue, Between]]:
    with served(tmp_path_factory.mktemp("s")) as server, Between(server) as between, tq.connect(server.ipc) as near:
        yield near, between


@pytest.fixture
def far(link: tuple[tq.Queue, Between]) -> Iterator[Far]:
    found = Far(*link)
    with found.reader:
        yield found


def pulling(pool: ThreadPoolExecutor, far: Far, **terms: Any) -> Future[tq.Weights]:
    return pool.submit(far.reader.weights(far.name).pull, timeout_s=GENEROUS_S, **terms)


def test_a_reader_has_parts_before_the_version_is_published_and_each_crosses_once(
    far: Far, pool: ThreadPoolExecutor
) -> None:
    sender = far.send(1)
    pulled = pulling(pool, far)
    for parts, name in enumerate(NAMES[:-1], 1):
        sender.part(name)
        far.crossed.reached(parts * MIB)
        assert not pulled.done()
    sender.last(NAMES[-1])
    with pulled.result(GENEROUS_S) as weights:
        assert right(weights)
        assert weights.changed() == set(NAMES)
    assert TENSORS * MIB < far.crossed.bytes < 1.05 * TENSORS * MIB


def test_a_reader_takes_only_what_it_wants_and_does_not_hold(far: Far, pool: ThreadPoolExecutor) -> None:
    far.near.weights(far.name).publish(1, model())
    held = pulling(pool, far).result(GENEROUS_S)
    before = far.crossed.bytes
    sender = far.send(2, w1=71, w2=72)
    pulled = pulling(pool, far, above=1, since=held, only=["w0", "w1"])
    sender.part(*NAMES[:3])
    far.crossed.reached(before + MIB)
    sender.last(*NAMES[3:])
    with pulled.result(GENEROUS_S) as weights:
        assert weights.keys() == {"w0", "w1"}
        assert weights.changed() == {"w1"}
        assert np.array_equal(weights.numpy()["w1"], model(w1=71)["w1"])
    assert far.crossed.bytes - before < 1.2 * MIB


def test_a_version_that_is_given_up_is_not_seen_and_the_next_one_takes_what_came(
    far: Far, pool: ThreadPoolExecutor
) -> None:
    pulled = pulling(pool, far)
    with tq.connect(far.near.address) as sending:
        Sender(sending, 1, far.name).part(*NAMES[:5])
        far.crossed.reached(5 * MIB)
    again = far.send(1)  # the next relay begins the same version
    again.part(*NAMES[:2])
    again.part(*NAMES[2:6])
    again.last(*NAMES[6:])
    with pulled.result(GENEROUS_S) as weights:
        assert right(weights)
    assert far.crossed.bytes < 1.05 * TENSORS * MIB


def test_a_version_that_is_superseded_is_not_mixed_with_the_newer(far: Far, pool: ThreadPoolExecutor) -> None:
    pulled = pulling(pool, far)
    far.send(1, w0=90, w1=91).part(*NAMES[:4])
    far.crossed.reached(4 * MIB)
    newer = far.send(2)
    newer.part("w0")
    newer.last(*NAMES[1:])
    with pulled.result(GENEROUS_S) as weights:
        assert weights.version == 2
        assert right(weights)


def test_the_wait_for_a_version_ends_at_its_deadline_whatever_came(far: Far, pool: ThreadPoolExecutor) -> None:
    pulled = pool.submit(far.reader.weights(far.name).pull, timeout_s=0.5)
    far.send(1).part("w0")
    with pytest.raises(tq.DeadlineExceeded, match=r"version 1 .* is on its way: parts that have come: 1"):
        pulled.result(GENEROUS_S)
