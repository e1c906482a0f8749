"""Mutated frames against the decoders: each is a message or a `ProtocolError`, and nothing is kept."""

from __future__ import annotations

import gc
import time
from collections import Counter
from contextlib import suppress
from typing import Final

import msgspec

from tests.fuzz.frames import Fuzzer, with_digest
from tests.fuzz.memory import resident_bytes
from transferqueue.errors import ProtocolError
from transferqueue.transport.bulk import protocol as bulk
from transferqueue.wire import codec
from transferqueue.wire import messages as m
from transferqueue.wire.answers.stats import Stats

WARM_UP: Final = 20_000
"""Frames after which the allocator has what it needs; memory is compared from there on."""

BULK: Final = (with_digest(bulk.to_shard), with_digest(bulk.to_client))


class Report(msgspec.Struct):
    """frames: how many; messages: those that still were one, by type; refused: the others."""

    frames: int
    seconds: float
    refused: int
    messages: Counter[str]
    grown_bytes: int


def decode(frame: bytes) -> str:
    """What the frame is to every decoder: the name of the request or reply, or "" for none. Anything else raises."""
    name = ""
    for decoder in (codec.decode_call, codec.decode_answer):
        try:
            found = decoder(frame)
        except ProtocolError:
            continue
        part = found.request if isinstance(found, m.CallFrame) else found.reply
        name = m.tag_of(part)
    for decoder in BULK:
        with suppress(ProtocolError):
            name = m.tag_of(decoder(frame))
    session, call = codec.call_of(frame)
    if not (isinstance(session, int) and isinstance(call, int)):
        raise TypeError(f"call_of gave {session!r}, {call!r}")
    with suppress(ProtocolError):
        codec.decode_observed(m.Observed(msgspec.Raw(frame)), Stats)
    return name


def run(frames: int, seed: int) -> Report:
    """Decode so many mutated frames."""
    fuzzer, found = Fuzzer(seed), Counter[str]()
    started, before = time.perf_counter(), 0
    for number in range(frames):
        if number == min(WARM_UP, frames // 2):
            gc.collect()
            before = resident_bytes()
        frame = fuzzer.frame()
        try:
            found[decode(frame)] += 1
        except BaseException as error:
            error.add_note(f"frame {number} of seed {seed}: {frame[:200].hex()}")
            raise
    gc.collect()
    refused = found.pop("", 0)
    return Report(frames, time.perf_counter() - started, refused, found, resident_bytes() - before)
