"""Questions to the controller over a socket, without a call of a Ray actor, which takes several times as long as the
answer.

The controller's process listens at an abstract Unix socket: it has no file, disappears with the process, and is reached
from the same node only. Both ends check that the peer runs as the same user.

1. A frame is its length (4 bytes, little-endian) and MessagePack. A question is ``[name, arguments]`` for one of
   `NAMES`; nothing received is executed. An answer is the metadata, or the number of a result that the server keeps.
2. The client sends a question only after the server has greeted the connection. Until then anything that fails (another
   node, another user, too many connections, an argument that is no plain value) leaves the question to Ray, which gives
   the same answer.
3. An exception stays in the server, and so does metadata that is too large for a frame or no plain value: the client
   fetches it by its number over Ray, before its next question on that connection. So callers get the same errors as
   over Ray, and no sample counted as consumed is lost.
4. A connection that breaks in the middle of a question ends with `Disconnected`, or with Ray's error if the actor is
   gone: to ask again could take samples twice.
5. A forked process uses none of its parent's connections: two processes would get each other's answers.
"""

from __future__ import annotations

import itertools
import os
import secrets
import select
import socket
import struct
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import msgspec
import numpy as np
import torch

from transferqueue.adapters.transfer_queue.metadata import BatchMeta
from transferqueue.adapters.transfer_queue.samples.sample_shapes import SampleShapes
from transferqueue.errors import Corruption, Disconnected
from transferqueue.limits import MESSAGE_BYTES_MAX

NAMES: Final = frozenset({"get_meta", "describe"})
CONNECTIONS_MAX: Final = 256
"""Threads of clients that ask at one time. Others ask over Ray."""
RAISED_MAX: Final = 1024
"""Exceptions that wait to be fetched."""
GREETING_S: Final = 5.0
ANSWER_S: Final = 600.0
"""A question waits a minute for its samples, and one about millions of them is at work for minutes. A controller that
is gone ends the connection at once; this ends the wait for one that is stopped."""
_HELLO: Final = b"\x01"
_AT_ONCE: Final = 1 << 16
"""Bytes that the first call for a frame takes: a question, or metadata of a thousand samples, is shorter."""
_LENGTH: Final = struct.Struct("<I")
_CREDENTIALS: Final = struct.Struct("3i")
_encode: Final = msgspec.msgpack.Encoder().encode
_decode_question: Final = msgspec.msgpack.Decoder(tuple[str, list[Any]]).decode
_decode_answer: Final = msgspec.msgpack.Decoder(list[Any]).decode


_NOT_PLAIN: Final = (TypeError, ValueError, AttributeError, OverflowError, RecursionError, msgspec.MsgspecError)
"""What encoding raises of a value that MessagePack does not carry."""


class AskOtherwise(Exception):
    """The question was not sent: it has to go over Ray."""


# ---------------------------------------------------------------- frames


def _send(connected: socket.socket, frame: bytes) -> None:
    connected.sendall(_LENGTH.pack(len(frame)) + frame)


def _receive(connected: socket.socket) -> bytes:
    """The next frame, mostly in one call of the system. ``ConnectionError`` at the end, or for a frame that is too
    long, or that more follows before it was answered."""
    data = connected.recv(_AT_ONCE)
    if len(data) < _LENGTH.size:  # the end, or a part of the length
        data += _exactly(connected, _LENGTH.size - len(data))
    (size,) = _LENGTH.unpack_from(data)
    if size > MESSAGE_BYTES_MAX:
        raise ConnectionError(f"a frame of {size:,} bytes; at most {MESSAGE_BYTES_MAX:,} are allowed")
    left = _LENGTH.size + size - len(data)
    if left < 0:
        raise ConnectionError("a second frame came before the answer to the first; each end waits for the other")
    return data[_LENGTH.size :] + _exactly(connected, left)


def _exactly(connected: socket.socket, count: int) -> bytes:
    parts: list[bytes] = []
    while count:
        part = connected.recv(count)
        if not part:
            raise ConnectionError("the other end is gone")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _is_same_user(connected: socket.socket) -> bool:
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.geteuid())


# ---------------------------------------------------------------- metadata as plain values


def encode_meta(meta: BatchMeta) -> list[Any]:
    """Metadata as plain values for MessagePack. The list of partitions becomes one name if all are alike."""
    partitions = meta.partition_ids
    alike = len(set(partitions)) == 1
    return [
        np.array(meta.global_indexes, "<i8").tobytes(),
        partitions[0] if alike else partitions,
        {name: _encode_schema(schema) for name, schema in meta._schema.items()},
        meta.production_status.astype("<i1").tobytes(),
        meta.extra_info,
        meta._tags,
    ]


