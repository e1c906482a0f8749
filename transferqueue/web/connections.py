"""Limits on the connections of the page and of the HTTP service: their number, and the time of each.

1. The server keeps at most ``most`` connections. When one more comes, it closes the oldest connection that has no
   admitted request: a connection that is idle, that has sent half a head, or whose request was refused. So connections
   without a token displace each other, and never a client that brought the token. If every connection has an admitted
   request, the new one gets 503.
2. A connection sends the whole head of its first request within `head_s` seconds, and of each later one within `head_s`
   seconds of its first byte. The deadline is for the whole head, so a byte now and then does not extend it.
3. A connection that sends nothing after an answer is closed after `idle_s` seconds.
4. A request that is answered before its body arrived (a refusal) may send the rest of the body for `head_s` seconds: a
   connection that is closed at once may lose the answer.
5. A client reads its answer at `answer_bytes_per_s` or faster, after `stall_s` seconds of grace. A slower one is cut
   off.

An admitted request that waits for rows has no deadline here: its own ``timeout_s`` ends it. `bodies` bounds the time
and the size of a body that is read. h11 refuses a head of more than `HEAD_BYTES_MAX`.
"""

from __future__ import annotations

import asyncio
import socket
from functools import partial
from typing import Any, Final, NamedTuple, cast

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.flow_control import service_unavailable
from uvicorn.protocols.http.h11_impl import H11Protocol

from transferqueue.errors import AddressInUse
from transferqueue.transport import TcpAddress

ACCEPTED_MAX: Final = 64
"""Connections that are accepted in one turn of the loop: fewer than have a place, so that a request which came with its
connection is read before other connections can displace it."""
PENDING_MAX: Final = 1024
"""Connections that the kernel keeps until they are accepted. One that finds no room there is tried again only after a
second."""
TASKS_LEFT_MAX: Final = 4 * ACCEPTED_MAX
"""Requests that may still be running after their connection lost its place: each ends a few turns of the loop later."""
HEAD_BYTES_MAX: Final = 16 << 10
LET_IN: Final = "transferqueue.let_in"
"""Name of the ASGI extension by which `app.Gate` reports that it admitted the request."""
_TOO_LATE: Final = h11.Response(status_code=408, headers=[("connection", "close"), ("content-length", "0")])


def configured(app: ASGIApp, most: int, deadlines: ConnectionDeadlines | None = None) -> uvicorn.Config:
    """Configure uvicorn to serve `app` over at most `most` connections, within the limits of this module."""
    places = ConnectionPlaces(most, deadlines or ConnectionDeadlines())
    return uvicorn.Config(
        app,
        http=cast("type[asyncio.Protocol]", partial(HttpConnection, places)),
        timeout_keep_alive=places.deadlines.idle_s,
        h11_max_incomplete_event_size=HEAD_BYTES_MAX,
        backlog=ACCEPTED_MAX,
        limit_concurrency=most + TASKS_LEFT_MAX,
        log_level="error",  # uvicorn warns about every malformed request: strangers could fill the log
        access_log=False,
        server_header=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=3,  # open pages learn within a second that the server is gone
    )


class Server(uvicorn.Server):
    """uvicorn's server, with a queue of unaccepted connections that is longer than the number it accepts at once."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(PENDING_MAX)


def listening(place: TcpAddress) -> socket.socket:
    """A socket that listens at `place`. `AddressInUse` if it cannot."""
    family = socket.AF_INET6 if place.host.startswith("[") else socket.AF_INET
    try:
        listener = socket.create_server((place.host.strip("[]"), place.port), family=family)
    except OSError as error:
        raise AddressInUse(
            f"web address {place.host}:{place.port} cannot be listened at: {error.strerror}; take another"
        ) from error
    # Connections inherit it. Head and body are sent apart; without it the body waits 40 ms for the acknowledgement of
    # the head.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


class ConnectionDeadlines(NamedTuple):
    """Time limits of a connection (module docstring). idle_s exceeds the usual interval of a Prometheus."""

    head_s: float = 5.0
    idle_s: int = 15
    stall_s: float = 10.0
    answer_bytes_per_s: float = 1 << 20


class ConnectionPlaces:
    """The places of one server's connections. Used from one event loop."""

    def __init__(self, most: int, deadlines: ConnectionDeadlines) -> None:
        self.most: Final = most
        self.deadlines: Final = deadlines
        self.taken = 0
        self._strangers: dict[HttpConnection, None] = {}
        """Connections without an admitted request, the oldest first."""

    def take(self, connection: HttpConnection) -> None:
        """Give a new connection a place. If none is free, cut off the oldest connection without an admitted request."""
        self.taken += 1
        if self.taken > self.most and self._strangers:
            next(iter(self._strangers)).cut_off()
        self._strangers[connection] = None

    def let_in(self, connection: HttpConnection) -> None:
        """The request of the connection was admitted: it keeps its place until it is answered."""
        self._strangers.pop(connection, None)

    def answered(self, connection: HttpConnection) -> None:
        """The request was answered: the connection is now the newest of those that may be cut off."""
        self._strangers.pop(connection, None)
        self._strangers[connection] = None

    def leave(self, connection: HttpConnection) -> None:
        """The connection is closed."""
        self._strangers.pop(connection, None)
        self.taken -= 1


