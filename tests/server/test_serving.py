"""Whole servers: embedded in this process and as processes of their own, with real clients and signals."""

import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from transferqueue.errors import AddressInUse, DeadlineExceeded, Disconnected, UsageError
from transferqueue.limits import FRAMES_QUEUED_MAX, MIB, SMALL_FRAME_BYTES
from transferqueue.policies import Task
from transferqueue.schema import Field
from transferqueue.server.process import embedded
from transferqueue.server.process.assembly import ServerProcess
from transferqueue.server.runtime_directory import private_arena
from transferqueue.transport import FileLock, IpcAddress, Wakeup, dial, parse_address, this_host
from transferqueue.transport.system import threads
from transferqueue.wire import codec
from transferqueue.wire import messages as m
from transferqueue.wire.answers.stats import Stats

ONE_ROW = m.Columns(fields=[Field("x", "int64")], inline=[m.Inline("x", b"\x07" + bytes(7))])
AT_ONCE_S = 5.0
"""What a busy machine may add to no wait at all; a silence or the end of a lease would be noticed later."""


class Client:
    """The smallest client there can be: one thread, one call at a time unless posted."""

    def __init__(self, address, sessions=None):
        self.channel = dial(address)
        self.wakeup = Wakeup()
        self.session = self.ids = 0
        self.lock = FileLock(sessions / secrets.token_hex(16)) if sessions else None
        if self.lock:
            assert self.lock.take()
        self.welcome = self.ask(
            m.Hello(os.urandom(16), pid=os.getpid(), host=this_host(), lock=str(self.lock.path) if self.lock else "")
        )
        self.session = self.welcome.session

    def post(self, request):
        self.ids += 1
        self.channel.send(codec.encode_call(m.CallFrame(self.session, self.ids, 0, request)))
        return self.ids

    def take(self, timeout_s=20):
        """The next answer, whatever it answers."""
        deadline = time.monotonic() + timeout_s
        while (frame := self.channel.recv_nowait()) is None:
            assert time.monotonic() < deadline, "no answer"
            self.channel.wait(self.wakeup, deadline - time.monotonic())
        return codec.decode_answer(frame)

    def ask(self, request):
        call = self.post(request)
        answer = self.take()
        assert answer.id == call
        return answer.reply

    def close(self):
        self.channel.close()
        self.wakeup.close()
        if self.lock:
            self.lock.release()


@pytest.fixture
def server(tmp_path):
    found = embedded.start(MIB, tmp_path)
    yield found
    found.stop()


@pytest.fixture
def clients():
    """Makes clients; closes them at the end."""
    made = []

    def make(address, sessions=None):
        made.append(Client(address, sessions))
        return made[-1]

    yield make
    for client in made:
        client.close()


class Process:
    """``python -m transferqueue.server`` with these options."""

    def __init__(self, *options):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "transferqueue.server", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ready(self):
        return self.process.stdout.readline().split()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()


def arena_of(client):
    """The file of a served arena, which lies in a directory of its own."""
    path = Path(client.welcome.arenas[0])
    assert path.parent.parent == Path(f"/dev/shm/transferqueue-{os.getuid()}")
    return path


def lease(wait_s=0.0):
    return m.LeaseRequest("t", "train", rows=1, wait_s=wait_s)


def create(client):
    client.ask(m.CreateTable("t", fields=[Field("x", "int64")], tasks=[Task("train", needs=["x"])]))


# ---------------------------------------------------------------- embedded


def test_an_embedded_server_is_reached_from_inside_and_from_outside(server, clients, tmp_path):
    inside, outside = clients(server.inproc_address), clients(server.address, tmp_path / "sessions")
    assert inside.welcome.arenas == outside.welcome.arenas
    assert inside.welcome.runtime == str(tmp_path)
    create(inside)
    waiting = outside.post(lease(wait_s=20))
    inside.ask(m.PutRequest("t", 1, ONE_ROW))
    answer = outside.take()
    assert answer.id == waiting
    assert answer.reply.content.inline == [ONE_ROW.inline[0]]
    assert Path(parse_address(server.address).path).stat().st_mode & 0o777 == 0o600


