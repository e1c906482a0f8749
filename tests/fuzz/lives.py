"""Typed requests against a server of durability process or disk that is killed every few hundred of them, and goes on.

A life of the server is a process forked from one that has imported everything (`Launcher`), so that a restart costs
what recovery costs. It runs `serve`, as ``transferqueue serve --durability process --state DIR`` does. Several sessions
(`Talker`) send frames at once over the socket file; one of them brought memory and so is a shard. After each burst a
frame with an impossible request marks the end of what its connection sent, since the server always answers it.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import select
import signal
import socket
import statistics
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from tests.fuzz.memory import resident_bytes
from tests.fuzz.typed import FIELDS, Typed, World
from transferqueue.errors import BY_NAME, ProtocolError
from transferqueue.limits import MIB, TURN_S_MAX, Limits
from transferqueue.policies import Manual, Pacing, Task
from transferqueue.server.process.serve import serve
from transferqueue.transport import FileLock, this_host
from transferqueue.wire import codec
from transferqueue.wire import messages as m
from transferqueue.wire.answers.stats import AuditAnswer, Stats
from transferqueue.wire.versions import PROTOCOL

T = TypeVar("T")
MESSAGES_PER_LIFE: Final = 700
LIVES_PER_STATE: Final = 40
"""After so many lives the state directory begins anew: tables that were sealed, filled or dropped leave less and less
to fuzz."""
BURST: Final = 60
"""Messages of one session between two marks."""
TALKERS: Final = 3
READY_S: Final = 60.0
DEATH_S: Final = 3.0
ARENA_BYTES: Final = 32 * MIB
OFFERED_BYTES: Final = 4 * MIB
"""Of the shard that one of the sessions is."""
SHOWN: Final = 12
"""The last frames that a report of a death shows."""


class Report(msgspec.Struct):
    """What happened. replies: by the type of the request and of its reply (or error). grown_bytes: of the server, in
    its last life."""

    messages: int = 0
    lives: int = 0
    seconds: float = 0.0
    replies: Counter[tuple[str, str]] = msgspec.field(default_factory=Counter)
    restart_s: list[float] = msgspec.field(default_factory=list)
    largest_bytes: int = 0
    longest_turn: tuple[float, str] = (0.0, "")
    """Seconds by the clock of the longest turn of a server's loop for one request, and the request."""
    busiest_turn: tuple[float, str] = (0.0, "")
    """The same by processor time, of the turns over 20 ms by the clock."""

    def of_reply(self, name: str) -> int:
        """How many requests were answered so."""
        return sum(count for (_, reply), count in self.replies.items() if reply == name)


class Broken(AssertionError):
    """The server died, failed, did not answer, or its books do not balance."""


class Launcher:
    """A process that forks one server after another, each with everything imported. Of a test, or of the fuzzer."""

    def __init__(self, directory: Path, level: str) -> None:
        self.directory, self._level = directory, level
        self.address = f"ipc://{directory}/run/control.sock"
        self.log = directory / "server.log"
        self._here, there = socket.socketpair()
        (directory / "run").mkdir(mode=0o700, parents=True, exist_ok=True)
        gc.freeze()
        self._pid = os.fork()
        if self._pid == 0:
            self._here.close()
            self._launch(there)
        there.close()

    def _launch(self, there: socket.socket) -> None:
        """Fork a server for each line that comes; its number goes back, then a line when it listens."""
        log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 2)
        try:
            for line in there.makefile("rb"):
                pid = os.fork()
                if pid == 0:
                    self._serve(there, line.strip().decode())
                there.sendall(f"{pid}\n".encode())
                _, status = os.waitpid(pid, 0)
                there.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
        finally:
            os._exit(0)

    def _serve(self, there: socket.socket, state: str) -> None:
        code = 1
        try:
            serve(
                self.address, arena_bytes=ARENA_BYTES, durability=self._level, state=Path(state),
                snapshots=self.directory / "snapshots",
                on_ready=lambda _: there.sendall(b"ready\n"),
            )  # fmt: skip
            code = 0
        except BaseException:  # noqa: BLE001  (written down; the exit code tells)
            traceback.print_exc()
        finally:
            os._exit(code)

    def start(self, state: Path) -> int:
        """Start a server on `state`; its process number, once it listens."""
        self._here.sendall(f"{state}\n".encode())
        lines = {self._line(), self._line()} - {"ready"}
        (pid,) = lines
        if not pid.isdigit():
            raise Broken(f"the server ended with {pid} before it listened; {self.tail()}")
        return int(pid)

    def end(self, pid: int, number: int = signal.SIGKILL) -> None:
        """Send the server a signal and wait for its end; `Broken` if it was not this that ended it."""
        os.kill(pid, number)
        code = int(self._line())
        if code != (-number if number == signal.SIGKILL else 0):
            raise Broken(f"the server ended with {code} by itself; {self.tail()}")

    def death(self) -> str:
        """How the server ended, if it did a moment ago or does within one."""
        if not select.select([self._here], [], [], DEATH_S)[0]:
            return f"the server lives; {self.tail()}"
        code = self._line()
        return f"the server ended with {code}; {self.tail()}"

    def tail(self) -> str:
        """The end of what the server logged."""
        with suppress(FileNotFoundError):
            return f"its log ends with:\n{self.log.read_text()[-3000:]}"
        return "it logged nothing"

    def _line(self) -> str:
        if not select.select([self._here], [], [], READY_S)[0]:
            raise Broken(f"the server neither started nor ended within {READY_S:g} s; {self.tail()}")
        line = b""
        while not line.endswith(b"\n"):
            line += self._here.recv(1)
        return line.decode().strip()

    def close(self) -> None:
        """End the launcher. A server that runs is ended before."""
        self._here.close()
        os.waitpid(self._pid, 0)


