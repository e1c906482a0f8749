"""The sessions of a coordinator: their clients, peers and times. It decides nothing by itself.

- Hello opens a session; later calls name it by its number. Numbers contain the epoch (the run of the server), so a call
  meant for an earlier run never reaches another client's session.
- A client that says Hello again continues its session.
- A session whose process the kernel watches is never closed for silence. After `SESSION_SILENCE_S` of silence the
  server checks the lock of a session that only has a lock, and closes a session that has neither.
- A closed session whose lock is still held *lingers*: its memory stays until the lock is free. The kernel has no event
  for that, so the server tries the lock, soon at first and then every `LOCK_CHECK_S`, while such a session exists.

`Workers` records which sessions work on which task, and which one left last. Only reports use it:

- A session works on a task from its first lease of it until it ends. It is a producer of a table from its first put or
  reservation. Its leases and waiting requests show whether it is busy.
- For each task the label, time and ending of the last session that ended are remembered. The exit status of a process
  may be known only later, so a report looks it up when needed.
- Open sessions bound the memory of these records. Of ended ones, the latest `GONE_MAX` tasks are remembered.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

import msgspec

from transferqueue.errors import Corruption, Disconnected, Full
from transferqueue.errors.text import visible
from transferqueue.limits import CALLS_PARKED_MAX, LOCK_CHECK_FIRST_S, LOCK_CHECK_S, SESSION_SILENCE_S, SESSIONS_MAX
from transferqueue.server.sessions.exit_status import SessionEnding
from transferqueue.server.sessions.liveness import ProcessHandle
from transferqueue.transport.control.unix_socket import UnixPeer
from transferqueue.transport.control.zeromq import KeyedPeer
from transferqueue.wire import messages as m

Peer = UnixPeer | bytes | KeyedPeer | int
"""The destination of answers: a connection to the socket file, a ZeroMQ routing id with or without a key, or the number
of an in-process channel."""

NOWHERE: Final = b""
"""The peer of a session whose client has not said Hello since the server was restarted."""

_NUMBERS_PER_EPOCH: Final = 1 << 20
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(m.Hello).decode


def encode_hello(hello: m.Hello) -> bytes:
    """The Hello of a client as the ledger stores it, so that the next run of the server finds the client again."""
    return _encode(hello)


def decode_hello(session: int, stored: bytes) -> m.Hello:
    """The Hello that `encode_hello` encoded for a session. `Corruption` if the bytes are no Hello."""
    try:
        return _decode(stored)
    except msgspec.MsgspecError as error:
        raise Corruption(f"session {session} of the journal has no readable Hello: {error}") from error


class OpenSession:
    """One open session.

    `process` shows whether its client is alive. The client has all replies up to call `seen`. `hello_call` is the id of
    its latest Hello. `remote`: its bytes go over the bulk endpoint. `refused`: the refusals of calls that are not
    carried out again, until the client has seen them.
    """

    __slots__ = (
        "hello",
        "hello_call",
        "last_message_at",
        "number",
        "opened_at",
        "peer",
        "process",
        "refused",
        "remote",
        "seen",
    )

    def __init__(self, number: int, hello: m.Hello, process: ProcessHandle, peer: Peer, now: float) -> None:
        self.number: Final = number
        self.hello: Final = hello
        self.process: Final = process
        self.opened_at: Final = now
        self.peer = peer
        self.last_message_at = now
        self.seen = self.hello_call = 0
        self.remote = hello.remote or not process.is_local
        self.refused: dict[int, m.Failed] = {}

    @property
    def label(self) -> str:
        """Its name in texts: the label that the client gave, else its process number."""
        return visible(self.hello.label) or (f"pid {self.hello.pid}" if self.hello.pid else f"session {self.number}")

    def message_received(self, peer: Peer, seen: int, now: float) -> None:
        """Record that a frame came from `peer`, whose client has all replies up to `seen`."""
        self.peer, self.last_message_at = peer, now
        if seen > self.seen:
            self.answers_received(seen)

    def answers_received(self, seen: int) -> None:
        """Record that the client has all replies up to `seen`, which is higher than before."""
        self.seen = seen
        if self.refused:
            self.refused = {call: refused for call, refused in self.refused.items() if call > seen}

    def confirm_hello(self, peer: Peer, call: int, now: float) -> bool:
        """Record a Hello from `peer`. Returns False, and ignores it, if a later Hello came on another connection."""
        if call >= self.hello_call:
            self.hello_call = call
            self.message_received(peer, self.seen, now)
        return peer == self.peer

    def refuse(self, call: int, refused: m.Failed) -> None:
        """Remember the refusal of `call`. A repeated frame gets the same answer: a refused call is never carried out
        later."""
        self.refused[call] = refused
        if len(self.refused) > CALLS_PARKED_MAX:
            del self.refused[next(iter(self.refused))]


class SessionTable:
    """All sessions of one coordinator, open and lingering."""

    def __init__(self, epoch: int) -> None:
        self._last = epoch * _NUMBERS_PER_EPOCH
        self.by_number: Final[dict[int, OpenSession]] = {}
        """The open sessions."""
        self._by_client: dict[bytes, OpenSession] = {}
        self._lingering: dict[int, OpenSession] = {}
        self._past_labels: OrderedDict[int, str] = OrderedDict()
        self._check_locks_at: float | None = None
        self._lock_pause_s = LOCK_CHECK_FIRST_S
        self._check_silence_at: float | None = None

    def __len__(self) -> int:
        return len(self.by_number)

    def __iter__(self) -> Iterator[OpenSession]:
        return iter(self.by_number.values())

    @property
    def lingering(self) -> list[OpenSession]:
        """Closed sessions through which a process may still see memory."""
        return list(self._lingering.values())

    @property
    def last(self) -> int:
        """The number of the session that was opened last."""
        return self._last

    def of_client(self, client: bytes) -> OpenSession | None:
        """The open session of a client, if it has one."""
        return self._by_client.get(client)

    def get(self, number: int) -> OpenSession | None:
        """The open session of this number; None if there is none."""
        return self.by_number.get(number)

    def label_of(self, number: int) -> str:
        """The name of a session in texts, also of one that ended, while its label is remembered."""
        session = self.by_number.get(number)
        return session.label if session else self._past_labels.get(number, f"session {number}")

    def of_call(self, number: int) -> OpenSession:
        """The open session that a call names. `Disconnected` if there is none."""
        session = self.by_number.get(number)
        if session is None:
            raise Disconnected(
                f"session {number} is not open here: this server was restarted, or the session was closed or silent "
                f"for over {SESSION_SILENCE_S:g} s; connect again"
            )
        return session

    def check_room(self) -> None:
        """`Full` if no more sessions may be opened."""
        if len(self.by_number) + len(self._lingering) >= SESSIONS_MAX:
            raise Full(
                f"session refused: {SESSIONS_MAX} sessions are open, the most that this server allows; close some"
            )

    def open(self, hello: m.Hello, process: ProcessHandle, peer: Peer, now: float) -> OpenSession:
        """Open a new session. Call `check_room` first."""
        self._last += 1
        return self.restore(self._last, hello, process, now, peer)

    def restore(
        self, number: int, hello: m.Hello, process: ProcessHandle, now: float, peer: Peer = NOWHERE
    ) -> OpenSession:
        """Open a session under its number of an earlier run. Its silence counts from now. Its peer is unknown until its
        client says Hello."""
        session = OpenSession(number, hello, process, peer, now)
        self.by_number[number] = session
        self._by_client[hello.client] = session
        if process.pidfd < 0 and self._check_silence_at is None:
            self._check_silence_at = now + SESSION_SILENCE_S
        return session

    def close(self, session: OpenSession, now: float) -> bool:
        """Close a session. Returns whether it lingers, so that its memory must stay."""
        del self.by_number[session.number], self._by_client[session.hello.client]
        self._past_labels[session.number] = session.label
        if len(self._past_labels) > LABELS_KEPT_MAX:
            self._past_labels.popitem(last=False)
        session.process.forget_process()
        if not session.process.may_see_memory():
            return False
        self._lingering[session.number] = session
        self._lock_pause_s = LOCK_CHECK_FIRST_S
        self._check_locks_at = now + self._lock_pause_s
        return True

    def of_peer(self, peer: Peer) -> list[OpenSession]:
        """The open sessions whose answers go to `peer`."""
        return [session for session in self.by_number.values() if session.peer == peer]

    def silent(self, now: float) -> list[OpenSession]:
        """The open sessions to close for silence: neither a process nor a lock shows that they live."""
        if self._check_silence_at is None or now < self._check_silence_at:
            return []
        unwatched = [session for session in self.by_number.values() if session.process.pidfd < 0]
        dead, alive = [], []
        for session in unwatched:
            if now - session.last_message_at >= SESSION_SILENCE_S:
                if not session.process.may_see_memory():
                    dead.append(session)
                    continue
                session.last_message_at = now  # its lock is held: check again after another silence
            alive.append(session.last_message_at)
        self._check_silence_at = min(alive) + SESSION_SILENCE_S if alive else None
        return dead

    def released_by_dead_process(self, now: float) -> list[OpenSession]:
        """Take the lingering sessions whose lock is free now: no process sees memory through them any more."""
        if self._check_locks_at is None or now < self._check_locks_at:
            return []
        free = [session for session in self._lingering.values() if not session.process.may_see_memory()]
        for session in free:
            del self._lingering[session.number]
        self._lock_pause_s = min(2 * self._lock_pause_s, LOCK_CHECK_S)
        self._check_locks_at = now + self._lock_pause_s if self._lingering else None
        return free

    def next_deadline(self) -> float | None:
        """When to call `silent` or `released_by_dead_process` next; None: not until a session changes."""
        silence_at, locks_at = self._check_silence_at, self._check_locks_at
        if silence_at is None or locks_at is None:
            return locks_at if silence_at is None else silence_at
        return min(silence_at, locks_at)


LABELS_KEPT_MAX: Final = 4096
"""The labels of this many ended sessions are remembered: as many as the events of a table may name."""
GONE_MAX: Final = 256
"""The last worker of this many tasks is remembered. Each may hold a descriptor of its process."""

Key = tuple[str, str]
"""Table and task, or `PRODUCERS`."""
PRODUCERS: Final = ""
"""Stands in place of a task for the sessions that put rows."""


class DepartedWorker:
    """A worker whose session ended."""

    __slots__ = ("at", "ending", "label")

    def __init__(self, label: str, at: float, ending: SessionEnding) -> None:
        self.label, self.at, self.ending = label, at, ending


class Workers:
    """The workers of one coordinator."""

    def __init__(self) -> None:
        self._tasks: dict[int, dict[Key, float]] = {}
        """Session -> task -> when the session last asked for rows of the task."""
        self._sessions: dict[Key, dict[int, None]] = {}
        self._gone: OrderedDict[Key, DepartedWorker] = OrderedDict()

    def record_request(self, session: int, table: str, task: str, now: float) -> None:
        """Record that a session asks for rows of an existing task."""
        key = (table, task)
        mine = self._tasks.get(session)
        if mine is None:
            mine = self._tasks[session] = {}
        if key not in mine:
            self._sessions.setdefault(key, {})[session] = None
        mine[key] = now

    def record_end(self, session: int, label: str, reason: str, pidfd: int, now: float) -> None:
        """Record that a session ended. `reason` and `pidfd` are as in `SessionEnding`."""
        for key in self._tasks.pop(session, ()):
            others = self._sessions[key]
            del others[session]
            if not others:
                del self._sessions[key]
            self._forget(key)
            self._gone[key] = DepartedWorker(label, now, SessionEnding(reason, pidfd))
        while len(self._gone) > GONE_MAX:
            self._forget(next(iter(self._gone)))

    def forget_table(self, table: str) -> None:
        """Forget the workers of a dropped table, since another table may get its name."""
        for key in [key for key in self._gone if key[0] == table]:
            self._forget(key)
        for key in [key for key in self._sessions if key[0] == table]:
            for session in self._sessions.pop(key):
                del self._tasks[session][key]

    def last_to_ask(self, table: str, task: str) -> tuple[int, float] | None:
        """The open session that last asked for rows of the task, and when; None if there is none."""
        key = (table, task)
        return max(
            ((session, self._tasks[session][key]) for session in self._sessions.get(key, ())),
            key=lambda asked: asked[1],
            default=None,
        )

    def of(self, table: str, task: str) -> list[int]:
        """The open sessions that work on the task, in the order in which they first asked."""
        return list(self._sessions.get((table, task), ()))

    def last_gone(self, table: str, task: str) -> DepartedWorker | None:
        """The worker of the task whose session ended last; None if there is none."""
        return self._gone.get((table, task))

    def close(self) -> None:
        """Forget all workers, and close their descriptors."""
        for key in list(self._gone):
            self._forget(key)

    def _forget(self, key: Key) -> None:
        gone = self._gone.pop(key, None)
        if gone is not None:
            gone.ending.close()
