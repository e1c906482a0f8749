"""The columns of a batch of ended rows: their pieces are of bounded size, whatever is in them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from transferqueue.ledger.rows import DROPPED, EndedRows, TableEvent
from transferqueue.ledger.rules.recording import EndedBatch
from transferqueue.policies import Recorded
from transferqueue.server.row_record import batch_columns
from transferqueue.server.row_record.batch_columns import BatchColumns, RowEvents


def batch_of(rows: Any, events: list[TableEvent]) -> EndedBatch:
    """Rows without columns of their own."""
    return EndedBatch(
        table="t", terms=Recorded("run"), life="0" * 16, number=1, now=0.0, rows=rows,
        ended=[EndedRows(0.0, DROPPED, "over", rows, np.full(rows.size, -1), {})],
        put_age_s=np.zeros(rows.size), facts={}, attempts={}, tags={}, fields={}, has={}, inline={}, places={},
        blocks={}, events=events, workers={3: "w"},
    )  # fmt: skip


def test_long_details_of_many_rows_come_in_pieces() -> None:
    """An event of many rows is stored once, and written for each of them."""
    rows = np.arange(1 << 12)
    events = [TableEvent(0.0, "failed", rows, "train", 3, "x" * 1000) for _ in range(32)]
    columns = BatchColumns(batch_of(rows, events), lambda _: np.empty(0, np.uint8), 0.0)
    pieces = list(columns.chunks(rows))
    assert sum(piece.num_rows for piece in pieces) == rows.size
    assert len(pieces) >= 4
    assert max(piece.nbytes for piece in pieces) < 2 * batch_columns.ROW_GROUP_BYTES


def test_rows_without_a_step_are_in_no_row_group_of_others() -> None:
    """Arrow skips no row group with nulls for a step."""
    batch = batch_of(np.arange(6), [])
    batch.ended[0].steps = np.array([3, -1, 2, -1, 3, 2])
    columns = BatchColumns(batch, lambda _: np.empty(0, np.uint8), 0.0)
    (chosen,) = columns.files()
    assert [piece["_step"].to_pylist() for piece in columns.chunks(chosen)] == [[None, None], [2, 2, 3, 3]]


def test_each_row_has_its_own_events_in_their_order() -> None:
    draw = random.Random(1)
    rows = np.array(draw.sample(range(100), 40))
    events = [
        TableEvent(
            float(at), f"e{at}", np.array(sorted(draw.sample(range(100), draw.randrange(1, 60)))), "", at % 4, ""
        )
        for at in range(30)
    ]
    at = np.array(draw.sample(range(40), 15))
    told = RowEvents(rows, events, {3: "w"}, 0.0).of(at).to_pylist()
    assert [[one["what"] for one in row] for row in told] == [
        [event.what for event in events if rows[position] in event.rows] for position in at.tolist()
    ]
    assert {one["worker"] for row in told for one in row} == {None, "session 1", "session 2", "w"}
