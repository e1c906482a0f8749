"""Declares what is stored of a row, of a row in a task, and of a group: each attribute once.

From its declaration follow an attribute's column in memory, its column in images and snapshots, the type of that column
in the snapshot's files, and the check of values that come from such a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np

from transferqueue.ledger.arrays import AnyArray, BoolArray

COUNT_MAX: Final = 1 << 53
"""The highest version, order, step and count: exact in a float64, and far below the end of int64."""
Count = Annotated[int, msgspec.Meta(ge=0, le=COUNT_MAX)]
SECONDS_MAX: Final = 1e12
"""The longest age, and the longest time left: thirty thousand years."""

Columns = dict[str, AnyArray]
"""Named columns of equal length."""


class Attribute(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """One attribute.

    Args:
        name: of its column in snapshots.
        dtype: of its column.
        fill: the value of a new row.
        lowest: a snapshot has no value below this; default None: any.
        highest: a snapshot has no value above this; default None: any.
        codes: texts for the values 0, 1, ...; the files of a snapshot have the texts.
        time: "": the value is no time. Snapshots have times relative to the moment at which they are taken: "age", the
            seconds since then; "left", the seconds until then, and NaN for none.
    """

    name: str
    dtype: str
    fill: int | float = 0
    lowest: int | None = None
    highest: int | None = None
    codes: tuple[str, ...] = ()
    time: Literal["", "age", "left"] = ""

    def saved(self, values: AnyArray, now: float) -> AnyArray:
        """The values as a snapshot has them, taken at `now`."""
        if self.time:
            return now - values if self.time == "age" else values - now
        return values

    def loaded(self, values: AnyArray, now: float) -> AnyArray:
        """The values of a snapshot that is restored at `now`."""
        if self.time:
            return now - values if self.time == "age" else values + now
        return values

    def beyond(self, values: AnyArray) -> BoolArray:
        """Which values of a snapshot are out of range."""
        if self.time:
            far: BoolArray = ~(np.abs(values) <= SECONDS_MAX)
            return far & ~np.isnan(values) if self.time == "left" else far
        beyond: BoolArray = values != values  # NaN
        if self.lowest is not None:
            beyond |= values < self.lowest
        if self.highest is not None:
            beyond |= values > self.highest
        return beyond


def columns_of(objects: Iterable[object], attributes: Mapping[str, Attribute], now: float = 0.0) -> Columns:
    """Columns of objects as a snapshot has them. `attributes`: by the name that the objects have them under."""
    listed = list(objects)
    return {
        one.name: one.saved(np.array([getattr(each, name) for each in listed], one.dtype), now)
        for name, one in attributes.items()
    }


def rows_of(columns: Columns, attributes: Mapping[str, Attribute], now: float = 0.0) -> Iterator[dict[str, Any]]:
    """The values of each object in the columns of a snapshot, by the names that the object has them under; None for a
    time that is not set."""
    values: list[Sequence[Any]] = []
    for one in attributes.values():
        column = one.loaded(columns[one.name], now).tolist()
        values.append([None if value != value else value for value in column] if one.time else column)
    return (dict(zip(attributes, each, strict=True)) for each in zip(*values, strict=True))