class Talker:
    """One session that sends typed frames and reads what comes. `mark`: the id of the frame that ends a burst."""

    def __init__(self, path: str, rng: random.Random, report: Report, *, offers: bool) -> None:
        self._path, self._rng, self._report = path, rng, report
        self.world = World()
        self._typed = Typed(rng, self.world)
        self._lock = FileLock(Path(path).parent / f"talker-{rng.getrandbits(40)}.lock")
        self._offers = offers
        self._lock.take()
        self.world.lock = str(self._lock.path)
        self._asked: dict[int, tuple[str, str]] = {}
        self._sent: dict[int, bytes] = {}
        self._call = 0
        self.session = 0
        self._socket = socket.socket(socket.AF_UNIX)
        self._rest = b""
        self.renew()

    def renew(self) -> None:
        """Be another client from the next connection on."""
        offer = None
        if self._offers:
            arena = Path(f"{self._path}.arena")
            arena.touch(0o600)
            os.truncate(arena, OFFERED_BYTES)
            offer = m.ShardOffer(str(arena), OFFERED_BYTES, "tcp://127.0.0.1:9", "", bytes(32))
        self._hello = m.Hello(
            self._rng.randbytes(16), pid=os.getpid(), host=this_host(), lock=self.world.lock, shard=offer
        )
        self._is_stale = False

    def connect(self) -> None:
        """Dial, and greet; the session of before, if the server still has it."""
        self._socket.close()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(READY_S)
        self._socket.connect(self._path)
        self._rest = b""
        reply = self.ask(self._hello, session=0)
        if not isinstance(reply, m.Welcome):
            raise Broken(f"Hello was answered with {reply}")
        self.session = reply.session

    def ask(self, request: m.Request, session: int | None = None) -> m.Reply:
        """One honest call."""
        self._call += 1
        frame = codec.encode_call(m.CallFrame(self.session if session is None else session, self._call, 0, request))
        self._socket.sendall(len(frame).to_bytes(4, "little") + frame)
        for found in self._frames():
            answer = codec.decode_answer(found)
            if answer.id == self._call:
                return answer.reply
        raise Broken(f"{m.tag_of(request)} was not answered: the server hung up")

    def send(self, count: int) -> None:
        """So many frames at once, and the mark."""
        frames = [self._frame() for _ in range(count)]
        self._call += 1
        self._mark = self._call
        frames.append(msgspec.msgpack.encode([PROTOCOL, self.session, self._mark, 0, ["Nothing"]]))
        with suppress(BrokenPipeError, ConnectionResetError):  # seen when its answers are read
            self._socket.sendall(b"".join(len(frame).to_bytes(4, "little") + frame for frame in frames))

    def _frame(self) -> bytes:
        rng = self._rng
        if self._sent and rng.random() < 0.03:  # sent again, as a client does that hears nothing
            return self._sent[rng.choice(list(self._sent))]
        self._call += 1
        tree = self._typed.request()
        name = tree[0] if isinstance(tree, list) and tree and isinstance(tree[0], str) else "none"
        session, seen = self.session, rng.choice([0, max(0, self._call - 50)])
        if rng.random() < 0.005:
            seen = rng.choice([1 << 31, 1 << 62, (1 << 63) - 1, (1 << 64) - 1, -1])
            self._is_stale |= seen > self._call  # the server takes all calls of this session for answered from now on
        if rng.random() < 0.005:
            session = rng.choice([0, -1, 1 << 62, (1 << 64) - 1])
        elif name in ("Goodbye", "Hello"):
            self._is_stale = True  # closed, or its answers go elsewhere
        if name == "Goodbye" and rng.random() < 0.5:
            session = 0
        self._asked[self._call] = name, tree[1] if name != "none" and len(tree) > 1 and isinstance(tree[1], str) else ""
        frame = self._typed.call(session, self._call, seen, tree)
        self._sent[self._call] = frame
        return frame

    def hear(self) -> None:
        """Read all answers up to that of the mark. `Broken` for an answer that is a defect of the server."""
        for frame in self._frames():
            answer = codec.decode_answer(frame)
            if self._heard(answer):
                break
        else:
            raise Broken("the server hung up")
        for call in [call for call in self._sent if call < self._mark - 60]:
            del self._sent[call]
        if self._is_stale:
            self.renew()
            self.connect()

    def _heard(self, answer: m.AnswerFrame) -> bool:
        reply = answer.reply
        name = reply.error if isinstance(reply, m.Failed) else m.tag_of(reply)
        if answer.id == self._mark:
            return True
        asked, table = self._asked.pop(answer.id, ("none", ""))
        self._report.replies[asked, name] += 1
        if isinstance(reply, m.Failed):
            if reply.error == "InternalError":
                frame = self._sent.get(answer.id, b"")
                raise Broken(f"{reply.text}\nit answered {shown(frame)}")
        else:
            self.world.heard(reply, table)
        return False

    def _frames(self) -> Iterator[bytes]:
        """What arrives, until the other end hangs up."""
        while True:
            while len(self._rest) >= 4 and len(self._rest) >= 4 + (size := int.from_bytes(self._rest[:4], "little")):
                frame, self._rest = self._rest[4 : 4 + size], self._rest[4 + size :]
                yield frame
            try:
                came = self._socket.recv(1 << 18)
            except TimeoutError:
                raise Broken(f"the server did not answer for {READY_S:g} s") from None
            except ConnectionResetError:
                return
            if not came:
                return
            self._rest += came

    def last(self) -> str:
        """The last frames that were sent, readable."""
        return "\n".join(shown(frame) for frame in list(self._sent.values())[-SHOWN:])

    def close(self) -> None:
        """Hang up."""
        self._socket.close()
        self._lock.release()


