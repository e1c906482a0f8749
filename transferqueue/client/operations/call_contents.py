"""The values of one call that the table stores by their content (`Repeat` without counts).

1. The first attempt refers to all of them by content, since any client may have brought them. A pipeline writes all at
   once: its caller may change the arrays before an answer comes.
2. If the table does not have one of them, or rows that exist already have the field in a newer block, the commit is
   refused with `NotFound`, and nothing has changed. The second attempt refers to those that this client has committed
   before, and writes the others.
3. The third attempt writes all. A value that another client brought meanwhile is still stored once.
"""

from __future__ import annotations

from typing import NamedTuple

from transferqueue.client.session.operation_runner import BlockingWork, Operation
from transferqueue.client.table_info import RecentContents
from transferqueue.storage.inputs.content_blocks import ContentBlock, content_blocks
from transferqueue.storage.inputs.prepare import Prepared


class NextAttempt(NamedTuple):
    """Blocks that the next attempt writes, and those that it refers to."""

    written: list[ContentBlock]
    referred: list[ContentBlock]


class CallContents:
    """The blocks of values by content of one call.

    Args:
        known: contents that this client has committed to the table.
        refers: whether the first attempt refers to values rather than write them.
    """

    def __init__(self, known: RecentContents, *, refers: bool) -> None:
        self._known = known
        self._blocks_of: dict[str, list[ContentBlock]] = {}
        self._referred: frozenset[bytes] | None = None if refers else frozenset()
        """Contents that the next attempt refers to; None: all."""

    def take(self, column: Prepared, *, checksums: bool) -> Operation[bool]:
        """Make the blocks of a column, once. Returns whether it has any: else it is stored as any other."""
        name = column.field.name

        def make() -> None:
            self._blocks_of[name] = content_blocks(column, checksums=checksums)

        if name not in self._blocks_of:
            yield BlockingWork(column.nbytes, make)
        return bool(self._blocks_of[name])

    def next_attempt(self) -> NextAttempt:
        """The blocks that the next attempt writes, and those that it refers to."""
        attempt = NextAttempt([], [])
        for block in self._every():
            is_referred = self._referred is None or block.content in self._referred
            (attempt.referred if is_referred else attempt.written).append(block)
        return attempt

    def refused(self) -> bool:
        """The table lacks a content. Returns whether another attempt refers to fewer."""
        blocks = self._every()
        if not blocks or self._referred == frozenset():
            return False
        known = self._known.among([block.content for block in blocks])
        is_first = self._referred is None
        self._referred = known if is_first and len(known) < len({block.content for block in blocks}) else frozenset()
        return True

    def committed(self) -> None:
        """The table has all of them now."""
        if self._blocks_of:
            self._known.add([block.content for block in self._every()])

    def clear(self) -> None:
        """Make the blocks again: the fields of the table have changed."""
        self._blocks_of.clear()

    def _every(self) -> list[ContentBlock]:
        return [block for blocks in self._blocks_of.values() for block in blocks]
