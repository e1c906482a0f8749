"""Updates computed from old values: read, call the user's function, write unless the values changed meanwhile, else
retry.

The function runs in the calling process and is never sent. An update of several samples and fields is one commit: all
of it, or nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import torch
from tensordict import TensorDict

import transferqueue as tq
from transferqueue.adapters.transfer_queue.samples import table_steps
from transferqueue.adapters.transfer_queue.samples.columns import values_of
from transferqueue.adapters.transfer_queue.steps import Steps
from transferqueue.errors import DeadlineExceeded, RowsChanged
from transferqueue.schema import Field
from transferqueue.storage import PlainValues

T = TypeVar("T")
MergeFunction = Callable[[Any, Any], Any]
"""Makes the new value of one field of one sample from the old value and the one given."""

RETRY_S: Final = 60.0
"""How long an update is repeated while others write the same samples. Each of their writes ends one attempt, so some
writer always makes progress."""


async def retried(
    what: str, attempt: Callable[[], Steps[T]], retry_on: tuple[type[Exception], ...] = (RowsChanged,)
) -> T:
    """Return the result of `attempt`, repeated while others write what it read. ``TimeoutError`` after `RETRY_S`;
    nothing was changed."""
    deadline, attempts = time.monotonic() + RETRY_S, 1
    while True:
        try:
            return await attempt()
        except retry_on as error:
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"{what}: each of {attempts} attempts in {RETRY_S:g} s met a write of the same samples by another "
                    f"caller: {error}; nothing was changed; try again with fewer writers at once"
                ) from error
            attempts += 1


async def merge(table: tq.Table, rows: Any, data: TensorDict, merge_fn: MergeFunction) -> None:
    """Set each field of `data` in these rows to ``merge_fn(old, new)``, in one commit.

    Raises `NotFound` if a row lacks one of the fields, `RowsChanged` if one was written after it was read,
    ``TypeError`` for a result of another type; nothing is changed then. What `merge_fn` raises passes through.
    """
    names = [str(name) for name in data.keys()]  # noqa: SIM118  (a TensorDict is no mapping)
    with await table_steps.read(table, rows, names) as read:
        columns = {name: _merged(table.fields[name], read[name], values_of(data.get(name)), merge_fn) for name in names}
        await table_steps.update(table, rows, columns, if_unchanged=read)


def _merged(field: Field, column: tq.Column, new: Sequence[Any], merge_fn: MergeFunction) -> Any:
    """Return the column of the merged values, as an update takes it."""
    old = column.list() if field.blob else _tensors(field, column)
    values = [merge_fn(before, after) for before, after in zip(old, new, strict=True)]
    for before, value in zip(old, values, strict=True):
        _check(field.name, before, value)
    if field.blob:
        return PlainValues(values)
    return torch.stack(values) if field.dense else values


def _tensors(field: Field, column: tq.Column) -> list[torch.Tensor]:
    """The old values as views, which no other reader sees: a function may change them in place."""
    if field.dense:
        return list(column.torch())
    return list(column.nested().unbind()) if field.ragged else list(map(torch.as_tensor, column))


def _check(name: str, before: Any, value: Any) -> None:
    if not isinstance(before, torch.Tensor):
        if isinstance(value, torch.Tensor):
            raise TypeError(
                f"merge_fn returned a tensor for field {name!r}, which must remain non-tensor; return a plain value"
            )
        return
    if not isinstance(value, torch.Tensor) or value.dtype != before.dtype:
        given = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
        raise TypeError(
            f"merge_fn returned {given} for field {name!r} and must keep dtype {before.dtype}; convert the result"
        )
