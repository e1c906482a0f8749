"""The columns of a reply: values inside the reply, or blocks that stay pinned while they are in use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from transferqueue.client.client import ClientSession
from transferqueue.client.memory.mapped import MappedMemory, placement_of
from transferqueue.client.memory.shard_clients import OWN
from transferqueue.client.operations.device import Destination
from transferqueue.client.session.operation_runner import BlockingWork, Operation, request_reply
from transferqueue.client.table_info import ReplyFields, TableInfo
from transferqueue.errors import NotFound, OutOfMemory, ProtocolError, SchemaError, UsageError, listing
from transferqueue.errors.on_failure import OnFailure
from transferqueue.errors.text import SHOWN_CHARS, counted, shortened
from transferqueue.schema import NO_SLICES, Field, Slice, sliced_fields
from transferqueue.storage.columns.column import Column
from transferqueue.storage.columns.joined import Tree, along_chains, check_forest, join
from transferqueue.storage.columns.placement import MappedBlocks, RowPlacement
from transferqueue.storage.elements.dtypes import I64
from transferqueue.wire import messages as m

Memory = Mapping[int, NDArray[np.uint8]]
"""The bytes of blocks, by block."""


class ColumnsWanted(NamedTuple):
    """How a caller of a lease or a read wants the columns."""

    slices: Mapping[str, Slice] = NO_SLICES
    """Of the fields that are not wanted whole."""
    destination: Destination | None = None
    """Where the tensors are to be; None: views of shared memory."""
    values: bool = True
    """False: only the names of the columns are wanted."""


class ColumnSource:
    """The columns of one reply's rows, each made when it is first asked for. `end` returns their memory.

    Args:
        subject: the rows, for error texts.
        content: of the reply.
        fields: of the reply, and all that are known.
        memory: keeps the blocks pinned.
        made: columns that were received from other shards; default None.
        held: the blocks that hold the memory of `made`; default: none.
        slices: parts of fields that are not wanted whole; default: none.
    """

    def __init__(
        self,
        subject: str,
        content: m.ReplyRows,
        fields: ReplyFields,
        memory: Memory,
        made: dict[str, Column] | None = None,
        held: Sequence[MappedBlocks] = (),
        slices: Mapping[str, Slice] = NO_SLICES,
    ) -> None:
        self.subject, self.rows = subject, len(content.rows) // 8
        self.fields: Mapping[str, Field] = sliced_fields(fields.own, slices) if slices else fields.own
        """The fields of the columns, by name."""
        self._content, self._known = content, fields.known
        self._memory, self._slices = memory, slices
        self._trees = {name: tree for part in content.parts if (tree := part.tree) is not None for name in tree.fields}
        made = made or {}
        self._columns = {name: column for name, column in made.items() if name not in self._trees}
        self._nodes = {name: made[name] for name in self._trees if name in made}
        """The stored values of fields of which some rows continue others."""
        self._blocks = list(held)
        self._left_out: list[str] = []
        self.ended = ""
        """How it ended; empty while it lasts."""

    def without(self, fields: list[str]) -> ColumnSource:
        """Note fields that did not come because not all rows have them, for the error of `column`. Returns this
        source."""
        self._left_out = fields
        return self

    def column(self, name: str) -> Column:
        """The column of a field."""
        column = self._columns.get(name)
        if column is not None:
            return column
        self._check(name)
        self._make(name)
        return self._columns[name]

    def tree(self, name: str) -> Tree:
        """The values of a field as a forest; without an edge if no row continues another."""
        self._check(name)
        part = self._trees.get(name)
        if part is None:
            return Tree(self.column(name), np.full(self.rows, -1), np.arange(self.rows))
        if name in self._slices:
            raise UsageError(
                f'field "{name}" was leased or read in part, and the nodes of its tree are whole; name it without a '
                "Slice in fields="
            )
        nodes, edges = self._node_column(name), _edges(part)
        check_forest(self._known[name], len(nodes), *edges)
        return Tree(nodes, *edges)

    def _check(self, name: str) -> None:
        if name not in self.fields:
            raise NotFound(
                f'field "{name}" is left out of these rows of {self.subject}, since not all of them have it: it is not '
                "there yet, or was freed; name it in the fields of a read to hear which; they have "
                f"{listing(self.fields)}"
                if name in self._left_out
                else f'field "{shortened(str(name), SHOWN_CHARS)}" is not in this batch of {self.subject}; it has '
                f"{listing(self.fields)}; name others with fields="
            )

    def lengths(self, name: str, rows: bytes | None = None) -> I64 | None:
        """The lengths of a field's rows, of those `rows` (ids) alone if given. None if the field is not here whole, or
        the source has ended."""
        if name not in self.fields or name in self._slices or self.ended:
            return None
        tree = self.tree(name)
        lengths: I64 = along_chains(tree.nodes.lengths, tree.parents)[tree.node_of_row]
        if rows is None:
            return lengths
        ids = np.frombuffer(self._content.rows, "<i8")
        order = np.argsort(ids)
        return lengths[order[np.searchsorted(ids, np.frombuffer(rows, "<i8"), sorter=order)]]

    def _make(self, name: str) -> None:
        """Make the column of a field, with those that lie in the same blocks. Of two concurrent threads, both use the
        first one's."""
        for value in self._content.inline:
            if value.field == name:
                self._columns.setdefault(name, Column.of_inline(self.fields[name], value.data))
                return
        if (tree := self._trees.get(name)) is not None:
            self._columns.setdefault(name, self._joined(name, tree))
            return
        for part in self._content.parts:
            if name in part.fields:
                placement = self._placement(part)
                for field in part.fields:
                    self._columns.setdefault(field, Column(self._known[field], placement, self._slices.get(field)))
                return
        raise ProtocolError(f'the reply defines field "{name}", and has no values of it')

    def _placement(self, part: m.ReplyColumns) -> RowPlacement:
        memory, nothing = self._memory, np.empty(0, np.uint8)  # nothing: after the end
        blocks = MappedBlocks(part.blocks, [memory.get(block.block, nothing) for block in part.blocks], self._known)
        placement = placement_of(part, blocks, self.rows)
        self._blocks.append(blocks)
        if self.ended:
            self.end(self.ended)
        return placement

    def _node_column(self, name: str) -> Column:
        if name not in self._nodes:
            placement = self._placement(tree := self._trees[name])
            for field in tree.fields:
                self._nodes.setdefault(field, Column(self._known[field], placement))
        return self._nodes[name]

    def _joined(self, name: str, tree: m.ReplyTree) -> Column:
        """A column of the rows, each with all that it continues."""
        parents, node_of_row = _edges(tree)
        try:
            joined = join(self._known[name], self._node_column(name).placement, parents, node_of_row)
        except MemoryError as error:
            raise OutOfMemory(
                f'field "{name}" of {self.subject}: rows continue others, and this process has no memory for '
                f"{counted(self.rows, 'whole row')} ({error}); use tree({name!r}), which has each stored value "
                "once, or take fewer rows"
            ) from error
        self._blocks.append(joined.blocks)
        return Column(self._known[name], joined, self._slices.get(name))

    def land(self, destination: Destination) -> Operation[None]:
        """Begin to copy all columns that are tensors to their destination. Errors as of `device_copy.land`."""
        columns = {name: self.column(name) for name in self.fields}
        nbytes = sum(block.nbytes for part in self._content.parts for block in part.blocks)
        yield BlockingWork(nbytes, lambda: self._columns.update(destination(columns)))

    def end(self, how: str) -> None:
        """Return the memory as soon as no view of it is left. Views that were taken stay valid; taking another one is
        `BatchEnded`."""
        self.ended = self.ended or how
        self._memory = {}
        for blocks in self._blocks:
            blocks.end(
                f"the batch of {self.subject} {how}, and its memory was returned; take its values before "
                "(.numpy(), .torch(), ...): views taken then stay valid"
            )