def shown(frame: bytes) -> str:
    """A frame for a report."""
    try:
        return repr(codec.decode_call(frame))[:600]
    except ProtocolError as error:
        return f"{frame[:200].hex()} ({error})"


def run(
    directory: Path, *, messages: int, seed: int, level: str = "process", per_life: int = MESSAGES_PER_LIFE
) -> Report:
    """So many typed messages, the server killed after each `per_life`. `Broken` for anything that must not happen."""
    report, started = Report(), time.perf_counter()
    rng = random.Random(seed)
    launcher = Launcher(directory, level)
    try:
        while report.messages < messages:
            state = directory / f"state-{report.lives}"
            _one_state(launcher, state, rng, report, messages, per_life)
    finally:
        launcher.close()
    report.seconds = time.perf_counter() - started
    return report


def _one_state(
    launcher: Launcher, state: Path, rng: random.Random, report: Report, messages: int, per_life: int
) -> None:
    path = launcher.address.removeprefix("ipc://")
    talkers = [
        Talker(path, rng, report, offers=number == 1 and launcher._level == "process") for number in range(TALKERS)
    ]
    auditor = Talker(path, rng, report, offers=False)
    pid = 0
    try:
        for _ in range(LIVES_PER_STATE):
            at = time.perf_counter()
            pid = launcher.start(state)
            report.restart_s.append(time.perf_counter() - at)
            _live(talkers, auditor, report, per_life)
            report.largest_bytes = max(report.largest_bytes, resident_bytes(pid))
            launcher.end(pid)
            pid = 0
            report.lives += 1
            if report.messages >= messages:
                return
    except (Broken, OSError) as error:
        last = "\n".join(talker.last() for talker in talkers)
        death = launcher.death() if pid else launcher.tail()
        raise Broken(
            f"life {report.lives}, after {report.messages:,} messages: {error}\nlast sent:\n{last}\n{death}"
        ) from error
    finally:
        for talker in (*talkers, auditor):
            talker.close()
        if pid:
            with suppress(ProcessLookupError, Broken, ValueError):
                launcher.end(pid)


