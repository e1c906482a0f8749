"""One connection against a scripted server: who waits, who goes away, and what arrives too late."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.client.scripted import ScriptedServer
from tests.client.test_interrupted_finalizers import until
from tests.wire.test_versions import OLD_REFUSAL
from transferqueue.client.session import io_thread
from transferqueue.client.session.connection import Connection
from transferqueue.client.session.io_thread import HEARTBEAT_PACES, IoThread, heartbeat_s
from transferqueue.errors import Disconnected, Forked, NotFound, ProtocolError, Unreachable, UsageError, VersionMismatch
from transferqueue.limits import HEARTBEAT_S, RESEND_S, SESSION_SILENCE_S, UNPIN_S
from transferqueue.transport import Wakeup, dial
from transferqueue.wire import messages as m
from transferqueue.wire.codec import encode_fields
from transferqueue.wire.versions import PROTOCOL

BLOCK = m.BlockLocation(block=11, shard=0, extent=1, offset=0, nbytes=64, rows=1, fields=["x"], counts=[0])
NUMBERS = struct.pack("<q", 3)
CONTENT = m.ReplyRows(
    NUMBERS, NUMBERS, NUMBERS, NUMBERS, bytes(4), NUMBERS, NUMBERS, bytes(8), None, None, [],
    [m.ReplyColumns(["x"], [BLOCK], bytes(4), bytes(4))], encode_fields([]),
)  # fmt: skip
LEASED = m.Leased(lease=4, token=9, lease_s=60.0, version=0, content=CONTENT)
LEASE = m.LeaseRequest("t", "train", rows=1, wait_s=60.0)
AT_ONCE_S = 5.0
"""What a busy machine may add to no wait at all."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ScriptedServer]:
    with ScriptedServer(tmp_path) as found:
        yield found


def connected(address: str) -> Connection:
    connection = Connection(dial(address), address)
    connection.open(m.Hello(bytes(16)), timeout_s=10)
    return connection


@pytest.fixture
def connection(server: ScriptedServer) -> Iterator[Connection]:
    found = connected(server.address)
    yield found
    found.close()


class Caller(threading.Thread):
    """A thread that makes one call and keeps how it ended."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__()
        self._call = call
        self.ended: Any = None
        self.start()

    def run(self) -> None:
        try:
            self.ended = self._call()
        except BaseException as error:  # noqa: BLE001  (kept, and looked at by the test)
            self.ended = error

    def outcome(self) -> Any:
        self.join(timeout=20)
        assert not self.is_alive()
        return self.ended


def test_nothing_listens(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/nobody.sock"
    before = threading.active_count()
    started = time.monotonic()
    with pytest.raises(Unreachable, match=r"nothing answered at ipc.*within 0.2 s.*transferqueue serve"):
        Connection(dial(address), address).open(m.Hello(bytes(16)), timeout_s=0.2)
    assert time.monotonic() - started < AT_ONCE_S
    assert threading.active_count() == before


@pytest.mark.parametrize("listens", ["nothing", "what closes every connection"])
def test_a_client_that_waits_for_its_server_sleeps(
    listens: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says nothing before it is greeted, so nothing that it has not said for long is due. Behind a tunnel whose
    other end is gone, connections are accepted and closed."""
    ahead, turns, turned = [0.0], 0, threading.Event()
    turn = io_thread.IoThread._turn

    def counted(io: io_thread.IoThread) -> None:
        nonlocal turns
        turns += 1
        turn(io)
        turned.set()

    monkeypatch.setattr(io_thread.IoThread, "_turn", counted)
    with socket.create_server(("127.0.0.1", 0)) as closing:
        accepting = threading.Thread(target=_close_all, args=(closing,), daemon=True)
        accepting.start()
        address = (
            f"ipc://{tmp_path}/nobody.sock" if listens == "nothing" else f"tcp://127.0.0.1:{closing.getsockname()[1]}"
        )
        connection = Connection(dial(address), address, lambda: time.monotonic() + ahead[0])
        opening = Caller(lambda: connection.open(m.Hello(bytes(16)), timeout_s=0.8))
        for sent, passed in enumerate((RESEND_S, RESEND_S + HEARTBEAT_S + 0.5), 1):  # then its Hello is not due again
            while sum(1 + hello.tries for hello in connection._io.calls.unanswered()) < sent:
                assert turned.wait(20)
                turned.clear()
            ahead[0] = passed
            connection._io.wakeup.set()
        assert isinstance(opening.outcome(), Unreachable)
        closing.shutdown(socket.SHUT_RDWR)
        accepting.join(20)
    assert turns < 200, "it turned all the time"


