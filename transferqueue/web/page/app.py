"""The page as an ASGI application: its files, a stream of frames, the life of a row, the recorded rows of a run
(`web.rollouts`), and `/metrics` for Prometheus.

All viewers share one sampler (`sampler`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from http import HTTPStatus
from importlib.resources import files
from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import transferqueue as tq
from transferqueue.errors import TransferQueueError, UsageError
from transferqueue.errors.text import visible
from transferqueue.limits import check_name
from transferqueue.observe.prometheus import CONTENT_TYPE, exposition
from transferqueue.web.access import HEADERS, LINK, METRICS, AccessPolicy
from transferqueue.web.connections import LET_IN
from transferqueue.web.page.row_life import live_content, named
from transferqueue.web.page.sampler import Sampler
from transferqueue.web.rollouts.document import encoded
from transferqueue.web.rollouts.record import RecordBrowser
from transferqueue.web.rollouts.routes import rollouts
from transferqueue.web.rollouts.tokenizer import RunTexts
from transferqueue.web.status import status_of

VIEWERS_MAX: Final = 16
"""Bound on open streams. Each is a connection of one page."""
CONNECTIONS_MAX: Final = 128
"""Bound on connections (`web.connections`)."""
_KINDS: Final = {
    "page.html": "text/html",
    "draw.js": "text/javascript",
    "page.js": "text/javascript",
    "row.js": "text/javascript",
    "rollouts.js": "text/javascript",
    "page.css": "text/css",
    "icon.svg": "image/svg+xml",
}


Endpoint = Callable[[Request], Awaitable[Response]]
EVENTS: Final = "text/event-stream"
ROW_DIGITS_MAX: Final = 18
"""Digits of a row id in a path: every number of so many digits fits into 64 bits."""
PATH_CHARS_SHOWN: Final = 200
_HEADERS: Final = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]


def make_app(queue: tq.AsyncQueue, access: AccessPolicy) -> Gate:
    """The application that shows `queue` to requests that `access` admits. Starts a sampler in the running event
    loop."""
    return make_run_page(queue, access, None)


def make_run_page(
    queue: tq.AsyncQueue | None, access: AccessPolicy, record: RecordBrowser | None, why_not_live: str = ""
) -> Gate:
    """The application that shows `queue`, if there is one, and the rows of `record`, if there is one. why_not_live:
    why there is no queue."""
    files_of_page = {f"/{name}": page_file(name) for name in _KINDS if name != "page.html"}
    pages = {
        "/": page_file("page.html"),
        **files_of_page,
        **rollouts(record, live=queue is not None, why_not_live=why_not_live),
    }
    if queue is not None:
        pages |= _of_queue(queue, record.texts if record else partial(RunTexts, None))
    return gated(access, [Route(path, page, methods=["GET"]) for path, page in pages.items()], _refused)


def _of_queue(queue: tq.AsyncQueue, texts: Callable[[], RunTexts]) -> dict[str, Endpoint]:
    """The routes about a queue that runs. Starts a sampler in the running event loop. texts: of its tokens."""
    sampler = Sampler(queue)
    sampler.start()

    async def events(request: Request) -> Response:
        if request.method == "HEAD":
            return Response(media_type=EVENTS)
        if sampler.viewers >= VIEWERS_MAX:
            return PlainTextResponse(
                f"{VIEWERS_MAX} pages are open, which is the most; close one", HTTPStatus.SERVICE_UNAVAILABLE
            )
        return StreamingResponse(sampler.watch(), media_type=EVENTS)

    async def row(request: Request) -> Response:
        table = check_name("table", request.path_params["table"])
        life = await queue.inspect(table, row_id(request.path_params["row"]))
        shown = named(life, await live_content(queue, life, texts))
        return Response(encoded(shown), media_type="application/json")

    return {"/events": events, "/row/{table:path}/{row}": row, METRICS: metrics_of(queue)}


def row_id(text: str) -> int:
    """Parse the row id in a path. `UsageError` if it is not a row id."""
    if not (text.isascii() and text.isdecimal() and len(text) <= ROW_DIGITS_MAX):
        shown = text if len(text) <= ROW_DIGITS_MAX else f"{text[:ROW_DIGITS_MAX]}..."
        raise UsageError(f"row {shown!r} is no row id; give a number of at most {ROW_DIGITS_MAX} digits, such as 17")
    return int(text)


def metrics_of(queue: tq.AsyncQueue) -> Endpoint:
    """`/metrics`: one moment of `queue`, in the Prometheus text format. 503 where the server does not answer."""

    async def metrics(_request: Request) -> Response:
        try:
            stats = await queue.stats()
        except TransferQueueError as error:
            return PlainTextResponse(f"{visible(str(error))}\n", HTTPStatus.SERVICE_UNAVAILABLE)
        return Response(exposition(stats), media_type=CONTENT_TYPE)

    return metrics


class Gate:
    """An ASGI application behind access control: only requests that `access` admits reach `inner`."""

    def __init__(self, access: AccessPolicy, inner: ASGIApp) -> None:
        self._access, self._inner = access, inner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. If it is admitted, report that to the connection first (`connections`)."""

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_HEADERS]
            await send(message)

        request = Request(scope)
        link_token = _link_token(scope)
        refusal = self._access.refuses(scope["path"], request.headers, request.cookies, link_token)
        if refusal is not None:
            await PlainTextResponse(f"{refusal.why}\n", refusal.status)(scope, receive, guarded)
            return
        scope.get("extensions", {}).get(LET_IN, _ignore_admission)()
        if link_token is None:
            await self._inner(scope, receive, guarded)
            return
        response = RedirectResponse(
            LINK, HTTPStatus.SEE_OTHER
        )  # removes the token from the address bar, the history and logs
        response.set_cookie(self._access.cookie, link_token, httponly=True, samesite="strict")
        await response(scope, receive, guarded)


