"""The jobs of a spill disk, and their answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from transferqueue.storage.elements.dtypes import U8


class SpilledBlock(NamedTuple):
    """A block on the disk: its number, the place and size of its bytes in the file, and their checksum."""

    block: int
    offset: int
    nbytes: int
    checksum: int


class BlockToWrite(NamedTuple):
    """A block in the arena. `checksum`: 0 if unknown."""

    block: int
    offset: int
    nbytes: int
    checksum: int


class BlockToLoad(NamedTuple):
    """A block on the disk, and its destination in the arena."""

    place: SpilledBlock
    offset: int


class BlocksWritten(NamedTuple):
    """The end of a write. `places`: of its blocks, in order. `error`: why no block was kept; "": all were written."""

    job: int
    places: list[SpilledBlock]
    error: str


class BlocksLoaded(NamedTuple):
    """The end of a load. `failed`: why a block was not read. `damaged`: blocks whose checksum did not match."""

    job: int
    loaded: list[int]
    failed: dict[int, str]
    damaged: list[int]


class SpillAnswers(NamedTuple):
    """The jobs of a disk that have ended."""

    written: list[BlocksWritten]
    loaded: list[BlocksLoaded]


class SpillSpace(Protocol):
    """The part of a `SpillFile` that a spiller uses."""

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