def test_stopping_tells_clients_and_leaves_no_file(clients, tmp_path):
    server = embedded.start(MIB, tmp_path)
    inside, outside = clients(server.inproc_address), clients(server.address)
    create(inside)
    outside.post(lease(wait_s=20))
    server.stop()
    server.stop()
    assert outside.take().reply.error == "Disconnected"
    assert inside.take().reply.error == "Disconnected"
    with pytest.raises(Disconnected):
        inside.take()
    assert list(tmp_path.iterdir()) == []


def test_an_abandoned_server_stops(tmp_path):
    before = threading.active_count()
    server = embedded.start(MIB, tmp_path)
    assert threading.active_count() == before + 1
    del server
    assert threading.active_count() == before
    assert list(tmp_path.iterdir()) == []


def test_a_stop_that_does_not_come_to_an_end_says_where_the_server_is(tmp_path, monkeypatch):
    monkeypatch.setattr(threads.still_runs, "__defaults__", (0.05,))
    stuck = threading.Event()
    server = embedded.start(MIB, tmp_path)
    served = server._end.peek()[2][0]
    served._files.callback(stuck.wait)  # as a file system that does not answer
    try:
        with pytest.raises(
            DeadlineExceeded, match=r"did not end within .* Its thread is at .*threading.py:\d+ in wait"
        ):
            server.stop()
        server.stop()  # does nothing
    finally:
        stuck.set()
    (thread,) = (each for each in threading.enumerate() if each.name.startswith("transferqueue server"))
    thread.join(AT_ONCE_S)
    assert not thread.is_alive()


def test_a_forked_child_does_not_stop_the_server_of_its_parent(server, clients):
    child = os.fork()
    if child == 0:
        try:
            server.stop()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert clients(server.address).ask(m.ListTables()) == m.Tables([])


def test_a_server_of_this_process_is_found_by_its_address(server, clients):
    assert embedded.running(server.address) is server
    assert embedded.running("ipc:///nowhere.sock") is None
    client = clients(server.address)
    create(client)
    before = server.times_ready("t", "train")
    assert (before[1], server.times_ready("t", "other")) == (0, None)
    client.ask(m.PutRequest("t", 1, ONE_ROW))
    after = server.times_ready("t", "train")
    assert after == server.times_ready("t", "train") == (before[0], 1)
    client.ask(m.DropTable("t"))
    create(client)
    client.ask(m.PutRequest("t", 1, ONE_ROW))
    again = server.times_ready("t", "train")
    assert again[1] == after[1]
    assert again != after  # another table of this name
    child = os.fork()
    if child == 0:
        os._exit(embedded.running(server.address) is not None)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_two_embedded_servers_share_a_runtime_directory(tmp_path, clients):
    first, second = embedded.start(MIB, tmp_path), embedded.start(MIB, tmp_path)
    first.stop()
    assert clients(second.address).ask(m.ListTables()) == m.Tables([])
    second.stop()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_others_may_open_is_refused_and_nothing_is_left(tmp_path):
    tmp_path.chmod(0o777)
    before = threading.active_count()
    with pytest.raises(UsageError, match="chmod 700"):
        embedded.start(MIB, tmp_path)
    assert threading.active_count() == before
    assert list(tmp_path.iterdir()) == []


def test_an_arena_of_no_size_is_refused(tmp_path):
    for size in (0, -1, "much"):
        with pytest.raises(UsageError, match="size"):
            embedded.start(size, tmp_path)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- the loop


@pytest.fixture
def running(tmp_path):
    """A server whose loop the test can look at."""
    found = ServerProcess(IpcAddress(tmp_path / "s.sock"), private_arena(MIB), [parse_address("tcp://127.0.0.1:0")])
    thread = threading.Thread(target=found.run)
    thread.start()
    yield found
    found.stop()
    thread.join()


