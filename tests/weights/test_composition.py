"""A version is a composition: only what changed is written and fetched, and what is pulled is what was published."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import transferqueue as tq
from tests.scale import examples
from transferqueue.wire import messages as m

LARGE = 1 << 18
"""Elements of a tensor that has an extent to itself, or shares one with its like."""


@pytest.fixture
def queue() -> Iterator[tq.Queue]:
    with tq.connect(arena_bytes="256MiB") as found:
        yield found


def kept_bytes(queue: tq.Queue, channel: str = "policy") -> int:
    found: int = queue.stats().channels[channel].bytes
    return found


def full(value: float, size: int = LARGE) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.full(size, value, np.float32)


def test_only_tensors_that_changed_are_written(queue: tq.Queue) -> None:
    channel = queue.weights("policy", keep=2)
    tensors = {f"w{number}": full(number) for number in range(8)}
    channel.publish(0, tensors)
    channel.publish(1, tensors | {"w3": full(100)})
    assert kept_bytes(queue) == 9 * 4 * LARGE
    first, second = channel.pull(version=0), channel.pull(version=1)
    assert first.numpy()["w3"][0] == 3
    assert second.numpy()["w3"][0] == 100
    assert second.numpy()["w7"][-1] == 7
    channel.publish(2, tensors | {"w3": full(100)})  # nothing changed: nothing is written
    assert kept_bytes(queue) == 8 * 4 * LARGE


def test_a_tensor_of_another_shape_or_type_is_another_one(queue: tq.Queue) -> None:
    channel = queue.weights("policy")
    channel.publish(0, {"a": np.zeros((4, 4), np.float32), "b": np.zeros(4, np.float32)})
    channel.publish(1, {"a": np.zeros((2, 8), np.float32), "b": np.zeros(4, np.int32)})
    found = channel.pull().numpy()
    assert found["a"].shape == (2, 8)
    assert found["b"].dtype == np.int32


def test_a_subscriber_is_given_what_changed(queue: tq.Queue) -> None:
    channel = queue.weights("policy")
    tensors = {"a": full(1), "b": full(2), "empty": np.zeros((0, 3), np.float32)}
    channel.publish(0, tensors)
    with channel.subscribe() as subscription:
        first = subscription.pull(timeout_s=20)
        assert first.changed() == {"a", "b", "empty"}
        view = first.numpy()["b"]
        channel.publish(1, tensors | {"a": full(5)})
        second = subscription.pull(timeout_s=20)
        assert second.changed() == {"a"}
        assert (second.numpy()["a"][0], second.numpy()["b"][0]) == (5, 2)
        assert view[0] == 2
        with pytest.raises(tq.BatchEnded, match=r"version 0 .* was released"):
            first.numpy()["a"]
        assert subscription.version == 1
    with pytest.raises(tq.BatchEnded):
        second.numpy()["b"]


def test_what_was_released_is_fetched_again(queue: tq.Queue) -> None:
    channel = queue.weights("policy")
    channel.publish(0, {"a": full(1)})
    gone = channel.pull()
    gone.release()
    again = channel.pull(since=gone)
    assert again.changed() == {"a"}
    assert again.numpy()["a"][0] == 1


def test_bytes_that_do_not_match_are_refused(queue: tq.Queue) -> None:
    channel = queue.weights("policy")
    channel.publish(0, {"a": full(1), "b": full(2)})
    good = channel.pull()
    pulled: Any = queue._client.connection.call(m.Pull("policy"))
    at = next(block for block in pulled.blocks if block.fields == ["_a"])
    with open(queue._client.memory._paths[at.shard], "r+b") as arena:  # type: ignore[union-attr]
        arena.seek(at.offset)
        arena.write(b"damaged!")
    with pytest.raises(tq.Corruption, match=r'tensor "_a" of version 0 of channel "policy": checksum'):
        channel.pull()
    assert channel.pull(since=good).changed() == set()  # what was compared once is not read again


def test_an_adapter_lies_over_its_base(queue: tq.Queue) -> None:
    channel = queue.weights("policy", keep=1)
    with pytest.raises(tq.NotFound, match='adapter "math" has no base'):
        channel.publish(0, {"lora_A": full(1)}, adapter="math")
    base = {"w": full(1), "v": full(2)}
    channel.publish(0, base)
    channel.publish(1, {"0.lora_A": full(3, 64), "lora_B": full(4, 64)}, adapter="math")
    channel.publish(2, {"lora_A": full(5, 64)}, adapter="code")
    channel.publish(3, {"0.lora_A": full(6, 64)}, adapter="math")
    weights = channel.pull()
    assert weights.adapters == ["code", "math"]
    assert set(weights) == {"w", "v"}
    assert {name: value[0] for name, value in weights.numpy("math").items()} == {"0.lora_A": 6}
    assert {name: value[0] for name, value in weights.numpy("code").items()} == {"lora_A": 5}
    assert weights.numpy()["v"][0] == 2
    assert kept_bytes(queue) == 2 * 4 * LARGE + 2 * 4 * 64
    with pytest.raises(tq.NotFound, match=r'adapter "art" is not in version 3 .*; it has code, math'):
        weights.torch("art")
    channel.publish(4, base)
    assert channel.pull().adapters == []


@pytest.mark.parametrize("name", ["_a", "a/b", "a b", ""])
def test_bad_adapter_names_are_refused(queue: tq.Queue, name: str) -> None:
    channel = queue.weights("policy")
    channel.publish(0, {"w": full(1, 4)})
    with pytest.raises(tq.UsageError, match="adapter"):
        channel.publish(1, {"w": full(1, 4)}, adapter=name)
    assert channel.pull().version == 0


@pytest.mark.slow
def test_memory_stays_bounded_however_little_stays_the_same() -> None:
    """Each version keeps one tensor fewer of the first: without the rule of halves its memory would stay to the end."""
    with tq.connect(arena_bytes="64MiB") as queue:
        channel = queue.weights("policy", keep=1)
        for version in range(48):
            tensors = {f"w{n}": full(0 if n >= version % 16 else version) for n in range(16)}
            channel.publish(version, tensors, timeout_s=20)
            with channel.pull() as weights:
                assert [int(value[0]) for value in weights.numpy().values()] == [int(t[0]) for t in tensors.values()]
            gc.collect()
            assert queue.stats().bytes.granted <= 2.5 * 16 * 4 * LARGE


def test_a_late_joiner_finds_the_newest_and_what_is_kept() -> None:
    with tq.connect() as queue:
        channel = queue.weights("policy", keep=2)
        for version in range(5):
            channel.publish(version, {"a": full(version, 8), "b": full(9, 8)})
        with tq.connect(queue.address) as late:
            joined = late.weights("policy")
            assert joined.pull(timeout_s=0).numpy()["a"][0] == 4
            assert joined.pull(version=3, timeout_s=0).numpy()["b"][0] == 9
            joined.applied(3)
            told = queue.stats().channels["policy"]
            (session,) = told.applied
            assert told.applied[session] == 3
            assert told.publish_lag_s[session] >= 0
            assert told.applied_age_s[session] >= 0


Values = st.dictionaries(st.sampled_from("abcde"), st.integers(0, 2), min_size=1)
Publication = st.tuples(st.sampled_from([None, None, "x", "y"]), Values)
Step = st.tuples(Publication, st.booleans(), st.integers(1, 3))


@pytest.mark.slow
@settings(max_examples=examples(15), deadline=None)
@given(steps=st.lists(Step, min_size=1, max_size=12))
def test_what_is_pulled_is_what_was_published(steps: list[Any]) -> None:
    """Any sequence of publications, pulls and bounds of what is kept, against plain dicts."""
    with tq.connect(arena_bytes="64MiB") as queue:
        versions: dict[int, dict[str | None, dict[str, int]]] = {}
        held: tq.Weights | None = None
        for version, ((adapter, values), pulls, keep) in enumerate(steps):
            channel = queue.weights("policy", keep=keep)
            adapter = adapter if versions else None
            before = {} if adapter is None else versions[max(versions)]
            channel.publish(version, {name: full(v, 16) for name, v in values.items()}, adapter=adapter)
            versions[version] = {**before, adapter: values}
            versions = dict(list(versions.items())[-keep:])
            assert queue.stats().channels["policy"].kept == list(versions)
            if pulls:
                held = channel.pull(since=held)
            for number, expected in versions.items():
                assert as_dict(channel.pull(version=number, since=held)) == expected
        del held
        gc.collect()


def as_dict(weights: tq.Weights) -> dict[str | None, dict[str, int]]:
    return {
        adapter: {name: int(value[0]) for name, value in weights.numpy(adapter).items()}
        for adapter in (None, *weights.adapters)
    }