def gated(access: AccessPolicy, routes: Sequence[Route], refused: Callable[[HTTPStatus, str, str], Response]) -> Gate:
    """The application of these routes behind access control. refused: makes the answer to an error from its status,
    name and text."""

    async def no_route(request: Request, error: Exception) -> Response:
        status, shown = HTTPStatus(getattr(error, "status_code", 404)), repr(request.url.path[:PATH_CHARS_SHOWN])
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            allowed = ", ".join(sorted((getattr(error, "headers", None) or {}).get("Allow", "").split(", ")))
            response = refused(status, "UsageError", f"{shown} does not take {request.method[:16]!r}; use {allowed}")
            response.headers["Allow"] = allowed
            return response
        return refused(
            status, "NotFound", f"there is no {shown}; there are {', '.join(route.path for route in routes)}"
        )

    async def error_of(_request: Request, error: Exception) -> Response:
        if not isinstance(error, TransferQueueError):
            raise error
        return refused(status_of(error), type(error).__name__, str(error))

    inner = Starlette(routes=routes, exception_handlers={HTTPException: no_route, TransferQueueError: error_of})
    inner.router.redirect_slashes = False
    return Gate(access, inner)


def _link_token(scope: Scope) -> str | None:
    """The token in the link that was printed."""
    query: bytes = scope["query_string"]
    if scope["path"] != LINK or scope["method"] not in ("GET", "HEAD") or not query.startswith(b"token="):
        return None
    return query.removeprefix(b"token=").decode("latin-1")


def _ignore_admission() -> None:
    """Does nothing; for a server that does not use `connections`."""


def _refused(status: HTTPStatus, _error: str, text: str) -> Response:
    return PlainTextResponse(f"{visible(text)}\n", status)


def page_file(name: str) -> Endpoint:
    """Serve a file of the page unchanged."""
    body = files("transferqueue.web.page").joinpath(name).read_bytes()

    async def give(_request: Request) -> Response:
        return Response(body, media_type=_KINDS[name])

    return give
