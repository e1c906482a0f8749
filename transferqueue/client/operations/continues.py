"""The arguments of a put that say which rows its rows continue (``parent=``, ``continued=``)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from transferqueue.client.operations import arguments as checks
from transferqueue.client.operations.name_suggestions import CONTINUING
from transferqueue.client.table_info import TableInfo
from transferqueue.errors import UsageError
from transferqueue.errors.text import counted, shown
from transferqueue.storage.inputs.prepare import Prepared
from transferqueue.wire import messages as m


class Continues(NamedTuple):
    """Checked arguments. `parents`: one for all rows, or one for each; `names`: None: all ragged columns."""

    parents: NDArray[np.int64]
    names: list[str] | None

    @property
    def among(self) -> list[str] | None:
        """Names of the columns that continue others; None: all ragged ones."""
        return [] if (self.parents == -1).all() else self.names

    def check_names(self, terms: TableInfo) -> None:
        """Raise `UsageError` if the table has a column whose values these arguments may have been meant to be."""
        for name in CONTINUING if self is not WHOLE else ():
            if name in terms.fields:
                raise UsageError(
                    f'table "{terms.name}" has a field "{name}", and put takes {name}= for rows that continue others, '
                    "so it cannot tell which is meant; make the table with another name of the field"
                )

    def check_columns(self, columns: Sequence[Prepared], rows: int) -> None:
        """Raise `UsageError` if these are not the parents of so many rows, or nothing of the columns continues them."""
        if self.parents.ndim and len(self.parents) != rows:
            raise UsageError(
                f"parent names {counted(len(self.parents), 'row')}, and the put has {rows}; give one for each row, or "
                "a number: one for all"
            )
        if self.among is None and not any(column.continued for column in columns):
            raise UsageError(
                "a put with parent= has no ragged column, so nothing of it continues the parent; give a list of arrays "
                "or of lists, or leave out parent="
            )

    def request(self, put: m.PutRequest) -> m.PutRequest:
        """The put as one that continues these rows, if there are any."""
        if (self.parents == -1).all():
            return put
        names = [field.name for field in put.columns.fields if field.ragged] if self.names is None else self.names
        parents = np.broadcast_to(self.parents, put.rows).astype("<i8").tobytes()
        return m.ContinueRequest(put.table, put.rows, put.columns, put.reservation, put.wait_s, parents, names)


WHOLE: Final = Continues(np.full((), -1, np.int64), [])
"""The rows continue no others."""


def continues_of(parent: Any, continued: Iterable[str] | None) -> Continues:
    """Check the arguments of a put."""
    if parent is None:
        if continued is not None:
            raise UsageError(f"continued={shown(continued)} is given without parent=; say which row it continues")
        return WHOLE
    ids = np.frombuffer(checks.row_ids(parent), "<i8")
    return Continues(ids if np.ndim(parent) else ids.reshape(()), checks.names("continued column", continued))
