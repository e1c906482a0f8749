"""The HTTP service: the calls of `actions` as ``POST /action/…``, their description, and `/metrics`.

`/openapi.json` describes the calls for programs, the page at `/` for people. `access` admits requests to a loopback
address with the token. A call waits at the queue, for at most the time in its body. If the client hangs up, the wait
ends and takes no rows.

A refusal has the name and the text of an error of the queue, and a status: 4xx if the caller must act, 5xx if the
operator must. 504 means not yet: call again. 410 means that no more rows will come. A refusal with 4xx has changed
nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from http import HTTPStatus
from importlib.resources import files
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import transferqueue as tq
from transferqueue.errors import TransferQueueError
from transferqueue.errors.text import visible
from transferqueue.web.access import METRICS, AccessPolicy
from transferqueue.web.page.app import Endpoint, Gate, gated, metrics_of
from transferqueue.web.service.actions import ACTIONS, Action, Actions
from transferqueue.web.service.bodies import JSON, BadRequest, BodyBudget, Codec, codec_of, decode
from transferqueue.web.service.openapi import described, shown
from transferqueue.web.service.schemas import ErrorBody
from transferqueue.web.status import status_of


def make_service(queue: tq.AsyncQueue, access: AccessPolicy) -> Gate:
    """The application that serves `queue` to requests that `access` admits."""
    actions, budget, document = Actions(queue), BodyBudget(), described()
    pages: dict[str, Endpoint] = {
        "/": _fixed(shown(document), "text/html"),
        "/service.css": _fixed(files("transferqueue.web.service").joinpath("service.css").read_bytes(), "text/css"),
        "/openapi.json": _fixed(JSON.encode(document), JSON.media_type),
        METRICS: metrics_of(queue),
    }
    routes = [Route(f"/action/{action.name}", _call(action, actions, budget), methods=["POST"]) for action in ACTIONS]
    routes += [Route(path, page, methods=["GET"]) for path, page in pages.items()]
    return gated(access, routes, lambda status, error, text: _refused(JSON, status, error, text))


def _call(action: Action, actions: Actions, budget: BodyBudget) -> Endpoint:
    call = action.of(actions)

    async def endpoint(request: Request) -> Response:
        codec = JSON
        try:
            codec = codec_of(request)
            async with budget.body(request) as body:
                arguments = await asyncio.to_thread(decode, codec, body, action.takes)
                answer = await (_unless_gone(request, call(arguments)) if action.waits else call(arguments))
                return Response(await asyncio.to_thread(codec.encode, answer), media_type=codec.media_type)
        except BadRequest as refusal:
            return _refused(codec, refusal.status, "UsageError", str(refusal))
        except TransferQueueError as error:
            return _refused(codec, status_of(error), type(error).__name__, str(error))

    return endpoint


async def _unless_gone(request: Request, work: Awaitable[Any]) -> Any:
    """The result of `work`, which is cancelled if the client hangs up: rows that it leased are released."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise BadRequest(HTTPStatus.BAD_REQUEST, "the client hung up while it waited")
    finally:
        for pending in (task, gone):
            pending.cancel()
        await asyncio.wait({task, gone})
        _ = task.cancelled() or task.exception()  # retrieve the error, or asyncio logs that it was never retrieved


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue


def _refused(codec: Codec, status: HTTPStatus, error: str, text: str) -> Response:
    return Response(codec.encode(ErrorBody(error=error, text=visible(text))), status, media_type=codec.media_type)


def _fixed(body: bytes, media_type: str) -> Endpoint:
    async def give(_request: Request) -> Response:
        return Response(body, media_type=media_type)

    return give
