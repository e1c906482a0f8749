"""Several coordinators used as one queue: each table is at one, none is at two, and one that is gone takes nothing with
it but its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

import transferqueue as tq
from tests.client.deployments import LoopThread, Worker
from transferqueue.client.session.addresses import TOKEN_VARIABLE
from transferqueue.transport.security import keyring
from transferqueue.transport.security.keys import write_token
from transferqueue.wire.home_coordinator import home_coordinator

pytestmark = pytest.mark.slow

PATIENCE_S = 30.0
TASK = tq.Task("train", needs=["x"])


class Coordinator:
    """A server process with a seat; `ipc` and `tcp` are its addresses."""

    def __init__(self, directory: Path, seat: str, *words: str, durable: bool = False) -> None:
        directory.mkdir(mode=0o700, exist_ok=True)
        self.directory, self.seat = directory, seat
        command = [sys.executable, "-m", "transferqueue.server", "--address", f"ipc://{directory}/q.sock"]
        if durable:
            words = (*words, "--durability", "process", "--state", str(directory / "state"))
        else:
            words = (*words, "--tcp", "127.0.0.1:0")
        self.process = subprocess.Popen(
            [*command, "--arena-bytes", "64MiB", "--coordinator", seat, *words], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        told = self.process.stdout.readline().split()
        if told[:1] != ["ready"]:
            self.process.communicate(timeout=PATIENCE_S)
            raise AssertionError("the server did not start")
        self.ipc, self.tcp = told[1], told[-1]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            assert self.process.wait(PATIENCE_S) == 0
        assert self.process.stdout is not None
        self.process.stdout.close()


class Deployed:
    """Coordinators of all seats of one deployment."""

    def __init__(self, directory: Path, seats: Sequence[str], **named: Any) -> None:
        with ExitStack() as made:
            self.all: list[Coordinator] = []
            for number, seat in enumerate(seats):
                self.all.append(Coordinator(directory / f"c{number}", seat, **named))
                made.callback(self.all[-1].stop)
            self._made = made.pop_all()

    @property
    def address(self) -> str:
        return ",".join(one.ipc for one in self.all)

    def of(self, name: str) -> Coordinator:
        return self.all[home_coordinator(name, len(self.all)) - 1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._made.close()


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    with Deployed(tmp_path_factory.mktemp("three"), ["rl:1/3", "rl:2/3", "rl:3/3"]) as found:
        yield found


@pytest.fixture(params=["sync", "async"])
def queue(request: pytest.FixtureRequest, three: Deployed) -> Iterator[Any]:
    """A queue of either front on all of them, with the tables of this test's own."""
    with ExitStack() as opened:
        if request.param == "sync":
            found: Any = opened.enter_context(tq.connect(three.address))
        else:
            found = opened.enter_context(opened.enter_context(LoopThread()).connect(three.address))
        yield found
        for name in found.tables():
            found.drop_table(name)


def one_each(seats: int) -> list[str]:
    """Names of tables, one at each seat, in their order."""
    return [
        next(f"t{number}" for number in range(1000) if home_coordinator(f"t{number}", seats) == seat + 1)
        for seat in range(seats)
    ]


def test_tables_lie_where_their_names_say_and_work_as_ever(queue: Any, three: Deployed) -> None:
    names = one_each(3)
    for number, name in enumerate(names):
        table = queue.create_table(name, tasks=[TASK])
        assert table.put(x=[[number], [number, number]]).tolist() == [0, 1]
        assert queue.coordinator_of(name) == three.all[number].ipc
    assert queue.tables() == sorted(names)
    for number, name in enumerate(names):
        with queue.table(name).lease("train", rows=2, timeout_s=PATIENCE_S) as batch:
            assert batch["x"].list() == [[number], [number, number]]
        with tq.connect(three.all[number].ipc) as alone:
            assert alone.tables() == [name]
            assert alone.audit().tables[name].rows_done == 2


def test_the_order_and_kind_of_the_addresses_do_not_matter(three: Deployed) -> None:
    with tq.connect(three.address) as queue:
        queue.create_table("orders", tasks=[TASK]).put(x=[[1]])
        for ways in (
            [one.tcp for one in reversed(three.all)],
            [three.all[1].tcp, f"{three.all[2].ipc}, {three.all[0].ipc}"],
        ):
            with tq.connect(ways) as other:
                assert other.table("orders").audit().rows_live == 1
                assert [one.split("/")[-1] for one in other.coordinators] != []
        queue.drop_table("orders")


