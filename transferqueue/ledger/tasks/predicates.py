"""Evaluates the predicates of a lease or a read. A row must satisfy all predicates of the list."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from transferqueue.errors import UsageError
from transferqueue.ledger.arrays import BoolArray, IntArray
from transferqueue.ledger.rows import RowStore
from transferqueue.limits import PREDICATES_MAX, check_name
from transferqueue.policies import Compare, Predicate, TagIs, VersionBetween

_OPERATORS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    ">": operator.gt,
}
_FACTS: Final = ("tokens", "priority", "ordinal")


def check_where(rows: RowStore, where: Sequence[Predicate], expected_fields: frozenset[str]) -> None:
    """Raise if a predicate cannot be evaluated here. `expected_fields`: of some task, and not declared yet."""
    if len(where) > PREDICATES_MAX:
        raise UsageError(f"where has {len(where)} predicates; at most {PREDICATES_MAX}")
    for predicate in where:
        if isinstance(predicate, TagIs):
            check_name("tag", predicate.name)
        elif isinstance(predicate, Compare):
            _check_compare(rows, predicate, expected_fields)


def _check_compare(rows: RowStore, predicate: Compare, expected_fields: frozenset[str]) -> None:
    name = predicate.field
    field = rows.fields.get(name)
    if field is None:
        if name not in _FACTS and name not in expected_fields:
            raise rows.unknown_field(name)
        return
    if not field.inline:
        raise UsageError(
            f'where compares field "{name}", which is {field.describe()}; only scalars of at most 8 bytes and '
            f"{', '.join(_FACTS)} can be compared"
        )
    if field.dtype.startswith("complex") and predicate.op not in ("==", "!="):
        raise UsageError(
            f'where orders field "{name}", which is {field.dtype}; complex numbers have no order: use == or !='
        )


def matches(rows: RowStore, where: Sequence[Predicate], ids: IntArray, at: IntArray) -> BoolArray:
    """Which rows satisfy every predicate."""
    matching = np.ones(ids.size, np.bool_)
    for predicate in where:
        matching &= _matches(rows, predicate, ids, at)
    return matching


def _matches(rows: RowStore, predicate: Predicate, ids: IntArray, at: IntArray) -> BoolArray:
    if isinstance(predicate, TagIs):
        return _match_tag(rows, predicate, ids)
    if isinstance(predicate, VersionBetween):
        return _version_between(rows, predicate, at)
    return _compare(rows, predicate, at)


def _match_tag(rows: RowStore, predicate: TagIs, ids: IntArray) -> BoolArray:
    def same(row: int) -> bool:
        value = rows.tags.get(row, {}).get(predicate.name)
        # Tag 1 and tag True compare equal in Python, but are different tags.
        return value == predicate.value and isinstance(value, bool) == isinstance(predicate.value, bool)

    return np.fromiter((same(row) for row in ids.tolist()), np.bool_, ids.size)


def _version_between(rows: RowStore, predicate: VersionBetween, at: IntArray) -> BoolArray:
    version = rows.version.a[at]
    between = np.ones(at.size, np.bool_)
    if predicate.low is not None:
        between &= version >= predicate.low
    if predicate.high is not None:
        between &= version <= predicate.high
    return between


def _compare(rows: RowStore, predicate: Compare, at: IntArray) -> BoolArray:
    compare = _OPERATORS[predicate.op]
    column = rows.inline.get(predicate.field)
    if column is not None:
        values = column.a[at]
        if values.dtype == np.bool_:  # numpy cannot compare bool with a 64-bit number
            values = values.view(np.uint8)
        with np.errstate(over="ignore"):  # a value beyond the column's range becomes infinity
            satisfied: BoolArray = compare(values, predicate.value)
        return satisfied & rows.has_all(at, rows.mask((predicate.field,)))
    if predicate.field in _FACTS:
        matching: BoolArray = compare(rows.facts[predicate.field].a[at], predicate.value)
        return matching
    return np.zeros(at.size, np.bool_)
