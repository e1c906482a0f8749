"""Extents that a session writes into: shared by small puts, returned when nobody writes there any more."""

from __future__ import annotations

import itertools
from collections.abc import Generator
from typing import Any

import numpy as np
import pytest

import transferqueue as tq
from transferqueue.client.memory.grants import OPEN_MAX, CommitOutcome, WriteGrants, WriteRegion
from transferqueue.client.session.calls import Deadline
from transferqueue.limits import (
    ALIGNMENT,
    GIB,
    KIB,
    MIB,
    PAGE_BYTES,
    SMALL_EXTENT_BYTES,
    SMALL_EXTENTS_BYTES,
    SMALL_EXTENTS_SHARE,
)
from transferqueue.wire import messages as m


class Node:
    """Grants extents one after the other and notes which come back."""

    def __init__(self, arena_bytes: int = GIB) -> None:
        self.granted: list[m.Grant] = []
        self.returned: list[int] = []
        self.returned_at: list[list[int]] = []
        """What had come back at each request for another one."""
        self.grants = WriteGrants(self.take_back, arena_bytes)

    def take_back(self, request: m.Request) -> None:
        assert isinstance(request, m.ReturnGrant)
        self.returned.append(request.extent)

    def region(self, nbytes: int) -> WriteRegion:
        operation: Generator[Any, Any, WriteRegion] = self.grants.region(nbytes, Deadline(lambda: 0.0, 1.0))
        reply: Any = None
        while True:
            try:
                request = operation.send(reply)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            assert isinstance(request, m.Grant)
            self.granted.append(request)
            self.returned_at.append(list(self.returned))
            number = len(self.granted)
            reply = m.Granted(extent=number, shard=0, offset=number * 64 * MIB, nbytes=request.nbytes)


def test_small_pieces_follow_each_other_in_one_extent() -> None:
    node = Node()
    regions = [node.region(100) for _ in range(3)]
    assert len(node.granted) == 1
    assert node.granted[0].nbytes == SMALL_EXTENTS_BYTES
    assert [region.offset - regions[0].offset for region in regions] == [0, 128, 256]
    assert all(region.offset % ALIGNMENT == 0 and region.nbytes == 100 for region in regions)


@pytest.mark.parametrize("arena_bytes", [1, PAGE_BYTES, 100 * KIB, 4 * MIB, 5 * MIB, 16 * MIB, GIB])
def test_an_open_extent_takes_a_small_part_of_its_arena(arena_bytes: int) -> None:
    """A producer that is idle keeps it. The puts that share it waste at most a quarter of it."""
    node = Node(arena_bytes)
    node.region(1)
    shared = node.granted[0].nbytes
    assert shared % PAGE_BYTES == 0
    assert shared <= max(PAGE_BYTES, arena_bytes // SMALL_EXTENTS_SHARE)
    assert shared == SMALL_EXTENTS_BYTES or arena_bytes < SMALL_EXTENTS_SHARE * SMALL_EXTENTS_BYTES
    node.region(shared // 4 - 1)
    assert len(node.granted) == 1
    node.region(shared // 4).done(CommitOutcome.COMMITTED)
    assert [granted.nbytes for granted in node.granted] == [shared, shared // 4]


def test_a_large_piece_has_an_extent_of_its_size_which_its_commit_closes() -> None:
    node = Node()
    node.region(SMALL_EXTENT_BYTES).done(CommitOutcome.COMMITTED)
    assert (node.granted[0].nbytes, node.returned) == (SMALL_EXTENT_BYTES, [])


@pytest.mark.parametrize("left", [0, 1, 64, PAGE_BYTES - ALIGNMENT, PAGE_BYTES - ALIGNMENT + 1, PAGE_BYTES - 1])
def test_the_server_has_closed_each_extent_that_is_not_returned(left: int) -> None:
    """Most large puts leave less than a page of their grant, and need no request to return it."""
    with tq.connect("embedded") as server, tq.connect(server.address, label="producer") as queue:
        table = queue.create_table("t", fields=[tq.Field("x", "uint8", (4 * MIB - left,))])
        returned: list[object] = []
        queue._client.grants._return_extent = returned.append  # and the server does not hear of it
        table.put(x=np.zeros((1, 4 * MIB - left), np.uint8))
        (producer,) = [each for each in server.sessions().values() if each.label == "producer"]
        assert (producer.grants, returned) == (0, [])


@pytest.mark.parametrize("outcome", [CommitOutcome.REFUSED, CommitOutcome.UNKNOWN])
def test_a_large_piece_that_was_not_committed_is_returned(outcome: CommitOutcome) -> None:
    node = Node()
    node.region(5 * MIB).done(outcome)
    assert node.returned == [1]


def test_a_refused_piece_is_written_again_if_it_was_the_last() -> None:
    node = Node()
    first = node.region(100)
    first.done(CommitOutcome.REFUSED)
    second, third = node.region(100), node.region(100)
    assert second.offset == first.offset
    second.done(CommitOutcome.REFUSED)
    assert node.region(100).offset > third.offset


def test_a_piece_of_unknown_fate_is_never_written_again() -> None:
    node = Node()
    first = node.region(100)
    first.done(CommitOutcome.UNKNOWN)
    assert node.region(100).offset > first.offset


def test_full_extents_are_returned_when_their_last_writer_is_done() -> None:
    node = Node()
    writing = node.region(SMALL_EXTENT_BYTES - 1)
    while len(node.granted) <= OPEN_MAX:
        node.region(SMALL_EXTENT_BYTES - 1).done(CommitOutcome.COMMITTED)
    assert node.returned == [2]
    writing.done(CommitOutcome.COMMITTED)
    assert node.returned == [2, 1]


def test_whoever_asks_for_memory_holds_none_that_has_no_room_for_it() -> None:
    """The wait may be one for that memory: two producers of small puts held all of an arena of 4 MiB, and waited for
    more."""
    node = Node()
    for _ in range(9):
        node.region(SMALL_EXTENT_BYTES - 1).done(CommitOutcome.COMMITTED)
    assert node.returned_at == [[], [1], [1, 2]]


def test_pieces_of_one_extent_never_overlap() -> None:
    node = Node()
    taken: dict[int, list[tuple[int, int]]] = {}
    for nbytes in (1, 63, 64, 65, 100_000, 7, 200_000, 250_000, 3, SMALL_EXTENT_BYTES - 1, 64, SMALL_EXTENT_BYTES, 1):
        region = node.region(nbytes)
        taken.setdefault(region.extent, []).append((region.offset, region.offset + nbytes))
    for spans in taken.values():
        spans.sort()
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