def test_an_idle_server_does_not_wake(running, clients):
    client = clients(running.address)
    create(client)
    client.ask(m.ListTables())
    turns, cpu, began = running.loop.turns, time.process_time(), time.monotonic()
    assert running.coordinator.next_deadline() is None
    threading.Event().wait(0.3)
    assert running.loop.turns == turns
    assert time.process_time() - cpu < (time.monotonic() - began) / 3
    client.ask(m.ListTables())
    assert running.loop.turns == turns + 1


def test_a_frame_is_one_turn_however_many_it_serves(running, clients):
    client = clients(running.address)
    create(client)
    waiting = [client.post(lease(wait_s=20)) for _ in range(41)]
    client.ask(m.ListTables())
    before = sum(running.coordinator.turns.requests.counts)
    rows = m.Columns(fields=[Field("x", "int64")], inline=[m.Inline("x", bytes(8 * len(waiting)))])
    put = client.post(m.PutRequest("t", len(waiting), rows))
    assert sorted(client.take().id for _ in [*waiting, put]) == [*waiting, put]
    client.ask(m.ListTables())
    assert sum(running.coordinator.turns.requests.counts) - before <= 3  # the put, and the two that ask for tables


def test_one_who_waits_costs_no_wakes(running, clients):
    client, other = clients(running.address), clients(running.address)
    create(client)
    client.post(lease(wait_s=20))
    other.ask(m.ListTables())
    turns = running.loop.turns
    threading.Event().wait(0.2)
    assert running.loop.turns == turns


def test_a_deadline_is_kept_without_any_frame(running, clients):
    client = clients(running.address)
    create(client)
    start = time.monotonic()
    client.post(lease(wait_s=0.1))
    assert client.take().reply.error == "DeadlineExceeded"
    assert 0.1 <= time.monotonic() - start < 5


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_a_peer_that_spews_garbage_changes_nothing(running, clients, kind):
    address = running.address if kind == "ipc" else running.tcp_addresses[0]
    client = clients(running.address)
    create(client)
    stranger, wakeup = dial(address), Wakeup()
    frames = [
        b"",
        b"x",
        os.urandom(1000),
        b"\x91" * SMALL_FRAME_BYTES,
        codec.encode_call(m.CallFrame(1, 1, 0, m.ListTables()))[:-1],
    ]
    for frame in frames * 20:
        stranger.send(frame)
    for _ in range(len(frames) * 20):
        while (frame := stranger.recv_nowait()) is None:
            stranger.wait(wakeup, 10)
        assert codec.decode_answer(frame).reply.error == "ProtocolError"
    stats = codec.decode_observed(client.ask(m.Observe("stats")), Stats)
    assert stats.server.garbage == len(frames) * 20
    assert stats.sessions == 1
    assert client.ask(m.ListTables()) == m.Tables(["t"])
    stranger.close()
    wakeup.close()


