"""Messages to bytes and back: the put of 512 rows, and the lease reply, alike and in one run or as different as can
be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from transferqueue.schema import Field
from transferqueue.wire import codec as short
from transferqueue.wire import messages as m
from transferqueue.wire.codec import decode_answer, decode_call, encode_answer, encode_call, encode_fields

ROWS = 512
FIELDS = [Field(f"field_{number:03d}", "float32", (None,)) for number in range(32)]
NAMES = [field.name for field in FIELDS]


def i64() -> bytes:
    return np.arange(ROWS, dtype="<i8").tobytes()


def i32() -> bytes:
    return np.arange(ROWS, dtype="<i4").tobytes()


def put() -> m.CallFrame:
    placed = m.WrittenBlock(extent=7, offset=0, nbytes=1 << 25, rows=ROWS, fields=NAMES, counts=[1 << 18] * 32)
    facts = m.RowFacts(group_id=i64(), group_size=i32(), policy_version=i64())
    return m.CallFrame(1, 2, 1, m.PutRequest("rollouts", ROWS, m.Columns(fields=FIELDS, blocks=[placed], facts=facts)))


def leased(*, alike: bool) -> m.AnswerFrame:
    values = np.full(ROWS, -1) if alike else np.arange(ROWS)
    slots = np.arange(ROWS, dtype=np.int32) if alike else np.arange(ROWS, dtype=np.int32)[::-1].copy()
    fact, short_fact = short.encode_constant(values), short.encode_constant(values.astype(np.int32))
    block = m.BlockLocation(3, 0, 7, 0, 1 << 25, ROWS, NAMES, [1 << 18] * 32)
    content = m.ReplyRows(
        rows=i64(),
        policy_version=fact,
        policy_version_max=fact,
        group_id=fact,
        group_size=short_fact,
        ordinal=fact,
        tokens=fact,
        priority=fact,
        keys=None,
        tags=None,
        inline=[],
        parts=[m.ReplyColumns(NAMES, [block], bytes(4), short.encode_ascending(slots))],
        definitions=encode_fields(FIELDS),
    )
    return m.AnswerFrame(1, 2, m.Leased(lease=1, token=2, lease_s=60.0, version=3, content=content))


def test_put_to_bytes_and_back(benchmark: Any) -> None:
    call = put()
    assert benchmark(lambda: decode_call(encode_call(call))) == call


@pytest.mark.parametrize("alike", [True, False], ids=["alike", "different"])
def test_lease_reply_to_bytes_and_back(benchmark: Any, alike: bool) -> None:
    answer = leased(alike=alike)
    benchmark.extra_info["nbytes"] = len(encode_answer(answer))
    assert benchmark(lambda: decode_answer(encode_answer(answer))) == answer