def test_another_process_joins_by_the_queues_own_address(three: Deployed) -> None:
    with tq.connect(three.address) as queue:
        queue.create_table("joined", tasks=[TASK]).put(x=[[4]])
        with Worker(queue.address, "print(queue.table('joined').audit().rows_live)") as worker:
            assert worker.line() == "1"
        queue.drop_table("joined")


def test_a_channel_is_at_one_too_and_drives_the_clock_of_a_table_beside_it(queue: Any) -> None:
    job = type(queue).__name__
    policy = f"{job}/policy"
    pacing = tq.Pacing("train", batch_rows=2, channel=policy)
    table = queue.create_table(f"{job}/rows", tasks=[TASK], pacing=pacing)
    queue.weights(policy).publish(3, {"w": np.ones(2)})
    assert table.stats().version == 3
    assert queue.weights(policy).pull(timeout_s=PATIENCE_S).version == 3
    assert queue.stats().channels[policy].newest == 3


def test_a_clock_that_is_elsewhere_is_refused(queue: Any) -> None:
    rows, policy = one_each(3)[:2]
    with pytest.raises(
        tq.Impossible, match=f'these do not communicate: give both the same beginning, such as "{rows}"'
    ):
        queue.create_table(rows, tasks=[TASK], pacing=tq.Pacing("train", batch_rows=2, channel=policy))
    assert queue.tables() == []


def test_all_are_observed_together_and_one_by_one(queue: Any, three: Deployed) -> None:
    names = one_each(3)
    for name in names:
        queue.create_table(name, tasks=[TASK]).put(x=[[1]])
    stats, audit, doctor = queue.stats(), queue.audit(), queue.doctor()
    assert stats.tables.keys() == audit.tables.keys() == doctor.tables.keys() == set(names)
    assert audit.balanced
    addresses = [one.ipc for one in three.all]
    assert list(stats.coordinators) == list(doctor.coordinators) == list(queue.sessions().coordinators) == addresses
    assert [one.server.coordinator for one in stats.coordinators.values()] == ["rl:1/3", "rl:2/3", "rl:3/3"]
    assert list(queue.doctor(names[1]).tables) == [names[1]]
    assert queue.inspect(names[2], 0).row == 0


def test_a_client_that_lacks_one_is_refused_before_it_does_anything(three: Deployed) -> None:
    with pytest.raises(tq.UsageError) as refused:
        tq.connect([three.all[0].ipc, three.all[2].ipc])
    assert str(refused.value) == (
        f"these 2 addresses are not all coordinators of one deployment, each once: {three.all[0].ipc} is rl:1/3, "
        f"{three.all[2].ipc} is rl:3/3; give the addresses of all of it, or start the servers as one (transferqueue "
        "serve --coordinator 1/2 to 2/2)"
    )
    with pytest.raises(tq.UsageError, match="each once"):
        tq.connect([*(one.ipc for one in three.all), three.all[0].tcp])


def test_servers_of_two_deployments_are_not_one(three: Deployed, tmp_path: Path) -> None:
    with Deployed(tmp_path, ["other:3/3", "1/1"]) as others:
        for stranger in others.all:
            with pytest.raises(tq.UsageError, match=f"is {stranger.seat}; give the addresses of all of it"):
                tq.connect([three.all[0].ipc, three.all[1].ipc, stranger.ipc])


def test_who_is_at_one_alone_cannot_make_a_table_that_belongs_to_another(three: Deployed) -> None:
    here, there, _ = one_each(3)
    with tq.connect(three.all[0].ipc) as alone:
        assert alone.create_table(here, tasks=[TASK]).name == here
        for refused in (
            lambda: alone.create_table(there),
            lambda: alone.table(there, timeout_s=PATIENCE_S),
            lambda: alone.weights(there).publish(1, {"w": np.ones(2)}),
            lambda: alone.weights(there).pull(timeout_s=PATIENCE_S),
        ):
            with pytest.raises(
                tq.UsageError, match=f'"{there}" belongs to coordinator 2 of 3, and this one is rl:1/3; connect with'
            ):
                refused()
        assert alone.tables() == [here]
        alone.drop_table(here)


def test_what_concerns_one_coordinator_is_asked_of_one(three: Deployed) -> None:
    with (
        tq.connect(three.address) as queue,
        pytest.raises(tq.UsageError, match="this call is for one coordinator, and the queue has 3"),
    ):
        queue.drain_shard(1)