def _close_all(closing: socket.socket) -> None:
    with suppress(OSError):
        while True:
            closing.accept()[0].close()


def test_a_server_may_start_later(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/scripted.sock"
    connection = Connection(dial(address), address)
    opening = Caller(lambda: connection.open(m.Hello(bytes(16)), timeout_s=20))
    with ScriptedServer(tmp_path):
        assert opening.outcome().session == 5
        connection.close()


def test_a_refusal_is_raised_with_its_type_and_text(server: ScriptedServer, connection: Connection) -> None:
    caller = Caller(lambda: connection.call(m.OpenTable("t")))
    server.answer(server.next(m.OpenTable).id, m.Failed("NotFound", 'table "t" does not exist'))
    assert isinstance(caller.outcome(), NotFound)
    assert str(caller.outcome()) == 'table "t" does not exist'


def test_answers_may_come_in_any_order(server: ScriptedServer, connection: Connection) -> None:
    first = Caller(lambda: connection.call(m.OpenTable("a")))
    one = server.next(m.OpenTable)
    second = Caller(lambda: connection.call(m.ListTables()))
    two = server.next(m.ListTables)
    server.answer(two.id, m.Tables(["a"]))
    assert second.outcome() == m.Tables(["a"])
    server.answer(one.id, m.DoneReply(rows=1))
    assert first.outcome() == m.DoneReply(rows=1)


@pytest.fixture
def _interrupts() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where the tests were started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interrupts")
def test_an_interrupted_lease_is_given_back_when_its_reply_comes(
    server: ScriptedServer, connection: Connection
) -> None:
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        call = server.next(m.LeaseRequest)
        signal.pthread_kill(main, signal.SIGINT)
        again = server.next(m.LeaseRequest)  # over another connection
        assert (again.id, again.request.wait_s) == (call.id, 0.0)
        server.answer(call.id, LEASED)

    other = threading.Thread(target=interrupt)
    other.start()
    with pytest.raises(KeyboardInterrupt):
        connection.call(LEASE)
    other.join()
    released = server.next(m.ReleaseRequest)
    assert (released.request.lease, released.request.token, released.request.failed) == (4, 9, False)
    unpinned = server.next(m.Unpin).request
    assert (unpinned.blocks, unpinned.counts) == (struct.pack("<q", 11), struct.pack("<q", 1))
    server.answer(released.id, m.DoneReply())
    caller = Caller(lambda: connection.call(m.ListTables()))  # the connection works on
    server.answer(server.next(m.ListTables).id, m.Tables([]))
    assert caller.outcome() == m.Tables([])


@pytest.mark.parametrize(
    ("request_", "reply", "undone"),
    [
        (m.Reserve("t", 8, wait_s=9), m.Reserved(reservation=3, rows=8, version=0, refills=[]), m.Unreserve("t", 3)),
        (m.Grant(64, wait_s=9), m.Granted(extent=6, shard=0, offset=0, nbytes=4096), m.ReturnGrant(6)),
        (m.ReadRequest("t"), m.ReadRows(CONTENT), m.Unpin(struct.pack("<q", 11), struct.pack("<q", 1))),
        (m.Pull("c", wait_s=9), m.WeightsReply(1, [], [BLOCK]), m.Unpin(struct.pack("<q", 11), struct.pack("<q", 1))),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_cancelled_wait_would_have_got_is_given_back(
    server: ScriptedServer, connection: Connection, request_: Any, reply: Any, undone: Any
) -> None:
    async def cancel() -> m.CallFrame:
        waiting = asyncio.create_task(connection.acall(request_))
        call = await asyncio.to_thread(server.next, type(request_))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return call

    call = asyncio.run(cancel())
    server.answer(call.id, reply)
    assert server.next(type(undone)).request == undone


def test_a_reply_to_a_loop_that_is_closed_is_given_back(server: ScriptedServer, connection: Connection) -> None:
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)  # it would complain about the task that is left
    waiting = loop.create_task(connection.acall(m.Grant(64, wait_s=9)))
    call = loop.run_until_complete(asyncio.to_thread(server.next, m.Grant))
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    server.answer(call.id, m.Granted(extent=6, shard=0, offset=0, nbytes=4096))
    assert server.next(m.ReturnGrant).request == m.ReturnGrant(6)
    assert not waiting.done()


@pytest.mark.slow
def test_a_lost_call_is_sent_again_with_its_id_and_its_answer_counts_once(
    server: ScriptedServer, connection: Connection
) -> None:
    started = time.monotonic()
    caller = Caller(lambda: connection.call(m.ListTables()))
    first, second = server.next(m.ListTables), server.next(m.ListTables)
    assert time.monotonic() - started >= RESEND_S * 0.9
    assert first == second
    server.answer(first.id, m.Tables(["a"]))
    server.answer(first.id, m.Tables(["a"]))
    assert caller.outcome() == m.Tables(["a"])


def test_sessions_that_connected_together_do_not_say_together_that_they_live() -> None:
    paces = [heartbeat_s(session) for session in range(1 << 20, (1 << 20) + 1000)]
    assert len(set(paces)) == HEARTBEAT_PACES
    assert 0.75 * HEARTBEAT_S < min(paces) < max(paces) == HEARTBEAT_S
    assert 3 * HEARTBEAT_S < SESSION_SILENCE_S


def test_closing_ends_all_waits_at_once(server: ScriptedServer, connection: Connection) -> None:
    callers = [Caller(lambda: connection.call(LEASE)) for _ in range(4)]
    for _ in callers:
        server.next(m.LeaseRequest)
    started = time.monotonic()
    connection.close()
    assert time.monotonic() - started < AT_ONCE_S
    for caller in callers:
        assert isinstance(caller.outcome(), Disconnected)
        assert "was closed" in str(caller.outcome())
    assert server.next(m.Goodbye)
    with pytest.raises(Disconnected, match="was closed"):
        connection.call(m.ListTables())
    connection.post(m.ListTables())
    connection.close()


@pytest.mark.slow
def test_closing_does_not_wait_for_a_server_that_is_stuck(tmp_path: Path) -> None:
    stuck, go_on = threading.Event(), threading.Event()

    def script(call: m.CallFrame) -> None:
        if isinstance(call.request, m.ListTables):
            stuck.set()
            go_on.wait(20)

    with ScriptedServer(tmp_path, script) as server:
        connection = connected(server.address)
        caller = Caller(lambda: connection.call(m.ListTables()))
        assert stuck.wait(20)
        started = time.monotonic()
        connection.close()
        assert time.monotonic() - started < AT_ONCE_S
        assert isinstance(caller.outcome(), Disconnected)
        go_on.set()


def test_a_server_that_stops_ends_all_waits(server: ScriptedServer, connection: Connection) -> None:
    caller = Caller(lambda: connection.call(LEASE))
    server.next(m.LeaseRequest)
    server.answer(0, m.Failed("Disconnected", "the server was stopped"))
    assert isinstance(caller.outcome(), Disconnected)
    with pytest.raises(Disconnected, match=rf"^{server.address} ended this session: the server was stopped$"):
        connection.call(m.ListTables())


@pytest.mark.slow
def test_a_server_that_is_gone_is_noticed_by_the_kernel(tmp_path: Path) -> None:
    with ScriptedServer(tmp_path) as server:
        connection = connected(server.address)
        caller = Caller(lambda: connection.call(LEASE))
        server.next(m.LeaseRequest)
    started = time.monotonic()
    assert isinstance(caller.outcome(), Disconnected)
    assert "is gone" in str(caller.outcome())
    assert time.monotonic() - started < AT_ONCE_S
    connection.close()


def test_garbage_from_the_server_ends_the_session(server: ScriptedServer, connection: Connection) -> None:
    caller = Caller(lambda: connection.call(LEASE))
    server.next(m.LeaseRequest)
    server.say(b"\xc1 not a message")
    assert isinstance(caller.outcome(), ProtocolError)
    assert "not a message" in str(caller.outcome())


def test_posts_and_unpins_need_no_waiter(server: ScriptedServer, connection: Connection) -> None:
    connection.unpin([1, 2])
    connection.post(m.ReturnGrant(6))
    assert server.next(m.ReturnGrant).request == m.ReturnGrant(6)


def test_pins_that_return_soon_after_their_reply_wake_nobody(
    server: ScriptedServer, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller goes on with its rows; the thread that it would wake takes its core, or the interpreter."""
    monkeypatch.setattr(io_thread, "UNPIN_S", 0.3)
    answer, _ = connection.start(LEASE)
    server.answer(server.next(m.LeaseRequest).id, LEASED)
    assert answer() == LEASED
    woken: list[Wakeup] = []
    ring = Wakeup.set
    monkeypatch.setattr(Wakeup, "set", lambda bell: (woken.append(bell), ring(bell)))
    connection.unpin([11])
    assert connection._io.wakeup not in woken
    assert server.next(m.Unpin).request.counts == struct.pack("<q", 1), "and they return all the same"
    assert connection._io.wakeup not in woken


def test_after_a_reply_whose_pins_do_not_return_an_idle_client_sleeps(
    server: ScriptedServer, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks once for pins, and not again before the heartbeat; pins that return later wake it."""
    turned: list[float] = []
    turn = IoThread._turn
    monkeypatch.setattr(IoThread, "_turn", lambda io: (turned.append(time.monotonic()), turn(io)))
    answer, _ = connection.start(LEASE)
    server.answer(server.next(m.LeaseRequest).id, LEASED)
    assert answer() == LEASED
    assert until(lambda: connection._io.unpins_at is None)
    quiet = len(turned)
    time.sleep(4 * UNPIN_S)
    assert len(turned) == quiet
    began = time.monotonic()
    connection.unpin([11])
    assert server.next(m.Unpin).request.counts == struct.pack("<q", 1)
    assert time.monotonic() - began < RESEND_S


def test_what_is_handed_back_may_be_gone_already_but_other_refusals_are_told(
    server: ScriptedServer, connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        for error in ("LeaseExpired", "NotFound", "InternalError"):
            connection.post(m.ReleaseRequest("t", 1, 1))
            server.answer(server.next(m.ReleaseRequest).id, m.Failed(error, f"refused with {error}"))
        caller = Caller(lambda: connection.call(m.ListTables()))
        server.answer(server.next(m.ListTables).id, m.Tables([]))
        caller.outcome()
    assert [record.getMessage() for record in caplog.records] == [
        "Release, for which no caller waits, was refused: refused with InternalError"
    ]


def test_posts_made_before_closing_are_delivered_before_the_goodbye(
    server: ScriptedServer, connection: Connection
) -> None:
    connection.post(m.ReturnGrant(6))
    connection.close()
    kinds = [type(server.calls.get(timeout=20).request) for _ in range(3)]
    assert kinds == [m.Hello, m.ReturnGrant, m.Goodbye]


def test_a_forked_child_is_told_and_the_parent_is_not_disturbed(server: ScriptedServer, connection: Connection) -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # no test framework in here: report by the pipe, leave by _exit
        told = b"nothing"
        try:
            connection.call(m.ListTables())
        except Forked as error:
            told = str(error).encode()
        connection.post(m.ListTables())
        connection.unpin([1])
        connection.close()
        os.write(write, told)
        os._exit(0)
    os.close(write)
    assert b"forked child" in os.read(read, 4096)
    os.close(read)
    os.waitpid(child, 0)
    caller = Caller(lambda: connection.call(m.OpenTable("t")))
    call = server.next(m.OpenTable)
    server.answer(call.id, m.DoneReply())
    assert caller.outcome() == m.DoneReply()


def test_a_request_that_cannot_be_sent_harms_nothing(server: ScriptedServer, connection: Connection) -> None:
    with pytest.raises(UsageError, match="64 bits"):
        connection.call(m.AdvanceClock("t", 1 << 80))
    caller = Caller(lambda: connection.call(m.ListTables()))
    server.answer(server.next(m.ListTables).id, m.Tables([]))
    assert caller.outcome() == m.Tables([])


def test_a_hello_that_went_down_with_the_first_way_is_said_again_on_the_next(tmp_path: Path) -> None:
    path = tmp_path / "scripted.sock"
    with socket.socket(socket.AF_UNIX) as going:
        going.bind(str(path))
        going.listen()
        channel = dial(f"ipc://{path}")
        going.accept()[0].close()
    path.unlink()
    with ScriptedServer(tmp_path) as server:
        connection = Connection(channel, server.address)
        began = time.monotonic()
        assert connection.open(m.Hello(bytes(16)), timeout_s=10).session == 5
        assert time.monotonic() - began < RESEND_S
        connection.close()


def test_a_server_of_another_protocol_ends_the_first_call_at_once(tmp_path: Path) -> None:
    with ScriptedServer(tmp_path, always=OLD_REFUSAL) as server:
        connection = Connection(dial(server.address), server.address)
        with pytest.raises(
            VersionMismatch,
            match=rf"speaks protocol 0 and this client speaks protocol {PROTOCOL} .*: upgrade the server",
        ):
            connection.open(m.Hello(bytes(16), version="2.0"), timeout_s=60)
        assert isinstance(connection.over, VersionMismatch)
