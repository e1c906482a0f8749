"""Bodies of requests and answers: limited in size and time, as JSON or as MessagePack.

- A body states its length first, and is read whole or not at all. A body over `BODY_BYTES_MAX`, or over the room beside
  the requests under way, is refused before any byte is kept. A body that arrives too slowly is refused.
- The content type decides the encoding: ``application/json`` (the default) or ``application/msgpack``. The answer has
  the encoding of the request.
- Nothing in a body is code: msgspec builds the structs of `schemas`, or refuses.
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
"""Bound on one request. A JSON list of small values takes some twenty times its bytes while it is decoded."""
BODIES_BYTES_MAX: Final = 256 << 20
"""Bound on all requests that are being read or carried out."""
BODY_S: Final = 60.0
"""A body of the largest size arrives in this time at 1 MiB/s."""


class BadRequest(Exception):
    """A malformed request; nothing was changed."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


class Codec(NamedTuple):
    """One encoding of a body."""

    media_type: str
    encode: Callable[[Any], bytes]
    decode: Callable[..., Any]


JSON: Final = Codec("application/json", msgspec.json.encode, msgspec.json.decode)
MSGPACK: Final = Codec("application/msgpack", msgspec.msgpack.encode, msgspec.msgpack.decode)


def codec_of(request: Request) -> Codec:
    """The codec of a request; status 415 if its content type is neither."""
    content_type = request.headers.get("content-type", JSON.media_type).partition(";")[0].strip().lower()
    for codec in (JSON, MSGPACK):
        if content_type == codec.media_type:
            return codec
    raise BadRequest(
        HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        f"content type {content_type!r} is not read here; send {JSON.media_type} or {MSGPACK.media_type}",
    )


class BodyBudget:
    """Bounds the bytes of all bodies in this process."""

    def __init__(self) -> None:
        self._taken = 0

    @asynccontextmanager
    async def body(self, request: Request) -> AsyncIterator[bytes]:
        """Read the body. Its bytes count until the block ends."""
        size = _content_length(request)
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


def _content_length(request: Request) -> int:
    length = request.headers.get("content-length")
    if length is None or not length.isdecimal():
        raise BadRequest(HTTPStatus.LENGTH_REQUIRED, "the request does not say its length; send Content-Length")
    if int(length) > BODY_BYTES_MAX:
        raise BadRequest(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the request has {length} bytes; at most {BODY_BYTES_MAX}: send fewer rows at a time",
        )
    return int(length)


async def _read(request: Request) -> bytes:
    try:
        async with asyncio.timeout(BODY_S):
            return await request.body()
    except TimeoutError as late:
        raise BadRequest(HTTPStatus.REQUEST_TIMEOUT, f"the request did not arrive within {BODY_S:g} s") from late
    except ClientDisconnect as gone:
        raise BadRequest(HTTPStatus.BAD_REQUEST, "the request did not arrive whole") from gone


def decode(codec: Codec, body: bytes, into: Any) -> Any:
    """Decode a body as `into`; an empty body has no member. Status 400 names the mistake and its place."""
    try:
        return codec.decode(body or codec.encode({}), type=into)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(
            HTTPStatus.BAD_REQUEST, f"the body is not what this call takes: {error}; see /openapi.json"
        ) from error
