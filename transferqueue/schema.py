"""Fields: the dtype and shape of a column, and the layout of its bytes in a block.

A *field* is a name, a dtype and the shape of one row's value. A dimension of None varies from row to row. Dtype and
shape determine one of these layouts:

=============  ==========================  =====================================================
layout         field                       buffers of a block of n rows, in this order
=============  ==========================  =====================================================
dense          no None in shape            values ``[n, *shape]``
ragged         only shape[0] is None       offsets int64 ``[n + 1]`` (in steps of the first
                                           dimension), values ``[offsets[n], *shape[1:]]``
varied         any other None              shapes int64 ``[n, ndim]``, offsets int64 ``[n + 1]``
                                           (in elements), values ``[offsets[n]]``
text, bytes,   dtype "str", "bytes",       offsets int64 ``[n + 1]`` (in bytes), data
value          "value" (MessagePack)
=============  ==========================  =====================================================

Each buffer begins on a 64-byte boundary. The layout of a block is a pure function of its fields, its number of rows,
and one count (the last offset) for each field that is not dense. So a few integers describe a block, and its receiver
can check that they fit the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Final

import msgspec

from transferqueue.errors import SchemaError, UsageError, listing
from transferqueue.errors.text import shown
from transferqueue.limits import ALIGNMENT, SIZE_BYTES_MAX, check_name

ITEM_BYTES: Final[dict[str, int]] = {
    "bool": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "str": 1,
    "bytes": 1,
    "value": 1,
}
"""Bytes of one element of each dtype. All are little-endian."""

BLOB_DTYPES: Final = frozenset({"str", "bytes", "value"})
"""Dtypes whose rows are byte strings."""

TORCH_ONLY_DTYPES: Final = frozenset(name for name in ITEM_BYTES if name == "bfloat16" or name.startswith("float8"))
"""Dtypes that numpy lacks: `Column.torch()` gives them, `Column.numpy()` needs ml_dtypes."""

_PER_TOKEN: Final = frozenset(
    {
        "loss_mask",
        "response_mask",
        "token_versions",
        "logprobs",
        "rollout_logprobs",
        "old_logprobs",
        "prox_logprobs",
        "ref_logprobs",
        "values",
        "returns",
        "advantages",
        "token_advantages",
    }
)
"""Fields that have one value a token where their rows have lengths, in the workflows and adapters of this package."""

_FINITE: Final = (_PER_TOKEN | {"rewards"}) - {"loss_mask", "response_mask", "token_versions"}
"""Fields where one NaN or infinity would become the loss of a whole step."""

RAGGED_RANK_MAX: Final = 8
"""The most dimensions of one row's value."""


@lru_cache(maxsize=4096)
def _check_field(name: str, dtype: str, shape: tuple[int | None, ...]) -> None:
    """Raise `SchemaError` if this is no valid field. Cached: each reply names its fields again."""
    check_name("field", name)
    if dtype not in ITEM_BYTES:
        raise SchemaError(f'field "{name}": dtype {shown(dtype)} is unknown; known are {", ".join(ITEM_BYTES)}')
    if dtype in BLOB_DTYPES and shape:
        raise SchemaError(f'field "{name}": dtype {dtype!r} has no shape; omit shape={shape}')
    if len(shape) > RAGGED_RANK_MAX:
        raise SchemaError(f'field "{name}": {len(shape)} dimensions; at most {RAGGED_RANK_MAX}')
    if any(size is not None and not 0 <= size <= SIZE_BYTES_MAX for size in shape):
        raise SchemaError(f'field "{name}": shape {shown(shape)} has a negative size, or one that no memory holds')


