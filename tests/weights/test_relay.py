"""A relay in one process: what it carries, when it ends, and that bytes arrive as they were."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

import transferqueue as tq
from tests.weights.republished import republish
from transferqueue.errors import AlreadyExists, Corruption, DeadlineExceeded, UsageError
from transferqueue.weights import RelayProcess, WeightRelay

GENEROUS_S = 60.0


@pytest.fixture
def hosts() -> Iterator[tuple[tq.Queue, tq.Queue]]:
    with tq.connect() as source, tq.connect(arena_bytes="64MiB") as here:
        yield source, here


def test_base_and_adapters_arrive_in_one_commit_and_only_the_newest_is_carried(
    hosts: tuple[tq.Queue, tq.Queue],
) -> None:
    source, here = hosts
    channel = source.weights("policy")
    channel.publish(0, {"w": np.zeros(8, np.float32)})
    channel.publish(1, {"w": np.ones(8, np.float32)})
    channel.publish(2, {"a": np.full(4, 2, np.float32)}, adapter="style")
    with WeightRelay(source, here, "policy") as relay:
        assert relay.carry() == 2
    assert here.stats().channels["policy"].kept == [2]
    with here.weights("policy").pull(timeout_s=0) as found:
        assert (found.version, found.adapters) == (2, ["style"])
        assert found.numpy()["w"].tolist() == [1.0] * 8
        assert found.numpy("style")["a"].tolist() == [2.0] * 4


def test_bytes_arrive_as_they_were_whatever_they_are(hosts: tuple[tq.Queue, tq.Queue]) -> None:
    source, here = hosts
    tensors = {
        "bf16": np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3),
        "fp8": np.arange(5, dtype=ml_dtypes.float8_e4m3fn),
        "scalar": np.array(7.5),
        "empty": np.empty((0, 4), np.float32),
        "bool": np.array([True, False, True]),
    }
    source.weights("policy").publish(1, tensors)
    with WeightRelay(source, here, "policy") as relay:
        relay.carry()
    with here.weights("policy").pull(timeout_s=0) as found:
        for name, value in tensors.items():
            assert found.numpy()[name].dtype == value.dtype
            assert found.numpy()[name].shape == value.shape
            assert found.numpy()[name].tobytes() == value.tobytes()


def test_what_is_unchanged_is_neither_carried_nor_written_also_by_a_relay_that_was_started_again(
    hosts: tuple[tq.Queue, tq.Queue],
) -> None:
    source, here = hosts
    large = {f"w{at}": np.full(1 << 18, at, np.float32) for at in range(4)}
    source.weights("policy").publish(1, large)
    with WeightRelay(source, here, "policy") as relay:
        relay.carry()
    assert here.stats().channels["policy"].bytes == 4 << 20
    source.weights("policy").publish(2, large | {"w3": np.zeros(1 << 18, np.float32)})
    with WeightRelay(source, here, "policy") as again:
        assert again.version == 1
        assert again.carry() == 2
    assert here.stats().channels["policy"].bytes == 5 << 20
    with here.weights("policy").pull(timeout_s=0) as found:
        assert found.numpy()["w3"].any() == False  # noqa: E712
        assert found.numpy()["w2"][-1] == 2


def test_memory_is_what_is_kept_and_one_version_more(hosts: tuple[tq.Queue, tq.Queue]) -> None:
    source, here = hosts  # 64 MiB: four versions of 12 MiB, and what an extent is rounded to
    channel = source.weights("policy")
    with WeightRelay(source, here, "policy", keep=2) as relay:
        for version in range(12):
            channel.publish(version, {"w": np.full(12 << 20, version, np.uint8)})
            assert relay.carry(timeout_s=GENEROUS_S) == version
    stats = here.stats()
    assert stats.channels["policy"].kept == [10, 11]
    assert stats.channels["policy"].bytes == 24 << 20


def test_a_relay_ends_at_its_deadline_and_another_goes_on_from_what_is_here(hosts: tuple[tq.Queue, tq.Queue]) -> None:
    source, here = hosts
    source.weights("policy").publish(4, {"w": np.zeros(8)})
    with WeightRelay(source, here, "policy") as first:
        assert first.version == -1
        assert first.carry() == 4
        with pytest.raises(DeadlineExceeded, match="a version above 4: its latest is 4"):
            first.carry(wait_s=0.02)
    with WeightRelay(source, here, "policy") as second:
        assert second.version == 4
        assert list(source.stats().channels["policy"].applied.values()) == [4], "told at once"
        source.weights("policy").publish(5, {"w": np.ones(8)})
        assert second.carry() == 5
    assert here.stats().channels["policy"].kept == [4, 5]


def test_a_source_that_is_behind_is_waited_for(hosts: tuple[tq.Queue, tq.Queue]) -> None:
    source, here = hosts
    here.weights("policy").publish(9, {"w": np.zeros(8)})
    source.weights("policy").publish(3, {"w": np.ones(8)})
    with WeightRelay(source, here, "policy") as relay:
        with pytest.raises(DeadlineExceeded, match="a version above 9: its latest is 3"):
            relay.carry(wait_s=0.02)
        source.weights("policy").publish(10, {"w": np.ones(8)})
        assert relay.carry() == 10


def test_what_could_not_be_published_here_is_carried_by_the_next_call(hosts: tuple[tq.Queue, tq.Queue]) -> None:
    source, here = hosts
    source.weights("policy").publish(3, {"w": np.zeros(8)})
    with WeightRelay(source, here, "policy") as relay:
        here.weights("policy").publish(3, {"w": np.zeros(8)})  # somebody else's
        with pytest.raises(AlreadyExists, match="versions are published once"):
            relay.carry()
        assert relay.version == -1
        source.weights("policy").publish(4, {"w": np.ones(8)})
        assert relay.carry() == 4


def test_what_was_damaged_on_the_way_is_refused_by_who_pulls_it(hosts: tuple[tq.Queue, tq.Queue]) -> None:
    source, here = hosts
    source.weights("policy").publish(1, {"w": np.zeros(8)})
    with source.weights("policy").pull() as found:
        found.numpy()["w"][3] = 1.0  # a view of this process alone
        republish(here.weights("policy"), found)
    with pytest.raises(Corruption, match='tensor "_w" of version 1'):
        here.weights("policy").pull(timeout_s=0)


# ---------------------------------------------------------------- by addresses


def test_a_carrier_needs_a_source() -> None:
    with pytest.raises(UsageError, match='the relay of channel "policy" has no source; name at least one'):
        RelayProcess([], "ipc:///nowhere", "policy", tell=print)


def test_a_carrier_takes_the_next_source_where_one_has_nothing_new_and_stops_at_once(
    hosts: tuple[tq.Queue, tq.Queue],
) -> None:
    source, here = hosts
    lines: list[str] = []
    heard = threading.Condition()

    def tell(line: str) -> None:
        with heard:
            lines.append(line)
            heard.notify_all()

    with tq.connect() as silent:
        carrier = RelayProcess([silent.address, source.address], here.address, "policy", wait_s=0.05, tell=tell)
        thread = threading.Thread(target=carrier.run)
        thread.start()
        source.weights("policy").publish(5, {"w": np.ones(8)})
        with heard:
            assert heard.wait_for(lambda: any("version 5 is here" in line for line in lines), GENEROUS_S)
        assert "nothing was published yet" in lines[0]
        carrier.stop()
        thread.join(GENEROUS_S)
        assert not thread.is_alive()
    with here.weights("policy").pull(timeout_s=0) as found:
        assert found.version == 5


def test_what_a_person_must_mend_ends_a_carrier(hosts: tuple[tq.Queue, tq.Queue]) -> None:
    with pytest.raises(UsageError, match=r"address 'no\.place' "):
        RelayProcess(["no.place"], hosts[1].address, "policy", tell=print).run()