def decode_meta(plain: list[Any]) -> BatchMeta:
    """The metadata that `encode_meta` encoded. `Corruption` if it is none."""
    try:
        indexes, partitions, schema, status, extra, tags = plain
        rows = np.frombuffer(indexes, "<i8").tolist()
        return BatchMeta(
            global_indexes=rows,
            partition_ids=[partitions] * len(rows) if isinstance(partitions, str) else partitions,
            field_schema={name: _decode_schema(stored) for name, stored in schema.items()},
            production_status=np.frombuffer(status, np.int8).copy(),
            extra_info=extra,
            custom_meta=tags,
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Corruption(
            f"the controller's answer is no metadata: {error!r}; do both ends have one version?"
        ) from error


def _encode_schema(schema: dict[str, Any]) -> dict[str, Any]:
    plain = dict(schema)
    if isinstance(dtype := schema.get("dtype"), torch.dtype):
        plain["dtype"] = str(dtype).removeprefix("torch.")
    if isinstance(shapes := schema.get("per_sample_shapes"), SampleShapes):
        plain["per_sample_shapes"] = {"dimensions": shapes.array.shape[1], "data": shapes.array.astype("<i8").tobytes()}
    return plain


def _decode_schema(plain: dict[str, Any]) -> dict[str, Any]:
    schema = dict(plain)
    if (dtype := plain.get("dtype")) is not None:
        schema["dtype"] = getattr(torch, dtype)
        if not isinstance(schema["dtype"], torch.dtype):
            raise TypeError(f"{dtype!r} is no dtype")
    if schema.get("shape") is not None:
        schema["shape"] = tuple(schema["shape"])
    if isinstance(shapes := plain.get("per_sample_shapes"), dict):
        array = np.frombuffer(shapes["data"], "<i8").reshape(-1, shapes["dimensions"])
        schema["per_sample_shapes"] = SampleShapes(array.astype(np.int64))
    elif shapes is not None:
        schema["per_sample_shapes"] = [None if shape is None else tuple(shape) for shape in shapes]
    return schema


# ---------------------------------------------------------------- the controller's end


class QuestionServer:
    """Answers questions, each connection in its own thread. `answer` calls a method of the controller by name."""

    def __init__(self, answer: Callable[..., Any]) -> None:
        self.name = f"transferqueue-{os.getpid()}-{secrets.token_hex(16)}"
        self._answer = answer
        self._raised: OrderedDict[int, BaseException] = OrderedDict()
        self._large: dict[int, Any] = {}
        """Metadata that waits to be fetched: at most one for each connection, which asks no more before that."""
        self._numbers = itertools.count(1)
        self._guard = threading.Lock()
        self._connected: set[socket.socket] = set()
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(f"\0{self.name}")
        self._listening.listen(CONNECTIONS_MAX)
        threading.Thread(target=self._accept, name="transfer_queue questions", daemon=True).start()

    def kept(self, number: int) -> Any:
        """Raise the exception of this number, or return the metadata."""
        with self._guard:
            if number in self._large:
                return self._large.pop(number)
            error = self._raised.pop(number, None)
        raise error or Disconnected(f"answer {number} was fetched already, or too many others were kept after it")

    def close(self) -> None:
        """End all connections."""
        for connection in (self._listening, *self._connected):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                connected, _ = self._listening.accept()
            except ConnectionError:  # the client is gone already
                continue
            except OSError:  # closed, or no descriptor is left: clients are refused, and ask over Ray
                self._listening.close()
                return
            try:
                self._begin(connected)
            except (OSError, RuntimeError):  # gone, or no thread is left: this client asks over Ray
                self._connected.discard(connected)
                connected.close()

    def _begin(self, connected: socket.socket) -> None:
        if len(self._connected) >= CONNECTIONS_MAX or not _is_same_user(connected):
            connected.close()
            return
        self._connected.add(connected)
        threading.Thread(target=self._serve, args=(connected,), name="transfer_queue question", daemon=True).start()

    def _serve(self, connected: socket.socket) -> None:
        large = 0
        try:
            with connected:
                connected.sendall(_HELLO)
                while True:
                    question = _receive(connected)
                    self._large.pop(large, None)
                    frame, large = self._answered(question)
                    _send(connected, frame)
        except OSError:
            pass  # the client is gone
        finally:
            self._large.pop(large, None)
            self._connected.discard(connected)

    def _answered(self, question: bytes) -> tuple[bytes, int]:
        """The frame of the answer, and the number under which metadata is kept instead of one; 0: none is."""
        try:
            name, arguments = _decode_question(question)
            if name not in NAMES:
                raise ValueError(f"question {name!r} is unknown; there are {', '.join(sorted(NAMES))}")
            meta = self._answer(name, *arguments)
        except Exception as error:  # noqa: BLE001  (kept for the client, which fetches and raises it)
            return _encode([self._keep(error.with_traceback(None)), None]), 0
        try:
            frame = _encode([0, encode_meta(meta)])
        except _NOT_PLAIN:
            frame = b""
        if 0 < len(frame) <= MESSAGE_BYTES_MAX:
            return frame, 0
        number = next(self._numbers)
        with self._guard:
            self._large[number] = meta
        return _encode([number, None]), number

    def _keep(self, error: BaseException) -> int:
        number = next(self._numbers)
        with self._guard:
            self._raised[number] = error
            while len(self._raised) > RAISED_MAX:
                self._raised.popitem(last=False)
        return number


# ---------------------------------------------------------------- the client's end


class LocalControllerSocket:
    """Asks the controller: `NAMES` directly, everything else over `ask`. Callable from any thread; each asking thread
    has its own connection. `name`: of the server's socket; "": none."""

    def __init__(self, name: str, ask: Callable[..., Any]) -> None:
        self._name, self._over_ray = name, ask
        self._idle: deque[socket.socket] = deque()
        self._pid = os.getpid()

    def ask(self, name: str, *arguments: Any) -> Any:
        """Call a method of the controller by name."""
        if self._name and name in NAMES:
            try:
                return self._ask(name, arguments)
            except AskOtherwise:
                pass
        return self._over_ray(name, *arguments)

    def _ask(self, name: str, arguments: tuple[Any, ...]) -> BatchMeta:
        question = _question(name, arguments)
        connected = self._taken()
        try:
            _send(connected, question)
            number, plain = _decode_answer(_receive(connected))
        except TimeoutError as error:
            connected.close()
            raise Disconnected(
                f"the controller did not answer {name} within {ANSWER_S:g} s; samples may count as consumed"
            ) from error
        except BaseException as error:
            connected.close()
            if not isinstance(error, ConnectionError):
                raise
            self._over_ray("hello")  # if the actor is gone, Ray says why
            raise Disconnected(
                f"the connection to the controller ended during {name}: {error}; samples may count as consumed, ask "
                "again for others"
            ) from error
        try:
            return self._over_ray("kept", number) if number else decode_meta(plain)
        finally:
            self._idle.append(connected)  # only after fetching the result kept for it

    def _taken(self) -> socket.socket:
        """An idle connection: one still open, or a new one."""
        self._leave_to_parent()
        while self._idle:
            with suppress(IndexError):  # another thread was quicker
                connected = self._idle.pop()
                if _stands(connected):
                    return connected
                connected.close()
        return self._dialled()

    def _dialled(self) -> socket.socket:
        connected = socket.socket(socket.AF_UNIX)
        try:
            connected.settimeout(GREETING_S)
            connected.connect(f"\0{self._name}")
            if not _is_same_user(connected) or connected.recv(1) != _HELLO:
                raise ConnectionError("it is not the controller, or takes no more connections")
            connected.settimeout(ANSWER_S)
        except OSError as error:
            connected.close()
            if isinstance(error, TimeoutError):
                self._name = ""  # the server is gone: do not wait again
            raise AskOtherwise from error
        except BaseException:
            connected.close()
            raise
        return connected

    def _leave_to_parent(self) -> None:
        """After a fork: forget the connections, which are the parent's. To close them here does not end them there."""
        if self._pid != os.getpid():
            self._idle, self._pid = deque(), os.getpid()

    def close(self) -> None:
        """Close the idle connections, and ask over Ray from now on."""
        self._leave_to_parent()
        self._name = ""
        while self._idle:
            with suppress(IndexError):
                self._idle.pop().close()


def _question(name: str, arguments: tuple[Any, ...]) -> bytes:
    """The frame of a question. `AskOtherwise` for arguments that would not arrive as they are."""
    try:
        frame = _encode((name, arguments))
        is_same = _decode_question(frame) == (name, list(arguments))
    except _NOT_PLAIN as error:
        raise AskOtherwise from error
    if not is_same or len(frame) > MESSAGE_BYTES_MAX:
        raise AskOtherwise
    return frame


def _stands(connected: socket.socket) -> bool:
    """Whether an idle connection can be used: nothing is readable there, not even its end."""
    polled = select.poll()  # `recv` would wait as long as the socket's timeout, whatever its flags
    polled.register(connected, select.POLLIN)
    return not polled.poll(0)