@lru_cache(maxsize=4096)
def _check_rules(name: str, dtype: str, shape: tuple[int | None, ...], like: str | None, finite: bool | None) -> None:
    """Raise `SchemaError` for a rule that no value of the field could keep, or that each keeps anyway."""
    if like:
        check_name("field", like)
        if like == name or not shape or shape[0] is not None:
            raise SchemaError(
                f'field "{name}": like={like!r} is for rows of differing lengths, as another field has them; name that '
                "field, and give a shape that begins with None"
            )
    if finite is not None and not isinstance(finite, bool):
        raise SchemaError(f'field "{name}": finite={shown(finite)} is {type(finite).__name__}; give True or False')
    if finite and not _may_be_infinite(dtype):
        raise SchemaError(
            f'field "{name}": finite=True is for floating dtypes, and each {dtype} is finite; leave it out'
        )


def _may_be_infinite(dtype: str) -> bool:
    return dtype in TORCH_ONLY_DTYPES or dtype.startswith(("float", "complex"))


class Field(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, dict=True, repr_omit_defaults=True
):
    """A column's name, dtype and row shape, and the rules for its values: ``Field("image", "uint8", (None, None, 3))``.

    By its name, a ragged field of shape ``(None,)`` with one value a token (``logprobs``, ``rollout_logprobs``,
    ``loss_mask``, ``token_advantages`` and others, see ``transferqueue docs reference/table``) has as many values as
    the row's ``response_ids``, or as prompt and response together. ``rewards``, log-probs, advantages, values and
    returns of floating dtypes are finite.

    The client checks both rules in the call that writes the field, and changes nothing if a row breaks one. It compares
    lengths with a field of the same call; else, in an ack or release, with that field in the batch, and in an update
    with `if_unchanged`, with that field in the rows that were read. A field that comes in another call, by an update of
    row ids, is not compared: the server keeps no lengths. `finite` reads the written values once more, which adds 0.15
    to a put of 4 MiB, and 0.6 to 0.7 to one of 32 MiB.

    Properties are computed once and cached: a batch of many fields reads them often.

    Args:
        name: of the column.
        dtype: such as "float32", "bfloat16", "str", "bytes" or "value".
        shape: the shape of one row's value; default ``()``: a scalar. None stands for a dimension in which rows differ.
            For "str", "bytes" and "value" the shape is ``()``.
        like: another field; each row has as many elements in its first dimension as it has of that one. Default None:
            by the name, as above. "": any number.
        finite: whether NaN and infinity are refused; default None: by the name, as above.

    Raises:
        SchemaError: an invalid field.

    Example:
        >>> Field("teacher_logprobs", "float32", (None,), like="response_ids", finite=True)
        Field(name='teacher_logprobs', dtype='float32', shape=(None,), like='response_ids', finite=True)
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...] = ()
    like: str | None = None
    finite: bool | None = None

    def __post_init__(self) -> None:
        try:
            _check_field(self.name, self.dtype, self.shape)
            if self.like is not None or self.finite is not None:
                _check_rules(self.name, self.dtype, self.shape, self.like, self.finite)
        except TypeError as error:
            raise SchemaError(
                f"field {shown(self.name)}: dtype {shown(self.dtype)} or shape {shown(self.shape)} is not one: {error}"
            ) from error

    @cached_property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]

    @cached_property
    def blob(self) -> bool:
        """Whether a row is a byte string (text, bytes, plain value)."""
        return self.dtype in BLOB_DTYPES

    @cached_property
    def dense(self) -> bool:
        """Whether every row has the same number of bytes."""
        return not self.blob and None not in self.shape

    @cached_property
    def ragged(self) -> bool:
        """Whether only the first dimension varies."""
        return not self.blob and len(self.shape) > 0 and self.shape[0] is None and None not in self.shape[1:]

    @cached_property
    def varied(self) -> bool:
        """Whether a dimension other than (only) the first varies."""
        return not (self.blob or self.dense or self.ragged)

    @cached_property
    def inline(self) -> bool:
        """Whether values are stored in the ledger, not in a block: fixed-width scalars of at most 8 bytes."""
        return self.dense and self.shape == () and self.item_bytes <= 8 and self.dtype not in TORCH_ONLY_DTYPES

    @cached_property
    def has_lengths_of(self) -> str:
        """The field whose lengths its rows have; "": any. Without `like` it is a convention, which prompt and response
        together keep too."""
        if self.like is None:
            return "response_ids" if self.name in _PER_TOKEN and self.shape == (None,) else ""
        return self.like

    @cached_property
    def is_finite(self) -> bool:
        """Whether NaN and infinity are refused."""
        if self.finite is None:
            return self.name in _FINITE and _may_be_infinite(self.dtype)
        return self.finite

    @cached_property
    def fixed(self) -> tuple[int, ...]:
        """Sizes of the dimensions that do not vary: the shape of a dense row, and of one step of a ragged one."""
        return tuple(size for size in self.shape if size is not None)

    @cached_property
    def step_elements(self) -> int:
        """Elements of one offset step: of a dense row, of one step of a ragged row, else 1."""
        return math.prod(self.fixed) if self.dense or self.ragged else 1

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one offset step; of a row, if the field is dense."""
        return self.step_elements * self.item_bytes

    def describe(self) -> str:
        """For messages: ``float32[None, 3]``, ``str``, ``int64``, ``float32[None] like="response_ids"``."""
        said = f"{self.dtype}{list(self.shape)}" if self.shape else self.dtype
        if self.like is not None:
            said += f' like="{self.like}"'
        return said if self.finite is None else f"{said} finite={self.finite}"


