"""Declares what is stored of a row, of a row in a task, and of a group: each attribute once.

From its declaration follow an attribute's column in memory, its stored column (`ledger.persistence`), the type of that
column in files, and the check of values that come from a file.
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
        name: of its stored column.
        dtype: of its column.
        fill: the value of a new row.
        lowest: no stored value is below this; default None: any.
        highest: no stored value is above this; default None: any.
        codes: texts for the values 0, 1, ...; files have the texts.
        time: "": the value is no time. Stored times are relative to the moment at which they are stored: "age", the
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
        """The values as they are stored at `now`."""
        if self.time:
            return now - values if self.time == "age" else values - now
        return values

    def loaded(self, values: AnyArray, now: float) -> AnyArray:
        """Stored values, restored at `now`."""
        if self.time:
            return now - values if self.time == "age" else values + now
        return values

    def beyond(self, values: AnyArray) -> BoolArray:
        """Which stored values are out of range."""
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
    """Stored columns of objects. `attributes`: by the name that the objects have them under."""
    listed = list(objects)
    return {
        one.name: one.saved(np.array([getattr(each, name) for each in listed], one.dtype), now)
        for name, one in attributes.items()
    }


def rows_of(columns: Columns, attributes: Mapping[str, Attribute], now: float = 0.0) -> Iterator[dict[str, Any]]:
    """The values of each object in stored columns, by the names that the object has them under; None for a
    time that is not set."""
    values: list[Sequence[Any]] = []
    for one in attributes.values():
        column = one.loaded(columns[one.name], now).tolist()
        values.append([None if value != value else value for value in column] if one.time else column)
    return (dict(zip(attributes, each, strict=True)) for each in zip(*values, strict=True))
