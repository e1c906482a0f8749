"""Write grants: extents that the server lets this session write into, and the regions of them that puts write.

1. A put of `SMALL_EXTENT_BYTES` or more, and any publication of weights, asks for an extent of its size and returns it
   at its end. In an arena below 16 MiB smaller ones do, too: there an open extent has at most a part in
   `SMALL_EXTENTS_SHARE` of the arena, since idle clients keep theirs.
2. Smaller puts take regions of an open extent, one after the other: one round trip each, and no page wasted. An extent
   without room for a put is retired before the next one is asked for: the wait for that may be one for this memory. The
   newest few stay open.
3. A retired extent is returned when the last put that writes into it has ended, never before.
4. If a region was certainly not committed and was the last one taken, the next put takes it. If its commit is in doubt
   (an interrupt, a lost server), no put writes there again.
5. If a transfer to another machine failed, late frames of it may still write into its region. No put writes there
   again, and the extent takes no further put.
6. A commit that fills an extent also closes it: the client need not return it.
7. The copies of a region are regions in other shards, with the same bytes. They end as it does.
8. An extent whose shard was lost takes no further put.
9. Puts share an extent only within a lane, so that memory that is freed early does not lie between memory that stays.
"""

from __future__ import annotations

import enum
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from transferqueue.client.session.calls import Deadline
from transferqueue.client.session.operation_runner import Operation, request_reply
from transferqueue.limits import ALIGNMENT, PAGE_BYTES, SMALL_EXTENT_BYTES, SMALL_EXTENTS_BYTES, SMALL_EXTENTS_SHARE
from transferqueue.schema import align
from transferqueue.wire import messages as m

OPEN_MAX: Final = 2
"""Open extents kept for each copy that puts have: the one in use, and one that another thread asked for at the same
moment."""


ROWS: Final = "rows"
"""The lane of columns that are freed with their rows."""
COLUMNS: Final = "columns"
"""The lane of columns that may be freed before their rows."""
CONTENTS: Final = "contents"
"""The lane of values that rows of many puts share: they end with the last of these rows."""


class CommitOutcome(enum.Enum):
    """The outcome of the commit of a region."""

    COMMITTED = enum.auto()
    REFUSED = enum.auto()
    UNKNOWN = enum.auto()
    TORN = enum.auto()


class _GrantedExtent:
    __slots__ = ("granted", "lane", "retired", "used", "writers")

    def __init__(self, granted: m.Granted, lane: str = ROWS) -> None:
        self.granted, self.lane = granted, lane
        self.used = self.writers = 0
        self.retired = False


class WriteRegion:
    """Bytes [offset, offset + nbytes) of the arena of `shard`. One put may write there until `done`."""

    __slots__ = ("_extent", "_grants", "copies", "extent", "nbytes", "offset", "shard")

    def __init__(self, grants: WriteGrants, extent: _GrantedExtent, offset: int, nbytes: int) -> None:
        self._grants, self._extent = grants, extent
        self.shard, self.extent = extent.granted.shard, extent.granted.extent
        self.offset, self.nbytes = offset, nbytes
        self.copies: list[WriteRegion] = []

    @property
    def granted(self) -> m.Granted:
        """The extent as it was granted."""
        return self._extent.granted

    def done(self, outcome: CommitOutcome) -> None:
        """The put has ended with this outcome."""
        for one in (self, *self.copies):
            self._grants._done(one._extent, one, outcome)