@lru_cache(maxsize=4096)
def known(field: Field) -> Field:
    """The first field that equals this one: its cached properties are computed already."""
    return field


@lru_cache(maxsize=4096)
def _form(dtype: str, shape: tuple[int | None, ...]) -> tuple[bool, bool, int]:
    """The layout of a field: dense, varied and row_bytes. Cached, since messages repeat few forms and computing it
    takes longer than the rest of their commit."""
    field = Field("any", dtype, shape)
    return field.dense, field.varied, field.row_bytes


SLICE_MAX: Final = 1 << 48
"""The largest number in a slice: more steps than any memory holds, and twice it is an int64."""

Range = tuple[int, int]
"""``(start, stop)``: the elements from `start` to before `stop`."""


class Share(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="share", array_like=True):
    """One share of each row's first dimension, such as that of one context-parallel rank: ``Share(0, 4)``.

    The dimension is divided into `of` chunks of ``length // of`` steps; the last chunk has the rest too.

    Args:
        index: of the share, from 0 to ``of - 1``.
        of: the number of shares.
        zigzag: default False: one chunk. True: each row has twice as many chunks, and the share is chunks `index` and
            ``2 * of - 1 - index``, one after the other, as ring attention balances causal masks.

    Raises:
        UsageError: an index that is none of ``0 .. of - 1``.

    Example:
        >>> Share(0, 4, zigzag=True)
        Share(index=0, of=4, zigzag=True)
    """

    index: int
    of: int
    zigzag: bool = False

    def __post_init__(self) -> None:
        if (
            not all(type(number) is int for number in (self.index, self.of))
            or not 0 <= self.index < self.of <= SLICE_MAX
        ):
            raise UsageError(
                f"Share({shown(self.index)}, {shown(self.of)}): the first number is the index of a share and the "
                "second how many there are; give whole numbers with 0 <= index < of, such as Share(rank, ranks)"
            )


