"""A server with keys, over real sockets: who comes in, who hears nothing, and what a revoked key still has."""

import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import transferqueue as tq
from tests.client.deployments import until_someone_waits
from transferqueue.transport.security import keyring
from transferqueue.transport.security.keyring import Keyring
from transferqueue.transport.security.keys import ClientKeys, JoinToken, KeyPair, read_token, write_token

QUIET_S = 0.5
"""A stranger hears nothing for as long; a longer wait would only hear nothing for longer."""


class Keyed:
    """A server process at loopback with a key for each role."""

    def __init__(self, directory: Path, *words: str, port: int = 0, umask: int = 0o077) -> None:
        self.keys = directory / "keys"
        for role in ("admin", "producer", "consumer", "observer"):
            keyring.add(self.keys, role, role)
        program = (
            f"import os; os.umask({umask}); from transferqueue.server.__main__ import main; raise SystemExit(main())"
        )
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-c", program, "--address", f"ipc://{directory}/run/q.sock"),
                *("--tcp", f"127.0.0.1:{port}", "--arena-bytes", "64MiB", "--keys", str(self.keys), *words),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        told = self.process.stdout.readline().split()
        if told[:1] != ["ready"]:
            self.process.communicate(timeout=30)
            raise AssertionError("the server did not start")
        _, self.ipc, self.tcp = told

    def token(self, name: str) -> str:
        return write_token(keyring.token_of(self.keys, name, self.tcp))

    def connect(self, name: str) -> tq.Queue:
        return tq.connect(self.token(name))

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(timeout=30) == 0
        self.process.stdout.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    found = Keyed(tmp_path_factory.mktemp("keyed"))
    yield found
    found.stop()


@pytest.fixture(scope="module")
def table(server):
    with server.connect("admin") as queue:
        fields = [tq.Field("x", "int64", (None,))]
        yield queue.create_table("t", fields=fields, tasks=[tq.Task("train", needs=["x"])])


@pytest.mark.slow
def test_the_roles_work_together(server, table):
    with server.connect("producer") as producer, server.connect("consumer") as consumer:
        producer.table("t").put(x=[[1], [2]])
        with consumer.table("t").lease("train", rows=2, timeout_s=20) as batch:
            assert batch["x"].list() == [[1], [2]]
        with pytest.raises(tq.PermissionDenied, match="Lease is not for a client whose key has role producer"):
            producer.table("t").lease("train", rows=1)
        with pytest.raises(tq.PermissionDenied, match="Put is not for a client whose key has role consumer"):
            consumer.table("t").put(x=[[1]])
        with pytest.raises(tq.PermissionDenied, match="admin may send it"):
            consumer.drop_table("t")
    with server.connect("observer") as observer:
        assert observer.audit().balanced


@pytest.mark.slow
def test_a_token_is_taken_as_key_and_from_the_environment(server, table, monkeypatch):
    with tq.connect(server.tcp, key=server.token("observer")) as queue:
        assert queue.tables() == ["t"]
        assert queue.address == server.tcp
    with tq.connect(key=server.token("observer")) as queue:
        assert queue.tables() == ["t"]
    monkeypatch.setenv("TRANSFERQUEUE_TOKEN", server.token("observer"))
    for address in (None, server.tcp):
        with tq.connect(address) as queue:
            assert queue.tables() == ["t"]
    with tq.connect(server.ipc) as queue, tq.connect(arena_bytes="1MiB") as own:
        assert (queue.tables(), own.tables()) == (["t"], [])


@pytest.mark.slow
def test_strangers_hear_nothing(server):
    known = read_token(server.token("admin")).keys
    unknown = write_token(JoinToken(server.tcp, ClientKeys(known.server, KeyPair.new()), "x", "admin"))
    other = write_token(JoinToken(server.tcp, ClientKeys(KeyPair.new().public, known.own), "x", "admin"))
    for key, why in [("", "connect with a join token"), (unknown, "does not know"), (other, "does not know")]:
        with pytest.raises(tq.Unreachable, match=why):
            tq.connect(server.tcp, key=key, timeout_s=QUIET_S)


@pytest.mark.slow
def test_bytes_over_the_network_ask_for_the_same_keys(server, table):
    with tq.connect(server.token("producer"), data="remote") as producer:
        producer.table("t").put(x=[[1] * 5000, [2]])
        with (
            tq.connect(server.token("consumer"), data="remote") as consumer,
            consumer.table("t").lease("train", rows=2, timeout_s=20) as batch,
        ):
            assert [len(one) for one in batch["x"].list()] == [5000, 1]


