"""Two sites: weights cross the link once, whoever generates there; bytes are counted on loopback, between two relays."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import transferqueue as tq
from tests.client.deployments import served
from tests.client.test_remote import Between
from transferqueue.errors import DeadlineExceeded
from transferqueue.workflows.two_sites import SiteReceiver

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 60.0
MIB = 1 << 20
TENSORS = 8


def model(**changed: int) -> dict[str, np.ndarray]:
    """Eight tensors of a MiB that no compression would make smaller."""
    names = {f"w{at}": at for at in range(TENSORS)} | changed
    return {name: np.random.default_rng(seed).integers(0, 255, MIB, dtype=np.uint8) for name, seed in names.items()}


class Crossed:
    """Counts the bytes that a relay passes on, both ways."""

    def __init__(self) -> None:
        self.bytes = 0

    def __call__(self, _passed: int, data: bytes, _up: bool) -> bytes:
        self.bytes += len(data)
        return data


@contextmanager
def receiver(sender: str, site: str) -> Iterator[None]:
    """A receiver, as a process."""
    command = [sys.executable, "-m", "transferqueue.workflows.two_sites", "--sender", sender, "--site", site]
    process = subprocess.Popen([*command, "--channel", "policy"], cwd=ROOT)
    try:
        yield
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_version_crosses_once_and_every_replica_of_the_site_has_it(tmp_path: Path) -> None:
    counted = Crossed()
    with served(tmp_path) as server, Between(server) as between, tq.connect(server.ipc) as trainer:
        between.control.meddle = between.bulk.meddle = counted
        published = trainer.weights("policy")
        with tq.connect() as site, receiver(between.control.address, site.address):
            published.publish(7, model())
            replicas = [site.weights("policy").subscribe() for _ in range(4)]
            for replica in replicas:
                found = replica.pull(timeout_s=WAIT_S)
                assert found.version == 7
                assert all((found.numpy()[name] == value).all() for name, value in model().items())
            first = counted.bytes
            assert TENSORS * MIB < first < 1.05 * TENSORS * MIB

            published.publish(9, model(w3=100))  # one tensor of eight
            for replica in replicas:
                found = replica.pull(timeout_s=WAIT_S)
                assert (found.version, found.changed()) == (9, {"w3"})
                assert (found.numpy()["w3"] == model(w3=100)["w3"]).all()
            assert MIB < counted.bytes - first < 1.5 * MIB
            assert list(trainer.stats()["channels"]["policy"]["applied"].values()) == [9]


# ---------------------------------------------------------------- in one process


@pytest.fixture
def sites() -> Iterator[tuple[tq.Queue, tq.Queue]]:
    with tq.connect() as sender, tq.connect() as site:
        yield sender, site


def test_base_and_adapters_arrive_in_one_commit_and_only_the_newest_is_carried(
    sites: tuple[tq.Queue, tq.Queue],
) -> None:
    sender, site = sites
    channel = sender.weights("policy")
    channel.publish(0, {"w": np.zeros(8, np.float32)})
    channel.publish(1, {"w": np.ones(8, np.float32)})
    channel.publish(2, {"a": np.full(4, 2, np.float32)}, adapter="style")
    with SiteReceiver(sender, site, "policy") as receiver:
        assert receiver.receive() == 2
    assert site.stats()["channels"]["policy"]["kept"] == [2]
    with site.weights("policy").pull(timeout_s=0) as found:
        assert (found.version, found.adapters) == (2, ["style"])
        assert found.numpy()["w"].tolist() == [1.0] * 8
        assert found.numpy("style")["a"].tolist() == [2.0] * 4


def test_a_receiver_ends_at_its_deadline_and_another_goes_on_from_what_the_site_has(
    sites: tuple[tq.Queue, tq.Queue],
) -> None:
    sender, site = sites
    sender.weights("policy").publish(4, {"w": np.zeros(8)})
    with SiteReceiver(sender, site, "policy") as first:
        assert first.receive() == 4
        with pytest.raises(DeadlineExceeded, match="a version above 4: its latest is 4"):
            first.receive(wait_s=0.02)
    with SiteReceiver(sender, site, "policy") as second:
        assert second.version == 4
        sender.weights("policy").publish(5, {"w": np.ones(8)})
        assert second.receive() == 5
    assert site.stats()["channels"]["policy"]["kept"] == [4, 5]


def test_what_could_not_be_published_at_the_site_is_carried_by_the_next_call(sites: tuple[tq.Queue, tq.Queue]) -> None:
    sender, site = sites
    sender.weights("policy").publish(3, {"w": np.zeros(8)})
    with SiteReceiver(sender, site, "policy") as receiver:
        site.weights("policy").publish(3, {"w": np.zeros(8)})  # somebody else's
        with pytest.raises(tq.AlreadyExists, match="versions are published once"):
            receiver.receive()
        assert receiver.version == -1
        sender.weights("policy").publish(4, {"w": np.ones(8)})
        assert receiver.receive() == 4


def test_only_weights_that_were_pulled_are_mirrored(sites: tuple[tq.Queue, tq.Queue]) -> None:
    with pytest.raises(tq.UsageError, match="weights are dict; mirror what was pulled"):
        sites[1].weights("policy").mirror({"w": np.zeros(8)})  # type: ignore[arg-type]