def _edges(part: m.ReplyTree) -> tuple[I64, I64]:
    """The parent of each node, and the node of each row."""
    parents, node_of_row = np.frombuffer(part.parents, "<i4"), np.frombuffer(part.node_of_row, "<i4")
    return parents.astype(np.int64), node_of_row.astype(np.int64)


def content_source(
    client: ClientSession,
    content: m.ReplyRows,
    terms: TableInfo,
    subject: str,
    wanted: ColumnsWanted,
) -> Operation[ColumnSource]:
    """The columns of a reply, as they are wanted. Its pins return when the source has ended and no view is left, or at
    once if this fails or if no values are wanted. `SchemaError` for a slice that does not fit its field."""
    slices = wanted.slices
    named = {block.block: block for part in content.parts for block in part.blocks}
    fields = terms.reply_fields(content.definitions)
    if not fields.known.keys() >= {name for block in named.values() for name in block.fields}:
        # a block may hold further fields, which this client has not heard of
        with OnFailure(client.connection.unpin, list(named)):
            terms.update_from((yield from request_reply(m.OpenTable(name=terms.name), m.TableTerms)))
        fields = terms.reply_fields(content.definitions)
    if slices:
        try:
            sliced_fields(fields.own, slices)
        except SchemaError:
            client.connection.unpin(list(named))
            raise
    if not wanted.values:
        client.connection.unpin(list(named))
        source = ColumnSource(subject, content, fields, {})
        source.end("was read without values")
        return source
    own = client.memory
    if client.verifier is None and isinstance(own, MappedMemory) and {at.shard for at in named.values()} <= {OWN}:
        memory = own.pin(OWN, named.values())
        placed: dict[str, Column] = {}
        held: list[MappedBlocks] = []
    else:
        memory = {}
        whole = {name for part in content.parts if part.tree is not None for name in part.fields}
        cut = {name: part for name, part in slices.items() if name not in whole} if whole else slices
        placed, held = yield from client.shards.columns(content.parts, fields.known, len(content.rows) // 8, cut)
    source = ColumnSource(subject, content, fields, memory, placed, held, slices)
    try:
        if client.verifier is not None:
            yield from client.verifier.check(content, placed, held, subject)
        if wanted.destination is not None:
            yield from source.land(wanted.destination)
    except BaseException:
        source.end("was not handed out")
        raise
    return source
