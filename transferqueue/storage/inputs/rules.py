"""What a field says of its values beyond dtype and shape: as many as another field has (`Field.like`), and finite (`Field.finite`).

Lengths are compared before a byte is written: those of the columns of one commit, and those that the rows of a lease came with. A field
with a rule by its name alone keeps a convention, of which there are two: one value for each token of the response, or of prompt and
response together, perhaps without the first. Finite values are looked at where they lie after they were written, before the commit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from transferqueue.errors import SchemaError
from transferqueue.schema import TORCH_ONLY_DTYPES, Field
from transferqueue.storage.elements.dtypes import I64, U8, stored_dtype
from transferqueue.storage.elements.numbers import widen_to_float32
from transferqueue.text import counted

if TYPE_CHECKING:
    from transferqueue.storage.inputs.prepare import Prepared

Lengths = Callable[[str], "I64 | None"]
"""The lengths of a field's rows, int64 ``[rows]``; None if they are not known."""


def unknown(name: str) -> I64 | None:
    """The lengths of columns that rows have already, where nothing is known of them."""
    return None


def check_lengths(columns: Sequence[Prepared], before: Lengths) -> None:
    """Raise `SchemaError` if a column of a commit has other lengths than its field says.

    before: the lengths that the rows have already.
    """
    for column in columns:
        if column.field.has_lengths_of:
            _check_lengths(column, {each.field.name: each for each in columns}, before)


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
    if whole is None:  # not known here: as long as the response, or longer
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
        f'field "{field.name}": row {row} has {counted(own[row], "value")}, and its "{field.has_lengths_of}" has {wanted[row]}; {remedy}'
    )


_EXPONENTS: Final = {"float16": 0x7C00, "bfloat16": 0x7F80}
"""Bits that are all set in a NaN or an infinity alone."""


def check_finite(column: Prepared, values: U8) -> None:
    """Raise `SchemaError` if the written values of a column have a NaN or an infinity. values: its bytes."""
    dtype = column.field.dtype
    numbers = values.view(stored_dtype(dtype))
    if dtype in _EXPONENTS:
        bits, exponent = numbers.view("<u2"), np.uint16(_EXPONENTS[dtype])
        fine = not ((bits & exponent) == exponent).any()
    elif dtype in TORCH_ONLY_DTYPES:
        fine = bool(np.isfinite(widen_to_float32(numbers, dtype)).all())
    else:
        fine = _all_finite(numbers.view(f"<f{numbers.itemsize // 2}") if numbers.dtype.kind == "c" else numbers)
    if not fine:
        raise _infinite(column, widen_to_float32(numbers, dtype) if dtype in TORCH_ONLY_DTYPES else numbers)


def _all_finite(numbers: NDArray[Any]) -> bool:
    """One that is not finite makes the sum of squares so too, which takes half as long for float32, a tenth for float64."""
    with np.errstate(all="ignore"):
        return bool(np.isfinite(np.dot(numbers, numbers)) or np.isfinite(numbers).all())


def _infinite(column: Prepared, numbers: NDArray[Any]) -> SchemaError:
    at = int(np.flatnonzero(~np.isfinite(numbers))[0])
    stored_row = at * column.stored_rows // len(numbers)
    if column.offsets is not None:
        element = at * int(column.offsets[-1]) // len(numbers)
        stored_row = int(np.searchsorted(column.offsets, element, "right")) - 1
    row = stored_row if column.slots is None else int(np.flatnonzero(column.slots == stored_row)[0])
    count = int(np.count_nonzero(~np.isfinite(numbers)))
    return SchemaError(
        f'field "{column.field.name}": row {row} has {numbers[at]} ({count} of {numbers.size} values are not finite), which would become the '
        "loss of a whole step; mask or drop such rows, or declare the field with finite=False"
    )
