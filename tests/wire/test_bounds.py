"""Limits before allocation: every count, length and depth in a message has its bound, and no frame decodes to much more
than its own size."""

import tracemalloc
import typing
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from transferqueue.errors import ProtocolError
from transferqueue.limits import (
    BLOCK_ROWS_MAX,
    FIELDS_MAX,
    ITEMS_MAX,
    MESSAGE_BYTES_MAX,
    MIB,
    REQUEST_BYTES_MAX,
    ROWS_DESCRIBED_MAX,
    ROWS_PER_REQUEST_MAX,
)
from transferqueue.transport.bulk import protocol as bulk
from transferqueue.wire import codec
from transferqueue.wire import messages as m
from transferqueue.wire.versions import PROTOCOL

CHECKED_ELSEWHERE = {
    # strings and lists of terms: a decoder that refused them could not say which rule they break, as the ledger does.
    # None is larger than its frame, and each is compared with its bound in limits.py before anything is made of it.
    "Field.name": "schema.Field", "Field.dtype": "schema.Field", "Field.shape": "schema.Field",
    "Field.like": "schema.Field",
    "Task.name": "ledger.terms", "Task.needs": "ledger.terms", "Task.needs[]": "ledger.terms",
    "Task.gives": "ledger.terms", "Task.gives[]": "ledger.terms",
    "Plugin.name": "ledger.selectors", "Plugin.options": "ledger.selectors", "Plugin.options.key": "ledger.selectors",
    "Plugin.options.value": "ledger.selectors",
    "Limits.bytes": "limits.parse_bytes", "Pacing.task": "ledger.terms", "Pacing.channel": "ledger.terms",
    "Requeue.task": "ledger.terms", "TagIs.name": "ledger.predicates", "TagIs.value": "ledger.predicates",
    "Recorded.directory": "policies",
    "Recorded.bytes": "limits",
    "Compare.field": "ledger.predicates",
    "RowFacts.tags[].key": "ledger.facts (a bound here doubles the time of decoding)",
    "ReplyRows.tags[].key": "ledger.facts",
    "RowsRead.tags[].key": "ledger.facts (compared with tags that have passed)",
    "Observed.value": "wire.codec (bytes as they came; decoded by who asked, in bounded depth)",
}  # fmt: skip


def fields_of(kind, path, seen):
    """Path and type of everything below a type that has a length or a count."""
    match kind:
        case inspect.StructType():
            if kind.cls not in seen:
                seen.add(kind.cls)
                for field in kind.fields:
                    yield from fields_of(field.type, f"{kind.cls.__name__}.{field.name}", seen)
        case inspect.UnionType():
            for one in kind.types:
                yield from fields_of(one, path, seen)
        case inspect.ListType() | inspect.VarTupleType():
            yield path, kind
            yield from fields_of(kind.item_type, path + "[]", seen)
        case inspect.TupleType():
            for one in kind.item_types:
                yield from fields_of(one, path + "()", seen)
        case inspect.DictType():
            yield path, kind
            yield from fields_of(kind.key_type, path + ".key", seen)
            yield from fields_of(kind.value_type, path + ".value", seen)
        case inspect.StrType() | inspect.BytesType() | inspect.RawType() | inspect.AnyType():
            yield path, kind


def lengths():
    seen = set()
    roots = (m.CallFrame, m.AnswerFrame, bulk.ToShard, bulk.ToClient)
    return [found for root in roots for found in fields_of(inspect.type_info(root), "", seen)]


def test_every_length_has_a_bound():
    unbounded = {path for path, kind in lengths() if getattr(kind, "max_length", None) is None}
    assert unbounded == set(CHECKED_ELSEWHERE), (
        "give the field a type with a bound (wire/messages/), or its reason here"
    )


def test_bounds_are_what_they_should_be():
    for path, kind in lengths():
        of_rows = BLOCK_ROWS_MAX if path.startswith(("ReplyRows.", "ReplyColumns.", "ReplyTree.")) else ITEMS_MAX
        most = getattr(kind, "max_length", None)
        if most is not None:
            assert most <= (MESSAGE_BYTES_MAX if isinstance(kind, inspect.BytesType | inspect.StrType) else of_rows), (
                path
            )


def frame_with(request, field, value):
    """A call of `request`, one field of which is replaced by encoded bytes."""
    tree = msgspec.msgpack.decode(msgspec.msgpack.encode(request))
    at = [one.name for one in inspect.type_info(type(request)).fields].index(field) + 1
    tree[at] = msgspec.Raw(value)
    return msgspec.msgpack.encode([PROTOCOL, 1, 2, 0, tree])


def array(count, item):
    return b"\xdd" + count.to_bytes(4, "big") + item * count


CHEAP = {"name": b"\xa0", "tags": b"\x80", "tag": b"\x81\xa1a\x01", "key": b"\xa0", "where": b"\x93\xa5TagIs\xa1a\x00",
         "field": b"\x93\xa1x\xa4bool\x90", "inline": b"\x93\xa6Inline\xa0\xc4\x00", "count": b"\x00",
         "placed": b"\x97\xa6Placed\x00\x00\x00\x00\x90\x90"}  # fmt: skip