class Slice:
    """Part of each row's value, for `fields` of a lease or a read: ``fields={"experts": Slice(None, (12, 24))}``.

    It has one entry for each dimension of a row's value, from the first on; missing entries and None are whole. The
    shape of the column is cut to it: of a field ``[None, 48, 4]``, one step a token, ``Slice(None, (12, 24))`` and
    ``Slice(None, Share(1, 4))`` leave ``[None, 12, 4]``. Steps of a ragged row are taken as far as the row has them, so
    a row that is shorter than `start` is empty. A slice fits dense and ragged fields with at least one dimension. The
    call that uses it raises `SchemaError` for any other field, and for one that is shorter than the slice.

    Args:
        first: of the first dimension: ``(start, stop)`` with ``0 <= start < stop``, or a `Share`; default None: all of
            it.
        *inner: of the further dimensions: ``(start, stop)``, a `Share` that is not zigzag, or None.

    Raises:
        UsageError: a range that is empty or negative, or a zigzag share of another dimension than the first.

    Example:
        >>> Slice(None, (12, 24))  # layers 12 to 23 of all tokens
        Slice(None, (12, 24))
        >>> Slice((0, 512))  # the first 512 tokens of each row
        Slice((0, 512))
        >>> Slice(Share(1, 4), None, (0, 8))  # the second quarter of the tokens, the first 8 of the last dimension
        Slice(Share(index=1, of=4, zigzag=False), None, (0, 8))
        >>> Slice(None, Share(3, 8))  # the columns of a matrix that tensor-parallel rank 3 of 8 has
        Slice(None, Share(index=3, of=8, zigzag=False))
    """

    __slots__ = ("first", "inner")

    def __init__(self, first: Range | Share | None = None, *inner: Range | Share | None) -> None:
        self.first = first if isinstance(first, Share) else _range(0, first)
        ranges = [_inner_part(axis, each) for axis, each in enumerate(inner, start=1)]
        while ranges and ranges[-1] is None:
            ranges.pop()
        self.inner = ranges or None

    @property
    def whole(self) -> bool:
        """Whether all of each value is wanted."""
        return self.first is None and self.inner is None

    def __repr__(self) -> str:
        return f"Slice({', '.join(map(repr, (self.first, *(self.inner or ()))))})"

    def __eq__(self, other: object) -> bool:
        return (self.first, self.inner) == (other.first, other.inner) if isinstance(other, Slice) else NotImplemented

    def __hash__(self) -> int:
        return hash((self.first, *(self.inner or ())))


def _inner_part(axis: int, given: Range | Share | None) -> Range | Share | None:
    if not isinstance(given, Share):
        return _range(axis, given)
    if given.zigzag:
        raise UsageError(
            f"axis {axis} of Slice is {shown(given)}; zigzag divides the first dimension: leave zigzag out, or give "
            "(start, stop)"
        )
    return given


def _range(axis: int, given: Range | None) -> Range | None:
    if given is None:
        return None
    if not isinstance(given, tuple) or len(given) != 2 or not all(type(number) is int for number in given):
        raise UsageError(
            f"axis {axis} of Slice is {shown(given)}; give (start, stop), two whole numbers, or None: a Slice takes "
            "every element between"
        )
    if not 0 <= given[0] < given[1] <= SLICE_MAX:
        raise UsageError(
            f"axis {axis} of Slice is {shown(given)}, which is empty, negative or beyond 2**48; give 0 <= start < stop"
        )
    return given


FieldsWanted = Iterable[str] | Mapping[str, Slice | None] | None
"""The fields that a caller wants: names, or names with the part of each (None: all of it); None: the default set."""

NO_SLICES: Final[Mapping[str, Slice]] = {}
"""Of a caller who wants every field whole."""


def sliced_fields(fields: Mapping[str, Field], slices: Mapping[str, Slice]) -> Mapping[str, Field]:
    """`fields` as they are after the slices. Raises as `sliced_field`."""
    if not slices:
        return fields
    sliced = {name: sliced_field(fields[name], wanted) for name, wanted in slices.items() if name in fields}
    return {**fields, **sliced} if sliced else fields


