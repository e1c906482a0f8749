"""Garbage against a server that runs: mutated frames through an honest channel, and bytes below it, over ipc and tcp.

What is sent is never a request that the server should carry out: calls of the open session only if no decoder takes
them for a message, calls of other sessions in any shape. So the tables, the sessions and the books must be the same
afterwards.
"""

from __future__ import annotations

import random
import socket
import struct
import time
from contextlib import suppress
from typing import Any, Final

import msgspec

import transferqueue as tq
from tests.fuzz.frames import Fuzzer
from tests.fuzz.memory import resident_bytes
from transferqueue.errors import ProtocolError, Unreachable
from transferqueue.transport import Wakeup, dial
from transferqueue.transport.address import IpcAddress, TcpAddress, parse_address
from transferqueue.transport.bulk import protocol as bulk
from transferqueue.transport.bulk.client import BulkClient
from transferqueue.wire import codec
from transferqueue.wire import messages as m

BURST: Final = 500
"""Frames on their way at once: no more than the server would keep for a peer that reads late."""
ASK_S: Final = 2.0
"""What is not answered is asked again, as clients do: answers to a peer that reads late may be dropped."""
TRIES: Final = 15
_GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL" + bytes(16) + b"\x00" + bytes(31)
_CURVE: Final = _GREETING.replace(b"NULL" + bytes(16), b"CURVE" + bytes(15))
_READY_BODY: Final = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
_READY: Final = b"\x04" + bytes([len(_READY_BODY)]) + _READY_BODY


class LiveReport(msgspec.Struct):
    """frames: through channels; connections: raw ones. before, after: what the server says of itself."""

    frames: int
    connections: int
    seconds: float
    grown_bytes: int
    before: Any
    after: Any


