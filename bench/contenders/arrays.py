"""The form that peers without ragged tensors are given: for each column its values and its offsets, as numpy arrays.

This is kinder to them than a user would be, who holds lists of tensors: nothing is left for them to flatten.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from bench.workloads import Bytes, Counts, Flat

Arrays = dict[str, tuple[Bytes, Counts]]


def arrays(columns: Mapping[str, Flat]) -> Arrays:
    """Values and bytes per row, by name. A value that rows share is repeated: these peers know no sharing."""
    return {name: _repeated(flat) for name, flat in columns.items()}


def _repeated(flat: Flat) -> tuple[Bytes, Counts]:
    if flat.repeats == 1:
        return flat.values, flat.counts
    groups = len(flat.counts)
    values = np.repeat(flat.values.reshape(groups, -1), flat.repeats, axis=0).reshape(-1)
    return values, np.repeat(flat.counts, flat.repeats)


def some_rows(got: Mapping[str, Any], names: list[str], rows: list[int] | None) -> Arrays:
    """The columns asked for; of these the rows asked for, gathered as cheaply as numpy can."""
    chosen = {name: got[name] for name in names}
    if rows is None:
        return chosen
    return {name: _gather(values, counts, np.asarray(rows)) for name, (values, counts) in chosen.items()}


def _gather(values: Bytes, counts: Counts, rows: Counts) -> tuple[Bytes, Counts]:
    ends = np.cumsum(counts)
    parts = [values[ends[row] - counts[row] : ends[row]] for row in rows.tolist()]
    return np.concatenate(parts), counts[rows]
