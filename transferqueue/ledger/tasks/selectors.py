"""What each selector sorts by: an int64 key per unit, smallest first, and an order among equals.

A unit is a row, or a group seen as one: the oldest version, the sum of tokens and the highest priority of
its members. Units of equal key come in the order in which they became ready; those of `Freshest`, the most
recently put first. A plugin is an object of the server with one method, found by name; a message never
carries code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Protocol

import numpy as np

from transferqueue.errors import InternalError, NotFound, listing
from transferqueue.ledger.rows.arrays import AnyArray, IntArray
from transferqueue.ledger.rows.row_state import RowStore
from transferqueue.policies import (
    Fifo,
    Freshest,
    LongestFirst,
    OldestVersionFirst,
    Plugin,
    Priority,
    Selector,
    TokenBalanced,
)


class UnitFacts:
    """Facts of units, one value each. starts: where each unit's rows begin in `at`; None: a row each."""

    def __init__(self, rows: RowStore, ids: IntArray, at: IntArray, starts: IntArray | None) -> None:
        self._rows = rows
        self._ids = ids
        self._at = at
        self._starts = starts

    def _reduced(self, values: AnyArray, by: np.ufunc) -> AnyArray:
        return values if self._starts is None else by.reduceat(values, self._starts)

    @property
    def count(self) -> int:
        """How many units."""
        return self._at.size if self._starts is None else self._starts.size

    @property
    def version(self) -> IntArray:
        """Policy version; of a group, the oldest."""
        return self._reduced(self._rows.version.a[self._at], np.minimum)

    @property
    def tokens(self) -> IntArray:
        """Tokens; of a group, the sum."""
        return self._reduced(self._rows.facts["tokens"].a[self._at], np.add)

    @property
    def priority(self) -> AnyArray:
        """Priority; of a group, the highest."""
        return self._reduced(self._rows.facts["priority"].a[self._at], np.maximum)

    @property
    def last_row(self) -> IntArray:
        """Row id; of a group, the highest."""
        return self._reduced(self._ids, np.maximum)


class SelectorPlugin(Protocol):
    """What entry point ``transferqueue.selectors`` registers: made from options, it ranks units."""

    def keys(self, units: UnitFacts) -> AnyArray:
        """A number per unit, smallest first: int64 or float64 ``[units]``, no NaN. Must be pure."""
        ...


PluginFactory = Callable[[Mapping[str, str | int | float | bool]], SelectorPlugin]
Ranking = Callable[[UnitFacts], IntArray]


def sortable(values: AnyArray) -> IntArray:
    """Float64 as int64 in the same order: the sign-magnitude trick of radix-sorting floats."""
    bits = (values.astype(np.float64) + 0.0).view(np.int64)
    return np.where(bits < 0, bits ^ np.int64(0x7FFF_FFFF_FFFF_FFFF), bits)


def _all_equal(units: UnitFacts) -> IntArray:
    return np.zeros(units.count, np.int64)


_RANKINGS: Final[dict[type, Ranking]] = {
    Fifo: _all_equal,
    OldestVersionFirst: lambda units: units.version,
    Freshest: lambda units: -units.version,
    LongestFirst: lambda units: -units.tokens,
    Priority: lambda units: -sortable(units.priority),
}

RANKED_BY: Final = {
    Fifo: frozenset[str](),
    OldestVersionFirst: frozenset({"policy_version"}),
    Freshest: frozenset({"policy_version"}),
    LongestFirst: frozenset({"tokens"}),
    Priority: frozenset({"priority"}),
    Plugin: frozenset({"policy_version", "tokens", "priority"}),
}
"""Facts whose change moves a ready unit."""


class Ranker:
    """One task's selector at work."""

    DERIVED: Final = ("equal_counts", "ranked_by", "newest_first", "by_arrival", "_ranking")
    """What follows from the selector and is not in an image."""

    def __init__(self, selector: Selector, plugins: Mapping[str, PluginFactory]) -> None:
        self.selector: Final = selector
        self.rank_by(plugins)

    def rank_by(self, plugins: Mapping[str, PluginFactory]) -> None:
        """Rank as the selector says, with the plugins that are installed; `NotFound` if its own is not."""
        selector = self.selector
        inner = selector.inner if isinstance(selector, TokenBalanced) else selector
        self.equal_counts = selector.equal_counts if isinstance(selector, TokenBalanced) else True
        self.ranked_by = RANKED_BY[type(inner)]
        self.newest_first = isinstance(inner, Freshest)
        self.by_arrival = isinstance(inner, Fifo)
        self._ranking = _plugin(inner, plugins) if isinstance(inner, Plugin) else _RANKINGS[type(inner)]

    def keys(self, units: UnitFacts) -> IntArray:
        """Sort key of each unit."""
        return self._ranking(units)


def _plugin(selector: Plugin, plugins: Mapping[str, PluginFactory]) -> Ranking:
    factory = plugins.get(selector.name)
    if factory is None:
        raise NotFound(
            f'selector plugin "{selector.name}" is not installed on the server; it has {listing(plugins)}. '
            "Register it there by entry point transferqueue.selectors"
        )
    made = factory(dict(selector.options))

    def ranking(units: UnitFacts) -> IntArray:
        keys = np.asarray(made.keys(units))
        if keys.shape != (units.count,) or keys.dtype.kind not in "iuf":
            raise InternalError(
                f'selector plugin "{selector.name}" gave {keys.dtype}{list(keys.shape)} for {units.count} units'
            )
        return sortable(keys) if keys.dtype.kind == "f" else keys.astype(np.int64)

    return ranking
