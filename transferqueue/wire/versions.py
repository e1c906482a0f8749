"""The protocol number of a frame, and the errors of both ends when their numbers differ. Pure.

Invariants (`transferqueue docs compatibility`):

1. A frame is a MessagePack array, and its first item is the number of the protocol. So a call begins with the bytes
   ``0x95 n`` and an answer with ``0x94 n``, for as long as n is below 128.
2. Some parts never change, in any protocol: a call is ``[n, session, id, seen, request]``, an answer is
   ``[n, epoch, id, reply]``, ``Hello`` has the version of the client's package as its sixth item, and a refusal is
   ``["Failed", error, text]``. So each end can read who the other one is, whatever number it speaks.
3. Protocol 0 is that of packages before frames had a number: calls ``[session, id, seen, request]`` and answers
   ``[epoch, id, reply]``. No supported package speaks it; a client of it is refused in its own form.
4. A server answers a frame of another protocol with one refusal and carries nothing out. A client ends its connection
   at the first answer of another protocol.
"""

from __future__ import annotations

from typing import Final

import msgspec

from transferqueue.errors import VersionMismatch
from transferqueue.errors.text import visible_lines

PROTOCOL: Final = 4
"""The protocol of this package. It grows with each change of a frame: `python -m tests.wire.golden` holds this."""

PACKAGE: Final = "asyncflow-transferqueue"
"""The name under which the package is installed."""

VERSION: Final = "0.2.0"
"""The version of the package; the build reads it here. Asking `importlib.metadata` took each process 25 ms of processor
time."""

_PACKAGE_ITEM: Final = 5
"""The item of `Hello` with the version of the client's package, counted from its tag."""
_BY_OLD_PACKAGES: Final = 0
_TEXT_CHARS_MAX: Final = 500
_PAGE: Final = "`transferqueue docs compatibility` says which versions talk to each other"

_any_call: Final = msgspec.msgpack.Decoder(tuple[int, int, int, int, msgspec.Raw])
_old_call: Final = msgspec.msgpack.Decoder(tuple[int, int, int, msgspec.Raw])
_any_answer: Final = msgspec.msgpack.Decoder(tuple[int, int, int, msgspec.Raw])
_old_answer: Final = msgspec.msgpack.Decoder(tuple[int, int, msgspec.Raw])
_request: Final = msgspec.msgpack.Decoder(list[msgspec.Raw])
_refusal: Final = msgspec.msgpack.Decoder(tuple[str, str, str])
_text: Final = msgspec.msgpack.Decoder(str)
_encoder: Final = msgspec.msgpack.Encoder()


def refusal_of(frame: bytes, *, epoch: int, package: str) -> bytes | None:
    """The answer to a call of another protocol, in a form that its sender can read; None if `frame` is no such call.
    `package` is the version of the server's package."""
    try:
        number, call, request = _read_call(frame)
        name, client = _read_request(request)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if number == PROTOCOL or not name.isidentifier():
        return None
    same = f"install {PACKAGE} {package} where the client runs" if package else "install its version for the client"
    text = (
        f"the client speaks protocol {number}{_of_package(client)} and this server speaks protocol {PROTOCOL}"
        f"{_of_package(package)}: upgrade the {'server' if number > PROTOCOL else 'client'}, or {same}; {_PAGE}"
    )
    if number == _BY_OLD_PACKAGES:
        return _encoder.encode((epoch, call, ("Failed", "ProtocolError", text)))
    return _encoder.encode((PROTOCOL, epoch, call, ("Failed", VersionMismatch.__name__, text)))


def mismatch_of(frame: bytes, *, address: str, package: str) -> VersionMismatch | None:
    """The client's error for an answer of another protocol; None if `frame` is no such answer. `package` is the version
    of the client's package."""
    try:
        number, reply = _read_answer(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if number == PROTOCOL:
        return None
    server_text = f". The server said: {said}" if number and (said := _said(reply)) else ""
    return VersionMismatch(
        f"the server at {address} speaks protocol {number} and this client speaks protocol {PROTOCOL}"
        f"{_of_package(package)}: upgrade the {'client' if number > PROTOCOL else 'server'}, or install the server's "
        f"version of {PACKAGE} for the client; {_PAGE}{server_text}"
    )


def _read_call(frame: bytes) -> tuple[int, int, msgspec.Raw]:
    """Protocol, id and request of a call of any protocol."""
    if frame[:1] == b"\x94":
        _, call, _, request = _old_call.decode(frame)
        return _BY_OLD_PACKAGES, call, request
    number, _, call, _, request = _any_call.decode(frame)
    return max(number, 1), call, request


def _read_request(request: msgspec.Raw) -> tuple[str, str]:
    """The tag of a request, and the version of the package if it is a `Hello` that names one."""
    items = _request.decode(request)
    name = _text.decode(items[0]) if items else ""
    if name != "Hello" or len(items) <= _PACKAGE_ITEM:
        return name, ""
    return name, _text.decode(items[_PACKAGE_ITEM])[:_TEXT_CHARS_MAX]


def _read_answer(frame: bytes) -> tuple[int, msgspec.Raw]:
    """Protocol and reply of an answer of any protocol."""
    if frame[:1] == b"\x93":
        return _BY_OLD_PACKAGES, _old_answer.decode(frame)[2]
    number, _, _, reply = _any_answer.decode(frame)
    return max(number, 1), reply


def _said(reply: msgspec.Raw) -> str:
    """The text of a refusal, safe to show; "" for any other reply."""
    try:
        return visible_lines(_refusal.decode(reply)[2][:_TEXT_CHARS_MAX])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""


def _of_package(version: str) -> str:
    return f" (package {version})" if version else ""
