"""Operations that carry columns: put, update and the results of an ack, from the caller's values to one commit.

1. Columns are checked whole against the fields that the table is known to have, before a byte is written.
   A name never heard of is asked for first; if the table has none, the field is inferred.
2. If a column does not fit, the table is asked once more: perhaps the field is new, or the table is another one
   than it was. If it changed, the columns are checked again; if not, the refusal stands.
3. Inline columns travel in the message. The others are written into granted memory (`written_blocks`).
4. Values that come again (`Repeat` without counts) are first referred to by the content of their bytes, which the table
   may have. If it does not, the commit is refused, and the next attempt writes them (`call_contents`).
5. The commit is one message. If it is refused, nothing has changed, and the next put writes into the region. If the
   shard of the region is gone, the columns are written into another shard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from transferqueue.client.client import ClientSession
from transferqueue.client.memory.grants import OPEN_MAX, CommitOutcome
from transferqueue.client.operations.arguments import few, flag, row_ids
from transferqueue.client.operations.call_contents import CallContents
from transferqueue.client.operations.continues import WHOLE, Continues
from transferqueue.client.operations.name_suggestions import check_columns
from transferqueue.client.operations.row_metadata import GivenFacts
from transferqueue.client.operations.rows import RowsBase, rows_read
from transferqueue.client.operations.written_blocks import WrittenBlocks, reference, write_columns
from transferqueue.client.session.calls import ENDLESS_S, Deadline, timeout
from transferqueue.client.session.operation_runner import Operation, StartDeadline, request_reply, unexpected
from transferqueue.client.table_info import TableInfo
from transferqueue.errors import FlowSignal, NotFound, SchemaError, ShardLost, UsageError, listing
from transferqueue.limits import FIELDS_MAX, check_name, check_rows
from transferqueue.schema import Field
from transferqueue.storage.inputs.columns import Lengths, count_rows, count_tokens, prepare_columns, unknown
from transferqueue.storage.inputs.from_libraries import import_columns
from transferqueue.storage.inputs.prepare import Prepared, Repeat
from transferqueue.wire import messages as m

R = TypeVar("R", bound=m.Message)

CERTAIN: Final = (UsageError, FlowSignal)
"""Refusals after which nothing of a commit can be in the table."""


class PreparedCommit(msgspec.Struct, frozen=True):
    """The checked columns and facts of one call, for `rows` rows."""

    rows: int
    columns: list[Prepared]
    facts: m.RowFacts


Request = Callable[[int, m.Columns], m.Request]
"""Makes the request of a commit from its number of rows and its columns."""


def put(
    client: ClientSession,
    terms: TableInfo,
    facts: GivenFacts,
    columns: Mapping[str, Any],
    reservation: int,
    timeout_s: object,
    used: Callable[[int], object] | None = None,
    *,
    continues: Continues = WHOLE,
    refers: bool = True,
) -> Operation[NDArray[np.int64]]:
    """Put new rows. Returns their ids.

    `used` is called with the number of rows, if they come out of a reservation. `continues`: rows of the table that
    they continue. `refers` is as of `Commit`.
    """
    deadline: Deadline = yield StartDeadline(timeout(timeout_s))
    return (yield from _put(client, terms, facts, columns, reservation, deadline, used, continues, refers=refers))


def put_at_once(
    client: ClientSession, terms: TableInfo, facts: GivenFacts, columns: Mapping[str, Any]
) -> Operation[NDArray[np.int64]]:
    """Put new rows where there is room now, else `Full`. Like any call that does not wait, it gives the server time to
    answer."""
    return _put(client, terms, facts, columns, 0, Deadline(client.clock, 0.0))


def _put(
    client: ClientSession,
    terms: TableInfo,
    facts: GivenFacts,
    columns: Mapping[str, Any],
    reservation: int,
    deadline: Deadline,
    used: Callable[[int], object] | None = None,
    continues: Continues = WHOLE,
    *,
    refers: bool = True,
) -> Operation[NDArray[np.int64]]:
    def request(rows: int, carried: m.Columns) -> m.PutRequest:
        put = m.PutRequest(terms.name, rows, carried, reservation, deadline.left())
        return put if continues is WHOLE else continues.request(put)

    continues.check_names(terms)
    commit = Commit(client, terms, "put", facts, columns, None, deadline, refers=refers, continues=continues)
    put_rows = yield from commit.send(request, m.PutRows)
    if not columns.keys() >= terms.of_puts:
        terms.tell_missing(columns)
    if put_rows.stale:
        terms.tell_stale(put_rows.stale, put_rows.fresh_from)
    if used is not None:
        used(put_rows.rows)
    return np.arange(put_rows.first, put_rows.first + put_rows.rows, dtype=np.int64)


def update(
    client: ClientSession,
    terms: TableInfo,
    rows: object,
    facts: GivenFacts,
    columns: Mapping[str, Any],
    overwrite: bool,
    if_unchanged: RowsBase | None,
    *,
    refers: bool = True,
) -> Operation[None]:
    """Give existing rows more columns or facts. `refers` is as of `Commit`."""
    ids = row_ids(rows)
    if not ids or not (columns or facts.said()):
        raise UsageError("an update without rows, or without columns and facts, would change nothing; give both")
    overwrite = flag("overwrite", overwrite)
    read, before = None, unknown
    if if_unchanged is not None:
        read = rows_read(if_unchanged, terms.name, ids, columns, facts.names(), overwrite=overwrite)
        before = if_unchanged._source.lengths
    endless = Deadline(client.clock, ENDLESS_S)

    def request(_: int, carried: m.Columns) -> m.Update:
        return m.Update(terms.name, ids, carried, overwrite, read)

    commit = Commit(client, terms, "update", facts, columns, len(ids) // 8, endless, refers=refers, before=before)
    yield from commit.send(request, m.DoneReply)


class Commit:
    """The columns and facts that one call carries into the table, in one commit.

    Args:
        client: the session.
        terms: of the table.
        call: put, update, ack or release, with whose parameters the names of new columns are compared.
        facts: as the caller gave them.
        columns: as the caller gave them.
        rows: how many rows get them; None: new ones, as many as they have.
        deadline: of the wait for memory.
        refers: whether the first attempt refers to values by content; a pipeline writes them at once.
        before: the lengths of columns that the rows have already, as far as the caller knows them.
        continues: rows that a put continues.
    """

    def __init__(
        self,
        client: ClientSession,
        terms: TableInfo,
        call: str,
        facts: GivenFacts,
        columns: Mapping[str, Any],
        rows: int | None,
        deadline: Deadline,
        *,
        refers: bool = True,
        before: Lengths = unknown,
        continues: Continues = WHOLE,
    ) -> None:
        self._client, self._terms, self._call = client, terms, call
        self._columns, self._facts = import_columns(columns), facts.readable()
        self._rows, self._deadline, self._before, self._continues = rows, deadline, before, continues
        repeats = any(isinstance(value, Repeat) for value in self._columns.values())
        self._contents = CallContents(terms.contents, refers=refers) if repeats else None

    def send(self, request: Request, kind: type[R]) -> Operation[R]:
        """Write the columns and send the request, again if it fails for a reason that another attempt may avoid.
        Returns the reply, which is a `kind`."""
        if not self._terms.fields.keys() >= self._columns.keys():
            yield from self._ask_for_fields()
        shards_left, asked_again = OPEN_MAX + 1, False
        while True:
            try:
                return (yield from self._attempt(request, kind))
            except ShardLost:  # each time an extent of that shard is given up, of which no more are kept
                if not shards_left:
                    raise
                shards_left -= 1
                yield from self._client.shards.look()  # and let go of its memory, if it was mapped
            except NotFound:
                if self._contents is None or not self._contents.refused():
                    raise
            except SchemaError:
                if asked_again or not (yield from self._refresh()):
                    raise
                shards_left, asked_again = OPEN_MAX + 1, True
                if self._contents:
                    self._contents.clear()

    def _ask_for_fields(self) -> Operation[None]:
        """A column has a name that this client has not heard of: ask which fields the table has."""
        few("columns", self._columns, FIELDS_MAX)
        for name in self._columns:
            check_name("field", name)
        yield from self._refresh()
        check_columns(self._call, self._columns, self._facts.names(), self._terms)

    def _refresh(self) -> Operation[bool]:
        """Ask for the table's terms. Return whether its fields changed."""
        return self._terms.update_from((yield from request_reply(m.OpenTable(name=self._terms.name), m.TableTerms)))

    def _attempt(self, request: Request, kind: type[R]) -> Operation[R]:
        client, terms, contents = self._client, self._terms, self._contents
        has_new_fields = not terms.fields.keys() >= self._columns.keys()
        if has_new_fields:
            terms.check_added(self._columns)
        out = outgoing(self._columns, self._facts, terms.fields, self._rows, self._before, self._continues)
        fields: list[Field] = []
        placed: list[Prepared] = []
        inline: list[m.Inline] = []
        for column in out.columns:
            fields.append(column.field)
            if column.field.inline:
                inline.append(m.Inline(column.field.name, column.inline()))
            elif not (contents and column.by_content) or not (
                yield from contents.take(column, checksums=client.checksums)
            ):
                placed.append(column)
        use: m.GrantPurpose = "rows" if self._rows is None else "results"
        given, referred = contents.next_attempt() if contents else ([], [])
        written = None
        if placed or given:
            written = yield from write_columns(client, terms.last, placed, given, self._deadline, use)
        blocks = written.blocks() if written else []
        blocks += map(reference, referred)
        carried = m.Columns(fields, blocks, inline, out.facts)
        reply = yield from finish_commit(written, request(out.rows, carried), kind)
        if has_new_fields:
            terms.learn(fields)
        if contents:
            contents.committed()
        return reply


