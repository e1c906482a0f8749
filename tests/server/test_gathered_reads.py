"""Rows of any columns, in any order, gathered into frames of any size, arrive as they were put; and no frame changes
while anybody holds it."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest

from tests.server.test_bulk import Bench
from tests.storage.shards import Block, opened_shard
from tests.transport.whole_messages import deliver
from transferqueue.client.memory.client_transfer import FetchTransfer, RequestedColumns, rows_of
from transferqueue.schema import Field, Slice, sliced_fields
from transferqueue.server.shards import bulk_endpoint, shard_transfer
from transferqueue.server.shards.block_checks import BlockChecks
from transferqueue.server.shards.frame_digests import FrameDigests
from transferqueue.server.shards.shard_transfer import _Frame, frames_of, parts_of
from transferqueue.storage import Column, MappedBlocks, RowPlacement
from transferqueue.storage.columns import byte_stream, ranges
from transferqueue.storage.memory.arena import Arena
from transferqueue.storage.memory.backing import ArenaBacking
from transferqueue.storage.memory.buffer_pool import BufferPool
from transferqueue.transport.bulk import protocol as b
from transferqueue.wire import messages as m
from transferqueue.wire.codec import encode_ascending

FIELDS = [
    Field("bytes", "uint8", (3,)),
    Field("flags", "bool", ()),
    Field("none", "float32", (0,)),
    Field("wide", "int64", (90,)),
    Field("ragged", "int16", (None, 2)),
    Field("hollow", "uint8", (None, 0)),
    Field("varied", "int32", (None, None)),
    Field("text", "str"),
    Field("blob", "bytes"),
]
SPANS = {"ragged": (1, 4), "wide": (7, 50)}
CUTS = {name: Slice(span) for name, span in SPANS.items()}


def length(rng: Any) -> int:
    """Of a row: none, short, or more than a frame."""
    return int(rng.choice([0, 1, rng.integers(2, 40), rng.integers(100, 600)], p=[0.2, 0.2, 0.5, 0.1]))


def value(rng: Any, field: Field) -> Any:
    if field.dtype == "str":
        return "é1中"[int(rng.integers(3))] * length(rng)
    if field.dtype == "bytes":
        return rng.bytes(length(rng))
    shape = [length(rng) % 30 if field.varied else length(rng) if size is None else size for size in field.shape]
    return rng.integers(0, 2 if field.dtype == "bool" else 100, shape).astype(field.dtype)


def selection(rng: Any, total: int) -> Any:
    count = int(rng.integers(1, total + 1))
    scattered = rng.permutation(total)[:count]
    runs = [np.arange(start, min(start + 9, total)) for start in rng.integers(0, total, 3)]
    ways = (scattered, np.sort(scattered), rng.integers(0, total, count), np.arange(total)[::-1], np.concatenate(runs))
    return ways[int(rng.integers(len(ways)))].astype(np.int64)


def fetched(asked: list[Any], backing: ArenaBacking, fields: dict[str, Field], rng: Any) -> FetchTransfer:
    """What a client has after it took all frames, some of which wait a while."""
    fetch = FetchTransfer(1, RequestedColumns(7, 0, fields, asked), BufferPool())
    read, digests = fetch._request(), FrameDigests()
    parts = parts_of(read, backing, BlockChecks(), BufferPool().take)
    waiting: deque[b.Message] = deque()
    for number, content in enumerate(frames_of(read, parts, lambda: _Frame(digests))):
        head = b.ReadFrame(1, number, content.begun, last=content.last)
        waiting.append(b.message(head, content.pieces, content.digest))
        while waiting and (content.last or len(waiting) > rng.integers(4)):
            bytes_of, pieces = waiting.popleft()
            deliver(bytes_of, pieces, fetch)
            fetch.receive()
    assert fetch.done
    return fetch


@pytest.mark.parametrize("frame_bytes", [64, 100, 1000, 4096, 1 << 20])
@pytest.mark.parametrize("seed", range(3))
def test_what_was_put_arrives(monkeypatch: pytest.MonkeyPatch, seed: int, frame_bytes: int) -> None:
    rng = np.random.default_rng([seed, frame_bytes])
    rows = int(rng.choice([1, 7, 60]))
    monkeypatch.setattr(shard_transfer, "FRAME_BYTES", frame_bytes)
    monkeypatch.setattr(byte_stream, "EDGES_KEPT", int(rng.choice([0, 3 * rows, 1 << 18])))
    monkeypatch.setattr(ranges, "PLACED_RANGES_MAX", int(rng.choice([5, 512])))  # more of short rows are gathered alone
    fields = {field.name: field for field in rng.permutation(np.array(FIELDS, object))[: rng.integers(1, 8)]}
    puts = [{name: [value(rng, field) for _ in range(rows)] for name, field in fields.items()} for _ in range(3)]
    with opened_shard() as shard:
        blocks = [block for put in puts for block in shard.put(put, list(fields.values()))]
        at = selection(rng, 3 * rows)
        cuts = {name: cut for name, cut in CUTS.items() if seed and name in fields}
        asked = [rows_of(part(blocks, names, at, rows), len(at), cuts) for names in _halves(list(fields))]
        fetch = fetched(asked, ArenaBacking(shard.arena), fields, rng)
        for number, one in enumerate(asked):
            landed = fetch.landed[number]
            held = MappedBlocks([landed], [landed.memory], sliced_fields(fields, cuts))
            slots = np.arange(len(at), dtype=np.int32) if one.slot_of_row is None else one.slot_of_row
            for name in landed.fields:
                field = sliced_fields(fields, cuts)[name]
                got = Column(field, RowPlacement(held, np.zeros(len(at), np.int32), slots))
                span = slice(*SPANS[name]) if name in cuts else slice(None)
                for row, place in enumerate(at.tolist()):
                    sent = puts[place // rows][name][place % rows]
                    assert np.array_equal(got[row], sent[span] if np.ndim(sent) else sent)


def _halves(names: list[str]) -> list[list[str]]:
    return [half for half in (names[::2], names[1::2]) if half]


def part(blocks: list[Block], names: list[str], at: Any, rows: int) -> m.ReplyColumns:
    located = [m.BlockLocation(one.block, 0, 1, one.offset, one.nbytes, rows, one.fields, one.counts) for one in blocks]
    return m.ReplyColumns(
        names, located, (at // rows).astype("<i4").tobytes(), encode_ascending((at % rows).astype("<i4"))
    )


@pytest.mark.parametrize("seed", range(5))
def test_no_frame_changes_while_it_is_held(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Transfers by turns, one of which ends in the middle, over connections that are clogged now and then."""
    monkeypatch.setattr(shard_transfer, "FRAME_BYTES", 4096)
    monkeypatch.setattr(bulk_endpoint, "GATHERED_KEPT_BYTES", 3 * 4096)
    rng, arena = np.random.default_rng(seed), Arena.create(None, 64 << 20)
    bench, held = Bench(arena), list[tuple[b.Message, bytes]]()
    x = rng.integers(0, 255, (60, 300), np.uint8)
    at = bench.put(x=x, y=[rng.bytes(int(rng.integers(900))) for _ in x])
    for step in range(100):
        peer, what = bytes(rng.choice([b"p", b"q", b"r"])), rng.random()
        if what < 0.15:
            bench.say(bench.read(at, wanted=rng.permutation(60)[:50], number=step), peer=peer)
        elif what < 0.2:
            bench.exchange.lost(peer)
        elif what < 0.4:
            bench.exchange.prepare()
        elif what < 0.6 and held:
            del held[int(rng.integers(len(held)))]
        else:
            bench.exchange.advance({peer} if rng.random() < 0.5 else ())
        for to, message in bench.exchange.outbox:
            head = b.to_client(message[0])
            assert isinstance(head, b.ReadFrame)
            held.append((message, b"".join(map(bytes, message[1]))))
            if rng.random() < 0.8:
                bench.say(b.FlowAck(head.transfer, head.number + 1), peer=to)
        bench.exchange.outbox.clear()
        for (head_bytes, pieces), content in held:
            assert b"".join(map(bytes, pieces)) == content
            assert b.digest(list(map(memoryview, pieces))) == b.content_digest(head_bytes)
    assert held
    arena.close()
