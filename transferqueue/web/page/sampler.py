"""Samples a queue for its page, and remembers the last hour, so that whoever opens the page late sees the stall that was.

The server is asked once a second while somebody looks, and every five seconds while nobody does. All viewers get the same frame. A
slow viewer gets the newest frame when it reads, never a queue of old ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Final

import msgspec

import transferqueue as tq
from transferqueue.errors import FlowSignal, TransferQueueError
from transferqueue.observe.answers.stats import Stats, parse
from transferqueue.observe.diagnosis import DoctorAnswer, diagnose
from transferqueue.observe.frame import frame
from transferqueue.observe.workers import workers
from transferqueue.web.page.figures import FigureReader
from transferqueue.web.page.stalls import Stalls
from transferqueue.web.page.timeline import KEPT_S, Timeline

WATCHED_S: Final = 1.0
UNWATCHED_S: Final = 5.0
"""Between two samples. Patience of the doctor is ten seconds: no stall that it tells of falls between two samples."""
WORKERS_MAX: Final = 64
"""Workers that a frame lists: those that have waited longest."""


class Sampler:
    """Keeps the newest frame of a queue, as an event for browsers, and its past. `viewers`: how many streams are open."""

    def __init__(self, queue: tq.AsyncQueue) -> None:
        self.viewers = 0
        self._queue = queue
        self._before: Stats | None = None
        self._timeline, self._stalls = Timeline(), Stalls()
        self._figures = FigureReader(queue)
        self._event = b""
        self._number = 0
        self._changed = asyncio.Condition()
        self._somebody_came = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._gone = False
        self._period_s = UNWATCHED_S

    def start(self) -> None:
        """Sample from now on, in the running event loop."""
        self._task = asyncio.get_running_loop().create_task(self._sample(), name="page sampler")

    async def watch(self) -> AsyncIterator[bytes]:
        """Events: first the past, then the newest frame each time, until the viewer leaves or the server is gone."""
        self.viewers += 1
        seen = self._number
        self._somebody_came.set()
        try:
            yield _event("past", self._timeline.moments)
            while True:
                async with self._changed:
                    while self._number == seen:
                        await self._changed.wait()
                    seen = self._number
                yield self._event
                if self._gone:
                    return
        finally:
            self.viewers -= 1

    async def _sample(self) -> None:
        while True:
            try:
                event, self._gone = await self._frame(), False
            except FlowSignal as late:  # the server is busy: report it, and ask again
                event = _event("late", {"text": str(late)})
            except TransferQueueError as error:
                event, self._gone = _event("gone", {"text": str(error)}), True
            await self._tell(event)
            await self._pause()

    async def _pause(self) -> None:
        """Until the next sample is due, or somebody comes to look."""
        self._period_s = WATCHED_S if self.viewers else UNWATCHED_S
        if self.viewers:
            await asyncio.sleep(WATCHED_S)
            return
        self._somebody_came.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._somebody_came.wait(), UNWATCHED_S)

    async def _frame(self) -> bytes:
        stats = parse("stats", await self._queue.stats(), Stats)
        answer = parse("doctor", await self._queue.doctor(), DoctorAnswer)
        diagnosis, working = diagnose(answer), workers(answer)
        shown = frame(stats.server.address, self._before, stats)
        self._before = stats
        moment = self._timeline.add(shown, longest_s=2 * self._period_s)
        self._stalls.see(stats.now_s, diagnosis)
        self._stalls.forget(stats.now_s - KEPT_S)
        told = {
            "frame": shown,
            "moment": moment,
            "doctor": diagnosis,
            "stalled": diagnosis.stalled,
            "stalls": self._stalls.all,
            "workers": working[:WORKERS_MAX],
            "workers_more": len(working[WORKERS_MAX:]),
            "figures": await self._figures.tables(stats),
        }
        return _event("frame", told)

    async def _tell(self, event: bytes) -> None:
        async with self._changed:
            self._event, self._number = event, self._number + 1
            self._changed.notify_all()


def _event(kind: str, value: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(value) + b"\n\n"
