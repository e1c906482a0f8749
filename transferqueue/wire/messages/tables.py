"""Messages about tables: their terms, their tasks and fields, their clock and their end."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from transferqueue.limits import ROWS_PER_REQUEST_MAX, TERMS_BYTES_MAX, Limits
from transferqueue.policies import Pacing, Retention, Task
from transferqueue.wire.messages.base import DoneReply, Message, Name, Seconds, TableFields, Tasks, Text
from transferqueue.wire.messages.declarations import TABLE, request
from transferqueue.wire.roles import ADMINS, CLIENTS, CONSUMERS, WORKERS


class TableTerms(Message):
    """The present terms of a table: answer to CreateTable, OpenTable, AddTask, AddFields.

    `extra_fields`: whether rows may add fields that the terms do not name; None: yes, but clients refuse near misses.
    """

    name: Text
    fields: TableFields
    tasks: Tasks
    limits: Limits
    pacing: Pacing | None
    retention: Retention
    sealed: bool
    version: int
    replicas: int = 1
    extra_fields: bool | None = None


@request(reply=TableTerms, roles=ADMINS, home=TABLE, verb="Queue.create_table", bytes_max=TERMS_BYTES_MAX)
class CreateTable(Message):
    """A table and its terms.

    Args:
        exist_ok: an existing table with the same terms is no error.
        replicas: shards that have each block.
        extra_fields: whether rows may add fields that the terms do not name; None: if the terms declare no fields.
    """

    name: Name
    fields: TableFields = []
    tasks: Tasks = []
    limits: Limits = Limits()
    pacing: Pacing | None = None
    retention: Retention | None = None
    exist_ok: bool = False
    replicas: Annotated[int, Meta(ge=1)] = 1
    extra_fields: bool | None = None


@request(reply=TableTerms, roles=CLIENTS, home=TABLE, repeat="again", reads=True, verb="Queue.table")
class OpenTable(Message):
    """The terms of a table, waiting up to `wait_s` for it to be created."""

    name: Name
    wait_s: Seconds = 0.0


@request(reply=TableTerms, roles=ADMINS, verb="Table.add_task", bytes_max=TERMS_BYTES_MAX)
class AddTask(Message):
    """One more consumer of an existing table. Answer: TableTerms."""

    table: Name
    task: Task


@request(reply=TableTerms, roles=ADMINS, verb="Table.add_fields", bytes_max=TERMS_BYTES_MAX)
class AddFields(Message):
    """More fields of an existing table, before any row has them. Answer: TableTerms."""

    table: Name
    fields: TableFields


@request(reply=DoneReply, roles=ADMINS, verb="Queue.drop_table")
class DropTable(Message):
    """Removes a table: its rows are dropped (reason ``table_dropped``), and its waiters get an error. With `empty`, the
    request is refused while it has rows."""

    name: Name
    empty: bool = False


class Tables(Message):
    """Names of the tables, sorted."""

    names: Annotated[list[Text], Meta(max_length=ROWS_PER_REQUEST_MAX)]


@request(reply=Tables, roles=CLIENTS, repeat="again", reads=True, verb="Queue.tables")
class ListTables(Message):
    """Asks for the names of the tables."""


@request(reply=DoneReply, roles=WORKERS, verb="Table.seal")
class Seal(Message):
    """No more rows will enter."""

    table: Name


@request(
    reply=DoneReply,
    roles=CONSUMERS,
    verb="Table.advance",
    unanswered="advance to the same version again: it changes nothing twice",
)
class AdvanceClock(Message, tag="Advance"):
    """The table's clock (the trainer's version) is now `version`; it never goes back."""

    table: Name
    version: int
    wait_s: Seconds = 0.0


TableRequests = CreateTable | OpenTable | AddTask | AddFields | DropTable | ListTables | Seal | AdvanceClock
TableReplies = TableTerms | Tables
