"""Compares the lengths of columns before a byte is written: a field may demand as many elements in each row as another
one has (`Field.like`).

It knows the lengths of the columns of one call, and of columns of the same rows that a lease or a read brought. A field
that has the rule only by its name keeps one of two conventions: a value for each token of the response, or for each of
prompt and response together, perhaps without the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from transferqueue.errors import SchemaError
from transferqueue.errors.text import counted
from transferqueue.schema import Field
from transferqueue.storage.elements.dtypes import I64
from transferqueue.storage.inputs.prepare import Prepared

Lengths = Callable[[str], "I64 | None"]
"""The lengths of a field's rows, int64 ``[rows]``; None if unknown."""


def unknown(name: str) -> I64 | None:
    """None: the lengths of existing columns are unknown."""
    return None


def check_lengths(columns: Sequence[Prepared], before: Lengths) -> None:
    """Raise `SchemaError` if a column of a commit has other lengths than its field says.

    Args:
        columns: of the commit. A column that others are like is looked up here first.
        before: the lengths that the rows have already.
    """
    for column in columns:
        if column.field.has_lengths_of:
            _check_lengths(column, {other.field.name: other for other in columns}, before)


def _check_lengths(column: Prepared, columns: Mapping[str, Prepared], before: Lengths) -> None:
    def lengths(name: str) -> I64 | None:
        return columns[name].row_lengths() if name in columns else before(name)

    field, own = column.field, column.row_lengths()
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
