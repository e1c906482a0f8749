"""Relays as processes between hosts: bytes on each link are counted, and anybody is killed."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

import numpy as np
import pytest

import transferqueue as tq
from tests.cli.deployment import run
from tests.client.deployments import Served, Worker, served
from tests.client.test_keyed import Keyed
from tests.client.test_remote import Between
from tests.scale import sizes
from tests.weights.relays import GENEROUS_S, MIB, TENSORS, Crossed, RelayProcess, model, relaying

pytestmark = pytest.mark.slow

REPLICA = """
    channel = queue.weights("policy")
    with channel.subscribe() as versions:
        while True:
            found = versions.pull(timeout_s=60)
            sent = (np.random.default_rng(int(seed)).integers(0, 255, 1 << 20, dtype=np.uint8) for seed in sys.argv[2:])
            right = all(map(np.array_equal, found.numpy().values(), sent))
            channel.applied(found.version)
            print(found.version, len(found.changed()), right)
"""
"""A replica: for each version its number, how many tensors were new, and whether all were as `model` makes them from
the seeds that it was given for the version that comes."""


@pytest.fixture
def directory() -> Iterator[Path]:
    """Short: a socket's path is."""
    found = Path(tempfile.mkdtemp(prefix="tq-"))
    yield found
    shutil.rmtree(found)


def private(directory: Path, name: str) -> Path:
    made = directory / name
    made.mkdir(mode=0o700)
    return made


@contextmanager
def counted(server: Served | RelayProcess) -> Iterator[tuple[Between, Crossed]]:
    """The link to a server, by which its bytes are counted."""
    with Between(server) as between:  # type: ignore[arg-type]
        between.control.meddle = between.bulk.meddle = crossed = Crossed()
        yield between, crossed


def right(found: tq.Weights, **changed: int) -> bool:
    return all(np.array_equal(found.numpy()[name], value) for name, value in model(**changed).items())


def seeds(**changed: int) -> list[str]:
    return [str(seed) for seed in ({f"w{at}": at for at in range(TENSORS)} | changed).values()]


def test_a_version_crosses_once_for_all_replicas_of_a_host_late_and_replaced_ones_too(directory: Path) -> None:
    with (
        served(private(directory, "a")) as origin,
        counted(origin) as (between, crossed),
        tq.connect(origin.ipc) as trainer,
        relaying("--from", between.control.address, served=private(directory, "b")) as relay,
        ExitStack() as replicas,
    ):
        published = trainer.weights("policy")
        before = [replicas.enter_context(Worker(relay.ipc, REPLICA, *seeds())) for _ in range(2)]
        published.publish(7, model())
        assert [one.line() for one in before] == ["7 8 True"] * 2
        assert TENSORS * MIB < crossed.bytes < 1.05 * TENSORS * MIB

        first = crossed.bytes
        before[0].send(signal.SIGKILL)
        late = replicas.enter_context(Worker(relay.ipc, REPLICA, *seeds()))
        assert late.line() == "7 8 True"
        assert crossed.bytes - first < MIB // 8, "heartbeats: a replica pulls from its host"

        published.publish(9, model(w3=100))  # one tensor of eight
        assert [one.line().split()[:2] for one in (before[1], late)] == [["9", "1"]] * 2
        assert MIB < crossed.bytes - first < 1.5 * MIB
        relay.told("version 9 is here")
        assert list(trainer.stats().channels["policy"].applied.values()) == [9]
        assert relay.stop() == 0


@pytest.mark.parametrize("relays", sizes(2, 3))
def test_along_a_chain_each_link_carries_a_version_once(relays: int, directory: Path) -> None:
    with served(private(directory, "o")) as origin, tq.connect(origin.ipc) as trainer, ExitStack() as chain:
        links: list[Crossed] = []
        source: Served | RelayProcess = origin
        for name in "abc"[:relays]:
            between, crossed = chain.enter_context(counted(source))
            links.append(crossed)
            source = chain.enter_context(relaying("--from", between.control.address, served=private(directory, name)))
        with tq.connect(source.ipc) as end, end.weights("policy").subscribe() as last:
            trainer.weights("policy").publish(1, model())
            assert right(last.pull(timeout_s=GENEROUS_S))
            first = [link.bytes for link in links]
            assert all(TENSORS * MIB < bytes_ < 1.05 * TENSORS * MIB for bytes_ in first)
            trainer.weights("policy").publish(2, model(w0=50))
            found = last.pull(timeout_s=GENEROUS_S)
            assert right(found, w0=50)
            assert found.changed() == {"w0"}
            assert all(MIB < link.bytes - before < 1.5 * MIB for link, before in zip(links, first, strict=True))


