"""Connections that are idle, slow or do not read: each loses its place in time, and whoever brings the token is
answered meanwhile."""

import asyncio
import contextlib
import http.client
import resource
import socket
import threading
import time

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from transferqueue.transport import TcpAddress
from transferqueue.web.access import AccessPolicy
from transferqueue.web.connections import ConnectionDeadlines, Server, configured
from transferqueue.web.page.app import Gate

GENEROUS_S = 60
TOKEN = "token-of-the-test"  # noqa: S105
QUICK = ConnectionDeadlines(head_s=0.3, idle_s=1, stall_s=0.3, answer_bytes_per_s=1 << 30)
NEVER = ConnectionDeadlines(head_s=GENEROUS_S, idle_s=GENEROUS_S, stall_s=GENEROUS_S)
LARGE = 32 << 20


class Served:
    """A page of our own behind the door, served in a thread."""

    def __init__(self, most, deadlines):
        self.waiting, self.go = threading.Event(), threading.Event()
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self.listener.getsockname()[1]
        routes = [
            Route("/", self.quick),
            Route("/large", self.large),
            Route("/wait", self.wait),
            Route("/busy", self.busy),
            Route("/body", self.body, methods=["POST"]),
        ]
        gate = Gate(AccessPolicy(TcpAddress("127.0.0.1", self.port), TOKEN, "m" * 30), Starlette(routes=routes))
        self.server = Server(configured(gate, most, deadlines))
        self.thread = threading.Thread(target=self.server.run, args=([self.listener],))

    async def quick(self, _request):
        return PlainTextResponse("here")

    async def large(self, _request):
        return Response(bytes(LARGE))

    async def wait(self, _request):
        self.waiting.set()
        await asyncio.to_thread(self.go.wait, GENEROUS_S)
        return PlainTextResponse("waited")

    async def busy(self, _request):
        self.waiting.set()
        self.go.wait(GENEROUS_S)  # the loop does nothing else
        return PlainTextResponse("was busy")

    async def body(self, request):
        return PlainTextResponse(str(len(await request.body())))

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.go.set()
        self.server.should_exit = True
        self.thread.join()
        self.listener.close()

    def open(self, said=b""):
        found = socket.create_connection(("127.0.0.1", self.port), timeout=GENEROUS_S)
        found.sendall(said)
        return found

    def head(self, path="/", more="", method="GET", token=TOKEN):
        lines = [f"{method} {path} HTTP/1.1", f"Host: 127.0.0.1:{self.port}", f"Authorization: Bearer {token}"]
        return ("\r\n".join(lines) + f"\r\n{more}\r\n").encode()

    def get(self, path="/"):
        """What somebody with the token gets, over a connection of its own."""
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=GENEROUS_S)
        with contextlib.closing(client):
            client.request("GET", path, headers={"Authorization": f"Bearer {TOKEN}"})
            answer = client.getresponse()
            return answer.status, answer.read()


