"""Bodies of requests and answers: read within bounds, as JSON or as MessagePack.

The law:

- A body says its length first, and is read whole or not at all: one over `BODY_BYTES_MAX`, or for which there is no room beside
  those that are being read and answered, is refused before a byte of it is kept; one that trickles is given up.
- What it says it is decides how it is read: ``application/json`` (the default) or ``application/msgpack``. The answer is what
  the request was.
- Nothing in it is code: msgspec builds the structs of `actions`, or refuses.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, Final, NamedTuple

import msgspec
from starlette.requests import ClientDisconnect, Request

BODY_BYTES_MAX: Final = 64 << 20
"""One request: a JSON list of small things takes some twenty times its bytes while it is read."""
BODIES_BYTES_MAX: Final = 256 << 20
"""All that are being read or carried out at once."""
BODY_S: Final = 60.0
"""A body of the largest size arrives in this time at 1 MiB/s."""


class BadRequest(Exception):
    """A request that is not understood; nothing was changed."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


class Codec(NamedTuple):
    """One way to write a body."""

    media_type: str
    encode: Callable[[Any], bytes]
    decode: Callable[..., Any]


JSON: Final = Codec("application/json", msgspec.json.encode, msgspec.json.decode)
MSGPACK: Final = Codec("application/msgpack", msgspec.msgpack.encode, msgspec.msgpack.decode)


def codec_of(request: Request) -> Codec:
    """What the request is written in; 415 for what is neither."""
    said = request.headers.get("content-type", JSON.media_type).partition(";")[0].strip().lower()
    for codec in (JSON, MSGPACK):
        if said == codec.media_type:
            return codec
    raise BadRequest(
        HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        f"content type {said!r} is not read here; send {JSON.media_type} or {MSGPACK.media_type}",
    )


class BodyBudget:
    """Bytes of bodies that are in this process at once."""

    def __init__(self) -> None:
        self._taken = 0

    @asynccontextmanager
    async def body(self, request: Request) -> AsyncIterator[bytes]:
        """The body, and room for it as long as it is used."""
        size = _told(request)
        if self._taken + size > BODIES_BYTES_MAX:
            raise BadRequest(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"{self._taken} bytes of requests are being carried out, and {size} more are over {BODIES_BYTES_MAX}; "
                "try again in a moment",
            )
        self._taken += size
        try:
            yield await _read(request)
        finally:
            self._taken -= size


def _told(request: Request) -> int:
    told = request.headers.get("content-length")
    if told is None or not told.isdecimal():
        raise BadRequest(HTTPStatus.LENGTH_REQUIRED, "the request does not say its length; send Content-Length")
    if int(told) > BODY_BYTES_MAX:
        raise BadRequest(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the request has {told} bytes; at most {BODY_BYTES_MAX}: send fewer rows at a time",
        )
    return int(told)


async def _read(request: Request) -> bytes:
    try:
        async with asyncio.timeout(BODY_S):
            return await request.body()
    except TimeoutError as late:
        raise BadRequest(HTTPStatus.REQUEST_TIMEOUT, f"the request did not arrive within {BODY_S:g} s") from late
    except ClientDisconnect as gone:
        raise BadRequest(HTTPStatus.BAD_REQUEST, "the request did not arrive whole") from gone


def decode(codec: Codec, body: bytes, into: Any) -> Any:
    """A body as a value of `into`; an empty one is one without any member. 400 with what is wrong, and where."""
    try:
        return codec.decode(body or codec.encode({}), type=into)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(
            HTTPStatus.BAD_REQUEST, f"the body is not what this call takes: {error}; see /openapi.json"
        ) from error