def run(queue: tq.Queue, addresses: list[str], pid: int, *, frames: int, connections: int, seed: int) -> LiveReport:
    """So many frames and raw connections, shared by the addresses, and half as many to the bulk endpoint. queue: an
    honest client, whose session is abused."""
    started = time.perf_counter()
    session = queue._client.connection._io.calls.session
    streams = [Stream(address, Fuzzer(seed + at, session), session) for at, address in enumerate(addresses)]
    bulk_port = queue.stats().server.bulk_port
    streams.append(BulkStream(f"tcp://127.0.0.1:{bulk_port}", Fuzzer(seed - 1, session), session))
    noise = random.Random(seed)
    for stream in streams:  # the server takes the memory it needs once
        stream.send(frames // 10 // len(addresses))
        below(stream.address, noise, connections // 10 // len(addresses))
    before, resident = state(queue), resident_bytes(pid)
    for stream in streams:
        stream.send(frames // len(addresses))
        below(stream.address, noise, connections // len(addresses))
    after = state(queue)
    if queue.stats().server.internal_errors:
        raise RuntimeError("a frame met a defect; the server's log has it")
    for stream in streams:
        stream.close()
    return LiveReport(frames, connections, time.perf_counter() - started, resident_bytes(pid) - resident, before, after)


def state(queue: tq.Queue) -> Any:
    """Everything that a request could have changed; no times, no counts of messages."""
    told = queue.stats().plain()
    sessions = {
        name: {key: one[key] for key in ("label", "state", "leases", "reserved", "pins", "grants", "waits")}
        for name, one in queue.sessions().plain().items()
    }
    counted = [told[name] for name in ("tables", "channels", "bytes", "waiting")] + [
        told["server"][name] for name in ("extents", "internal_errors", "leases_ended", "sessions_dropped")
    ]
    return _timeless([queue.audit().plain(), queue.tables(), queue.doctor().plain()["tables"], sessions, counted])


def _timeless(told: Any) -> Any:
    """The same without what time alone changes: names that end in ``_s``."""
    if isinstance(told, dict):
        return {name: _timeless(one) for name, one in told.items() if not str(name).endswith("_s")}
    return [_timeless(one) for one in told] if isinstance(told, list) else told


class Stream:
    """A well-behaved channel with ill-behaved frames. It reads all its answers."""

    def __init__(self, address: str, fuzzer: Fuzzer, session: int) -> None:
        self.address = address
        self._fuzzer = fuzzer
        self._session = session
        self._channel = dial(address)
        self._bell = Wakeup()

    def send(self, frames: int) -> None:
        """So many, and wait until the server has answered what came after each burst of them."""
        for at in range(frames):
            self._put(self._next())
            if at % BURST == BURST - 1:
                self._catch_up()
        self._catch_up()

    def close(self) -> None:
        """Hang up."""
        self._channel.close()
        self._bell.close()

    def _put(self, frame: bytes) -> None:
        self._channel.send(frame)

    def _next(self) -> bytes:
        while True:
            frame = self._fuzzer.frame()
            if self._is_harmless(frame):
                return frame

    def _is_harmless(self, frame: bytes) -> bool:
        try:
            call = codec.decode_call(frame)
        except ProtocolError:
            return True
        return not isinstance(call.request, m.Hello) and call.session != self._session

    def _catch_up(self) -> None:
        """Send what is certainly answered, and read until that answer."""
        mark = random.getrandbits(40)
        for _ in range(TRIES):
            self._channel.send(codec.encode_call(m.CallFrame(1, mark, 0, m.ListTables())))
            asked_at = time.monotonic()
            while time.monotonic() < asked_at + ASK_S:
                self._channel.wait(self._bell, ASK_S)
                while (frame := self._channel.recv_nowait()) is not None:
                    with suppress(ProtocolError):  # a frame that looked like one of protocol 0 is refused in that
                        if codec.decode_answer(frame).id == mark:
                            return
        raise TimeoutError(f"{self.address} does not answer any more")


class BulkStream(Stream):
    """The same at the bulk endpoint: heads, most with a good checksum. The others end their connection."""

    def __init__(self, address: str, fuzzer: Fuzzer, session: int) -> None:
        self.address = address
        self._fuzzer = fuzzer
        self._session = session
        self._line = self._dialled()

    def close(self) -> None:
        """Hang up."""
        self._line.close()

    def _dialled(self) -> BulkClient:
        host, _, port = self.address.removeprefix("tcp://").rpartition(":")
        line = BulkClient(host, int(port), epoch=0)
        if not line.open(ASK_S):
            raise TimeoutError(f"{self.address} does not listen any more")
        return line

    def _put(self, frame: bytes) -> None:
        if random.random() < 0.9:
            with suppress(Unreachable):  # found when it is caught up with
                self._line.send((bulk.framed(frame), ()))
            return
        host, _, port = self.address.removeprefix("tcp://").rpartition(":")
        with socket.create_connection((host, int(port))) as raw:
            raw.sendall(frame)

    def _next(self) -> bytes:
        return self._fuzzer.frame()

    def _catch_up(self) -> None:
        """A transfer that is not under way is certainly refused, by its number. Heads that are none end the
        connection."""
        mark = random.getrandbits(40)
        head, _ = bulk.message(bulk.FlowAck(mark, 0))
        for _ in range(TRIES):
            try:
                self._line.send((head, ()))
                while self._line.receive(heard := Heard(), ASK_S):
                    if heard.refused_with(mark):
                        return
            except Unreachable:
                pass  # or it says no more: what it heard had no beginning
            self._line.close()
            self._line = self._dialled()
        raise TimeoutError(f"{self.address} does not answer any more")


class Heard:
    """Takes an answer of the bulk endpoint: they have no content here, since nothing is ever read."""

    coming = 0

    def expect(self, head: bytes, nbytes: int) -> None:
        self.told = bulk.to_client(head)

    def fill(self, read: bulk.Reader) -> int:
        raise RuntimeError("bytes came that nobody had a ticket for")

    def refused_with(self, mark: int) -> bool:
        if isinstance(self.told, bulk.TransferFailed) and self.told.error == "InternalError":
            raise RuntimeError(self.told.text)
        return self.told.transfer == mark


def below(address: str, rng: random.Random, connections: int) -> None:
    """Raw connections that speak the protocol of the address badly or not at all, each closed without a word."""
    for _ in range(connections):
        with _open(address) as raw:
            try:
                raw.sendall(_bad_bytes(rng))
                if rng.random() < 0.3:
                    raw.recv(4096)
            except (BrokenPipeError, ConnectionResetError, TimeoutError):
                continue  # the server hung up first


def _open(address: str) -> socket.socket:
    place = parse_address(address)
    if isinstance(place, IpcAddress):
        raw = socket.socket(socket.AF_UNIX)
        raw.connect(str(place.path))
    else:
        assert isinstance(place, TcpAddress)
        raw = socket.create_connection((place.host, place.port))
    raw.settimeout(0.02)  # at a socket file nobody greets
    return raw


def _bad_bytes(rng: random.Random) -> bytes:
    """Noise; ZeroMQ's greeting and noise; its handshake and frames that lie about their lengths; a message of many
    parts. At a socket file all of that is lengths of frames, and frames."""
    noise = rng.randbytes(rng.choice([0, 1, 10, 64, 500, 20_000]))
    lie = struct.pack(
        ">BQ", rng.choice([0, 1, 2, 3, 4, 6, 7, 255]), rng.choice([0, 1 << 20, 1 << 31, 1 << 62, (1 << 64) - 1])
    )
    match rng.randrange(8):
        case 0:
            return noise
        case 7:
            return _CURVE + rng.choice([b"\x04\xc8\x05HELLO\x01\x00" + rng.randbytes(192), lie, _READY]) + noise
        case 1:
            return _GREETING[: rng.randrange(len(_GREETING))]
        case 2:
            return _GREETING + noise
        case 3:
            return _GREETING + _READY + noise
        case 4:
            return _GREETING + _READY + lie + noise
        case 5:
            return _GREETING + _READY + b"\x01\x01x" * 2000 + b"\x00\x01x"
        case _:
            changed = bytearray(_GREETING + _READY + b"\x00\x05hello")
            changed[rng.randrange(len(changed))] = rng.randrange(256)
            return bytes(changed)
