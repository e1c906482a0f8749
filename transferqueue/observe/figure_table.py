"""Figures that a process shows on the page: a small table, curves and warnings, the newest version of its own weight
channel.

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
CHARS_MAX: Final = 400
CURVES_MAX: Final = 64
POINTS_MAX: Final = 120
"""Points of a curve: the page gets all of them with each frame."""
_PART: Final = "/figures/"


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """Values over whole numbers that ascend, such as steps. None: a gap. Raises `UsageError` for other shapes and
    beyond the bounds of this module."""

    name: str
    unit: str = ""
    at: tuple[int, ...]
    values: tuple[float | None, ...]

    def __post_init__(self) -> None:
        if not 0 < len(self.at) == len(self.values) <= POINTS_MAX:
            raise UsageError(
                f"a curve of {len(self.values)} values at {len(self.at)} points: give 1 to {POINTS_MAX} of both"
            )


class FigureTable(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A title, names of columns, and lines of as many cells; curves, and warnings in words. Raises `UsageError` for
    other shapes and beyond the bounds of this module.

    >>> FigureTable(title="recall", columns=("refit", "20 %"), lines=(("1", "0.25"),)).lines
    (('1', '0.25'),)
    """

    title: str
    columns: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    curves: tuple[Curve, ...] = ()
    warnings: tuple[str, ...] = ()

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
        if len(self.curves) > CURVES_MAX or len(self.warnings) > LINES_MAX:
            raise UsageError(
                f"{len(self.curves)} curves and {len(self.warnings)} warnings: give at most {CURVES_MAX} curves and "
                f"{LINES_MAX} warnings"
            )
        cells = (*(cell for line in self.lines for cell in line), *(curve.name for curve in self.curves))
        longest = max(len(text) for text in (self.title, *self.columns, *cells, *self.warnings))
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