def test_a_snapshot_is_restored_at_its_seat_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSFERQUEUE_SNAPSHOTS", str(tmp_path))
    with Deployed(tmp_path, ["1/2", "2/2"]) as two:
        with tq.connect(two.address) as queue:
            name = one_each(2)[0]
            queue.create_table(name, tasks=[TASK]).put(x=[[7]])
            of_all = queue.snapshot("all")
        with tq.connect(two.all[0].ipc) as first, tq.connect(two.all[1].ipc) as second:
            where = first.snapshot("s")
            with pytest.raises(
                tq.UsageError, match=f'has table "{name}", which belongs to coordinator 1 of 2, and this one is 2/2'
            ):
                second.restore("s")
            assert second.tables() == []
            first.drop_table(name)
            assert first.restore("s") == where
            first.drop_table(name)
            assert first.restore("all/1-of-2") == of_all[:1]
        with tq.connect(two.address) as queue:
            assert queue.table(name).read()["x"].list() == [[7]]


def test_one_that_is_killed_takes_only_its_own_tables(tmp_path: Path) -> None:
    with Deployed(tmp_path, ["1/2", "2/2"]) as two, tq.connect(two.address) as queue:
        lost, kept = (queue.create_table(name, tasks=[TASK]) for name in one_each(2))
        for table in (lost, kept):
            table.put(x=[[1], [2]])
        two.all[0].kill()
        with pytest.raises(tq.Disconnected, match=f"the server at {two.all[0].ipc} is gone"):
            lost.lease("train", rows=1, timeout_s=PATIENCE_S)
        with kept.lease("train", rows=2, timeout_s=PATIENCE_S) as batch:
            assert batch["x"].list() == [[1], [2]]
        assert kept.put(x=[[3]]).tolist() == [2]
        stats = queue.stats()
        assert "is gone" in stats.coordinators[two.all[0].ipc].unreachable
        assert list(stats.tables) == [kept.name]
        with pytest.raises(tq.Disconnected, match="is gone"):
            queue.audit()
        with pytest.raises(tq.Unreachable, match=f"nothing answered at {two.all[0].ipc} within 0.5 s"):
            tq.connect(two.address, timeout_s=0.5)


def test_one_that_is_durable_comes_back_and_all_goes_on(tmp_path: Path) -> None:
    with Deployed(tmp_path, ["1/2", "2/2"], durable=True) as two, tq.connect(two.address) as queue:
        names = one_each(2)
        tables = [queue.create_table(name, tasks=[TASK]) for name in names]
        for table in tables:
            table.put(x=[[1]])
        two.all[1].kill()
        assert tables[0].put(x=[[2]]).tolist() == [1]
        two.all[1].stop()
        two.all[1] = Coordinator(two.all[1].directory, "2/2", durable=True)
        assert tables[1].put(x=[[2]]).tolist() == [1]
        assert queue.audit().balanced
        two.all[1].stop()
        with pytest.raises(AssertionError):
            Coordinator(two.all[1].directory, f"{home_coordinator(names[1], 3) % 3 + 1}/3", durable=True).stop()


def test_a_token_for_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(2):
        for role in ("admin", "producer"):
            keyring.add(tmp_path / f"k{number}", role, role)
    with ExitStack() as made:
        two = []
        for number in range(2):
            two.append(Coordinator(tmp_path / f"c{number}", f"{number + 1}/2", "--keys", str(tmp_path / f"k{number}")))
            made.callback(two[-1].stop)
        tokens = ",".join(
            write_token(keyring.token_of(tmp_path / f"k{number}", "admin", two[number].tcp)) for number in range(2)
        )
        addresses = [one.tcp for one in two]
        with tq.connect(tokens) as queue:
            assert queue.coordinators == addresses
        with tq.connect(addresses, key=tokens) as queue:
            assert queue.tables() == []
        monkeypatch.setenv(TOKEN_VARIABLE, tokens)
        with tq.connect(addresses[::-1]) as queue, tq.connect() as other:
            assert queue.coordinators == other.coordinators == addresses
        with pytest.raises(
            tq.UsageError, match=r"none of the 2 join tokens given is for tcp://127\.0\.0\.1:1; give one of each"
        ):
            tq.connect([addresses[0], "tcp://127.0.0.1:1"])


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ([], "the list of addresses is empty"),
        (["ipc:///a.sock", 3], "address 3 is int; an address is text"),
        (7, "address 7 is int; an address is text"),
        ("ipc:///a.sock,", "nothing answered at ipc:///a.sock, within"),
        ("tcp://a:1,b:2", "has no host and port"),
    ],
)
def test_what_is_no_list_of_addresses(address: Any, why: str) -> None:
    with pytest.raises((tq.UsageError, tq.Unreachable), match=why):
        tq.connect(address, timeout_s=0.1)


def test_arguments_of_an_embedded_server_beside_a_list(three: Deployed) -> None:
    with pytest.raises(tq.UsageError, match="arena_bytes and runtime are for an embedded server"):
        tq.connect(three.address, arena_bytes="1GiB")
