"""A source of prompts from Arrow, Parquet or ``datasets``: one group for each prompt, in an order fixed by a seed, from
any position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

import transferqueue as tq
from transferqueue.errors import NotFound, UsageError, listing


class Dataset(Protocol):
    """The method of ``datasets.Dataset`` that is used here."""

    def with_format(self, form: str, /) -> Any:
        """The same rows in another format, such as ``arrow``."""


class PromptSource:
    """A producer (`protocols.Producer`) of prompts: each becomes a group of `group_size` rows that share its values.

    Rows have the facts ``ordinal`` and ``group_id``, both the number of the prompt.

    Args:
        source: an Arrow table; a Parquet or Arrow IPC file; or a ``datasets.Dataset``. Held in memory, or memory-mapped
            where Arrow can.
        columns: source columns to use, or a mapping from them to names of fields (``{"question": "prompt"}``); default
            None: all, with their names.
        group_size: rows of each prompt, at least 1; default 1.
        groups_per_put: prompts in one put, at least 1; default 16.
        epochs: how often each prompt is used, at least 1; default 1.
        seed: each epoch gets its own order; default None: the order of the source.
        start: number of the first prompt, counted over all epochs; default 0. `Table.cursor` says where a stopped job
            continues.

    Raises:
        NotFound: there is no such file or column.
        UsageError: a source without rows or of another kind, or a number out of range.
    """

    def __init__(
        self,
        source: pa.Table | Path | str | Dataset,
        *,
        columns: Sequence[str] | Mapping[str, str] | None = None,
        group_size: int = 1,
        groups_per_put: int = 16,
        epochs: int = 1,
        seed: int | None = None,
        start: int = 0,
    ) -> None:
        self._table = _chosen(_arrow(source), columns)
        if min(group_size, groups_per_put, epochs) < 1 or start < 0:
            raise UsageError(
                f"prompts with group_size={group_size}, groups_per_put={groups_per_put}, epochs={epochs}, "
                f"start={start}: the first three are at least 1, the last at least 0"
            )
        if not len(self._table):
            raise UsageError("the source of prompts has no rows; give at least one")
        self._group_size, self._groups_per_put = group_size, groups_per_put
        self._seed = seed
        self._at, self._end = start, epochs * len(self._table)

    def wants(self) -> int:
        """Rows of the next put; 0 at the end."""
        return self._group_size * max(0, min(self._groups_per_put, self._end - self._at))

    def __call__(self, rows: int) -> Mapping[str, Any]:
        """Return the next groups, as arguments of `Table.put`.

        Args:
            rows: as `wants` returned.
        """
        ordinals = np.arange(self._at, self._at + rows // self._group_size)
        rows_of_source = self._table.take(pa.array(self._places(ordinals)))
        self._at += len(ordinals)
        columns = {name: tq.Repeat(rows_of_source[name], self._group_size) for name in rows_of_source.column_names}
        number = np.repeat(ordinals, self._group_size)
        return {**columns, "ordinal": number, "group_id": number, "group_size": self._group_size}

    def _places(self, ordinals: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the positions in the source of these prompt numbers."""
        epochs, places = np.divmod(ordinals, len(self._table))
        if self._seed is None:
            return places
        for epoch in np.unique(epochs):
            of_it = epochs == epoch
            order = np.random.default_rng([self._seed, int(epoch)]).permutation(len(self._table))
            places[of_it] = order[places[of_it]]
        return places


def _arrow(source: Any) -> pa.Table:
    if isinstance(source, pa.Table):
        return source
    if isinstance(source, str | Path):
        return _file(Path(source))
    if callable(getattr(source, "with_format", None)):
        return source.with_format("arrow")[:]
    raise UsageError(
        f"prompts come from {type(source).__name__}; give an Arrow table, a Parquet or Arrow file, or a "
        "datasets.Dataset"
    )


def _file(path: Path) -> pa.Table:
    try:
        if path.suffix == ".parquet":
            return pyarrow.parquet.read_table(path, memory_map=True)
        with pa.memory_map(str(path)) as mapped:
            opened = pyarrow.ipc.open_file if mapped.read(6) == b"ARROW1" else pyarrow.ipc.open_stream
            mapped.seek(0)
            return opened(mapped).read_all()
    except FileNotFoundError as error:
        raise NotFound(f"there is no file of prompts at {path}") from error
    except pa.ArrowInvalid as error:
        raise UsageError(f"{path} is neither a Parquet nor an Arrow file: {error}") from error


def _chosen(table: pa.Table, columns: Sequence[str] | Mapping[str, str] | None) -> pa.Table:
    if columns is None:
        return table
    names = dict(columns) if isinstance(columns, Mapping) else {name: name for name in columns}
    for name in names:
        if name not in table.column_names:
            raise NotFound(f'the source of prompts has no column "{name}"; it has {listing(table.column_names)}')
    return table.select(list(names)).rename_columns(list(names.values()))