def test_a_client_that_never_reads_is_dropped_and_no_one_else(running, clients):
    deaf, other, pacer = clients(running.address), clients(running.address), clients(running.address)
    create(other)
    other.ask(m.PutRequest("t", 1, ONE_ROW))
    deaf.ask(lease())
    other.post(lease(wait_s=20))
    while not running.coordinator.counters.sessions_dropped:
        assert deaf.ids < 64 * FRAMES_QUEUED_MAX
        for _ in range(FRAMES_QUEUED_MAX // 4):
            deaf.post(m.Observe("stats"))
        while (
            running.coordinator.counters.calls < deaf.ids + pacer.ids
        ):  # else its own channel would say that nobody reads
            if running.coordinator.counters.sessions_dropped:
                break
            deaf.channel.wait(deaf.wakeup, 0)  # write what the kernel did not take at once
            pacer.ask(m.ListTables())
    assert other.take().reply.content.rows == bytes(8)
    assert running.coordinator.counters.sessions_dropped == 1


def test_a_client_in_this_process_that_leaves_without_a_word_is_closed(running, clients):
    rude, other = clients(running.inproc_address), clients(running.address)
    create(other)
    other.ask(m.PutRequest("t", 1, ONE_ROW))
    rude.ask(lease())
    other.post(lease(wait_s=20))
    rude.channel.close()
    assert other.take().reply.content.rows == bytes(8)


# ---------------------------------------------------------------- death

WORKER = """
import sys
sys.path.insert(0, sys.argv[3])
from pathlib import Path
from tests.server.test_serving import Client, lease
client = Client(sys.argv[1], Path(sys.argv[2]))
assert client.ask(lease()).lease
print("leased", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_leases_of_a_killed_process_return_at_once(server, clients, tmp_path):
    client = clients(server.inproc_address)
    create(client)
    client.ask(m.PutRequest("t", 1, ONE_ROW))
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", WORKER, server.address, tmp_path / "sessions", root],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as worker:
        assert worker.stdout.readline() == b"leased\n"
        client.post(lease(wait_s=20))
        start = time.monotonic()
        worker.kill()
        assert client.take().reply.content.rows == bytes(8)
        assert time.monotonic() - start < AT_ONCE_S
    assert list((tmp_path / "sessions").iterdir()) == []


# ---------------------------------------------------------------- a process of its own


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_served_process_stops_on_a_signal_and_leaves_no_file(tmp_path, clients, number):
    address = f"ipc://{tmp_path}/run/control.sock"
    with Process("--address", address, "--arena-bytes", "64MiB", "--tcp", "127.0.0.1:0") as server:
        ready, ipc, tcp = server.ready()
        assert (ready, ipc) == ("ready", address)
        assert tcp.startswith("tcp://127.0.0.1:")
        client = clients(address, tmp_path / "run" / "sessions")
        arena = arena_of(client)
        assert arena.exists()
        assert clients(tcp).ask(m.ListTables()) == m.Tables([])
        start = time.monotonic()
        server.process.send_signal(number)
        assert client.take().reply.error == "Disconnected"
        assert server.process.wait(10) == 0
        assert time.monotonic() - start < AT_ONCE_S
        assert server.process.stderr.read() == ""
        client.close()
    assert not arena.parent.exists()
    assert [path.name for path in (tmp_path / "run").rglob("*")] in ([], ["sessions"])


@pytest.mark.slow
def test_a_second_server_is_refused_and_the_first_goes_on(tmp_path, clients):
    address = f"ipc://{tmp_path}/run/control.sock"
    with Process("--address", address) as first:
        assert first.ready() == ["ready", address]
        with Process("--address", address) as second:
            assert second.process.wait(20) == 2
            assert "is in use" in second.process.stderr.read()
        left = arena_of(clients(address))
        with pytest.raises(AddressInUse):
            ServerProcess(parse_address(address), private_arena(MIB))
        first.process.kill()
        first.process.wait()
        assert Path(f"{tmp_path}/run/control.sock").exists()
        with Process("--address", address) as third:
            assert third.ready() == ["ready", address]
            mine = arena_of(clients(address))
            assert mine.exists()
            assert not left.exists()
            third.process.terminate()
            assert third.process.wait(10) == 0
    assert list((tmp_path / "run").iterdir()) == []
    assert not mine.parent.exists()


@pytest.mark.slow
def test_a_wrong_call_says_so():
    for options, said in (
        (["--address", "nowhere"], "has an unknown form"),
        (["--address", "inproc:1"], "is inside a process"),
        (["--arena-bytes", "much"], "is not a size"),
        (["--tcp", "host"], "no host and port"),
    ):
        with Process(*options) as server:
            assert server.process.wait(20) == 2
            assert said in server.process.stderr.read()


@pytest.mark.slow
def test_a_tcp_address_alone_will_do(tmp_path, clients, monkeypatch):
    monkeypatch.setenv("TRANSFERQUEUE_RUNTIME", str(tmp_path))
    with Process("--address", "tcp://127.0.0.1:0", "--arena-bytes", "1MiB") as server:
        ready, tcp, ipc = server.ready()
        assert ready == "ready"
        assert ipc == f"ipc://{tmp_path}/tcp-0.sock"
        assert clients(tcp).ask(m.ListTables()) == m.Tables([])
        server.process.terminate()
        assert server.process.wait(10) == 0
    assert list(tmp_path.iterdir()) == []
