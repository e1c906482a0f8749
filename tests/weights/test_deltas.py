"""Versions as differences: what is written, what crosses, and that what is read is bit by bit what was published."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import transferqueue as tq
from tests.client.deployments import in_this_process, served
from tests.client.test_remote import Between
from tests.scale import sizes
from tests.weights.relays import GENEROUS_S, Crossed
from transferqueue.weights import WeightRelay
from transferqueue.wire import messages as m

Model = dict[str, NDArray[Any]]
SHAPES = {"embed": (512, 96), "up": (96, 200), "down": (200, 96), "experts": (4, 48, 64), "norm": (96,)}
WHOLE = sum(2 * int(np.prod(shape)) for shape in SHAPES.values())


def model(seed: int = 0) -> Model:
    """Weights of two bytes."""
    rng = np.random.default_rng(seed)
    return {name: rng.integers(0, 1 << 15, shape).astype(np.int16) for name, shape in SHAPES.items()}


def stepped(weights: Model, seed: int, share: float = 0.02) -> Model:
    """The weights after a step that moves this share of them by one."""
    rng = np.random.default_rng(seed)
    return {
        name: value + (rng.random(value.shape) < share).astype(np.int16) * rng.choice([1, -1], value.shape).astype("i2")
        for name, value in weights.items()
    }


def steps(count: int, share: float = 0.02) -> list[Model]:
    found = [model()]
    while len(found) < count:
        found.append(stepped(found[-1], len(found), share))
    return found


def same(weights: tq.Weights, sent: Model) -> bool:
    found = weights.numpy()
    return found.keys() == sent.keys() and all(found[name].tobytes() == sent[name].tobytes() for name in sent)


def figures(queue: tq.Queue) -> Any:
    return queue.stats().channels["policy"]


@pytest.fixture
def queue() -> Iterator[tq.Queue]:
    with tq.connect(arena_bytes="64MiB") as queue:
        yield queue


@pytest.fixture
def other(queue: tq.Queue) -> Iterator[tq.Queue]:
    with tq.connect(queue.address) as other:
        yield other


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize("deltas", [-1, 33, 1.5, "2"])
def test_a_number_of_differences_out_of_range_is_refused(deltas: Any, queue: tq.Queue) -> None:
    with pytest.raises(tq.UsageError, match="deltas="):
        queue.weights("policy", deltas=deltas)


# ---------------------------------------------------------------- what is written


def test_a_step_is_written_as_a_difference_and_each_reader_has_what_was_published(
    queue: tq.Queue, other: tq.Queue
) -> None:
    channel, late = queue.weights("policy"), other.weights("policy")
    with late.subscribe() as follower:
        for version, sent in enumerate(steps(12)):
            written = channel.publish(version, sent)
            assert written == WHOLE if not version else 0 < written < 0.05 * WHOLE
            assert same(follower.pull(timeout_s=0), sent)
            with late.pull(timeout_s=0) as weights:
                assert same(weights, sent)
    assert figures(queue).deltas == 4 * 11, "the norm is too small for a difference"
    assert figures(queue).deltas_refused == 0


def test_after_a_publication_that_failed_the_next_one_is_a_difference_to_what_is_published(queue: tq.Queue) -> None:
    channel, versions = queue.weights("policy"), steps(4)
    channel.publish(0, versions[0])
    channel.publish(1, versions[1])
    with pytest.raises(tq.UsageError, match="version 1"):
        channel.publish(1, versions[2])
    assert channel.publish(2, versions[3]) < 0.08 * WHOLE
    with channel.pull(timeout_s=0) as weights:
        assert same(weights, versions[3])


def test_tensors_with_gaps_and_padding_are_differences_too(queue: tq.Queue) -> None:
    channel, sent = queue.weights("policy"), {"w": np.zeros((100, 301), np.int16)}
    for version in range(4):
        every_third = {"w": sent["w"][:, ::3]}
        written = channel.publish(version, every_third)
        assert not version or written < 0.05 * every_third["w"].nbytes
        with channel.pull(timeout_s=0) as weights:
            assert np.array_equal(weights.numpy()["w"], every_third["w"])
        sent["w"][version::20, ::9] += 1


def test_what_changed_nearly_everywhere_is_written_whole(queue: tq.Queue) -> None:
    channel, sent = queue.weights("policy"), model()
    for version in range(4):
        assert channel.publish(version, sent) == WHOLE
        sent = {name: value + 1 for name, value in sent.items()}
    assert figures(queue).deltas == 0


def test_differences_are_bounded_and_a_version_holds_at_most_twice_its_bytes(queue: tq.Queue) -> None:
    channel = queue.weights("policy", keep=1, deltas=3)
    for version, sent in enumerate(steps(24, 0.3)):
        channel.publish(version, sent)
        assert figures(queue).deltas <= 3 * 4
        assert figures(queue).bytes <= 2 * WHOLE
        with channel.pull(timeout_s=0) as weights:
            assert same(weights, sent)


def test_without_differences_a_reader_views_what_lies_in_shared_memory(queue: tq.Queue) -> None:
    channel = queue.weights("policy", deltas=0)
    for version, sent in enumerate(steps(3)):
        assert channel.publish(version, sent) == WHOLE
    assert figures(queue).deltas == 0


def test_another_session_publishes_whole_and_then_differences(queue: tq.Queue, other: tq.Queue) -> None:
    versions = steps(5)
    for version, sent in enumerate(versions[:3]):
        queue.weights("policy").publish(version, sent)
    assert other.weights("policy").publish(3, versions[3]) == WHOLE, "as a trainer that was started again"
    assert other.weights("policy").publish(4, versions[4]) < 0.05 * WHOLE
    with queue.weights("policy").pull(timeout_s=0) as weights:
        assert same(weights, versions[4])


def test_ranks_publish_differences_of_their_shards(queue: tq.Queue, other: tq.Queue) -> None:
    one, two = queue.weights("policy"), other.weights("policy")
    for version, sent in enumerate(steps(6)):
        whole = sent["embed"]
        pending = one.begin(version, parts=2)
        second = {"embed": tq.WeightSlice(whole[200:], 200, 512), "up": sent["up"]}
        written = two.publish(version, second, pending=pending, part=1)
        rest = {name: sent[name] for name in ("down", "experts", "norm")}
        written += one.publish(version, {"embed": tq.WeightSlice(whole[:200], 0, 512)} | rest, pending=pending)
        assert written == WHOLE if not version else written < 0.05 * WHOLE
        with one.pull(timeout_s=0) as weights:
            assert same(weights, sent)
        with two.pull(only={"embed": range(150, 300), "up": tq.Slice(None, tq.Share(1, 4))}, timeout_s=0) as part:
            assert np.array_equal(part.numpy()["embed"], whole[150:300])
            assert np.array_equal(part.numpy()["up"], sent["up"][:, 50:100])


def test_an_adapter_is_a_difference_too_and_its_base_stays(queue: tq.Queue) -> None:
    channel, base = queue.weights("policy"), model()
    channel.publish(0, base)
    for version, adapter in enumerate(steps(6), 1):
        written = channel.publish(version, {"lora_A": adapter["embed"]}, adapter="style")
        assert version == 1 or written < 0.05 * adapter["embed"].nbytes
        with channel.pull(timeout_s=0) as weights:
            assert same(weights, base)
            assert np.array_equal(weights.numpy("style")["lora_A"], adapter["embed"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn", "int8", "complex128"])
def test_elements_of_any_type_come_bit_by_bit(dtype: str, queue: tq.Queue) -> None:
    torch = pytest.importorskip("torch", exc_type=ImportError)
    sent = torch.randn(64, 130).to(getattr(torch, dtype))
    channel = queue.weights("policy")
    for version in range(4):
        channel.publish(version, {"w": sent})
        with channel.pull(timeout_s=0) as weights, channel.pull(only={"w": tq.Slice((3, 9), (4, 101))}) as part:
            assert torch.equal(weights["w"].view(torch.uint8), sent.view(torch.uint8))
            assert torch.equal(
                part["w"].contiguous().view(torch.uint8), sent[3:9, 4:101].contiguous().view(torch.uint8)
            )
        sent = sent.clone()
        sent.view(torch.uint8)[version, ::40] ^= 0x81  # signs, exponents and NaN as they come
    assert figures(queue).deltas > 0


# ---------------------------------------------------------------- across a network


def test_a_follower_across_a_network_is_sent_what_changed(tmp_path: Path) -> None:
    versions = steps(9)
    with served(tmp_path) as server, Between(server) as between, tq.connect(server.ipc) as trainer:
        between.bulk.meddle = crossed = Crossed()
        channel = trainer.weights("policy", deltas=3)  # so that whole tensors are written meanwhile
        with tq.connect(between.control.address, data="remote") as reader:
            held = None
            for version, sent in enumerate(versions):
                channel.publish(version, sent)
                before = crossed.bytes
                weights = reader.weights("policy").pull(above=version - 1, since=held, timeout_s=GENEROUS_S)
                assert same(weights, sent)
                if held is not None:
                    assert crossed.bytes - before < 0.06 * WHOLE
                    held.release()
                held = weights
            share = tq.Slice(None, tq.Share(0, 4))
            with reader.weights("policy").pull(only={"up": share}, timeout_s=GENEROUS_S) as part:
                assert np.array_equal(part.numpy()["up"], versions[-1]["up"][:, :50])


def test_a_reader_of_a_part_is_sent_the_sections_of_a_difference_that_have_it(tmp_path: Path) -> None:
    parts = {
        "rows": tq.Slice(tq.Share(1, 4)),
        "few": tq.Slice((700, 701), (3, 9)),
        "columns": tq.Slice(None, tq.Share(1, 4)),
        "all": None,
    }
    shares = {"rows": 0.3, "few": 0.3, "columns": 1.1, "all": 1.1}
    with served(tmp_path) as server, Between(server) as between, tq.connect(server.ipc) as trainer:
        between.bulk.meddle = crossed = Crossed()
        sent = np.zeros((2048, 1024), np.int16)
        trainer.weights("policy").publish(0, {"w": sent})
        with tq.connect(between.control.address, data="remote") as reader:
            channel = reader.weights("policy")
            held = {name: channel.pull(only={"w": part}, timeout_s=GENEROUS_S) for name, part in parts.items()}
            for version in range(1, 3):
                sent += np.random.default_rng(version).random(sent.shape) < 0.02
                written = trainer.weights("policy").publish(version, {"w": sent})
                for name, part in parts.items():
                    before = crossed.bytes
                    found = channel.pull(only={"w": part}, since=held[name], timeout_s=GENEROUS_S)
                    assert crossed.bytes - before < shares[name] * written
                    bounds = {"rows": np.s_[512:1024], "few": np.s_[700:701, 3:9], "columns": np.s_[:, 256:512]}
                    assert np.array_equal(found.numpy()["w"], sent[bounds.get(name, np.s_[:])])
                    held[name].release()
                    held[name] = found
        assert figures(trainer).deltas_refused == 0


@pytest.mark.parametrize("part_bytes", [1, 4 << 20])
def test_relays_forward_differences_and_make_whole_tensors_themselves(part_bytes: int) -> None:
    with tq.connect() as origin, tq.connect() as middle, tq.connect() as end:
        first = WeightRelay(origin, middle, "policy", part_bytes=part_bytes)
        second = WeightRelay(middle, end, "policy", part_bytes=part_bytes)
        first._publisher._here._kept = first._publisher._here._kept._replace(deltas=2)
        with first, second:
            for version, sent in enumerate(steps(10)):
                origin.weights("policy").publish(version, sent)
                assert (first.carry(), second.carry()) == (version, version)
                for host in (middle, end):
                    with host.weights("policy").pull(timeout_s=0) as weights:
                        assert same(weights, sent)
            assert figures(middle).deltas <= 2 * 4
            assert figures(end).deltas == 4 * 9, "it was sent differences alone"


@pytest.mark.slow
@pytest.mark.parametrize("versions", sizes(40, 200))
def test_versions_through_two_relays_are_what_was_published(versions: int) -> None:
    """Readers that follow, that are slow, and that come late; differences that are dropped on any host; steps of any
    size."""
    rng = np.random.default_rng(versions)
    with tq.connect() as origin, tq.connect() as middle, tq.connect() as end:
        hosts, sent = [origin, middle, end], model()
        with (
            WeightRelay(origin, middle, "policy", part_bytes=1 << 14) as first,
            WeightRelay(middle, end, "policy") as second,
        ):
            following = [host.weights("policy").subscribe() for host in hosts]
            slow = end.weights("policy").subscribe()
            for version in range(versions):
                origin.weights("policy", deltas=int(rng.integers(1, 9))).publish(version, sent)
                first.carry()
                if rng.random() < 0.8:
                    second.carry()
                if rng.random() < 0.2:
                    dropping = hosts[rng.integers(3)]._client.connection
                    dropping.call(m.DropDeltas("policy"))
                assert same(following[0].pull(timeout_s=0), sent)
                assert same(following[1].pull(timeout_s=0), sent)
                if second.version == version:
                    assert same(following[2].pull(timeout_s=0), sent)
                    if rng.random() < 0.1:
                        assert same(slow.pull(timeout_s=0), sent)
                    with end.weights("policy").pull(timeout_s=0) as late:
                        assert same(late, sent)
                sent = stepped(sent, version, float(rng.choice([0.0, 0.001, 0.02, 0.02, 0.3, 0.9])))
            for reader in (*following, slow):
                reader.close()
        assert [figures(host).deltas_refused for host in hosts] == [0, 0, 0]


# ---------------------------------------------------------------- what goes wrong


def test_a_reader_whose_content_was_changed_takes_the_whole_and_it_is_counted(queue: tq.Queue) -> None:
    channel, versions = queue.weights("policy"), steps(3)
    channel.publish(0, versions[0])
    channel.publish(1, versions[1])
    held = channel.pull(timeout_s=0)
    held.numpy()["up"][3, 3] += 1  # a view of this process's own
    channel.publish(2, versions[2])
    weights = channel.pull(since=held, timeout_s=0)
    assert same(weights, versions[2])
    assert figures(queue).deltas_refused == 1


def test_a_content_of_another_channel_is_no_base(queue: tq.Queue) -> None:
    channel, versions = queue.weights("policy"), steps(3)
    queue.weights("another").publish(0, model(9))
    strange = queue.weights("another").pull(timeout_s=0)
    for version, sent in enumerate(versions):
        channel.publish(version, sent)
    assert same(channel.pull(since=strange, timeout_s=0), versions[2])
    assert figures(queue).deltas_refused == 0


def test_a_wrong_difference_is_never_given_to_a_reader_and_the_next_version_is_whole(queue: tq.Queue) -> None:
    channel, versions = queue.weights("policy"), steps(5)
    channel.publish(0, versions[0])
    queue._client.published["policy"].held["_up"].memory[5] ^= 1  # memory of the publisher fails
    channel.publish(1, versions[1])
    with pytest.raises(tq.Corruption, match='tensor "_up" of version 1'):
        channel.pull(timeout_s=0)
    assert figures(queue).deltas_refused == 1
    assert channel.publish(2, versions[2]) == WHOLE
    with channel.pull(timeout_s=0) as weights:
        assert same(weights, versions[2])
    assert channel.publish(3, versions[3]) < 0.05 * WHOLE


def test_a_publication_that_fails_or_is_of_an_adapter_keeps_no_wrong_difference(queue: tq.Queue) -> None:
    channel, versions = queue.weights("policy"), steps(5)
    channel.publish(0, versions[0])
    queue._client.published["policy"].held["_up"].memory[5] ^= 1  # memory of the publisher fails
    channel.publish(1, versions[1])
    with pytest.raises(tq.Corruption, match='tensor "_up" of version 1'):
        channel.pull(timeout_s=0)
    with pytest.raises(tq.UsageError, match="version 1"):
        channel.publish(1, versions[2])
    channel.publish(2, {"lora_A": versions[2]["embed"]}, adapter="style")
    channel.publish(3, versions[1])  # all ranges are as they were
    with channel.pull(timeout_s=0) as weights:
        assert same(weights, versions[1])
    channel.publish(4, versions[2])
    assert channel.publish(5, versions[3]) < 0.05 * WHOLE


def test_a_relay_that_makes_whole_tensors_finds_a_wrong_difference_and_carries_the_next_version() -> None:
    versions = steps(5)
    with tq.connect() as origin, tq.connect() as here:
        channel = origin.weights("policy")
        with WeightRelay(origin, here, "policy") as relay:
            relay._publisher._here._kept = relay._publisher._here._kept._replace(deltas=0)  # it makes them whole
            channel.publish(0, versions[0])
            relay.carry()
            origin._client.published["policy"].held["_up"].memory[5] ^= 1
            channel.publish(1, versions[1])
            assert relay.carry() == 1
            with pytest.raises(tq.Corruption, match='tensor "_up" of version 1'):
                here.weights("policy").pull(timeout_s=0)
            channel.publish(2, versions[2])
            assert relay.carry() == 2
        with here.weights("policy").pull(timeout_s=0) as weights:
            assert same(weights, versions[2])
        assert figures(origin).deltas_refused > 0


def test_a_full_arena_drops_differences_that_no_version_needs() -> None:
    with tq.connect(arena_bytes="4MiB") as queue:
        channel, versions = queue.weights("policy", keep=1, deltas=4), steps(7, 0.3)
        for version, sent in enumerate(versions[:6]):
            channel.publish(version, sent)
        assert figures(queue).deltas == 4 * 4, "those before the whole tensors are there for readers that are behind"
        for number in range(1000):
            queue.weights(f"filler-{number}").publish(0, {"w": np.zeros(16 << 10, np.uint8)}, timeout_s=GENEROUS_S)
            if figures(queue).deltas < 4 * 4:
                break
        assert (4 << 20) - queue.stats().bytes.granted < 200 << 10, "it was full"
        with channel.pull(timeout_s=0) as weights:
            assert same(weights, versions[5])
        assert channel.publish(6, versions[6], timeout_s=GENEROUS_S) < WHOLE


def test_a_snapshot_has_versions_with_differences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    versions = steps(4)
    with tq.connect() as queue:
        for version, sent in enumerate(versions[:3]):
            queue.weights("policy").publish(version, sent)
        queue.snapshot("kept")
    with tq.connect() as again:
        again.restore("kept")
        with again.weights("policy").pull(timeout_s=0) as weights:
            assert same(weights, versions[2])
        again.weights("policy").publish(3, versions[3])
        with again.weights("policy").pull(timeout_s=0) as weights:
            assert same(weights, versions[3])


# ---------------------------------------------------------------- what a reader that holds a version knows


def elements(weights: tq.Weights, name: str) -> set[int] | None:
    moved = weights.moved(name)
    return None if moved is None else set(moved.tolist())


@pytest.mark.parametrize("data", ["auto", "remote"])
def test_a_reader_is_told_which_elements_moved(data: Any, tmp_path: Path) -> None:
    with in_this_process("tcp", tmp_path) as address, tq.connect(address) as queue:
        channel, versions = queue.weights("policy"), steps(5)
        with tq.connect(address, data=data) as other:
            channel.publish(0, versions[0])
            held = other.weights("policy").pull()
            assert (held.since, elements(held, "embed")) == (-1, None)
            for before, version in ((0, 1), (1, 4)):  # the next one, and three later
                for number in range(before + 1, version + 1):
                    channel.publish(number, versions[number])
                found = other.weights("policy").pull(since=held)
                assert same(found, versions[version])
                assert found.since == before
                for name in ("embed", "up", "down", "experts"):
                    differ = np.flatnonzero(versions[before][name] != versions[version][name])
                    assert elements(found, name) >= set(differ.tolist())
                    assert len(found.moved(name)) < 0.07 * versions[0][name].size
                assert elements(found, "norm") is None, "it is too small for a difference"
                held.release()
                held = found
            with pytest.raises(tq.NotFound, match='tensor "other" is not in version 4'):
                held.moved("other")


def test_elements_of_slices_have_their_places_in_the_tensor(queue: tq.Queue, other: tq.Queue) -> None:
    channel, before = queue.weights("policy"), model()["down"]
    after = before.copy()
    after[[7, 150], [3, 90]] += 1
    held: tq.Weights | None = None
    for version, value in enumerate((before, after)):
        parts = [tq.WeightSlice(value[at : at + 100], first=at, rows=200) for at in (0, 100)]
        pending = channel.begin(version, parts=2)
        other.weights("policy").publish(version, {"down": parts[1]}, pending=pending, part=1)
        channel.publish(version, {"down": parts[0]}, pending=pending)
        held = held or channel.pull()
    found = channel.pull(since=held)
    assert elements(found, "down") == {7 * 96 + 3, 150 * 96 + 90}


def test_what_moved_in_most_places_is_not_named(queue: tq.Queue) -> None:
    channel, versions = queue.weights("policy"), steps(2, share=0.2)
    channel.publish(0, versions[0])
    held = channel.pull()
    channel.publish(1, versions[1])
    found = channel.pull(since=held)
    assert same(found, versions[1])
    assert elements(found, "embed") is None


def test_unpinned_weights_hold_no_memory_of_the_server_and_differences_follow(queue: tq.Queue) -> None:
    channel, versions = queue.weights("policy", keep=1), steps(4)
    channel.publish(0, versions[0])
    held = channel.pull()
    held.unpin()
    held.unpin()
    assert list(held) == []
    versions[1] = {**versions[1], "norm": versions[0]["norm"]}
    channel.publish(1, versions[1])
    found = channel.pull(since=held)
    assert found.changed() == {"embed", "up", "down", "experts"}, "the norm is read again, and has not changed"
    found.unpin()
    assert set(found) == {"embed", "up", "down", "experts"}
    channel.publish(2, versions[2])
    last = channel.pull(since=found)
    assert same(last, versions[2])
    assert elements(last, "up") == set(np.flatnonzero(versions[1]["up"] != versions[2]["up"]).tolist())