def test_a_relay_that_is_killed_in_the_middle_of_a_version_leaves_nothing_and_the_next_carries_it(
    directory: Path,
) -> None:
    with (
        served(private(directory, "a")) as origin,
        served(private(directory, "b")) as host,
        tq.connect(origin.ipc) as trainer,
        tq.connect(host.ipc) as replica,
        counted(origin) as (between, crossed),
    ):
        words = ("--from", between.control.address, "--into", host.ipc)
        with relaying(*words) as first:
            trainer.weights("policy").publish(1, model())
            versions = replica.weights("policy").subscribe()
            assert right(versions.pull(timeout_s=GENEROUS_S))
            first.told("version 1 is here")
            crossed.holds_at = crossed.bytes + 2 * MIB
            trainer.weights("policy").publish(2, model(w0=20, w1=21, w2=22, w3=23))
            assert crossed.holding.wait(GENEROUS_S)
            first.stop(signal.SIGKILL)
        crossed.let_go()
        channel = replica.stats().channels["policy"]
        assert (channel.kept, channel.bytes) == ([1], TENSORS * MIB)
        with pytest.raises(tq.DeadlineExceeded):
            versions.pull(timeout_s=0.01)
        with relaying(*words) as again:
            found = versions.pull(timeout_s=GENEROUS_S)
            assert right(found, w0=20, w1=21, w2=22, w3=23)
            assert found.changed() == {"w0", "w1", "w2", "w3"}
            assert again.stop() in (0, -signal.SIGTERM)
        versions.close()


@pytest.mark.long
def test_a_host_whose_server_is_killed_with_its_relay_begins_anew(directory: Path) -> None:
    with served(private(directory, "a")) as origin, tq.connect(origin.ipc) as trainer:
        trainer.weights("policy").publish(1, model())
        at = private(directory, "b")
        with relaying("--from", origin.tcp, served=at) as first, tq.connect(first.ipc) as replica:
            held = replica.weights("policy").pull(timeout_s=GENEROUS_S)
            first.stop(signal.SIGKILL)
            with pytest.raises(tq.PeerError):
                replica.weights("policy").pull(above=1, timeout_s=GENEROUS_S)
            assert right(held), "what is held is held"
        with relaying("--from", origin.tcp, served=at) as second, tq.connect(second.ipc) as replica:
            assert right(replica.weights("policy").pull(timeout_s=GENEROUS_S))


