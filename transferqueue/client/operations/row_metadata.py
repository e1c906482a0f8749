"""Facts of rows as callers give them (one value for all rows, or one per row) and as messages carry them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from transferqueue.client.operations.rows import RowsBase
from transferqueue.errors import SchemaError, UsageError
from transferqueue.errors.text import SHOWN_CHARS, counted, shortened, shown
from transferqueue.limits import KEY_CHARS_MAX, TAGS_MAX
from transferqueue.policies import Tags, check_tags
from transferqueue.storage.inputs.from_libraries import PLAIN_TYPES, arrow_columns, fact_of
from transferqueue.wire import messages as m

Ints = int | Sequence[int] | npt.NDArray[Any] | None
"""One integer for all rows, or one per row: a sequence, an array or a tensor. None: not given."""
Floats = float | Sequence[float] | npt.NDArray[Any] | None
"""One number for all rows, or one per row."""
Keys = str | Sequence[str] | None
TagsGiven = Mapping[str, str | int | float | bool] | Sequence[Mapping[str, str | int | float | bool]] | None


_UNSAID: Final = frozenset({type(None)})
_NO_FACTS: Final = m.RowFacts()


class GivenFacts(msgspec.Struct, kw_only=True):
    """The facts that one call gives its rows. Each fact is None (not given), one value, or one value per row."""

    group_id: Any = None
    group_size: Any = None
    ordinal: Any = None
    policy_version: Any = None
    policy_version_max: Any = None
    tokens: Any = None
    priority: Any = None
    key: Any = None
    tags: Any = None

    def rows(self) -> int | None:
        """How many rows the facts are for; None if each fact is the same for all rows."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, str | Mapping) or value is None:
                continue
            if np.ndim(value) if name not in ("key", "tags") else True:
                return len(value)
        return None

    def said(self) -> bool:
        """Whether any fact was given."""
        return not _UNSAID.issuperset(map(type, msgspec.structs.astuple(self)))

    def with_table(self, given: object, columns: dict[str, Any]) -> tuple[GivenFacts, dict[str, Any]]:
        """Add the columns of a whole table (see `columns_of`). A column with a fact's name is that fact.

        `UsageError` if it is not a table, and for a name that is both in the table and beside it.
        """
        table = columns_of(given)
        beside = {*columns, *self.names()} & table.keys()
        if beside:
            raise UsageError(f"{min(beside)!r} was given in the table and beside it; give it once")
        facts = {name: table.pop(name) for name in self.__struct_fields__ if name in table}
        return msgspec.structs.replace(self, **facts), {**table, **columns}

    def readable(self) -> GivenFacts:
        """The same, with facts that another library holds as lists. `SchemaError` for a null among them."""
        if PLAIN_TYPES.issuperset(map(type, msgspec.structs.astuple(self))):  # mostly
            return self
        given = {name: getattr(self, name) for name in self.names()}
        facts = {name: fact for name, value in given.items() if (fact := fact_of(name, value)) is not value}
        return msgspec.structs.replace(self, **facts) if facts else self

    def names(self) -> list[str]:
        """Names of the facts that were given."""
        return [name for name in self.__struct_fields__ if getattr(self, name) is not None]

    def message(self, rows: int, tokens: npt.NDArray[np.int64] | None = None) -> m.RowFacts:
        """The facts of `rows` rows as a message carries them, with `tokens` if the caller gave none. `SchemaError` for
        a fact that does not fit its type or the number of rows."""
        if tokens is None and not self.said():
            return _NO_FACTS
        oldest = _ints("policy_version", self.policy_version, rows)
        newest = _ints("policy_version_max", self.policy_version_max, rows)
        if oldest is not None and newest is not None:
            _check_order(oldest, newest)
        return m.RowFacts(
            group_id=_ints("group_id", self.group_id, rows),
            group_size=_ints("group_size", self.group_size, rows, "<i4"),
            ordinal=_ints("ordinal", self.ordinal, rows),
            policy_version=oldest,
            policy_version_max=newest,
            tokens=_ints("tokens", tokens if self.tokens is None else self.tokens, rows),
            priority=None if self.priority is None else _floats("priority", self.priority, rows),
            keys=None if self.key is None else _keys(self.key, rows),
            tags=None if self.tags is None else _tags(self.tags, rows),
        )


def _check_order(oldest: bytes, newest: bytes) -> None:
    """Raise if the newest version of a row is older than its oldest."""
    low, high = np.frombuffer(oldest, "<i8"), np.frombuffer(newest, "<i8")
    wrong = np.flatnonzero(high < low)
    if wrong.size:
        at = int(wrong[0])
        raise UsageError(
            f"policy_version_max={high[at]} of row {at} is below its policy_version={low[at]}; give the newest version "
            "that made a part of it"
        )