def sliced_field(field: Field, slice_: Slice) -> Field:
    """The field of a column that a slice leaves. `SchemaError` if the slice does not fit the field."""
    dimensions = len(field.shape)
    if not dimensions or field.varied:
        why = "one value a row" if not dimensions else "whose rows differ in more than the first dimension"
        raise SchemaError(f'field "{field.name}" is {field.describe()}, {why}: it cannot be sliced; read it whole')
    inner = slice_.inner or []
    if len(inner) >= dimensions:
        raise SchemaError(
            f'{slice_} has {len(inner) + 1} axes, and field "{field.name}" is {field.describe()}, with {dimensions}; '
            "leave axes out"
        )
    sizes = [_axis_size(field, slice_, axis, each) for axis, each in enumerate(inner, start=1)]
    return known(Field(field.name, field.dtype, (_first_size(field, slice_), *sizes, *field.shape[1 + len(inner) :])))


def _first_size(field: Field, slice_: Slice) -> int | None:
    size = field.shape[0]
    if isinstance(slice_.first, Share):
        return None if size is None else _share_size(slice_.first, size)
    return _axis_size(field, slice_, 0, slice_.first)


def _share_size(share: Share, size: int) -> int:
    chunks = 2 * share.of if share.zigzag else share.of
    rest = size % chunks if (share.zigzag and share.index == 0) or share.index == chunks - 1 else 0
    return size // chunks * (2 if share.zigzag else 1) + rest


def share_range(share: Share, size: int) -> Range:
    """The elements of a dimension of `size` that a share has, which is not zigzag: ``(start, stop)``, perhaps none."""
    chunk = size // share.of
    return share.index * chunk, size if share.index == share.of - 1 else (share.index + 1) * chunk


def _axis_size(field: Field, slice_: Slice, axis: int, wanted: Range | Share | None) -> int | None:
    size = field.shape[axis]
    if wanted is None or size is None:
        return size
    if isinstance(wanted, Share):
        start, stop = share_range(wanted, size)
        if start == stop:
            raise SchemaError(
                f'axis {axis} of {slice_} is empty: field "{field.name}" is {field.describe()}, with {size} there; '
                "take fewer shares"
            )
        return stop - start
    if wanted[1] > size:
        raise SchemaError(
            f'axis {axis} of {slice_} is {wanted}, and field "{field.name}" is {field.describe()}, with {size} there; '
            f"stop is at most {size}"
        )
    return wanted[1] - wanted[0]


def not_taken(table: str, field: str, takes: Iterable[str]) -> str:
    """The text of the error for a field that a table does not accept."""
    return (
        f'field "{field}" is not in table "{table}", which takes only the fields that it was made with or that a task '
        f"names: {listing(takes)}; declare it with add_fields, or make the table with extra_fields=True"
    )


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Where the buffers of one column begin, in bytes from the start of its block; -1: there is no such buffer."""

    values: int
    values_bytes: int
    offsets: int = -1
    shapes: int = -1


def align(size: int, to: int = ALIGNMENT) -> int:
    """`size` rounded up to a multiple of `to`."""
    return -(-size // to) * to


def layout(fields: Sequence[Field], rows: int, counts: Sequence[int]) -> tuple[list[Span], int]:
    """The spans of the columns of a block, and the block's size in bytes.

    `counts` has for each field the last offset (see the table above), 0 for a dense field. `UsageError` if the numbers
    do not describe a block.
    """
    if rows < 1 or len(counts) != len(fields):
        raise UsageError(f"a block of {rows} rows with {len(counts)} counts for {len(fields)} fields is not a block")
    spans: list[Span] = []
    at = 0
    for field, count in zip(fields, counts, strict=True):
        dense, varied, row_bytes = _form(field.dtype, field.shape)
        if count < 0 or (dense and count):
            raise UsageError(f'field "{field.name}": count {count} is not one of a {field.describe()} column')
        shapes = offsets = -1
        if not dense:
            if varied:
                shapes, at = at, align(at + 8 * rows * len(field.shape))
            offsets, at = at, -(-(at + 8 * (rows + 1)) // ALIGNMENT) * ALIGNMENT
        size = (rows if dense else count) * row_bytes
        spans.append(Span(at, size, offsets, shapes))
        at = -(-(at + size) // ALIGNMENT) * ALIGNMENT
    return spans, at
