"""The disk of a remote shard, as its coordinator uses it: jobs are commands to the shard, and the shard reports their ends. No I/O.

The rules (docs/decisions/0059):

1. A job has a number, which is never used again in the shard's session. It is under way until the shard has reported it.
2. A report of a job that is not under way any more is a frame that came twice, or late. It changes nothing.
3. A report must fit its job, block by block. One that does not is refused, with all reports of its request, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from transferqueue.errors import InternalError, ProtocolError
from transferqueue.limits import SPILL_JOB_BLOCKS
from transferqueue.server.spill.spill_file import SpillAnswers
from transferqueue.storage.elements.dtypes import U8
from transferqueue.storage.memory.checksum import UNCHECKED
from transferqueue.wire import messages as m


class ShardDisk:
    """What a spiller asks of the disk of a remote shard (`SpillSpace`). send: gives the shard a command, which names so many blocks."""

    def __init__(self, send: Callable[[m.Order, int], None]) -> None:
        self._send: Final = send
        self._writes: dict[int, m.WriteBlocks] = {}
        self._loads: dict[int, m.LoadBlocks] = {}
        """By number: the jobs that are under way."""
        self._last = 0
        self._answers = SpillAnswers([], [])

    def write(self, job: int, blocks: Sequence[m.BlockToWrite]) -> None:
        """See `SpillFile.write`."""
        self._last = job
        command = self._writes[job] = m.WriteBlocks(job, list(blocks))
        self._send(command, len(blocks))

    def load(self, job: int, blocks: Sequence[m.BlockToLoad]) -> None:
        """See `SpillFile.load`."""
        self._last = job
        command = self._loads[job] = m.LoadBlocks(job, list(blocks))
        self._send(command, len(blocks))

    def free(self, places: Iterable[m.SpilledBlock]) -> None:
        """See `SpillFile.free`."""
        kept = list(places)
        for first in range(0, len(kept), SPILL_JOB_BLOCKS):
            some = kept[first : first + SPILL_JOB_BLOCKS]
            self._send(m.FreeSpilled(some), len(some))

    def answers(self) -> SpillAnswers:
        """See `SpillFile.answers`."""
        ready, self._answers = self._answers, SpillAnswers([], [])
        return ready

    def read(self, place: m.SpilledBlock) -> U8:
        """Refuse: the bytes are in another process."""
        raise InternalError(f"block {place.block} is on the disk of a shard, which copies it for whoever reads it")

    def stop(self) -> None:
        """Do nothing: the shard closes its file."""

    def report(self, report: m.ReportSpill) -> None:
        """The shard reports what its disk has done. `ProtocolError` if a report does not fit its job; then none counts."""
        written = {answer.job: answer for answer in report.written}
        loaded = {answer.job: answer for answer in report.loaded}
        for number in (*written, *loaded):
            if number > self._last:
                raise ProtocolError(f"job {number} of the disk is reported, and {self._last} were given so far")
            write, load = self._writes.get(number), self._loads.get(number)
            if write is not None and (number not in written or not _is_of_write(write, written[number])):
                raise _misfit(number)
            if load is not None and (number not in loaded or not _is_of_load(load, loaded[number])):
                raise _misfit(number)
        self._answers.written.extend(answer for number, answer in written.items() if self._writes.pop(number, None))
        self._answers.loaded.extend(answer for number, answer in loaded.items() if self._loads.pop(number, None))


def _misfit(number: int) -> ProtocolError:
    return ProtocolError(
        f"the report of job {number} of the disk does not fit it: name each of its blocks once, as it was given"
    )


def _is_of_write(job: m.WriteBlocks, answer: m.BlocksWritten) -> bool:
    if answer.error:
        return not answer.places
    return len(answer.places) == len(job.blocks) and all(
        (place.block, place.nbytes) == (block.block, block.nbytes) and block.checksum in (UNCHECKED, place.checksum)
        for place, block in zip(answer.places, job.blocks, strict=True)
    )


def _is_of_load(job: m.LoadBlocks, answer: m.BlocksLoaded) -> bool:
    named = [*answer.loaded, *answer.failed, *answer.damaged]
    return sorted(named) == sorted(block.place.block for block in job.blocks)