def columns_of(given: object) -> dict[str, Any]:
    """The columns of a table: a mapping of names to columns, rows as they were read or leased, a table of pyarrow, or
    any data frame with ``__arrow_c_stream__``."""
    if isinstance(given, Mapping):
        columns = dict(given)
    elif isinstance(given, RowsBase):
        columns = dict(given.items())
    elif (read := arrow_columns(given)) is not None:
        columns = read
    else:
        raise UsageError(
            f"put was given {type(given).__name__} without a name, which is no table; give each column by name, "
            'put(name=values), or a pyarrow.Table, a data frame (of datasets: dataset.with_format("arrow")[:]) or a '
            "dict of columns"
        )
    if "row_id" in columns:
        raise UsageError(
            'column "row_id" is the id that rows had before, and these get new ones; leave it out: '
            '.drop_columns(["row_id"])'
        )
    return columns


def _ints(name: str, value: object, rows: int, dtype: str = "<i8") -> bytes | None:
    if value is None:
        return None
    bits = 32 if dtype == "<i4" else 64
    if type(value) is int and -(1 << (bits - 1)) <= value < 1 << (bits - 1):  # one for all rows, mostly
        return value.to_bytes(bits // 8, "little", signed=True) * rows
    given = _array(name, value, "integers")
    if given.dtype.kind not in "iu":
        raise SchemaError(f"{name} is {given.dtype}; it is made of integers: one for all rows, or one per row")
    if given.size and not -(1 << (bits - 1)) <= int(given.min()) <= int(given.max()) < 1 << (bits - 1):
        raise SchemaError(f"{name} reaches from {given.min()} to {given.max()}; it is made of integers of {bits} bits")
    return _broadcast(name, given, rows).astype(dtype).tobytes()


def _floats(name: str, value: object, rows: int) -> bytes:
    given = _array(name, value, "numbers")
    if given.dtype.kind not in "iuf":
        raise SchemaError(f"{name} is {given.dtype}; it is made of numbers: one for all rows, or one per row")
    numbers = _broadcast(name, given, rows).astype("<f8")
    if np.isnan(numbers).any():
        raise SchemaError(f"{name} has a value that is not a number; rows could not be ordered by it")
    return numbers.tobytes()


def _array(name: str, value: object, rule: str) -> npt.NDArray[Any]:
    try:
        return np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:
        raise SchemaError(
            f"{name} cannot be read as an array: {shortened(str(error), SHOWN_CHARS)}; give {rule}, one or one per row"
        ) from error


def _broadcast(name: str, given: npt.NDArray[Any], rows: int) -> npt.NDArray[Any]:
    if given.ndim == 0:
        return np.full(rows, given)
    if given.shape != (rows,):
        raise SchemaError(
            f"{name} has shape {given.shape} for {counted(rows, 'row')}; give one value for all rows, or one per row "
            f"({rows},)"
        )
    return given


def _keys(value: object, rows: int) -> list[str]:
    if not isinstance(value, Iterable):
        raise UsageError(f"key {shown(value)} is {type(value).__name__}; keys are strings, one per row")
    keys = [value] * rows if isinstance(value, str) else list(value)
    if len(keys) != rows:
        raise SchemaError(f"key has {counted(len(keys), 'value')} for {counted(rows, 'row')}; give one key per row")
    if set(map(type, keys)) != {str} or max(map(len, keys)) > KEY_CHARS_MAX:
        for key in keys:
            check_key(key)
    return keys


def check_key(key: object) -> str:
    """Return `key` if it may name a row, else raise `UsageError`."""
    if not isinstance(key, str):
        raise UsageError(f"key {shown(key)} is {type(key).__name__}; keys are strings")
    if len(key) > KEY_CHARS_MAX:
        raise UsageError(f"key {key[:40]!r}... has {len(key)} characters; at most {KEY_CHARS_MAX} are allowed")
    return key


def _tags(value: object, rows: int) -> list[Tags]:
    if isinstance(value, Mapping):
        return [_checked(value)] * rows
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise UsageError(f"tags are {type(value).__name__}; give one dict for all rows, or a list of one per row")
    if len(value) != rows:
        raise SchemaError(
            f"tags has {counted(len(value), 'value')} for {counted(rows, 'row')}; give one dict for all rows, or one "
            "per row"
        )
    return [_checked(tags) for tags in value]


def _checked(tags: object) -> Tags:
    checked = check_tags(dict(tags) if isinstance(tags, Mapping) else tags)
    if len(checked) > TAGS_MAX:
        raise UsageError(f"a row has {len(checked)} tags; at most {TAGS_MAX} are allowed: use a column")
    return checked