def rest(raw):
    """All that still comes over a connection until its end, however it ends."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while piece := raw.recv(1 << 16):
            found += piece
    return found


@pytest.mark.parametrize("held", [8, 60])
def test_half_open_connections_do_not_shut_the_door(held):
    """However many are held open, and however long they may be: the oldest of them goes when somebody comes."""
    with Served(8, NEVER) as served, contextlib.ExitStack() as stack:
        halves = [stack.enter_context(served.open(b"GET / HTTP/1.1\r\nHo")) for _ in range(held)]
        for _ in range(8):
            assert served.get() == (200, b"here")
        assert rest(halves[0]) == b""


def test_a_request_that_was_let_in_keeps_its_place_and_when_all_are_the_next_is_told():
    with Served(2, NEVER) as served, served.open(served.head("/wait")) as first:
        assert served.waiting.wait(GENEROUS_S)
        halves = [served.open(b"GET") for _ in range(5)]
        served.waiting.clear()
        with served.open(served.head("/wait")) as second:
            assert served.waiting.wait(GENEROUS_S)
            assert served.get()[0] == 503
            served.go.set()
            for raw in (first, second):
                assert raw.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        for raw in halves:
            raw.close()


def test_strangers_who_do_not_read_their_refusals_do_not_shut_the_door():
    with Served(4, NEVER) as served, contextlib.ExitStack() as stack:
        asked = served.head(token="wrong") * 2000
        for _ in range(8):
            raw = stack.enter_context(served.open())
            raw.setblocking(False)
            with contextlib.suppress(BlockingIOError, ConnectionError):
                raw.send(asked)
        assert served.get() == (200, b"here")


def test_refusals_that_outlive_their_connection_take_no_place():
    """Refusals that are not read wait to be written; they end a turn after their connections are cut off."""
    with Served(4, NEVER) as served, contextlib.ExitStack() as stack:
        served.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        for _ in range(3):
            raw = stack.enter_context(served.open())
            raw.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    raw.send(served.head(token="wrong") * 100)
        busy = stack.enter_context(served.open(served.head("/busy")))
        assert served.waiting.wait(GENEROUS_S)
        for _ in range(3):
            stack.enter_context(served.open(served.head(token="wrong")))
        ours = stack.enter_context(served.open(served.head()))
        served.go.set()
        assert busy.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        assert ours.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nX: " + b"x" * 8000])
def test_a_head_that_does_not_come_ends_the_connection(said):
    with Served(8, QUICK) as served, served.open(said) as raw:
        told = rest(raw)
        assert told.startswith(b"HTTP/1.1 408 ") if said else told == b""
        assert served.get() == (200, b"here")


def test_a_byte_now_and_then_does_not_extend_the_deadline_of_a_head():
    with Served(8, QUICK) as served, served.open(b"GET / HTTP/1.1\r\nX: ") as raw:
        raw.settimeout(0.05)
        until = time.monotonic() + GENEROUS_S
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < until:
                raw.send(b"x")
                with contextlib.suppress(TimeoutError):
                    if not raw.recv(1 << 16):
                        break
        assert time.monotonic() < until


def test_a_later_head_has_its_own_deadline():
    with Served(8, QUICK) as served, served.open(served.head()) as raw:
        told = b""
        while not told.endswith(b"here"):
            told += raw.recv(1 << 16)
        raw.sendall(b"GET / HT")
        assert rest(raw).startswith(b"HTTP/1.1 408 ")


@pytest.mark.slow
def test_an_idle_connection_ends():
    with Served(8, QUICK) as served, served.open(served.head()) as raw:
        assert rest(raw).endswith(b"here")


@pytest.mark.parametrize("token", ["wrong", TOKEN])
def test_a_body_that_nobody_reads_may_not_trickle_for_ever(token):
    """A refusal, or an answer to a request whose body is not read, comes at once; then the connection ends in time."""
    with Served(8, QUICK) as served, served.open(served.head(more="Content-Length: 1000000\r\n", token=token)) as raw:
        raw.settimeout(0.05)
        until, told = time.monotonic() + GENEROUS_S, b""
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < until:
                raw.send(b"x")
                with contextlib.suppress(TimeoutError):
                    piece = raw.recv(1 << 16)
                    told += piece
                    if not piece:
                        break
        assert told.startswith(b"HTTP/1.1 200 " if token == TOKEN else b"HTTP/1.1 401 ")
        assert time.monotonic() < until


def test_what_comes_after_a_refused_body_is_another_request():
    with Served(8, NEVER) as served:
        client = http.client.HTTPConnection("127.0.0.1", served.port, timeout=GENEROUS_S)
        with contextlib.closing(client):
            for _ in range(2):
                client.request("POST", "/body", bytes(1 << 20), {"Authorization": "Bearer wrong"})
                answer = client.getresponse()
                assert (answer.status, answer.read()[:8]) == (401, b"open the")
            client.request("POST", "/body", bytes(1 << 20), {"Authorization": f"Bearer {TOKEN}"})
            assert client.getresponse().read() == b"1048576"


@pytest.mark.parametrize("more", ["", "Connection: close\r\n"])
def test_a_client_that_does_not_read_its_answer_is_cut_off(more):
    with Served(1, QUICK) as served, served.open(served.head("/large", more)) as raw:
        assert raw.recv(15) == b"HTTP/1.1 200 OK"
        until = time.monotonic() + GENEROUS_S
        while served.get()[0] == 503:  # its place is the only one
            assert time.monotonic() < until
        assert len(rest(raw)) < LARGE


def test_a_client_that_reads_slowly_but_fast_enough_has_it_all():
    with (
        Served(1, ConnectionDeadlines(head_s=1, stall_s=GENEROUS_S)) as served,
        served.open(served.head("/large")) as raw,
    ):
        found = 0
        while found < LARGE:
            piece = raw.recv(1 << 20)
            assert piece
            found += len(piece)


@pytest.fixture
def descriptors():
    """As many as the test opens, at both ends."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] < 4096:
        pytest.skip(f"the hard limit of open files is {before[1]}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 4096), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.slow
@pytest.mark.usefixtures("descriptors")
def test_two_thousand_half_open_connections_do_not_shut_the_door():
    with Served(512, ConnectionDeadlines()) as served, contextlib.ExitStack() as stack:
        for _ in range(2000):
            with contextlib.suppress(ConnectionError):
                stack.enter_context(served.open(b"GET / HTTP/1.1\r\nHo"))
        began = time.monotonic()
        assert served.get() == (200, b"here")
        assert time.monotonic() - began < 5
