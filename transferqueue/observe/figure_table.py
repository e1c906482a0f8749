"""Figures that a process shows on the page: a small table, the newest version of its own weight channel.

A channel named ``TABLE/figures/NAME`` holds one array ``value``, a `FigureTable` in JSON. The page shows the newest
version of each, under the title.
"""

from __future__ import annotations

from typing import Final

import msgspec

from transferqueue.errors import UsageError

VALUE: Final = "value"
"""The only array of the channel: uint8 ``[bytes]``."""
LINES_MAX: Final = 64
CELLS_MAX: Final = 16
CHARS_MAX: Final = 200
_PART: Final = "/figures/"


class FigureTable(msgspec.Struct, frozen=True, kw_only=True):
    """A title, names of columns, and lines of as many cells. Raises `UsageError` for other shapes and beyond the bounds
    of this module.

    >>> FigureTable(title="recall", columns=("refit", "20 %"), lines=(("1", "0.25"),)).lines
    (('1', '0.25'),)
    """

    title: str
    columns: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        if not 0 < len(self.columns) <= CELLS_MAX or len(self.lines) > LINES_MAX:
            raise UsageError(
                f"a table of {len(self.columns)} columns and {len(self.lines)} lines: give 1 to {CELLS_MAX} columns "
                f"and at most {LINES_MAX} lines"
            )
        if any(len(line) != len(self.columns) for line in self.lines):
            raise UsageError(
                f"lines of {sorted({len(line) for line in self.lines})} cells for {len(self.columns)} columns; give "
                "each as many"
            )
        longest = max(
            len(text) for text in (self.title, *self.columns, *(cell for line in self.lines for cell in line))
        )
        if longest > CHARS_MAX:
            raise UsageError(f"a text of {longest} characters in a table of figures; give at most {CHARS_MAX}")


def figures_channel(table: str, name: str) -> str:
    """Return the name of the channel of the figures `name` of a table."""
    return f"{table}{_PART}{name}"


def has_figures(channel: str) -> bool:
    """Whether a channel's name says that it holds a `FigureTable`."""
    return _PART in channel


def decode(encoded: bytes) -> FigureTable:
    """Return the table of a channel's bytes. `UsageError` for other bytes."""
    try:
        return msgspec.json.decode(encoded, type=FigureTable)
    except msgspec.DecodeError as error:
        raise UsageError(
            f"a channel of figures has no table of figures: {error}; another program writes to it"
        ) from error
