"""One step of GRPO is one put. What takes longer than the others may wait is refused, with the number that is not;
nothing is left out in silence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fuzz.bounds import Measured, R, columns, grouped, int64s
from transferqueue.limits import ROWS_DESCRIBED_MAX, ROWS_PER_REQUEST_MAX, TASKS_MAX, Limits
from transferqueue.policies import Complete, DeliverPartial, DropGroup, Manual, Refill, Task
from transferqueue.schema import Field
from transferqueue.wire import messages as m

STEP: int = 1 << 14


@pytest.fixture
def measured(tmp_path: Path) -> Iterator[Measured]:
    found = Measured(tmp_path)
    yield found
    found.close()


def refused(measured: Measured, request: m.Request) -> str:
    reply = measured.send("admin", request, m.tag_of(request))
    assert isinstance(reply, m.Failed)
    assert reply.error == "UsageError"
    return reply.text


def test_a_step_of_grpo_is_one_put(measured: Measured) -> None:
    measured.ask(m.CreateTable("t", [R], [Task("r", ["r"]), Task("train", ["r"], groups=Complete())]))
    keys = [f"step-1/{number}" for number in range(STEP)]
    put = measured.ask(
        m.PutRequest("t", STEP, columns(STEP, **grouped(STEP, 8), keys=keys, tags=[{"task": "a"}] * STEP))
    )
    leased = measured.ask(m.LeaseRequest("t", "train", groups=STEP // 8))
    assert np.frombuffer(leased.content.rows, "<i8").tolist() == list(range(put.first, put.first + STEP))
    assert measured.ask(m.Find("t", keys[-2:])).rows == int64s(2, STEP - 2)
    assert measured.ask(m.Ack("t", leased.lease, leased.token, leased.content.rows)).rows == STEP


def test_65536_plain_rows_are_one_put(measured: Measured) -> None:
    rows = ROWS_PER_REQUEST_MAX
    measured.ask(m.CreateTable("t", [R], [Task(f"t{number}", ["r"]) for number in range(8)]))
    assert measured.ask(m.PutRequest("t", rows, columns(rows, ordinal=int64s(rows)))).rows == rows
    assert len(measured.ask(m.LeaseRequest("t", "t3", rows=rows)).content.rows) == 8 * rows


def test_what_takes_too_long_is_refused_with_the_number_that_does_not(measured: Measured) -> None:
    measured.ask(m.CreateTable("t", [R], [Task("train", ["r"], groups=Complete())], limits=Limits(rows=1 << 20)))
    measured.ask(m.CreateTable("many", [R], [Task(f"t{number}", ["r"]) for number in range(TASKS_MAX)]))
    text = refused(measured, m.PutRequest("t", STEP, columns(STEP, **grouped(STEP, 1))))
    assert text.startswith("a put of 16,384 rows with 16,384 groups into 1 task takes the server about ")
    assert "since all other clients wait meanwhile: send at most" in text
    put = measured.most(STEP, lambda rows: m.PutRequest("t", rows, columns(rows, **grouped(rows, 1))))
    assert put.rows > 4096
    rows = ROWS_PER_REQUEST_MAX
    put = measured.most(rows, lambda rows: m.PutRequest("many", rows, columns(rows)))
    assert 16_384 < put.rows < rows
    text = refused(measured, m.PutRequest("t", rows + 1, columns(rows + 1)))
    assert "send them in pieces of 65,536" in text
    few = ROWS_DESCRIBED_MAX + 1
    assert "rows with keys or tags" in refused(measured, m.PutRequest("t", few, columns(few, tags=[{}] * few)))


def test_a_read_of_all_rows_brings_all_or_says_that_it_does_not(measured: Measured) -> None:
    rows = ROWS_PER_REQUEST_MAX
    fields = [R, *(Field(f"f{number}", "float32") for number in range(40))]
    measured.ask(m.CreateTable("t", fields, [Task("train", ["f1"])], limits=Limits(rows=1 << 20)))
    blank = m.Columns(inline=[m.Inline("r", bytes(4 * rows))])
    for _ in range(2):
        measured.ask(m.PutRequest("t", rows, blank))
    assert len(measured.ask(m.ReadRequest("t")).content.rows) == 8 * 2 * rows
    assert len(measured.ask(m.ReadRequest("t", limit=rows + 1)).content.rows) == 8 * (rows + 1)
    for first in range(0, 2 * rows, 1 << 14):
        part = 1 << 14
        inline = [m.Inline(field.name, bytes(4 * part)) for field in fields[1:21]]
        measured.ask(m.Update("t", int64s(part, first), m.Columns(inline=inline)))
    text = refused(measured, m.ReadRequest("t"))
    assert text.startswith("a read of 131072 rows with 21 fields takes the server about ")
    assert "read at most" in text
    assert len(measured.ask(m.ReadRequest("t", fields=[])).content.rows) == 8 * 2 * rows


@pytest.mark.parametrize("rule", [DropGroup(), DeliverPartial(), Refill()], ids=lambda rule: type(rule).__name__)
def test_the_end_of_a_member_of_each_of_many_groups(measured: Measured, rule: Any) -> None:
    rows, least = 1 << 12, 4 if isinstance(rule, DeliverPartial) else None
    task = Task("train", ["r"], groups=Complete(incomplete=rule, min_size=least))
    measured.ask(m.CreateTable("t", [R], [task]))
    measured.ask(m.PutRequest("t", rows, columns(rows, **grouped(rows, 8))))
    first_of_each = np.arange(0, rows, 8).astype("<i8").tobytes()
    measured.ask(m.Drop("t", first_of_each, "bad"))
    left = np.frombuffer(measured.ask(m.ReadRequest("t")).content.rows, "<i8")
    if isinstance(rule, DropGroup):
        assert not left.size
    else:
        assert left.tolist() == [row for row in range(rows) if row % 8]
    reply = measured.send("admin", m.LeaseRequest("t", "train", groups=rows // 8), "Lease")
    assert isinstance(reply, m.Leased) == isinstance(rule, DeliverPartial)
    if isinstance(reply, m.Leased):
        assert np.frombuffer(reply.content.rows, "<i8").tolist() == left.tolist()


def test_rows_that_ended_may_end_again_where_they_stay(measured: Measured) -> None:
    measured.ask(m.CreateTable("t", [R], [Task("train", ["r"], groups=Complete())], retention=Manual()))
    measured.ask(m.PutRequest("t", 4, columns(4, **grouped(4, 4))))
    leased = measured.ask(m.LeaseRequest("t", "train", groups=1))
    measured.ask(m.Ack("t", leased.lease, leased.token, leased.content.rows))
    reply = measured.send("admin", drop := m.Drop("t", int64s(4), "unused"), m.tag_of(drop))
    assert isinstance(reply, m.Failed)
    assert reply.error == "NotFound", reply.text
    assert measured.ask(m.Delete("t", int64s(4))).rows == 4
