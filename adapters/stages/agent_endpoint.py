"""An endpoint in OpenAI's form on this machine, for one agent or many: where it listens, what it reads, its errors."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from aiohttp import web

from transferqueue.errors import UsageError

REQUEST_BYTES_MAX: Final = 64 << 20
"""Maximum size of an agent's request; images in a conversation count."""
STREAM_END: Final = b"data: [DONE]\n\n"


async def listen(
    path: str, answer: Callable[[web.Request], Awaitable[web.StreamResponse]], host: str
) -> tuple[web.AppRunner, str]:
    """Answer requests to a route on a free port. Returns the server, which the caller cleans up, and its URL."""
    application = web.Application(client_max_size=REQUEST_BYTES_MAX)
    application.router.add_route("*", path, answer)
    runner = web.AppRunner(application, handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, 0).start()
    return runner, f"http://{host}:{runner.addresses[0][1]}"


async def request_body(request: web.Request) -> dict[str, Any]:
    """Return the object that a request carries; empty without a body. Raises `UsageError` for anything else."""
    if not request.can_read_body:
        return {}
    try:
        body = await request.json()
    except ValueError as error:
        raise UsageError(f"the body of {request.path} is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise UsageError(f"the body of {request.path} is {type(body).__name__}; give an object")
    return body


async def event_stream(request: web.Request) -> web.StreamResponse:
    """Begin a response of events."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    return response


def event(content: Mapping[str, Any]) -> bytes:
    """Return an event of a stream."""
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def refusal(status: int, text: str) -> web.Response:
    """Return a response with an error."""
    return web.json_response(error_body(status, text), status=status)


def error_body(status: int, text: str) -> dict[str, Any]:
    """Return an error as OpenAI's clients expect it."""
    return {"error": {"message": text, "type": "transferqueue", "code": status}}
