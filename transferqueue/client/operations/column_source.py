"""The columns of a reply: values inside the reply, or blocks that stay pinned while they are in use."""

from __future__ import annotations

from transferqueue.client.client import ClientSession
from transferqueue.client.session.run import Operation, request_reply
from transferqueue.client.table_info import TableInfo
from transferqueue.errors import NotFound, listing
from transferqueue.schema import Field
from transferqueue.storage.columns.column import Column
from transferqueue.storage.columns.placement import MappedBlocks
from transferqueue.wire import messages as m


class ColumnSource:
    """The columns of one reply's rows. `end` returns their memory."""

    def __init__(self, subject: str, rows: int, columns: dict[str, Column], blocks: list[MappedBlocks]) -> None:
        self.subject, self.rows = subject, rows
        self._columns = columns
        self._blocks = blocks
        self._left_out: list[str] = []
        self.ended = ""
        """How it ended; empty while it lasts."""

    def without(self, fields: list[str]) -> ColumnSource:
        """Note fields that did not come because not all rows have them, for the error of `column`. Returns this source."""
        self._left_out = fields
        return self

    @property
    def fields(self) -> dict[str, Field]:
        """The fields of the columns, by name."""
        return {name: column.field for name, column in self._columns.items()}

    def column(self, name: str) -> Column:
        """The column of a field."""
        column = self._columns.get(name)
        if column is None:
            raise NotFound(
                f'field "{name}" is left out of these rows of {self.subject}, since not all of them have it; read those that do, '
                f"or wait for whoever gives it; they have {listing(self._columns)}"
                if name in self._left_out
                else f'field "{name}" is not in this batch of {self.subject}; it has {listing(self._columns)}; name others with '
                "fields="
            )
        return column

    def end(self, how: str) -> None:
        """Return the memory as soon as no view of it is left. Views that were taken stay valid; taking another one is `BatchEnded`."""
        self.ended = self.ended or how
        for blocks in self._blocks:
            blocks.end(
                f"the batch of {self.subject} {how}, and its memory was returned; take what is needed while it lasts "
                "(.numpy(), .torch(), ...): views taken then stay valid"
            )


def content_source(
    client: ClientSession, content: m.ReplyRows, terms: TableInfo, subject: str
) -> Operation[ColumnSource]:
    """The columns of a reply. Its pins return when the source has ended and no view is left, or at once if this fails."""
    rows = len(content.rows) // 8
    named = {block.block: block for part in content.parts for block in part.blocks}
    fields = terms.reply_fields(content.definitions)
    if not all(all(map(fields.__contains__, block.fields)) for block in named.values()):
        try:  # a block may hold further fields, which this client has not heard of
            terms.hear((yield from request_reply(m.OpenTable(name=terms.name), m.TableTerms)))
        except BaseException:
            client.connection.unpin(list(named))
            raise
        fields = terms.reply_fields(content.definitions)
    columns = {value.field: Column.of_inline(fields[value.field], value.data) for value in content.inline}
    placed, held = yield from client.shards.columns(content.parts, fields, rows)
    if client.verifier is not None:
        try:
            yield from client.verifier.check(content, placed, held, subject)
        except BaseException:
            for blocks in held:
                blocks.end(f"the batch of {subject} was not handed out")
            raise
    return ColumnSource(subject, rows, terms.ordered(columns | placed), held)