class HttpConnection(H11Protocol):
    """A connection of uvicorn within the limits of this module."""

    def __init__(
        self, places: ConnectionPlaces, *, _loop: asyncio.AbstractEventLoop | None = None, **given: Any
    ) -> None:
        super().__init__(**given, _loop=_loop)
        self._places, self._deadlines = places, places.deadlines
        self._inner, self.app = self.app, self._tell_app
        self._deadline: asyncio.TimerHandle | None = None
        self._in_place = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a place, and begin the deadline of the first head."""
        super().connection_made(transport)
        self._in_place = True
        self._places.take(self)
        self._within(self._deadlines.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave the place."""
        self._leave()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read; the first byte of a later head begins the deadline of that head."""
        awaited = self._deadline is not None
        super().data_received(data)
        if not awaited and self._head_is_open():
            self._within(self._deadlines.head_s)

    def handle_events(self) -> None:
        """Handle the bytes read; a whole head ends its deadline."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not before and not self.flow.write_paused:
            self._without_deadline()

    def on_response_complete(self) -> None:
        """The answer was written. Next comes another request, the rest of this one, or the end."""
        if self._in_place:
            self._places.answered(self)
        answered = self.cycle
        super().on_response_complete()
        if self.cycle is answered and not self.flow.write_paused:
            self._set_deadline_after_answer()

    def pause_writing(self) -> None:
        """The client reads more slowly than the answer is written. Its deadline now allows for the unsent bytes."""
        super().pause_writing()
        unsent = self.transport.get_write_buffer_size()
        self._within(self._deadlines.stall_s + unsent / self._deadlines.answer_bytes_per_s)

    def resume_writing(self) -> None:
        """The client has read the answer."""
        super().resume_writing()
        self._without_deadline()
        if self.cycle is not None and self.cycle.response_complete:
            self._set_deadline_after_answer()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection. Unsent bytes are discarded."""
        self.transport.abort()

    def cut_off(self) -> None:
        """Close at once. Unsent bytes are discarded."""
        self._leave()
        self.transport.abort()

    async def _tell_app(self, scope: Any, receive: Any, send: Any) -> None:
        if self._in_place and self._places.taken > self._places.most:  # the others all have an admitted request
            await service_unavailable(scope, receive, send)
            return
        await self._inner({**scope, "extensions": {LET_IN: lambda: self._places.let_in(self)}}, receive, send)

    def _head_is_open(self) -> bool:
        """Whether a head has begun and is not complete."""
        return self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])

    def _set_deadline_after_answer(self) -> None:
        """Begin the deadline that follows an answer, if any."""
        if self.transport.is_closing():
            self._within(self._deadlines.stall_s)
        elif self._head_is_open() or self.conn.our_state is h11.DONE:
            self._within(self._deadlines.head_s)  # an incomplete head, or the rest of a body that is not read

    def _within(self, seconds: float) -> None:
        self._without_deadline()
        self._deadline = self.loop.call_later(seconds, self._too_late)

    def _without_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_late(self) -> None:
        self._deadline = None
        if self._head_is_open() and self.conn.our_state is h11.IDLE:
            self.transport.write(self.conn.send(_TOO_LATE) or b"")
        self.cut_off()

    def _leave(self) -> None:
        self._without_deadline()
        if self._in_place:
            self._in_place = False
            self._places.leave(self)
            self.connections.discard(self)
