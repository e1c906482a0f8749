"""Calls and answers as bytes and back: one MessagePack array each, typed.

- A frame over `MESSAGE_BYTES_MAX` is refused unread, at both ends.
- Of a call over `SMALL_FRAME_BYTES` the server reads the envelope first (`head_of`): session, call, and the tag of the
  request. Each request declares how large its frame may be (`bytes_max`), so a frame is decoded only if its sender may
  send a request of this kind and size.
- Bytes that are not exactly a message raise `ProtocolError`: unknown tags, wrong types, numbers out of range, missing,
  extra or trailing bytes, nesting deeper than the types allow. Decoding builds values of the declared types and nothing
  else; it runs no code that a peer chose.
- A frame begins with the number of the protocol (see `versions`). A frame with another number is no message here.
- If the envelope of a frame is whole but its request is not, `call_of` still returns the call that it belongs to, so
  that the server can answer the sender.

The per-row numbers of a reply are encoded in the fewest items (`encode_constant`, `encode_ascending`). The numbers of n
rows travel as n items, or as one: the common value of all rows, or the first of ascending values, each one more than
the one before. For one row the two forms are the same bytes. The reader knows n, and refuses data of neither length.
Most facts of most batches are equal, and most batches are one run of one block: a reply of 1,024 rows is 9 KB, not 70.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeVar, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from transferqueue.errors import ProtocolError, UsageError, VersionMismatch
from transferqueue.limits import MESSAGE_BYTES_MAX, TERMS_BYTES_MAX, VALUE_DEPTH_MAX
from transferqueue.schema import Field
from transferqueue.wire import messages as m
from transferqueue.wire.unknown_names import explain
from transferqueue.wire.versions import PROTOCOL

_Decoded = TypeVar("_Decoded")


class CallHead(NamedTuple):
    """The facts in the first bytes of a call. `tag`: of its request."""

    session: int
    id: int
    tag: str


NO_HEAD: Final = CallHead(0, 0, "")
"""The head of a frame that is no call of this protocol."""


_encoder: Final = msgspec.msgpack.Encoder()
_calls: Final = msgspec.msgpack.Decoder(m.CallFrame)
_answers: Final = msgspec.msgpack.Decoder(m.AnswerFrame)
_envelope: Final = msgspec.msgpack.Decoder(tuple[int, int, int, msgspec.Raw])
_fields: Final = msgspec.msgpack.Decoder(m.Fields)

DEFINITIONS_KEPT: Final = 64
"""The bytes of this many sets of fields are remembered: at most one for each task whose rows a process takes."""


def encode_call(call: m.CallFrame) -> bytes:
    """The frame of a call. `UsageError` if it is larger than a message may be, or has a value that no message can
    have."""
    return _bounded(call, f"request {m.tag_of(call.request)}")


def encode_answer(answer: m.AnswerFrame) -> bytes:
    """The frame of an answer. `UsageError` as in `encode_call`."""
    try:
        frame = _encoder.encode(answer)
    except (OverflowError, TypeError, UnicodeEncodeError):
        frame = b""
    if not frame or len(frame) > MESSAGE_BYTES_MAX:
        return _bounded(answer, f"reply {m.tag_of(answer.reply)}")  # which reports the error
    return frame


def decode_call(frame: bytes) -> m.CallFrame:
    """The call in a frame, or `ProtocolError`."""
    if len(frame) > MESSAGE_BYTES_MAX:
        raise _too_long(frame)
    try:
        return _calls.decode(frame)
    except _UNDECODABLE as error:
        raise _no_message(frame, error) from error


def decode_answer(frame: bytes) -> m.AnswerFrame:
    """The answer in a frame, or `ProtocolError`."""
    if len(frame) > MESSAGE_BYTES_MAX:
        raise _too_long(frame)
    try:
        return _answers.decode(frame)
    except _UNDECODABLE as error:
        raise _no_message(frame, error) from error


def explain_call(frame: bytes, error: ProtocolError, *, client_package: str) -> ProtocolError:
    """The error that the client gets for a call that `decode_call` refused with `error`.

    Args:
        frame: the call.
        error: of `decode_call`.
        client_package: version of the client's package; "": not known.

    Returns:
        `VersionMismatch` if the call has a request, a policy or an option that this package does not know: it names
        those that this one has, and the package to install. Otherwise `error`.
    """
    cause = error.__cause__
    if not isinstance(cause, msgspec.ValidationError) or len(frame) > TERMS_BYTES_MAX:
        return error
    text = explain(frame, _REQUESTS, str(cause), reader="server", sender_package=client_package)
    return VersionMismatch(text) if text else error


def explain_answer(frame: bytes, error: ProtocolError, *, server_package: str) -> m.AnswerFrame | None:
    """An answer that reports the reply of a newer server as `VersionMismatch`, so that it ends its own call and no
    other; None if the answer is no such one.

    Args:
        frame: the answer.
        error: of `decode_answer`.
        server_package: version of the server's package; "": not known.
    """
    cause = error.__cause__
    if not isinstance(cause, msgspec.ValidationError) or len(frame) > TERMS_BYTES_MAX:
        return None
    text = explain(frame, _REPLIES, str(cause), reader="client", sender_package=server_package)
    if not text:
        return None
    try:
        number, epoch, call, _ = _envelope.decode(frame)
    except _UNDECODABLE:
        return None
    return m.AnswerFrame(epoch, call, m.Failed(VersionMismatch.__name__, text)) if number == PROTOCOL else None


def call_of(frame: bytes) -> tuple[int, int]:
    """Session and id of the call in a frame; (0, 0) if they cannot be read."""
    session, call, _ = head_of(frame)
    return session, call


def head_of(frame: bytes) -> CallHead:
    """The envelope of a call. Reads only the first bytes, however long the frame is; `NO_HEAD` if it is no call of this
    protocol."""
    if frame[:2] != _CALL_BEGINS:
        return NO_HEAD
    try:
        session, at = _unsigned(frame, len(_CALL_BEGINS))
        call, at = _unsigned(frame, at)
        _, at = _unsigned(frame, at)
        at += 1 if 0x90 <= frame[at] < 0xA0 else _LONG_ARRAYS[frame[at]]
        length = frame[at] - _SHORT_TEXT if frame[at] < _LONG_TEXT else -1
        tag = frame[at + 1 : at + 1 + length]
    except (IndexError, KeyError):
        return NO_HEAD
    return CallHead(session, call, tag.decode("ascii", "replace")) if len(tag) == length else NO_HEAD


def _unsigned(frame: bytes, at: int) -> tuple[int, int]:
    """The unsigned integer that begins at byte `at`, and the start of the next item."""
    if (first := frame[at]) < 0x80:
        return first, at + 1
    end = at + 1 + _INTEGER_BYTES[first]
    return int.from_bytes(frame[at + 1 : end], "big"), end


_CALL_BEGINS: Final = bytes((0x95, PROTOCOL))
_INTEGER_BYTES: Final = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}
_LONG_ARRAYS: Final = {0xDC: 3, 0xDD: 5}
"""Bytes of the heads of arrays of more than 15 items."""
_SHORT_TEXT: Final = 0xA0
_LONG_TEXT: Final = 0xC0
"""From `_SHORT_TEXT` up to here a byte begins a text of at most 31 bytes: no tag of a request is longer."""


def encode_observed(answer: object) -> m.Observed:
    """An answer (see `transferqueue.wire.answers`) in encoded form."""
    return m.Observed(msgspec.Raw(_encoder.encode(answer)))


def decode_observed(reply: m.Observed, kind: type[_Decoded]) -> _Decoded:
    """The answer that `encode_observed` encoded, of this kind. `ProtocolError` if it is not one."""
    try:
        return msgspec.msgpack.decode(reply.value, type=kind)
    except _UNDECODABLE as error:
        raise ProtocolError(
            f"the server's answer cannot be read as {kind}: {error}; install the same version of TransferQueue at both "
            "ends"
        ) from error


def encode_fields(fields: Sequence[Field]) -> bytes:
    """Definitions of fields in the form of `Content`."""
    return _encoder.encode(fields)


@lru_cache(maxsize=DEFINITIONS_KEPT)
def decode_fields(data: bytes) -> tuple[Field, ...]:
    """The fields that `encode_fields` encoded, or `ProtocolError`. Equal bytes give the same objects: making a hundred
    fields takes longer than the rest of a reply that names them."""
    fields: list[Field] = _decoded(_fields, data)
    return tuple(fields)


def _bounded(message: object, name: str) -> bytes:
    try:
        frame = _encoder.encode(message)
    except (OverflowError, TypeError, UnicodeEncodeError) as error:
        raise unsendable(name, error) from error
    if len(frame) > MESSAGE_BYTES_MAX:
        raise UsageError(
            f"{name} takes {len(frame):,} bytes as a message; at most {MESSAGE_BYTES_MAX:,} are allowed: "
            "use fewer rows or fields at a time"
        )
    return frame


def unsendable(name: str, error: Exception) -> UsageError:
    """The error for a message `name` that cannot be encoded."""
    if isinstance(error, UnicodeEncodeError):
        text = error.object[:40]
        return UsageError(
            f"{name} cannot be sent: the text {text!r} is not Unicode ({error.reason}); replace such characters, as by "
            '.encode("utf-8", "replace").decode()'
        )
    return UsageError(f"{name} cannot be sent: {error}; integers have at most 64 bits")


def _decoded(decoder: msgspec.msgpack.Decoder[_Decoded], frame: bytes) -> _Decoded:
    if len(frame) > MESSAGE_BYTES_MAX:
        raise _too_long(frame)
    try:
        return decoder.decode(frame)
    except _UNDECODABLE as error:
        raise _no_message(frame, error) from error


_REQUESTS: Final = {m.tag_of(kind): kind for kind in get_args(m.Request)}
_REPLIES: Final = {m.tag_of(kind): kind for kind in get_args(m.Reply)}
_UNDECODABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def _too_long(frame: bytes) -> ProtocolError:
    return ProtocolError(f"a message of {len(frame):,} bytes was not read; at most {MESSAGE_BYTES_MAX:,} are allowed")


def _no_message(frame: bytes, error: Exception) -> ProtocolError:
    why = f"nested far deeper than {VALUE_DEPTH_MAX}" if isinstance(error, RecursionError) else str(error)
    return ProtocolError(f"{len(frame)} bytes are not a message: {why}")


# ---------------------------------------------------------------- one number for each row

Numbers = npt.NDArray[Any]


def encode_constant(values: Numbers) -> bytes:
    """The bytes for `decode_constant`. Values are compared as bytes, in a tenth of numpy's time: NaN and minus zero
    survive."""
    data = values.tobytes()
    first = data[: values.itemsize]
    return first if data == first * values.size else data


def encode_ascending(values: Numbers) -> bytes:
    """The bytes for `decode_ascending`."""
    data = values.tobytes()
    if values.size > 1 and int(values[-1]) - int(values[0]) == values.size - 1:
        run = np.arange(values[0], int(values[0]) + values.size, dtype=values.dtype)
        return data[: values.itemsize] if data == run.tobytes() else data
    return data


def decode_constant(data: bytes, dtype: str, rows: int) -> Numbers:
    """The numbers of `rows` rows, `[rows]` of `dtype`, as a copy. `ProtocolError` if `data` has neither `rows` items
    nor one."""
    values = _items(data, dtype, rows)
    return values.copy() if values.size == rows else np.full(rows, values[0])


def decode_ascending(data: bytes, dtype: str, rows: int) -> Numbers:
    """The numbers of `rows` rows from data that `encode_ascending` made."""
    values = _items(data, dtype, rows)
    return values.copy() if values.size == rows else np.arange(values[0], values[0] + rows, dtype=values.dtype)


def _items(data: bytes, dtype: str, rows: int) -> Numbers:
    size = np.dtype(dtype).itemsize
    if len(data) != rows * size and not (rows and len(data) == size):
        raise ProtocolError(
            f"{len(data)} bytes are not the {dtype} of {rows} rows; send {size} for each, or {size} for all"
        )
    return np.frombuffer(data, dtype)
