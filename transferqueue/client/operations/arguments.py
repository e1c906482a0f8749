"""Check arguments before they are sent: the errors name the argument, which those of the message decoder could not."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping, Sized
from functools import lru_cache
from itertools import islice
from typing import Any, Final, TypeVar, get_type_hints

import msgspec
import numpy as np

from transferqueue.client.session.calls import Deadline, timeout
from transferqueue.client.session.operation_runner import Operation, StartDeadline
from transferqueue.errors import InternalError, UsageError
from transferqueue.errors.text import SHOWN_CHARS, shortened, shown
from transferqueue.limits import (
    COUNT_MAX,
    FIELDS_MAX,
    STEP_MAX,
    check_name,
    check_rows,
)
from transferqueue.schema import NO_SLICES, FieldsWanted, Slice

T = TypeVar("T")
_WHOLE_MAX: Final = COUNT_MAX
_HOMES: Final = re.compile(r"(transferqueue\.\w+|typing|collections\.abc)\.")


def within(timeout_s: object) -> Operation[Deadline]:
    """Start the deadline of the operation, `timeout_s` seconds from now (None: no limit). `UsageError` if it is not a
    time."""
    deadline = yield StartDeadline(timeout(timeout_s))
    if not isinstance(deadline, Deadline):
        raise InternalError(f"a deadline was answered with {type(deadline).__name__}")
    return deadline


def whole(name: str, value: object, least: int = 0, most: int = _WHOLE_MAX) -> int:
    """An integer from `least` to `most`."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(f"{name}={shown(value)} is {type(value).__name__}; give an integer") from None
    if not least <= number <= most:
        raise UsageError(f"{name}={shown(value)} is out of range; give {least} to {most}")
    return number


def flag(name: str, value: object) -> bool:
    """True or False: a text such as "no" is neither."""
    if not isinstance(value, bool | np.bool_):
        raise UsageError(f"{name}={shown(value)} is {type(value).__name__}; give True or False")
    return bool(value)


def step(value: object, least: int = 0) -> int:
    """A trainer's step."""
    return whole("step", value, least, STEP_MAX)


def positive(name: str, value: object) -> int:
    """An integer of at least 1."""
    return whole(name, value, least=1)


def row_ids(rows: object) -> bytes:
    """Row ids as a message carries them: one id, a sequence, an array or a tensor of ids."""
    try:
        ids = np.asarray(rows)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise UsageError(
            f"rows cannot be read as an array: {shortened(str(error), SHOWN_CHARS)}; give row ids: integers, in one "
            "dimension"
        ) from error
    if ids.size == 0:
        ids = ids.astype(np.int64)
    if ids.dtype.kind not in "iu" or ids.ndim > 1:
        raise UsageError(f"rows are {ids.dtype}{list(ids.shape)}; give row ids: integers, in one dimension")
    check_rows(ids.size)
    return ids.astype("<i8").tobytes()


def few(subject: str, values: Iterable[T], most: int) -> tuple[T, ...]:
    """Take the values, at most `most` of them: an endless iterator is refused too."""
    taken = tuple(islice(values, most + 1))
    if len(taken) > most:
        count = len(values) if isinstance(values, Sized) else f"more than {most}"
        raise UsageError(f"{count} {subject} are given; at most {most} are allowed")
    return taken


def names(kind: str, values: Iterable[str] | None) -> list[str] | None:
    """Names of the fields that a caller wants; None: the default set."""
    if values is None:
        return None
    if isinstance(values, str):
        raise UsageError(f"{kind}s are one string, {shown(values)}; give a list of names")
    if not isinstance(values, Iterable):
        raise UsageError(f"{kind}s are {type(values).__name__}, {shown(values)}; give a list of names")
    taken = few(f"{kind}s", values, FIELDS_MAX)
    try:
        return list(_checked(kind, taken))
    except TypeError:  # a value without a hash, such as a list, cannot be cached
        return [check_name(kind, name) for name in taken]


def field_slices(fields: FieldsWanted) -> tuple[list[str] | None, Mapping[str, Slice]]:
    """The names of the fields that a caller wants, and the slices of those not wanted whole."""
    wanted = names("field", fields)
    if not isinstance(fields, Mapping):
        return wanted, NO_SLICES
    for name, part in fields.items():
        if part is not None and not isinstance(part, Slice):
            raise UsageError(
                f"fields[{name!r}] is {type(part).__name__}, {shown(part)}; give a tq.Slice, such as tq.Slice((0, "
                "512)), or None for all of it"
            )
    return wanted, {name: part for name, part in fields.items() if part is not None and not part.whole}


@lru_cache(maxsize=64)
def _checked(kind: str, values: tuple[str, ...]) -> tuple[str, ...]:
    """Cached, since each step asks for the same names."""
    return tuple(check_name(kind, name) for name in values)


def peer(replica: object) -> tuple[int, int]:
    """``replica=(i, n)``: this is peer i of n; None is ``(0, 1)``."""
    if replica is None:
        return 0, 1
    if not isinstance(replica, tuple | list) or len(replica) != 2:
        raise UsageError(f"replica={shown(replica)} is not a pair; give (i, n): this is peer i of n, from 0")
    n = whole("replica's n", replica[1], least=1)
    return whole("replica's i", replica[0], most=n - 1), n


def policy(name: str, value: Any, kind: Any) -> Any:
    """Check that a value is of `kind`, and its parts of their declared types: msgspec does not check structs that are
    made by hand."""
    if (error := _refusal(value, kind)) is not None:
        raise UsageError(f"{name}: {_misfit(value) or f'{shown(value)} cannot be used: {error}'}")
    return value


def _refusal(value: Any, kind: Any) -> Exception | None:
    try:
        msgspec.convert(msgspec.to_builtins(value, builtin_types=(bytes,)), kind)
    except (msgspec.ValidationError, TypeError, OverflowError, UnicodeEncodeError) as error:
        return error
    return None


def _misfit(value: Any) -> str:
    """Name the part of a struct that is not of its declared type: ``selector='fifo' is not Fifo | Priority; give one``.
    "": none."""
    if isinstance(value, type):  # a policy's class, whose fields have no values
        return ""
    for field in getattr(value, "__struct_fields__", ()):
        part, kind = getattr(value, field), get_type_hints(type(value))[field]
        if _refusal(part, kind) is not None:
            kinds = kind.__name__ if isinstance(kind, type) else _HOMES.sub("", str(kind))
            deeper = _misfit(part)
            return f"{field}.{deeper}" if deeper else f"{field}={shown(part)} is not {kinds}; give one"
    return ""