def columns(field, value):
    """Columns with one kind of fact, encoded."""
    order = [one.name for one in inspect.type_info(m.RowFacts).fields]
    facts = [msgspec.Raw(value) if name == field else None for name in order]
    return msgspec.msgpack.encode(["Columns", [], [], [], ["RowFacts", *facts]])


def one_dict(entries):
    """A map of many short keys."""
    keys = (b"\xa3" + bytes([97 + at % 26, 97 + at // 26 % 26, 97 + at // 676 % 26]) for at in range(entries))
    return b"\xdf" + entries.to_bytes(4, "big") + b"".join(key + b"\x01" for key in keys)


def hostile(size):
    """Frames of about `size` bytes that make as many values as they can."""
    lease, update = m.LeaseRequest("t", "x"), m.Update("t", b"", m.Columns())
    yield "find keys", frame_with(m.Find("t", []), "keys", array(size, CHEAP["key"]))
    yield "lease fields", frame_with(lease, "fields", array(size, CHEAP["name"]))
    yield "lease where", frame_with(lease, "where", array(size // 9, CHEAP["where"]))
    yield "new fields", frame_with(m.AddFields("t", []), "fields", array(size // 8, CHEAP["field"]))
    yield "empty tags", frame_with(update, "columns", columns("tags", array(size, CHEAP["tags"])))
    yield "tags", frame_with(update, "columns", columns("tags", array(size // 4, CHEAP["tag"])))
    yield "keys", frame_with(update, "columns", columns("keys", array(size, CHEAP["key"])))
    yield "one row of tags", frame_with(update, "columns", columns("tags", array(1, one_dict(size // 5))))
    yield "blocks", frame_with(m.Publish("c", 1, [], []), "blocks", array(size // 13, CHEAP["placed"]))
    counts = b"\x97\xa6Placed\x00\x00\x00\x00\x90" + array(size // 16, CHEAP["count"])
    yield "counts", frame_with(m.Publish("c", 1, [], []), "blocks", array(16, counts))


SIZE = 4 * MIB
TAGS_BYTES_MAX = 256 * ROWS_DESCRIBED_MAX
"""The most rows that one request may describe, each with a dict of its own: what a frame of any size may cost."""


def peak_bytes(frame):
    """The most memory that decoding took at any time."""
    tracemalloc.start()
    try:
        with suppress(ProtocolError):
            codec.decode_call(frame)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_a_frame_decodes_to_a_bounded_multiple_of_itself():
    for name, frame in hostile(SIZE):
        assert peak_bytes(frame) < max(24 * len(frame), TAGS_BYTES_MAX), name


def test_a_count_is_compared_before_anything_is_made_for_it():
    claim = b"\xdd\xff\xff\xff\xff"
    for field in ("where", "fields"):
        tracemalloc.start()
        with pytest.raises(ProtocolError, match="length <="):
            codec.decode_call(frame_with(m.LeaseRequest("t", "x"), field, claim))
        assert tracemalloc.get_traced_memory()[1] < MIB
        tracemalloc.stop()


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa0", b"\xdd\x00\x00\x00\x01"])
def test_nesting_is_bounded(opening):
    for depth in (40, 1000, 1_000_000):
        for decode in (codec.decode_call, codec.decode_answer):
            with pytest.raises(ProtocolError):
                decode(opening * depth + b"\x90")
        assert codec.call_of(opening * depth + b"\x90") == (0, 0)
    with pytest.raises(ProtocolError, match="cannot be read as"):
        codec.decode_observed(m.Observed(msgspec.Raw(opening * 1_000_000 + b"\x90")), object)


def test_the_largest_request_that_is_allowed_passes():
    rows = ROWS_PER_REQUEST_MAX
    tags: list[Any] = [{}] * ROWS_DESCRIBED_MAX
    keys = ["k" * 60] * ROWS_DESCRIBED_MAX
    for facts in (
        m.RowFacts(ordinal=bytes(8 * rows), tokens=bytes(8 * rows)),
        m.RowFacts(keys=keys),
        m.RowFacts(tags=tags),
    ):
        update = m.Update("t", bytes(8 * rows), m.Columns(facts=facts))
        frame = codec.encode_call(m.CallFrame(1, 2, 0, update))
        assert codec.decode_call(frame).request == update
        assert len(frame) <= REQUEST_BYTES_MAX
    names = [f"f{at}" for at in range(FIELDS_MAX)]
    lease = m.LeaseRequest("t", "x", fields=names, where=[])
    assert codec.decode_call(codec.encode_call(m.CallFrame(1, 2, 0, lease))).request == lease


def test_numbers_of_bulk_heads_fit_where_they_are_packed():
    """A session number of 64 bits once met a `struct.pack` of 63."""
    for kind in typing.get_args(bulk.ToShard):
        numbers = [one.type for one in inspect.type_info(kind).fields if isinstance(one.type, inspect.IntType)]
        assert all(number.ge == 0 and number.lt <= 1 << 62 for number in numbers), kind