def retry_on_other_shard(client: ClientSession, attempt: Callable[[], Operation[R]]) -> Operation[R]:
    """Run `attempt`. If the shard that it wrote to is gone, run it again: it then writes to another shard."""
    for _ in range(OPEN_MAX + 1):  # each time an extent of that shard is given up, of which no more are kept
        try:
            return (yield from attempt())
        except ShardLost:
            yield from client.shards.look()  # and let go of its memory, if it was mapped
    return (yield from attempt())


def outgoing(
    columns: Mapping[str, Any],
    facts: GivenFacts,
    fields: Mapping[str, Field],
    rows: int | None,
    before: Lengths = unknown,
    continues: Continues = WHOLE,
) -> PreparedCommit:
    """Check columns and facts against each other and against the fields. `SchemaError` if they do not fit,
    `UsageError`, before any value is read, for more rows than one request may have."""
    count = _rows_of(columns, facts) if rows is None else rows
    check_rows(count, described=facts.key is not None or facts.tags is not None)
    prepared = prepare_columns(columns, fields, count, before, continues.among)
    continues.check_columns(prepared, count)
    tokens = count_tokens(prepared) if rows is None and facts.tokens is None else None  # an update does not count again
    return PreparedCommit(count, prepared, facts.message(count, tokens))


def finish_commit(written: WrittenBlocks | None, request: m.Request, kind: type[R]) -> Operation[R]:
    """Send the commit of written blocks, and end their regions with its outcome."""
    outcome = CommitOutcome.UNKNOWN
    try:
        reply = yield request
        if not isinstance(reply, kind):
            raise unexpected(request, reply, kind)
        outcome = CommitOutcome.COMMITTED
        return reply
    except CERTAIN:
        outcome = CommitOutcome.REFUSED
        raise
    except ShardLost:
        outcome = CommitOutcome.TORN
        raise
    finally:
        if written:
            written.done(outcome)


def _rows_of(columns: Mapping[str, Any], facts: GivenFacts) -> int:
    """Number of new rows: the length of the first column that has one value per row, else of the facts."""
    rows = count_rows(columns)
    if rows is None:
        rows = facts.rows()
    if rows is None:
        single = listing(f"{name} ({type(value).__name__})" for name, value in columns.items())
        given = f": a single value, which is for all rows, was given for {single}" if columns else ""
        raise SchemaError(
            f"a put has no column and no fact with one value per row{given}; give at least one as a list or an array, "
            "so that rows can be counted"
        )
    return rows
