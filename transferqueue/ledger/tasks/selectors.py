"""Computes the sort keys of selectors: an int64 per unit, smallest first, and the order among equal keys.

A unit is a row or a whole group. The facts of a group are the oldest version, the sum of tokens and the highest
priority of its members. Units of equal key keep the order in which they became ready; for `Freshest`, the one put last
comes first. A plugin is an object with one method that the server has loaded, found by name. No message carries code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Protocol

import numpy as np

from transferqueue.errors import InternalError, NotFound, UsageError, listing
from transferqueue.errors.text import SHOWN_CHARS, shortened, shown
from transferqueue.lazy import Plugins
from transferqueue.ledger.arrays import AnyArray, IntArray
from transferqueue.ledger.rows import RowStore
from transferqueue.policies import (
    Fifo,
    Freshest,
    LongestFirst,
    OldestVersionFirst,
    Plugin,
    Priority,
    PutOrder,
    Selector,
    TokenBalanced,
)


class UnitFacts:
    """Facts of units, one value each. `starts`: the start of each unit's rows in `at`; None: each unit is one row."""

    def __init__(self, rows: RowStore, ids: IntArray, at: IntArray, starts: IntArray | None) -> None:
        self._rows = rows
        self._ids = ids
        self._at = at
        self._starts = starts

    def _reduced(self, values: AnyArray, by: np.ufunc) -> AnyArray:
        return values if self._starts is None else by.reduceat(values, self._starts)

    @property
    def count(self) -> int:
        """Number of units."""
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
    """An object that ranks units.

    A package registers its class under the name that `policies.Plugin` gives, and is installed where the server runs::

        [project.entry-points."transferqueue.selectors"]
        mine = "my_package:MySelector"

    The server imports the class when a task first names it, and makes an object of it from the task's options, which it
    may refuse by an exception. An exception of `keys` ends the server.
    """

    def keys(self, units: UnitFacts) -> AnyArray:
        """Return a number per unit, smallest first: int64 or float64 ``[units]``, no NaN. Must be pure."""
        ...


PluginFactory = Callable[[Mapping[str, str | int | float | bool]], SelectorPlugin]
SELECTORS: Final = Plugins("transferqueue.selectors", {})
"""The selectors of other packages. A server gives its ledger those that are `found` at its start."""
Ranking = Callable[[UnitFacts], IntArray]


def sortable(values: AnyArray) -> IntArray:
    """Float64 as int64 in the same order: the sign-magnitude trick of radix-sorting floats."""
    bits = (values.astype(np.float64) + 0.0).view(np.int64)
    return np.where(bits < 0, bits ^ np.int64(0x7FFF_FFFF_FFFF_FFFF), bits)


def _all_equal(units: UnitFacts) -> IntArray:
    return np.zeros(units.count, np.int64)


_RANKINGS: Final[dict[type, tuple[Ranking, frozenset[str]]]] = {
    Fifo: (_all_equal, frozenset()),
    PutOrder: (lambda units: units.last_row, frozenset()),
    OldestVersionFirst: (lambda units: units.version, frozenset({"policy_version"})),
    Freshest: (lambda units: -units.version, frozenset({"policy_version"})),
    LongestFirst: (lambda units: -units.tokens, frozenset({"tokens"})),
    Priority: (lambda units: -sortable(units.priority), frozenset({"priority"})),
}
"""How each selector ranks units, and the facts that it sorts by: if one changes, ready units are ranked again."""

_RANKED_BY_PLUGIN: Final = frozenset({"policy_version", "tokens", "priority"})


class Ranker:
    """The selector of one task."""

    def __init__(self, selector: Selector, plugins: Mapping[str, PluginFactory]) -> None:
        """`NotFound` if the selector needs a plugin that is not installed, `UsageError` if that cannot be imported or
        refuses its options."""
        self.selector: Final = selector
        inner = selector.inner if isinstance(selector, TokenBalanced) else selector
        self.equal_counts = selector.equal_counts if isinstance(selector, TokenBalanced) else True
        self.newest_first = isinstance(inner, Freshest)
        self.by_arrival = isinstance(inner, Fifo)
        if isinstance(inner, Plugin):
            self._ranking, self.ranked_by = _plugin(inner, plugins), _RANKED_BY_PLUGIN
        else:
            self._ranking, self.ranked_by = _RANKINGS[type(inner)]

    def keys(self, units: UnitFacts) -> IntArray:
        """Sort key of each unit."""
        return self._ranking(units)


def _plugin(selector: Plugin, plugins: Mapping[str, PluginFactory]) -> Ranking:
    factory = plugins.get(selector.name)
    if factory is None:
        raise NotFound(
            f'selector plugin "{shortened(selector.name, SHOWN_CHARS)}" is not installed on the server; it has '
            f"{listing(plugins)}. Register it there by entry point transferqueue.selectors"
        )
    try:
        made = factory(dict(selector.options))
    except Exception as error:
        why = shortened(f"{type(error).__name__}: {error}", SHOWN_CHARS)
        raise UsageError(
            f'selector plugin "{selector.name}" refused options={shown(selector.options)} ({why}); give others'
        ) from error

    def ranking(units: UnitFacts) -> IntArray:
        keys = np.asarray(made.keys(units))
        if keys.shape != (units.count,) or keys.dtype.kind not in "iuf":
            raise InternalError(
                f'selector plugin "{selector.name}" gave {keys.dtype}{list(keys.shape)} for {units.count} units'
            )
        return sortable(keys) if keys.dtype.kind == "f" else keys.astype(np.int64)

    return ranking
