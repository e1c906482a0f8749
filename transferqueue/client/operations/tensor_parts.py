"""The part of a version that a pull takes: all of a tensor, a range of its rows, or a part along any of its dimensions.

A tensor may have been published in slices along its first dimension, each in a block of its own. So the wanted part of
a tensor is a part of each of its slices: a slice that has no wanted row is not needed at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np

from transferqueue.client.operations import arguments as checks
from transferqueue.client.operations.publish import base_field
from transferqueue.client.operations.stored_ranges import StoredRange
from transferqueue.client.operations.weight_blocks import BASE
from transferqueue.errors import UsageError
from transferqueue.errors.text import shown
from transferqueue.limits import ITEMS_MAX
from transferqueue.schema import Field, Share, Slice, share_range, sliced_field
from transferqueue.storage.elements.dtypes import U8
from transferqueue.storage.memory.delta import read_delta, section_bytes
from transferqueue.wire import messages as m

Only = Iterable[str] | Mapping[str, range | Slice | None]
"""What a pull takes: names of tensors of the base, or a mapping from names to the part of each: a `Slice`, a range of
rows along dimension 0, or None for all of it."""

WHOLE: Final = Slice()


class TensorParts:
    """The tensors, and parts of tensors, that a pull takes. `UsageError` unless they are names, or names with parts."""

    def __init__(self, only: Only | None) -> None:
        self._wanted: dict[str, range | Slice | None] | None = None if only is None else _checked(only)

    @property
    def everything(self) -> bool:
        """Whether the pull takes whole versions."""
        return self._wanted is None

    @property
    def names(self) -> frozenset[str]:
        """The fields of the tensors that are named."""
        return frozenset(self._wanted or ())

    def of(self, stored: StoredRange) -> Slice | None:
        """The wanted part of a range; None: it has nothing that is wanted. `SchemaError` for a part that does not fit
        its tensor."""
        field, one = stored.field, stored.slice
        if self._wanted is None:
            return WHOLE
        name = field.name if one is None else one.tensor
        if name not in self._wanted:
            return None
        part = self._wanted[name]
        if part is None:
            return WHOLE
        sizes = field.fixed if one is None else (one.rows, *field.fixed[1:])
        if isinstance(part, range):
            if not sizes or part.stop > sizes[0]:
                return None
            part = Slice((part.start, part.stop))
        return _of_slice(Field(name, field.dtype, sizes), part, one, field.fixed[0] if field.fixed else 0)


def _of_slice(tensor: Field, part: Slice, one: m.TensorSlice | None, rows: int) -> Slice | None:
    """The part of a slice with `rows` rows."""
    sliced_field(tensor, part)  # refuses what does not fit
    (start, stop), *inner = _ranges(tensor, part)
    first = 0 if one is None else one.first
    start, stop = max(start - first, 0), min(stop - first, rows)
    if start >= stop:
        return None
    sizes = (rows, *tensor.fixed[1:])
    return Slice(
        *(None if bounds == (0, size) else bounds for bounds, size in zip([(start, stop), *inner], sizes, strict=True))
    )


def _ranges(tensor: Field, part: Slice) -> list[tuple[int, int]]:
    """The wanted range of each dimension."""
    given = [part.first, *(part.inner or ())]
    return [
        (0, size) if one is None else share_range(one, size) if isinstance(one, Share) else one
        for one, size in zip([*given, *[None] * len(tensor.fixed)], tensor.fixed, strict=False)
    ]


def sections_with(stored: StoredRange, part: Slice) -> range:
    """The sections of a range's differences that lead from the first element of the part to its last."""
    step = section_bytes(stored.block.nbytes)
    if part.whole:
        return range(-(-stored.block.nbytes // step))
    bounds = _ranges(stored.field, part)
    first, last = (
        int(np.ravel_multi_index(place, stored.field.fixed)) * stored.field.item_bytes
        for place in zip(*((start, stop - 1) for start, stop in bounds), strict=True)
    )
    return range(first // step, last // step + 1)


def apply_delta_in_part(content: U8, delta: U8, stored: StoredRange, part: Slice) -> None:
    """Make the part of a content before into that after, in place, by the sections `sections_with` it of a difference
    of all of the range. `Corruption` if it is no difference of such a content."""
    sections = sections_with(stored, part)
    for size, positions, added in read_delta(delta, stored.block.nbytes, sections.start, sections.stop):
        shape = [*stored.field.fixed, stored.field.item_bytes // size]
        bounds = [*_ranges(stored.field, part), (0, shape[-1])]
        inside = positions < math.prod(shape)
        places = np.unravel_index(positions[inside], shape)
        wanted = np.logical_and.reduce(
            [(start <= at) & (at < stop) for at, (start, stop) in zip(places, bounds, strict=True)]
        )
        own = np.ravel_multi_index(
            [at[wanted] - start for at, (start, _) in zip(places, bounds, strict=True)],
            [stop - start for start, stop in bounds],
        )
        content.view(f"u{size}")[own] += added[inside][wanted]


def _checked(only: Only) -> dict[str, range | Slice | None]:
    if not isinstance(only, Iterable):
        raise UsageError(
            f"only={shown(only)} is {type(only).__name__}; give names of tensors, or a mapping from names to parts of "
            "them"
        )
    taken = checks.few("tensors", [only] if isinstance(only, str) else only, ITEMS_MAX)
    for name in taken:
        base_field(name)  # before a dict takes it: it may have no hash
    named = dict(only) if isinstance(only, Mapping) else dict.fromkeys(taken)
    for name, part in named.items():
        if isinstance(part, Slice):
            if isinstance(part.first, Share) and part.first.zigzag:
                raise UsageError(
                    f'{part} of tensor "{name}" is zigzag, which divides sequences; leave zigzag out, or give (start, '
                    "stop)"
                )
        elif part is not None and not (isinstance(part, range) and part.step == 1 and 0 <= part.start < part.stop):
            raise UsageError(
                f'{shown(part)} of tensor "{name}" is no part of it: give a tq.Slice, or a range of its rows with step '
                "1 that is not empty, or None for all of it"
            )
    if not named:
        raise UsageError("a pull of no tensors; name at least one in only=, or leave it out for all")
    return {f"{BASE}{name}": part for name, part in named.items()}
