"""Compare blocks with the checksums that they were put with, if the client asks for it (``connect(verify=True)``).

A server at level ``disk`` compares all blocks when it starts, and none while it serves. A client that maps its memory
reads the bytes anyway: here it reads them once more, when a reply first names them, and never again in its session. A
block that does not match is `Damaged`, before the caller has a view of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from transferqueue.client.session.operation_runner import BlockingWork, Operation
from transferqueue.errors import Corruption, listing
from transferqueue.storage.columns.column import Column
from transferqueue.storage.columns.joined import along_chains
from transferqueue.storage.columns.placement import MappedBlocks
from transferqueue.storage.elements.dtypes import U8
from transferqueue.storage.memory.checksum import UNCHECKED, checksum
from transferqueue.wire import messages as m

REMEMBERED_MAX: Final = 1 << 16
"""Blocks that a session remembers to have compared; with more it forgets them all, and compares again."""


class Damaged(Corruption):
    """Blocks that do not match their checksums. `rows` has the ids of the rows that lie there, as a message carries
    them."""

    def __init__(self, text: str, rows: bytes = b"") -> None:
        super().__init__(text)
        self.rows: Final = rows


class Verifier:
    """Compares each block once in a session. Safe from any thread: at worst a block is compared twice."""

    def __init__(self) -> None:
        self._seen: set[tuple[int, int]] = set()

    def check(
        self, content: m.ReplyRows, columns: Mapping[str, Column], held: Sequence[MappedBlocks], subject: str
    ) -> Operation[None]:
        """`Damaged` unless all blocks of a reply match their checksums. `columns` and `held` are its columns, and the
        blocks that hold their memory."""
        wanted = [one for one in _placed(held) if (one[0].block, one[0].checksum) not in self._seen]
        bad: list[m.BlockLocation] = []

        def compare() -> None:
            for at, memory in wanted:
                if checksum(memory[: at.nbytes]) != at.checksum:
                    bad.append(at)

        if wanted:
            yield BlockingWork(sum(at.nbytes for at, _ in wanted), compare)
        if bad:
            raise _damaged(content, columns, held, {at.block: at for at in bad}, subject)
        if len(self._seen) > REMEMBERED_MAX:
            self._seen.clear()
        self._seen.update((at.block, at.checksum) for at, _ in wanted)


def _placed(held: Iterable[MappedBlocks]) -> Iterator[tuple[m.BlockLocation, U8]]:
    """The blocks that lie in mapped memory, whole, and have a checksum."""
    for blocks in held:
        for at, memory in zip(blocks.shapes, blocks.memory, strict=True):
            if isinstance(at, m.BlockLocation) and at.checksum != UNCHECKED:
                yield at, memory


def _damaged(
    content: m.ReplyRows,
    columns: Mapping[str, Column],
    held: Sequence[MappedBlocks],
    bad: Mapping[int, m.BlockLocation],
    subject: str,
) -> Damaged:
    ids = np.frombuffer(content.rows, "<i8")
    rows: set[int] = set()
    fields: set[str] = set()
    for part, blocks in zip(content.parts, held, strict=True):
        there = [isinstance(at, m.BlockLocation) and at.block in bad for at in blocks.shapes]
        hit = np.array(there, np.bool_)[columns[part.fields[0]].placement.block_of_row]
        if (tree := part.tree) is not None:
            parents, node_of_row = (np.frombuffer(of, "<i4") for of in (tree.parents, tree.node_of_row))
            hit = along_chains(hit, parents.astype(np.int64), np.logical_or)[node_of_row]
        if hit.any():
            rows.update(ids[hit].tolist())
            fields.update(part.fields)
    where = ", ".join(
        f"block {number} (bytes {at.offset:,} to {at.offset + at.nbytes:,})" for number, at in bad.items()
    )
    ordered = sorted(rows)
    return Damaged(
        f"rows {listing(ordered)} of {subject} are damaged: {where} of the server's memory, with their "
        f"{listing(fields)}, does not match the checksum of its put. This client delivered none of it; put the "
        "rows again, or restart the server: it has damaged columns made again, or drops their rows as lost",
        np.array(ordered, "<i8").tobytes(),
    )
