"""Columns and tables of data-frame libraries and batches, converted for `put`.

Other libraries offer Arrow's C data interface: a column has ``__arrow_c_array__`` or ``__arrow_c_stream__``, a data
frame the latter. Both are imported once a call, without a copy, since a stream may be read only once and a refused call
may read its columns again. A `Column` of this package has the interface too, but Arrow lacks some of its dtypes, so its
values are taken in forms that keep them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from transferqueue.errors import SchemaError
from transferqueue.errors.text import SHOWN_CHARS, shortened
from transferqueue.schema import TORCH_ONLY_DTYPES
from transferqueue.storage.columns.column import Column
from transferqueue.storage.inputs.arrow import chunked, is_arrow, plain_values
from transferqueue.storage.inputs.prepare import PlainValues, Repeat

PLAIN_TYPES: Final = frozenset({np.ndarray, list, tuple, dict, str, bytes, int, float, bool, type(None)})
"""Types of most columns and facts, which need no look-up."""
_UNNAMED_INDEX: Final = re.compile(r"__index_level_\d+__")
"""The name that pyarrow gives to an index of pandas that has none."""


def import_columns(columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a call by name: an Arrow column for one that another library holds, a form that keeps the dtype
    for a `Column`, or else the value itself.

    `SchemaError` if its library cannot give it, or if it is a whole table.
    """
    return {name: value if type(value) in PLAIN_TYPES else _imported(name, value) for name, value in columns.items()}


def _imported(name: str, value: Any) -> Any:
    if isinstance(value, Repeat):
        return Repeat(_imported(name, value.values), value.counts)
    if isinstance(value, Column):
        return _of_column(value)
    return chunked(value, f'field "{name}"') if is_arrow(value) else value


def _of_column(column: Column) -> Any:
    field = column.field
    if field.dtype == "value":
        return PlainValues(column.list())
    if field.varied:
        return list(column)
    if field.dtype in TORCH_ONLY_DTYPES:
        return column.torch() if field.dense else column.nested()
    if field.dense:
        return column.numpy()
    return list(column) if field.dtype.startswith("complex") else chunked(column.arrow(), f'field "{field.name}"')


def fact_of(name: str, value: Any) -> Any:
    """A fact of rows: an Arrow column as a list, anything else unchanged. `SchemaError` for a null, with its row."""
    return plain_values(value, name) if is_arrow(value) else value


def arrow_columns(frame: Any) -> dict[str, Any] | None:
    """The columns of a table or data frame, by name; None if it has no Arrow interface. An index of pandas that has no
    name is left out.

    `SchemaError` if its library cannot give it as a table, and for two columns of one name.
    """
    if not is_arrow(frame):
        return None
    import pyarrow as pa

    try:
        table = pa.table(frame)
    except Exception as error:
        kind = type(frame)
        raise SchemaError(
            f"{kind.__module__}.{kind.__qualname__} cannot be read as an Arrow table: "
            f"{shortened(str(error), SHOWN_CHARS)}; give a data frame, or a single column by its name: put(name=column)"
        ) from error
    columns = {name: table.column(at) for at, name in enumerate(table.column_names)}
    if len(columns) < table.num_columns:
        raise SchemaError("the table has two columns of one name; rename one")
    return {name: column for name, column in columns.items() if not _UNNAMED_INDEX.fullmatch(name)}
