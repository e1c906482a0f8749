"""Reads the columns of one call, each once: counts their rows, checks each against its field, and compares their
lengths, before a byte is written.

A field may demand as many elements in each row as another one has (`Field.like`). The lengths that are known are those
of the columns of the call, and of columns of the same rows that a lease or a read brought. A field that has the rule
only by its name keeps one of two conventions: a value for each token of the response, or for each of prompt and
response together, perhaps without the first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from transferqueue.errors import SchemaError, TransferQueueError, UsageError
from transferqueue.errors.text import SHOWN_CHARS, counted, shortened
from transferqueue.schema import Field
from transferqueue.storage.elements.dtypes import I64
from transferqueue.storage.inputs.prepare import Prepared, Repeat, prepare

Lengths = Callable[[str], "I64 | None"]
"""The lengths of a field's rows, int64 ``[rows]``; None if unknown."""


def unknown(name: str) -> I64 | None:
    """None: the lengths of existing columns are unknown."""
    return None


def count_rows(columns: Mapping[str, Any]) -> int | None:
    """The length of the first column that has one value per row; None if there is none. `SchemaError` if it cannot be
    read."""
    for name, value in columns.items():
        if type(value) is np.ndarray and value.ndim:  # mostly
            return len(value)
        try:
            rows = _column_rows(value)
        except Exception as error:  # of a class that is not ours
            raise _unreadable(name, value, error) from error
        if rows is not None:
            return rows
    return None


def _column_rows(value: Any) -> int | None:
    """How many rows a column has; None for a single value."""
    if isinstance(value, Repeat):
        if value.counts is None:
            return _column_rows(value.values)
        return sum(value.counts.tolist()) if value.counts.ndim else int(value.counts) * len(value.values)
    if _single(value):
        return None
    nested = getattr(value, "is_nested", False)  # one of strided layout has no len()
    return int(value.size(0)) if nested else len(value)


def _single(value: Any) -> bool:
    """Whether a value is the same for all rows, not a column."""
    return isinstance(value, str | bytes | Mapping) or not hasattr(value, "__len__") or getattr(value, "ndim", 1) == 0


def _unreadable(name: str, value: object, error: Exception) -> SchemaError:
    """The error for a value whose own class, or the library of its class, fails."""
    kind, why = f"{type(value).__module__}.{type(value).__qualname__}", shortened(str(error), SHOWN_CHARS)
    return SchemaError(
        f'field "{name}": {shortened(kind, SHOWN_CHARS)} cannot be read ({type(error).__name__}: {why}); give a list, '
        "a numpy array, a torch tensor or an Arrow array"
    )


def prepare_columns(
    columns: Mapping[str, Any],
    fields: Mapping[str, Field],
    rows: int,
    before: Lengths = unknown,
    continued: Collection[str] | None = (),
) -> list[Prepared]:
    """Check the columns of a commit of `rows` rows against the fields that the table has; others are inferred.

    Args:
        columns: by name.
        fields: of the table.
        rows: of the call.
        before: the lengths that the rows have already, for columns that are not in the call.
        continued: names of columns that have only what the rows have beyond others; None: all ragged ones.

    Raises:
        SchemaError: a column does not fit, or has other lengths than its field says.
    """
    prepared: dict[str, Prepared] = {}
    for name, value in columns.items():
        try:
            prepared[name] = column = prepare(name, value, fields.get(name), rows)
        except (TransferQueueError, MemoryError):
            raise
        except Exception as error:
            raise _unreadable(name, value, error) from error
        column.finite = column.field.is_finite
        column.continued = column.field.ragged if continued is None else name in continued
    for column in prepared.values():
        if column.field.has_lengths_of:
            _check_lengths(column, prepared, before)
    return list(prepared.values())


def count_tokens(columns: Sequence[Prepared]) -> I64 | None:
    """Tokens of each row if the caller did not say: the length of its `input_ids`, else of its `prompt_ids` and
    `response_ids`, as far as this call has them. `UsageError` if they continue others, of unknown lengths."""
    found = {column.field.name: column for column in columns if column.field.shape}
    if "input_ids" in found:
        parts = [found["input_ids"]]
    else:
        parts = [found[name] for name in ("prompt_ids", "response_ids") if name in found]
    for part in parts:
        if part.continued:
            raise UsageError(
                f'field "{part.field.name}" continues the parent\'s, so the tokens of the rows cannot be counted; give '
                "tokens=, of the whole rows"
            )
    if not parts:
        return None
    summed: I64 = np.sum([part.row_lengths() for part in parts], axis=0)
    return summed


def _check_lengths(column: Prepared, columns: Mapping[str, Prepared], before: Lengths) -> None:
    def lengths(name: str) -> I64 | None:
        if (other := columns.get(name)) is None:
            return before(name)
        return other.row_lengths() if other.continued == column.continued else None  # None: whole, and only its end

    field, own = column.field, column.row_lengths()
    like = columns.get(field.like or "")
    if like is not None and like.continued != column.continued:
        one, other = (column, like) if column.continued else (like, column)
        raise SchemaError(
            f'field "{field.name}" is declared like "{field.like}", and "{one.field.name}" continues the parent\'s '
            f'while "{other.field.name}" does not, so their lengths cannot be compared; name both or neither in '
            "continued="
        )
    wanted = lengths(field.has_lengths_of)
    if wanted is None or np.array_equal(own, wanted):
        return
    if field.like is not None:
        raise _unlike(field, own, wanted, f'give as many as "{field.like}" has in each row, as the field declares')
    whole = _whole(wanted, lengths)
    if whole is None:  # unknown here: as long as the response, or longer
        fits = bool((own >= wanted).all())
    else:
        fits = np.array_equal(own, whole) or np.array_equal(own, whole - 1)
    if not fits:
        raise _unlike(
            field, own, wanted, 'give one for each token of the response, or of prompt and response, or declare like=""'
        )


def _whole(response: I64, lengths: Lengths) -> I64 | None:
    """The lengths of prompt and response together, if they are known."""
    whole = lengths("input_ids")
    if whole is not None:
        return whole
    prompt = lengths("prompt_ids")
    return None if prompt is None else prompt + response


def _unlike(field: Field, own: I64, wanted: I64, remedy: str) -> SchemaError:
    row = int(np.flatnonzero(own != wanted)[0])
    return SchemaError(
        f'field "{field.name}": row {row} has {counted(own[row], "value")}, and its "{field.has_lengths_of}" has '
        f"{wanted[row]}; {remedy}"
    )