class Origin:
    """A server at the same address in each of its lives; leaving it is its death."""

    def __init__(self, directory: Path, port: int, *words: str) -> None:
        self.ipc, self.tcp = f"ipc://{directory}/q.sock", f"tcp://127.0.0.1:{port}"
        command = [sys.executable, "-m", "transferqueue.server", "--address", self.ipc, "--tcp", f"127.0.0.1:{port}"]
        self.process = subprocess.Popen([*command, *words], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline().startswith("ready")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(GENEROUS_S)
        self.process.stdout.close()  # type: ignore[union-attr]


def free_port(directory: Path) -> int:
    """One that a server had a moment ago."""
    with served(private(directory, "x")) as before:
        return int(before.tcp.rpartition(":")[2])


@pytest.mark.long
def test_relays_go_on_when_their_source_was_started_again_with_nothing_and_only_changes_cross(directory: Path) -> None:
    at, port = private(directory, "a"), free_port(directory)
    with ExitStack() as opened:
        with Origin(at, port) as origin, tq.connect(origin.ipc) as trainer:
            relay = opened.enter_context(relaying("--from", origin.tcp, served=private(directory, "b")))
            replica = opened.enter_context(tq.connect(relay.ipc))
            versions = opened.enter_context(replica.weights("policy").subscribe())
            trainer.weights("policy").publish(3, model())
            versions.pull(timeout_s=GENEROUS_S)
            relay.told("version 3 is here")
        with Origin(at, port) as origin, tq.connect(origin.ipc) as trainer:
            trainer.weights("policy").publish(4, model(w5=77))
            found = versions.pull(timeout_s=GENEROUS_S)
            assert right(found, w5=77)
            assert found.changed() == {"w5"}


@pytest.mark.long
def test_replicas_and_relay_of_a_durable_host_wait_for_its_next_life_and_only_changes_cross(directory: Path) -> None:
    at, port = private(directory, "b"), free_port(directory)
    durable = ("--durability", "process", "--state", str(directory / "state"), "--arena-bytes", "64MiB")
    with ExitStack() as opened:
        origin = opened.enter_context(served(private(directory, "a")))
        between, crossed = opened.enter_context(counted(origin))
        trainer = opened.enter_context(tq.connect(origin.ipc)).weights("policy")
        with Origin(at, port, *durable) as host:
            relay = opened.enter_context(relaying("--from", between.control.address, "--into", host.ipc))
            versions = opened.enter_context(tq.connect(host.ipc)).weights("policy").subscribe()
            trainer.publish(1, model())
            assert right(versions.pull(timeout_s=GENEROUS_S))
            relay.told("version 1 is here")
        with Origin(at, port, *durable):
            first = crossed.bytes
            trainer.publish(2, model(w6=60))
            found = versions.pull(timeout_s=GENEROUS_S)
            assert right(found, w6=60)
            assert found.changed() == {"w6"}
            assert MIB < crossed.bytes - first < 1.5 * MIB
            versions.close()


def test_a_relay_with_a_key_of_a_producer_is_let_in(directory: Path) -> None:
    origin = Keyed(private(directory, "a"))
    with (
        relaying("--from", origin.token("producer"), served=private(directory, "b")) as relay,
        tq.connect(origin.ipc) as trainer,
        tq.connect(relay.ipc) as replica,
    ):
        trainer.weights("policy").publish(1, model())
        with replica.weights("policy").pull(timeout_s=GENEROUS_S) as found:
            assert right(found)
        relay.told("version 1 is here")
    origin.stop()


def test_the_next_source_is_taken_when_one_is_gone(directory: Path) -> None:
    with served(private(directory, "a")) as origin, tq.connect(origin.ipc) as trainer:
        trainer.weights("policy").publish(1, model())
        with (
            relaying("--from", origin.tcp, served=private(directory, "b")) as between,
            relaying("--from", between.tcp, "--from", origin.tcp, served=private(directory, "c")) as last,
            tq.connect(last.ipc) as replica,
            replica.weights("policy").subscribe() as versions,
        ):
            assert right(versions.pull(timeout_s=GENEROUS_S))
            last.told("version 1 is here")
            assert between.stop() == 0  # killed, it is missed after 40 s: SESSION_SILENCE_S and ANSWER_S
            trainer.weights("policy").publish(2, model(w1=9))
            assert right(versions.pull(timeout_s=GENEROUS_S), w1=9)


def test_it_stops_when_told_also_while_its_source_is_not_there(directory: Path) -> None:
    with relaying("--from", "tcp://127.0.0.1:9", served=private(directory, "a")) as relay:
        assert relay.stop() == 0


def test_it_ends_with_what_a_person_must_mend(directory: Path) -> None:
    with relaying("--from", "no.place", served=private(directory, "a")) as relay:
        assert "address 'no.place'" in relay.told("address")
        assert relay.process.wait(GENEROUS_S) == 2


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((), "--into None and --serve None were given"),
        (("--into", "ipc:///a", "--serve", "ipc:///b"), "give --into the address of one that runs"),
        (("--into", "ipc:///a", "--arena-bytes", "1GiB"), "--arena-bytes 1GiB is for --serve"),
        (("--serve", "nowhere"), "address 'nowhere'"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_there(words: tuple[str, ...], why: str) -> None:
    refused = run("relay", "--channel", "policy", "--from", "tcp://127.0.0.1:9", *words)
    assert refused.returncode == 2
    assert why in refused.stderr