class WriteGrants:
    """The extents that a session may write into. Safe from any thread.

    Args:
        return_extent: sends the request that returns one.
        arena_bytes: of the coordinator's own arena.
    """

    def __init__(self, return_extent: Callable[[m.Request], object], arena_bytes: int) -> None:
        self._return_extent = return_extent
        share = max(arena_bytes // SMALL_EXTENTS_SHARE // PAGE_BYTES, 1) * PAGE_BYTES
        self._shared = min(share, SMALL_EXTENTS_BYTES)
        """Bytes of the extents that small puts share."""
        self._whole_from = self._shared * SMALL_EXTENT_BYTES // SMALL_EXTENTS_BYTES
        """Bytes of a put that has an extent to itself."""
        self._guard = threading.RLock()
        self._open: dict[str, deque[_GrantedExtent]] = {ROWS: deque(), COLUMNS: deque(), CONTENTS: deque()}
        self._open_max = OPEN_MAX

    def region(
        self,
        nbytes: int,
        deadline: Deadline,
        apart: Sequence[int] = (),
        use: m.GrantPurpose = "results",
        lane: str = ROWS,
    ) -> Operation[WriteRegion]:
        """Room for `nbytes` in a shard that is none of `apart`, waiting for memory until the deadline.

        `lane` is `ROWS`, `COLUMNS` or `CONTENTS`.
        """
        if nbytes >= self._whole_from or use == "weights":
            return self._whole((yield from _ask(max(nbytes, 1), deadline, apart, use)), nbytes)
        while (region := self.take(nbytes, lane, apart)) is None:
            self._retire_full(nbytes, lane, apart)
            self._adopt((yield from _ask(self._shared, deadline, apart, use)), len(apart) + 1, lane)
        return region

    def _whole(self, granted: m.Granted, nbytes: int) -> WriteRegion:
        extent = _GrantedExtent(granted)
        extent.retired, extent.writers = True, 1
        return WriteRegion(self, extent, granted.offset, nbytes)

    def take(self, nbytes: int, lane: str = ROWS, apart: Sequence[int] = ()) -> WriteRegion | None:
        """`region` without asking the server: None if the put is to have an extent of its own, or no open extent of the
        lane has room."""
        if nbytes >= self._whole_from:
            return None
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        with self._guard:
            for extent in reversed(self._open[lane]):
                if extent.granted.shard not in apart and extent.used + size <= extent.granted.nbytes:
                    offset = extent.granted.offset + extent.used
                    extent.used += size
                    extent.writers += 1
                    return WriteRegion(self, extent, offset, nbytes)
        return None

    def _retire_full(self, nbytes: int, lane: str, apart: Sequence[int]) -> None:
        with self._guard:
            extents = self._open[lane]
            full = [
                each for each in extents if each.granted.shard not in apart and each.used + nbytes > each.granted.nbytes
            ]
            for extent in full:
                extents.remove(extent)
                extent.retired = True
                self._return_if_left(extent)

    def _adopt(self, granted: m.Granted, copies: int, lane: str) -> None:
        with self._guard:
            extents = self._open[lane]
            extents.append(_GrantedExtent(granted, lane))
            self._open_max = max(self._open_max, copies * OPEN_MAX)
            while len(extents) > self._open_max:
                retired = extents.popleft()
                retired.retired = True
                self._return_if_left(retired)

    def _done(self, extent: _GrantedExtent, region: WriteRegion, outcome: CommitOutcome) -> None:
        with self._guard:
            extent.writers -= 1
            if outcome is CommitOutcome.REFUSED:
                size = align(region.nbytes)
                if region.offset - extent.granted.offset + size == extent.used:
                    extent.used -= size
            if outcome is CommitOutcome.TORN and extent in self._open[extent.lane]:
                self._open[extent.lane].remove(extent)
                extent.retired = True
            if extent.retired and not (outcome is CommitOutcome.COMMITTED and _fills(region, extent.granted)):
                self._return_if_left(extent)

    def _return_if_left(self, extent: _GrantedExtent) -> None:
        if extent.retired and extent.writers == 0:
            self._return_extent(m.ReturnGrant(extent=extent.granted.extent))


def _fills(region: WriteRegion, granted: m.Granted) -> bool:
    """Whether the commit of a region closes its extent at the server (`BlockRegistry.commit`): less than a page is
    left. Its last block may end up to `ALIGNMENT` bytes before the region."""
    left = granted.nbytes - region.nbytes
    return region.offset == granted.offset and left <= PAGE_BYTES - ALIGNMENT


def _ask(nbytes: int, deadline: Deadline, apart: Sequence[int], use: m.GrantPurpose) -> Operation[m.Granted]:
    return request_reply(m.Grant(nbytes=nbytes, wait_s=deadline.left(), apart=list(apart), use=use), m.Granted)
