"""Calls of tables as steps: those of `transferqueue.Table` that the drop-in makes from threads and event loops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import transferqueue as tq
from transferqueue.adapters.transfer_queue.steps import Operate
from transferqueue.client.operations import commit, tables
from transferqueue.client.operations.row_metadata import GivenFacts
from transferqueue.client.operations.rows import RowsBase
from transferqueue.schema import Field

Rows = npt.NDArray[np.int64]


async def names(queue: tq.Queue) -> list[str]:
    """Names of all tables, sorted."""
    named = [await Operate(client, tables.tables()) for client in queue._clients]
    return sorted(name for some in named for name in some)


async def opened(queue: tq.Queue, name: str) -> tq.Table:
    """An existing table."""
    client = queue._of(name)
    return tq.Table(client, await Operate(client, tables.open_table(client, name, 0.0)))


async def created(
    queue: tq.Queue,
    name: str,
    fields: Sequence[Field],
    tasks: Sequence[tq.Task],
    limits: tq.Limits,
    retention: tq.Retention,
) -> tq.Table:
    """A new table, to which puts may add fields."""
    client = queue._of(name)
    operation = tables.create_table(client, name, fields, tasks, limits, None, retention, False, 1, True)
    return tq.Table(client, await Operate(client, operation))


async def read(table: tq.Table, rows: Any = None, fields: Any = None, *, values: bool = True) -> tq.Rows:
    """Rows without a lease."""
    return await Operate(table._client, tables.read(table._client, table._terms, rows, (), fields, None, values, None))


async def find(table: tq.Table, keys: Sequence[str]) -> Rows:
    """The row id of each key; -1: none."""
    return await Operate(table._client, tables.find(table._terms, keys))


async def put(table: tq.Table, columns: Mapping[str, Any], *, room_s: float = 0.0, **facts: Any) -> Rows:
    """Put rows, or raise `Full`: the drop-in's calls wait for room only while rows go to a disk, for `room_s`."""
    client, given = table._client, GivenFacts(**facts)
    if room_s:
        return await Operate(client, commit.put(client, table._terms, given, columns, 0, room_s))
    return await Operate(client, commit.put_at_once(client, table._terms, given, columns))


async def update(
    table: tq.Table, rows: Rows, columns: Mapping[str, Any], *, if_unchanged: RowsBase | None = None, **facts: Any
) -> None:
    """Replace columns and facts of rows."""
    client = table._client
    given = GivenFacts(**facts)
    await Operate(client, commit.update(client, table._terms, rows, given, columns, True, if_unchanged))


async def add_fields(table: tq.Table, fields: Sequence[Field]) -> None:
    """Declare more fields."""
    await Operate(table._client, tables.add_fields(table._client, table._terms, fields))
