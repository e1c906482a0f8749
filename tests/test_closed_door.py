"""What comes over the wire or off the disk is never executed, and never says where to connect to."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "transferqueue"

DIALS = {"connect", "connect_ex", "create_connection", "create_datagram_endpoint", "open_connection", "urlopen", "dial"}
ALLOWED = {
    # the address that the user gave, checked by parse_address
    ("transport/control/zeromq.py", "self._socket.connect"),
    ("transport/control/unix_socket.py", "connecting.connect"),
    ("transport/control/channel.py", "inproc.connect"),
    ("client/client.py", "dial"),
    ("cluster/shard.py", "dial"),
    ("weights/relay.py", "tq.connect"),
    # the store that whoever started the shard named
    ("adapters/stores/mooncake.py", "socket.create_connection"),
    # the host of that address: sends nothing, asks the kernel which of this machine's addresses it would send from
    ("cluster/shard.py", "asked.connect"),
    # the host that the user gave, at the port that Welcome told; or a remote shard, at the place that the server which
    # the user named has checked and told (SECURITY.md)
    ("transport/bulk/client.py", "connection.connect_ex"),
    # the address that this client was given, once its server was lost: does anything listen there?
    ("transport/control/port_probe.py", "trial.connect"),
    # the address of a command, or the server of the run whose folder the user named: does anything listen there?
    ("transport/control/port_probe.py", "probe.connect"),
    ("transport/control/port_probe.py", "socket.create_connection"),
    # a database in memory, which opens nothing
    ("storage/row_files/reader.py", "duckdb.connect"),
    # files, and the front for commands
    ("server/durability/journal.py", "sqlite3.connect"),
    ("cli/connection.py", "transferqueue.connect"),
    ("cli/completion.py", "tq.connect"),  # completes words of a command: the address is the command's own
}
"""Every place of the core that connects to anything. A new one needs its reason here: whose word is the address?"""


def _dotted(node: ast.expr) -> str:
    match node:
        case ast.Name():
            return node.id
        case ast.Attribute():
            return f"{_dotted(node.value)}.{node.attr}"
    return "?"


def dials(source: str) -> Iterator[str]:
    """Whatever in the source may open a connection."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and _dotted(node.func).rpartition(".")[2] in DIALS:
            yield _dotted(node.func)


def test_no_address_from_a_message_is_dialled() -> None:
    rooms = [path for path in PACKAGE.iterdir() if path.name not in {"adapters", "workflows", "testing", "__pycache__"}]
    files = [file for room in rooms for file in ([room] if room.suffix == ".py" else room.rglob("*.py"))]
    found = {(str(file.relative_to(PACKAGE)), what) for file in files for what in dials(file.read_text())}
    assert found <= ALLOWED
    assert ("transport/control/zeromq.py", "self._socket.connect") in found


@pytest.mark.parametrize(
    "source", ["s.connect(a)", "socket.create_connection(a)", "dial(a)", "zmq.Context().socket(zmq.REQ).connect(a)"]
)
def test_the_scan_finds(source: str) -> None:
    assert list(dials(source))


_CYCLE = """
import json, os, sys, tempfile, threading
from pathlib import Path
import numpy as np
import transferqueue as tq
from transferqueue.server.process.assembly import ServerProcess
from transferqueue.server.runtime_directory import private_arena
from transferqueue.transport import parse_address

if __debug__:
    raise SystemExit("run with -O")
WATCHED = {"pickle.find_class", "marshal.loads", "exec", "compile", "os.system", "subprocess.Popen", "ctypes.dlopen"}
heard, listening = [], []

def hook(event, args):
    if listening and event in WATCHED:
        heard.append(f"{event} {args!r}"[:300])

sys.addaudithook(hook)

def cycle(channel, address, **terms):
    with tq.connect(address, **terms) as queue:
        table = queue.create_table("t", tasks=[tq.Task("score", needs=["ids"]),
                                                tq.Task("train", needs=["ids", "reward"])])
        rows = table.put(ids=[[1, 2], [3]], text=["a", "b"], plain=[{"a": [1, None]}, []], image=np.ones((2, 3, 4)),
                         key=["k1", "k2"], tags={"lang": "en"}, policy_version=3)
        with table.lease("score", rows=2, timeout_s=30) as batch:
            batch.ack(reward=np.asarray([0.5, 1.5], np.float32))
        table.update(rows, late=[1, 2])
        fields = ["ids", "text", "plain", "image", "reward", "late"]
        with table.lease("train", rows=2, timeout_s=30, fields=fields) as batch:
            assert_equal(batch["plain"].list(), [{"a": [1, None]}, []])
            assert_equal(batch["text"].list(), ["a", "b"])
            assert_equal(batch["image"].numpy().sum(), 24.0)
        try:
            table.lease("train", rows=1, timeout_s=0.01)
        except tq.FlowSignal:
            pass
        channel = queue.weights(channel)
        channel.publish(1, {"w": np.arange(5.0)})
        with channel.pull(timeout_s=30) as weights:
            assert_equal(weights["w"].sum(), 10.0)
        channel.applied(1)
        for look in (queue.stats, queue.audit, queue.doctor, queue.sessions):
            look()
        queue.drop_table("t")

def assert_equal(found, wanted):
    if found != wanted:
        raise SystemExit(f"{found!r} is not {wanted!r}")

with tempfile.TemporaryDirectory() as directory:
    os.environ["TRANSFERQUEUE_RUNTIME"] = directory + "/own"
    place = parse_address(f"ipc://{directory}/run/q.sock")
    server = ServerProcess(place, private_arena(1 << 26), [parse_address("tcp://127.0.0.1:0")])
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    ways = [(server.address, {}), (server.tcp_addresses[0], {}), (server.tcp_addresses[0], {"data": "remote"})]
    for turn in range(2):  # the first loads what is loaded on first use
        if turn:
            listening.append(True)
            compile("0", "control", "eval")
            if not heard:
                raise SystemExit("the hook is deaf")
            heard.clear()
        for number, (address, terms) in enumerate(ways):
            cycle(f"policy {turn} {number}".replace(" ", "-"), address, **terms)
    listening.clear()
    server.stop()
    thread.join()
print(json.dumps(heard))
"""


@pytest.mark.slow
def test_a_whole_cycle_executes_nothing_that_it_received() -> None:
    done = subprocess.run([sys.executable, "-O", "-c", _CYCLE], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []
