"""Fit text to the terminal: drop columns by rank when it is narrow, and flow pieces without breaking any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
from rich.console import Console
from rich.text import Text

from transferqueue.errors.text import visible
from transferqueue.observe import units

GAP: Final = 2
"""Blank cells between two columns."""


class GridColumn(msgspec.Struct, frozen=True, kw_only=True):
    """One column of a grid. rank: columns of the highest rank are dropped first; rank 0 always stays."""

    heading: str
    cells: list[Text]
    rank: int = 0
    left: bool = False

    @property
    def width(self) -> int:
        """Terminal cells that the column takes."""
        return max(len(self.heading), *(_seen(cell).cell_len for cell in self.cells), 0)


def fit(columns: Sequence[GridColumn], width: int) -> list[GridColumn]:
    """The columns that fit into `width`. Columns of the highest rank are dropped first, whole ranks at a time."""
    kept = list(columns)
    while sum(column.width + GAP for column in kept) - GAP > width and (rank := max(c.rank for c in kept)):
        kept = [column for column in kept if column.rank < rank]
    return kept


def heading(columns: Sequence[GridColumn]) -> Text:
    """The line of headings."""
    return _line([_padded(column, Text(column.heading, style="dim")) for column in columns])


def grid_line(columns: Sequence[GridColumn], row: int) -> Text:
    """Line `row` of the grid."""
    return _line([_padded(column, column.cells[row]) for column in columns])


def grid(columns: Sequence[GridColumn], rows: int, width: int) -> list[Text]:
    """Headings and rows of the columns that fit into `width`."""
    columns = fit(columns, width)
    return [heading(columns), *(grid_line(columns, row) for row in range(rows))]


def flow(pieces: Sequence[Text], width: int, *, between: str = " · ", indent: int = 0) -> list[Text]:
    """`pieces` on as few lines as they need, joined by `between`; lines after the first are indented."""
    lines = [Text()]
    for piece in map(_seen, pieces):
        line = lines[-1]
        if line.plain.strip() and line.cell_len + len(between) + piece.cell_len > width:
            lines.append(line := Text(" " * indent))
        elif line.plain.strip():
            line.append(between, style="dim")
        line.append_text(piece)
    return lines


def wrap(text: Text, width: int, *, indent: int) -> list[Text]:
    """`text` broken at spaces to `width`, every line indented."""
    lines = _seen(text).wrap(Console(), max(width - indent, 20))
    for line in lines:
        line.rstrip()
    return [Text(" " * indent).append_text(line) for line in lines]


def spread(left: Text, right: Text, width: int) -> list[Text]:
    """`left` and `right` at the two ends of one line, or on two lines if one is too short."""
    left, right = _seen(left), _seen(right)
    gap = width - left.cell_len - right.cell_len
    if gap < GAP:
        return [left, right]
    return [left.append(" " * gap).append_text(right)]


def bar(share: float, width: int, *, style: str = "green") -> Text:
    """A bar of `width` cells, of which `share` is filled."""
    strong = min(width, max(round(share * width), int(share > 0)))
    return Text("━" * strong, style=style).append("─" * (width - strong), style="bright_black")


def age(seconds: float | None) -> Text:
    """A cell with a span of time; None: a dash."""
    return Text("–", style="bright_black") if seconds is None else Text(units.span(seconds))


def _seen(text: Text) -> Text:
    """The text with control characters made visible, so that its width is right."""
    return text if text.plain.isprintable() else Text(visible(text.plain), style=text.style)


def _padded(column: GridColumn, cell: Text) -> Text:
    cell = _seen(cell)
    space = " " * (column.width - cell.cell_len)
    return cell.copy().append(space) if column.left else Text(space).append_text(cell)


def _line(cells: list[Text]) -> Text:
    line = Text(" " * GAP).join(cells)
    line.rstrip()
    return line
