"""Versions as differences between processes: the publisher, relays and readers are killed, and no bit is wrong."""

from __future__ import annotations

import random
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import transferqueue as tq
from tests.client.deployments import Worker, served
from tests.scale import sizes
from tests.weights.relays import RelayProcess, until

pytestmark = pytest.mark.slow

CONTENT = """
def content(version):
    rng = np.random.default_rng(0)
    found = {f"w{at}": rng.integers(0, 1 << 14, (256, 96)).astype("i2") for at in range(3)}
    for step in range(1, version + 1):
        rng = np.random.default_rng(step)
        for value in found.values():
            value += rng.random(value.shape) < 0.02
    return found
"""
PUBLISHER = (
    CONTENT
    + """
channel = queue.weights("policy", deltas=4)
version = int(sys.argv[2])
for _ in sys.stdin:
    try:
        channel.publish(version, content(version), timeout_s=60)
    except tq.UsageError:  # what the one before had on its way has come
        pass
    version += 1
"""
)
READER = (
    CONTENT
    + """
with queue.weights("policy").subscribe() as versions:
    while sys.argv[2] == "fast" or sys.stdin.readline():
        found = versions.pull(timeout_s=60)
        sent = content(found.version)
        print(found.version, all(found.numpy()[name].tobytes() == sent[name].tobytes() for name in sent))
"""
)


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


class Chain:
    """A publisher, two relays and a reader, each of which can be killed and started again."""

    def __init__(self, directory: Path, opened: ExitStack) -> None:
        self._opened = opened
        hosts = [opened.enter_context(served(private(directory, name))) for name in "abc"]
        self.origin, self.middle, self.end = hosts
        self.queues = [opened.enter_context(tq.connect(host.ipc)) for host in hosts]
        self.running: dict[str, Worker | RelayProcess] = {}
        for name in ("publisher", "first", "second", "reader", "slow"):
            self.start(name)

    def newest(self, at: int) -> int:
        channel = self.queues[at].stats().channels.get("policy")
        return -1 if channel is None else channel.newest

    def start(self, name: str) -> None:
        made: Worker | RelayProcess
        if name == "publisher":
            made = self._opened.enter_context(Worker(self.origin.ipc, PUBLISHER, str(self.newest(0) + 1)))
        elif name in ("reader", "slow"):
            pace = "fast" if name == "reader" else "when told"
            made = self._opened.enter_context(Worker(self.end.ipc, READER, pace))
        else:
            source, into = (self.origin, self.middle) if name == "first" else (self.middle, self.end)
            made = RelayProcess("--from", source.tcp, "--into", into.ipc)
        self.running[name] = made

    def kill(self, name: str) -> None:
        process = self.running[name].process
        process.send_signal(signal.SIGKILL)
        said, _ = process.communicate()
        assert "False" not in said, "what a reader read before"

    def go(self) -> None:
        """Have the publisher begin one more version."""
        publisher = self.running["publisher"]
        assert isinstance(publisher, Worker)
        publisher.tell("go")

    def read_slowly(self) -> int:
        """Have the slow reader read the newest version, some after its last one. Which it was."""
        slow = self.running["slow"]
        assert isinstance(slow, Worker)
        slow.tell("go")
        version, right = slow.line().split()
        assert right == "True"
        return int(version)

    def reads_up_to(self, version: int, name: str = "reader") -> bool:
        """Whether the reader comes to this version, and all that it read was right."""
        reader = self.running[name]
        assert isinstance(reader, Worker)
        if name == "slow":
            reader.tell("go")
        while (line := reader.line()).endswith(" True"):
            if line.split()[0] == str(version):
                return True
        return False


@pytest.mark.parametrize("versions", sizes(8, 200))
def test_whoever_is_killed_what_is_read_is_what_was_published(versions: int, directory: Path) -> None:
    """Each is killed by turns, at some instant while versions are under way, until so many are published."""
    draws = random.Random(versions)
    with ExitStack() as opened:
        chain = Chain(directory, opened)
        opened.callback(chain.kill, "first")
        opened.callback(chain.kill, "second")
        slow_has = -1
        while chain.newest(0) < versions:
            for victim in ("first", "publisher", "second", "reader"):
                before = chain.newest(0)
                for _ in range(3):
                    chain.go()
                reached = before + draws.randrange(3)
                until(lambda reached=reached: chain.newest(0) >= reached)
                chain.kill(victim)
                chain.start(victim)
                chain.go()
                until(lambda before=before: chain.newest(0) > before)
            until(lambda slow_has=slow_has: chain.newest(2) > slow_has)
            slow_has = chain.read_slowly()
        chain.go()
        until(lambda: chain.newest(0) > slow_has)
        chain.kill("publisher")
        until(lambda: chain.newest(0) == chain.newest(1) == chain.newest(2))
        last = chain.newest(0)
        assert last >= versions
        assert chain.reads_up_to(last)
        assert chain.reads_up_to(last, "slow")
        chain.start("reader")
        assert chain.reads_up_to(last), "a late one too"
        assert [queue.stats().channels["policy"].deltas_refused for queue in chain.queues] == [0, 0, 0]