@pytest.mark.slow
def test_a_revoked_key_is_out_and_its_leases_return(server, table):
    table.put(x=[[7]])
    keyring.add(server.keys, "late", "consumer")
    token = server.token("late")
    consumer = tq.connect(token)
    held = consumer.table("t").lease("train", rows=1, timeout_s=20)
    assert held["x"].list() == [[7]]
    with ThreadPoolExecutor() as threads:
        waits = threads.submit(consumer.table("t").lease, "train", rows=1, timeout_s=60)
        with tq.connect(server.ipc) as looking:
            until_someone_waits(looking, "t")
        keyring.revoke(server.keys, "late")
        server.process.send_signal(signal.SIGHUP)
        with pytest.raises(tq.Disconnected, match="the key of this client was withdrawn; get another key"):
            waits.result(timeout=QUIET_S * 10)
    with table.lease("train", rows=1, timeout_s=20) as batch:
        assert batch["x"].list() == [[7]]
    with pytest.raises(tq.Unreachable, match="revoked"):
        tq.connect(token, timeout_s=QUIET_S)
    consumer.close()


@pytest.mark.slow
def test_files_of_a_server_are_private_under_any_umask(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = Keyed(tmp_path, "--durability", "process", "--state", str(tmp_path / "state"), port=port, umask=0)
    before = os.umask(0)
    try:
        with tq.connect(server.ipc) as local, server.connect("admin") as queue:
            queue.create_table("t", tasks=[tq.Task("train", needs=["x"])]).put(x=[[1, 2], [3]])
            assert local.tables() == ["t"]
            arena = Path(local._client.memory._paths[0])
            roots = [tmp_path / "run", server.keys, tmp_path / "state"]
            made = [path for root in roots for path in (root, *root.rglob("*"))]
            made += [arena.parent, *arena.parent.iterdir()] if str(arena).startswith("/dev/shm/") else []
            assert len(made) >= 9
            assert [str(path) for path in made if path.stat().st_mode & 0o077] == []
    finally:
        os.umask(before)
        server.stop()


def test_a_keyring_is_needed_for_any_address_but_loopback(tmp_path, monkeypatch):
    monkeypatch.setenv("TRANSFERQUEUE_KEYS", str(tmp_path / "none"))
    from transferqueue.server.process.serve import serve

    for address in ("tcp://0.0.0.0:0", "tcp://*:0", "tcp://[::]:0", "tcp://10.1.2.3:7777", "tcp://somehost:7777"):
        with pytest.raises(tq.UsageError, match=r"this server has no keys.*Make keys.*--keys, or listen at 127.0.0.1"):
            serve(f"ipc://{tmp_path}/run/q.sock", tcp=[address], on_ready=print)
    assert not list((tmp_path / "run").iterdir())


def test_a_key_is_refused_where_none_is_asked_for(tmp_path):
    keyring.add(tmp_path / "keys", "a", "admin")
    token = write_token(keyring.token_of(tmp_path / "keys", "a", "tcp://127.0.0.1:9"))
    with pytest.raises(tq.UsageError, match="asks for no key: only tcp does"):
        tq.connect(f"ipc://{tmp_path}/q.sock", key=token)
    with pytest.raises(tq.UsageError, match="and another as the key"):
        tq.connect(token, key=token)
    with pytest.raises(tq.UsageError, match="arena_bytes and runtime for an embedded one"):
        tq.connect(key=token, arena_bytes="1MiB")
    assert Keyring(tmp_path / "keys").server.public == read_token(token).keys.server


def test_bytes_may_go_plain_while_calls_are_encrypted(tmp_path):
    server = Keyed(tmp_path, "--plain-bytes")
    try:
        with pytest.raises(tq.Unreachable):
            tq.connect(server.tcp, data="remote", timeout_s=QUIET_S)
        with tq.connect(server.token("admin"), data="remote") as queue:
            table = queue.create_table("t")
            with table.read(table.put(x=range(7))) as found:
                assert found["x"].list() == list(range(7))
            port = queue.stats().server.bulk_port
        assert _spoken_to(port) == b"", "who says nothing is told nothing"
    finally:
        server.stop()


def _spoken_to(port):
    with socket.create_connection(("127.0.0.1", port), timeout=30) as stranger:
        stranger.shutdown(socket.SHUT_WR)
        return stranger.recv(100)
