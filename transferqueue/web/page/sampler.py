"""Sample a queue for its page, and keep the last hour for pages that open later.

The sampler asks the server once a second with viewers, and every five seconds without. All viewers get the same frame.
A slow viewer gets the newest frame when it reads, never a queue of old ones.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Final

import msgspec

import transferqueue as tq
from transferqueue.errors import FlowSignal, TransferQueueError
from transferqueue.observe.frame import frame
from transferqueue.observe.verdict import QueueVerdict, ended, report
from transferqueue.web.page.figures import FigureReader
from transferqueue.web.page.timeline import KEPT_S, Timeline
from transferqueue.web.page.troubles import Troubles
from transferqueue.wire.answers.stats import Stats

WATCHED_S: Final = 1.0
UNWATCHED_S: Final = 5.0
"""Time between two samples. A trouble lasts at least ten seconds, so none falls between two samples."""


class Sampler:
    """Keeps the newest frame of a queue as an event for browsers, and its last hour, also once the server is gone.

    Attributes:
        viewers: Number of open streams.
    """

    def __init__(self, queue: tq.AsyncQueue) -> None:
        self.viewers = 0
        self._queue = queue
        self._before: Stats | None = None
        self._timeline, self._troubles = Timeline(), Troubles()
        self._verdict: QueueVerdict | None = None
        self._last_frame, self._last_at = b"", time.monotonic()
        self._figures = FigureReader(queue)
        self._event = b""
        self._number = 0
        self._changed = asyncio.Condition()
        self._viewer_came = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._gone = False
        self._period_s = UNWATCHED_S

    def start(self) -> None:
        """Sample from now on, in the running event loop."""
        self._task = asyncio.get_running_loop().create_task(self._sample(), name="page sampler")

    async def watch(self) -> AsyncIterator[bytes]:
        """Yield the past, then each newest frame, until the viewer leaves or the server is gone."""
        self.viewers += 1
        seen = -1 if self._gone else self._number
        self._viewer_came.set()
        try:
            yield _event("past", self._timeline.moments)
            if self._gone:
                yield self._last_frame
            while True:
                async with self._changed:
                    while self._number == seen:
                        await self._changed.wait()
                    seen = -1 if self._gone else self._number
                yield self._event
                if self._gone:
                    return
        finally:
            self.viewers -= 1

    async def _sample(self) -> None:
        while True:
            try:
                event, self._gone = await self._frame(), False
                self._last_frame, self._last_at = event, time.monotonic()
            except FlowSignal as late:  # the server is busy: report it, and ask again
                event = _event("late", {"text": str(late)})
            except TransferQueueError as error:
                event, self._gone = self._farewell(str(error)), True
            await self._tell(event)
            await self._pause()

    async def _pause(self) -> None:
        """Wait until the next sample is due, or a viewer comes."""
        self._period_s = WATCHED_S if self.viewers else UNWATCHED_S
        if self.viewers:
            await asyncio.sleep(WATCHED_S)
            return
        self._viewer_came.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._viewer_came.wait(), UNWATCHED_S)

    async def _frame(self) -> bytes:
        stats = await self._queue.stats()
        answer = await self._queue.doctor()
        found = report(stats, answer)
        current = frame(stats.server.address, self._before, stats)
        self._before, self._verdict = stats, found.verdict
        moment = self._timeline.add(current, found.stages, longest_s=2 * self._period_s)
        self._troubles.see(stats.now_s, found.verdict)
        self._troubles.forget(stats.now_s - KEPT_S)
        content = {
            "frame": current,
            "moment": moment,
            "report": found,
            "troubles": self._troubles.all,
            "figures": await self._figures.tables(stats),
        }
        return _event("frame", content)

    def _farewell(self, why: str) -> bytes:
        """The event that the server is gone, with the seconds since the last frame."""
        return _event("gone", {"verdict": ended(self._verdict, why), "ago_s": time.monotonic() - self._last_at})

    async def _tell(self, event: bytes) -> None:
        async with self._changed:
            self._event, self._number = event, self._number + 1
            self._changed.notify_all()


def _event(kind: str, value: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(value) + b"\n\n"
