"""Facts of rows (group, version, tokens, ...): decodes them from a request and checks them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from transferqueue.errors import UsageError
from transferqueue.errors.text import counted
from transferqueue.ledger.arrays import AnyArray, decode
from transferqueue.ledger.attributes import COUNT_MAX, Attribute
from transferqueue.limits import ROWS_PER_REQUEST_MAX, TAGS_MAX, check_names, check_rows
from transferqueue.policies import Tags
from transferqueue.wire.messages import RowFacts

_TOKENS_MAX: Final = 1 << 40
"""Tokens are summed in int64 over a lease of up to 2**20 rows."""
FACTS: Final = (
    Attribute("group_id", "<i8", -1, -1, COUNT_MAX),
    Attribute("group_size", "<i4", 1, 1, COUNT_MAX),
    Attribute("ordinal", "<i8", -1, -COUNT_MAX, COUNT_MAX),
    Attribute("policy_version", "<i8", -1, -1, COUNT_MAX),
    Attribute("policy_version_max", "<i8", -1, -1, COUNT_MAX),
    Attribute("tokens", "<i8", 0, 0, _TOKENS_MAX),
    Attribute("priority", "<f8", 0.0),
)
"""Numeric facts, as messages carry them (`RowFacts`). Selectors negate and compare them as int64, and users read them
as float64: both are exact up to `COUNT_MAX`. A row without a group is a group of one."""
DTYPES: Final = {fact.name: fact.dtype for fact in FACTS}
NO_FACTS_GIVEN: Final = RowFacts()


@dataclass(slots=True)
class CheckedFacts:
    """Checked facts: an array for each numeric fact that is set, keys and tags as lists."""

    numbers: dict[str, AnyArray] = field(default_factory=dict)
    keys: list[str] | None = None
    tags: list[Tags] | None = None

    def take(self, chosen: AnyArray) -> CheckedFacts:
        """Return the facts of the rows at the positions `chosen`."""
        return CheckedFacts(
            {name: values[chosen] for name, values in self.numbers.items()},
            [self.keys[at] for at in chosen] if self.keys is not None else None,
            [self.tags[at] for at in chosen] if self.tags is not None else None,
        )

    def __bool__(self) -> bool:
        return bool(self.numbers) or self.keys is not None or self.tags is not None


NO_FACTS: Final = CheckedFacts()
"""Of a request without facts. Never changed."""


def check_facts(facts: RowFacts, rows: int) -> CheckedFacts:
    """Return `facts` as arrays of `rows` values; `UsageError` if a value is not valid."""
    if facts == NO_FACTS_GIVEN:
        return NO_FACTS
    if facts.keys is not None or facts.tags is not None:
        check_rows(rows, described=True)
    numbers: dict[str, AnyArray] = {}
    for fact in FACTS:
        data = getattr(facts, fact.name)
        if data is not None:
            numbers[fact.name] = decode(fact.name, data, fact.dtype, rows)
            _check_range(fact, numbers[fact.name])
    if "group_id" in numbers or "group_size" in numbers:
        check_groups(numbers)
    keys, tags = facts.keys, facts.tags
    for name, values in (("keys", keys), ("tags", tags)):
        if values is not None and len(values) != rows:
            raise UsageError(f"{name} has {counted(len(values), 'value')} for {counted(rows, 'row')}; give one a row")
    if keys is not None:
        _check_keys(keys)
    if tags is not None:
        _check_tags(tags)
    return CheckedFacts(numbers, keys, tags)


def _check_range(fact: Attribute, values: AnyArray) -> None:
    name, lowest, highest = fact.name, fact.lowest, fact.highest
    if lowest is None or highest is None:
        if np.isnan(values).any():
            raise UsageError(f"{name} has a NaN, which cannot be ordered; give numbers")
        return
    if not values.size:
        return
    least, most = (values.item(),) * 2 if values.size == 1 else (int(values.min()), int(values.max()))
    if least < lowest or most > highest:
        wrong = least if least < lowest else most
        raise UsageError(f"{name} {wrong} is out of range; {name} is {lowest} to {highest}")


def check_groups(numbers: dict[str, AnyArray]) -> None:
    """Raise `UsageError` unless the group ids and sizes of these numeric facts (by name) fit each other."""
    ids, sizes = numbers.get("group_id"), numbers.get("group_size")
    if ids is None and sizes is None:
        return
    if ids is None or sizes is None:
        present, missing = ("group_size", "group_id") if ids is None else ("group_id", "group_size")
        raise UsageError(f"{present} without {missing}; pass both")
    if sizes.size and int(sizes.max()) > ROWS_PER_REQUEST_MAX:
        raise UsageError(
            f"group_size {int(sizes.max())} is above {ROWS_PER_REQUEST_MAX}, the most rows one lease may have"
        )
    alone = ids < 0
    if (sizes[alone] > 1).any():
        raise UsageError(f"group_size {int(sizes[alone].max())} set for a row without a group_id; pass both")


def _check_keys(keys: list[str]) -> None:
    named = [key for key in keys if key]
    if len(set(named)) < len(named):
        twice, _ = Counter(named).most_common(1)[0]
        raise UsageError(f"key {twice!r} appears twice in one request; a key names one row")


def _check_tags(tags: list[Tags]) -> None:
    """As `policies.check_tags` of each, but for the values: the message has bounds for those."""
    most = max(map(len, tags), default=0)
    if most > TAGS_MAX:
        raise UsageError(f"a row has {most} tags; at most {TAGS_MAX}: use a column")
    check_names("tag", list(set[str]().union(*tags)))
