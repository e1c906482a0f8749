"""The tables of figures that processes publish for the page (`observe.figure_table`)."""

from __future__ import annotations

from contextlib import suppress

import transferqueue as tq
from transferqueue.errors import DeadlineExceeded, NotFound, UsageError
from transferqueue.observe.figure_table import VALUE, FigureTable, decode, has_figures
from transferqueue.wire.answers.stats import Stats


class FigureReader:
    """Reads the newest figures of each channel that has any."""

    def __init__(self, queue: tq.AsyncQueue) -> None:
        self._queue = queue
        self._read: dict[str, tuple[int, FigureTable]] = {}

    async def tables(self, stats: Stats) -> dict[str, FigureTable]:
        """Return the tables by channel. Reads only newer versions; omits channels without a table."""
        for name, channel in stats.channels.items():
            known = self._read[name][0] if name in self._read else -1
            if has_figures(name) and channel.newest > known:
                with suppress(DeadlineExceeded, NotFound, UsageError):  # gone meanwhile, or written by another program
                    self._read[name] = await self._pulled(name)
        self._read = {name: read for name, read in self._read.items() if name in stats.channels}
        return {name: table for name, (_, table) in self._read.items()}

    async def _pulled(self, channel: str) -> tuple[int, FigureTable]:
        pulled = await self._queue.weights(channel).pull(timeout_s=0.0)
        try:
            return pulled.version, decode(bytes(pulled.numpy()[VALUE]))
        finally:
            pulled.release()