def _live(talkers: list[Talker], auditor: Talker, report: Report, per_life: int) -> None:
    auditor.connect()
    _check(auditor, report)
    _furnish(auditor)
    for talker in talkers:
        talker.connect()
    sent = 0
    while sent < per_life:
        size = min(BURST, -(-(per_life - sent) // len(talkers)))
        for talker in talkers:
            talker.send(size)
            sent += size
        if sent < per_life:  # the last burst is on its way when the server is killed
            for talker in talkers:
                talker.hear()
            _check(auditor, report)
    report.messages += sent


def _check(auditor: Talker, report: Report) -> None:
    """`Broken` unless the books balance and nothing failed inside the server. Notes its longest turns in the report."""
    audit = _observed(auditor, "audit", AuditAnswer)
    if not audit.balanced:
        raise Broken(f"the books do not balance: {audit}")
    server = _observed(auditor, "stats", Stats).server
    if server.internal_errors:
        raise Broken(f"the server counts {server.internal_errors} internal errors")
    turns = server.turns["request"]
    report.longest_turn = max(report.longest_turn, (turns.longest_s, turns.longest_of))
    report.busiest_turn = max(report.busiest_turn, (turns.busiest_s, turns.busiest_of))


def _observed(auditor: Talker, what: str, kind: type[T]) -> T:
    reply = auditor.ask(m.Observe(what))
    if not isinstance(reply, m.Observed):
        raise Broken(f"Observe({what!r}) was answered with {reply}")
    return codec.decode_observed(reply, kind)


def _furnish(auditor: Talker) -> None:
    """Tables of every kind, with the names that `typed` knows: made anew where one was sealed or dropped."""
    small = Limits(rows=512)
    tasks = [Task("train", ["x", "y"]), Task("reward", ["x"], ["r"]), Task("all")]
    for request in (
        m.CreateTable("t", FIELDS, tasks, small),
        m.CreateTable("u", FIELDS, tasks[2:], small, retention=Manual()),
        m.CreateTable("v", FIELDS, tasks, small),
        m.CreateTable("paced", FIELDS, tasks, small, Pacing("train", 4, 1, 2, channel="clock")),
    ):
        terms = auditor.ask(m.OpenTable(request.name))
        if isinstance(terms, m.TableTerms) and not terms.sealed:
            continue
        auditor.ask(m.DropTable(request.name))
        reply = auditor.ask(request)
        if isinstance(reply, m.Failed):
            raise Broken(f"{request.name} was refused: {reply.text}")


def _turn(turn: tuple[float, str]) -> str:
    seconds, request = turn
    return f"{seconds * 1e3:.1f} ms ({request})" if request else "none over 20 ms"


def main() -> int:
    """One seed, in this process; prints what happened. 1 if something broke, or a turn for one request took 20 ms of
    processor time."""
    options = argparse.ArgumentParser(prog="python -m tests.fuzz.lives", description=__doc__)
    options.add_argument("directory", type=Path)
    options.add_argument("--messages", type=int, default=7_000)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--level", choices=["process", "disk"], default="process")
    given = options.parse_args()
    try:
        report = run(given.directory, messages=given.messages, seed=given.seed, level=given.level)
    except Broken as error:
        print(f"seed {given.seed}, durability {given.level}: BROKEN: {error}", flush=True)
        return 1
    refused = sum(count for (_, reply), count in report.replies.items() if reply in BY_NAME)
    print(
        f"seed {given.seed}, durability {given.level}: {report.messages:,} messages in {report.seconds:.0f} s, "
        f"{report.lives:,} kills, {sum(report.replies.values()) - refused:,} carried out, {refused:,} refused, books "
        f"balanced; a restart took {statistics.median(report.restart_s):.2f} s, the slowest "
        f"{max(report.restart_s):.2f} s; the largest server had {report.largest_bytes / MIB:.0f} MiB; longest turn for "
        f"one request {_turn(report.longest_turn)} by the clock, {_turn(report.busiest_turn)} of processor "
        "time", flush=True,
    )  # fmt: skip
    return int(report.busiest_turn[0] > TURN_S_MAX)


if __name__ == "__main__":
    sys.exit(main())
