"""The page as an ASGI application: its files, a stream of frames, the life of a row, and `/metrics` for Prometheus.

One sampler asks the server once a second while somebody looks, and nobody asks it otherwise; all viewers get the same frame.
A viewer that does not read gets the newest frame when it does, never a queue of old ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from http import HTTPStatus
from importlib.resources import files
from typing import Any, Final

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

import transferqueue as tq
from transferqueue.errors import FlowSignal, NotFound, TransferQueueError, UsageError
from transferqueue.observe.frame import frame
from transferqueue.observe.metrics import CONTENT_TYPE, exposition
from transferqueue.observe.row import RowLife
from transferqueue.observe.sessions import labels, parse_sessions
from transferqueue.observe.stall import diagnose
from transferqueue.observe.stats import Stats, parse
from transferqueue.web.door import HEADERS, SHOWING, Door
from transferqueue.web.life import named
from transferqueue.web.timeline import Timeline

SAMPLE_S: Final = 1.0
VIEWERS_MAX: Final = 16
"""Open streams: each is a connection of one page."""
_KINDS: Final = {
    "page.html": "text/html",
    "draw.js": "text/javascript",
    "page.js": "text/javascript",
    "page.css": "text/css",
    "icon.svg": "image/svg+xml",
}


Endpoint = Callable[[Request], Awaitable[Response]]
METHODS: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
"""All that the door looks at."""


class Sampler:
    """The newest frame of a queue, as an event for browsers. Asks while `viewers` is not 0."""

    def __init__(self, queue: tq.AsyncQueue) -> None:
        self.viewers = 0
        self._queue = queue
        self._before: Stats | None = None
        self._past = Timeline()
        self._event = b""
        self._number = 0
        self._changed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None
        self._gone = False

    async def watch(self) -> AsyncIterator[bytes]:
        """Events, the first of the past, then each the newest there is, until nobody reads them or the server is gone."""
        self.viewers += 1
        if self._task is None or self._task.done():
            self._gone = False
            self._task = asyncio.create_task(self._sample())
        seen = self._number
        try:
            yield _event("past", list(self._past.moments))
            while not self._gone:
                async with self._changed:
                    while self._number == seen:
                        await self._changed.wait()
                    seen = self._number
                yield self._event
        finally:
            self.viewers -= 1

    async def _sample(self) -> None:
        while self.viewers and not self._gone:
            try:
                event = await self._frame()
            except FlowSignal as late:  # the server is busy: say so, and ask again
                event = _event("late", {"text": str(late)})
            except TransferQueueError as error:
                self._gone = True
                event = _event("gone", {"text": str(error)})
            await self._tell(event)
            await asyncio.sleep(SAMPLE_S)

    async def _frame(self) -> bytes:
        stats = parse("stats", await self._queue.stats(), Stats)
        found = diagnose(await self._queue.doctor())
        shown = frame(stats.server.address, self._before, stats)
        self._before = stats
        moment = self._past.add(shown)
        return _event("frame", {"frame": shown, "moment": moment, "doctor": found, "stalled": found.stalled})

    async def _tell(self, event: bytes) -> None:
        async with self._changed:
            self._event, self._number = event, self._number + 1
            self._changed.notify_all()


def make_app(queue: tq.AsyncQueue, door: Door) -> Starlette:
    """The application that shows `queue` to whom `door` lets in."""
    sampler = Sampler(queue)

    async def events(_request: Request) -> Response:
        if sampler.viewers >= VIEWERS_MAX:
            return PlainTextResponse(
                f"{VIEWERS_MAX} pages are open, which is the most; close one", HTTPStatus.SERVICE_UNAVAILABLE
            )
        return StreamingResponse(sampler.watch(), media_type="text/event-stream")

    async def row(request: Request) -> Response:
        try:
            answer = await queue.inspect(request.path_params["table"], request.path_params["row"])
        except UsageError as error:
            return PlainTextResponse(
                str(error), HTTPStatus.NOT_FOUND if isinstance(error, NotFound) else HTTPStatus.BAD_REQUEST
            )
        names = labels(parse_sessions(await queue.sessions()))
        found = named(parse("row", answer, RowLife), names)
        return Response(msgspec.json.encode(found), media_type="application/json")

    async def nothing(_request: Request) -> Response:
        return PlainTextResponse("there is no such page\n", HTTPStatus.NOT_FOUND)

    pages: dict[str, Endpoint] = {
        "/": page_file("page.html"),
        "/draw.js": page_file("draw.js"),
        "/page.js": page_file("page.js"),
        "/page.css": page_file("page.css"),
        "/icon.svg": page_file("icon.svg"),
        "/events": events,
        "/row/{table}/{row:int}": row,
        "/metrics": metrics_of(queue),
        "/{other:path}": nothing,
    }
    return Starlette(routes=[Route(path, guarded(door, page), methods=METHODS) for path, page in pages.items()])


def metrics_of(queue: tq.AsyncQueue) -> Endpoint:
    """`/metrics`: one moment of `queue`, in the Prometheus text format. 503 where the server does not answer."""

    async def metrics(_request: Request) -> Response:
        try:
            found = parse("stats", await queue.stats(), Stats)
        except TransferQueueError as error:
            return PlainTextResponse(f"{error}\n", HTTPStatus.SERVICE_UNAVAILABLE)
        return Response(exposition(found), media_type=CONTENT_TYPE)

    return metrics


def guarded(door: Door, page: Endpoint, methods: Sequence[str] = SHOWING) -> Endpoint:
    """`page`, by these methods, for those whom `door` lets in."""

    async def behind(request: Request) -> Response:
        asked = request.query_params.get("token")
        refusal = door.refuses(request.method, request.headers, request.cookies, asked, methods)
        if refusal is not None:
            response: Response = PlainTextResponse(f"{refusal.why}\n", refusal.status)
        elif asked is not None:  # out of the address bar, the history and whatever logs them
            response = RedirectResponse(request.url.path, HTTPStatus.SEE_OTHER)
            response.set_cookie(door.cookie, asked, httponly=True, samesite="strict")
        else:
            response = await page(request)
        response.headers.update(HEADERS)
        return response

    return behind


def page_file(name: str) -> Endpoint:
    """A file of the page, as it is."""
    body = files("transferqueue.web").joinpath(name).read_bytes()

    async def give(_request: Request) -> Response:
        return Response(body, media_type=_KINDS[name])

    return give


def _event(kind: str, value: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(value) + b"\n\n"
