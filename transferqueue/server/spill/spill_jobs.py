"""The jobs of a disk to which cold blocks go: what each names, and what its answer says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from transferqueue.storage.elements.dtypes import U8


class SpilledBlock(NamedTuple):
    """A block on the disk: its number, where its bytes begin in the file, how many they are, and their checksum."""

    block: int
    offset: int
    nbytes: int
    checksum: int


class BlockToWrite(NamedTuple):
    """A block in the arena. checksum: 0 if it is not known."""

    block: int
    offset: int
    nbytes: int
    checksum: int


class BlockToLoad(NamedTuple):
    """A block on the disk, and where its bytes go in the arena."""

    place: SpilledBlock
    offset: int


class BlocksWritten(NamedTuple):
    """The end of a write. places: where its blocks are, in order. error: why nothing of it was kept; "" if all blocks
    were written."""

    job: int
    places: list[SpilledBlock]
    error: str


class BlocksLoaded(NamedTuple):
    """The end of a load. failed: why a block was not read. damaged: blocks that were read and had another checksum."""

    job: int
    loaded: list[int]
    failed: dict[int, str]
    damaged: list[int]


class SpillAnswers(NamedTuple):
    """Jobs of a disk that have ended."""

    written: list[BlocksWritten]
    loaded: list[BlocksLoaded]


class SpillSpace(Protocol):
    """What a spiller asks of a `SpillFile`."""

    def write(self, job: int, blocks: Sequence[BlockToWrite], /) -> None:
        """See `SpillFile.write`."""

    def load(self, job: int, blocks: Sequence[BlockToLoad], /) -> None:
        """See `SpillFile.load`."""

    def free(self, places: Iterable[SpilledBlock], /) -> None:
        """See `SpillFile.free`."""

    def answers(self) -> SpillAnswers:
        """See `SpillFile.answers`."""

    def read(self, place: SpilledBlock, /) -> U8:
        """See `SpillFile.read`."""

    def stop(self) -> None:
        """See `SpillFile.stop`."""
