"""State of rows that is the same for every task: fate, facts, which fields are set, inline values.

A mask with one bit per field, in 64-bit words, says which fields a row has. Keys and tags are dicts, since few rows
have them. Everything else is a column of `RowPages`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from transferqueue.errors import AlreadyExists, NotFound, SchemaError, UsageError, listing
from transferqueue.errors.text import SHOWN_CHARS, shortened
from transferqueue.ledger.arrays import AnyArray, BoolArray, Index, IntArray, agreed, numbered
from transferqueue.ledger.attributes import COUNT_MAX, Attribute, Columns
from transferqueue.ledger.rows.row_metadata import DTYPES, FACTS, CheckedFacts
from transferqueue.ledger.rows.row_pages import DONE, FATE, LIVE, RowPages, StateColumn
from transferqueue.limits import FIELDS_MAX
from transferqueue.policies import Tags
from transferqueue.schema import Field, known, not_taken
from transferqueue.wire.codec import encode_constant, encode_fields

ATTRIBUTES: Final = (
    FATE,
    Attribute("age_s", "f8", time="age"),
    Attribute("stamped", "i8", -1, -1, COUNT_MAX),
    *FACTS,
)
"""What is stored of each row, beside its fields, key and tags. A new attribute of a row is declared here."""
_TASKS_LEFT: Final = Attribute("tasks_left", "u1")
_FIELDS: Final = Attribute("fields", "u8")
_FREED: Final = Attribute("freed", "u8")

WORD = 64
MASKS_KEPT = 4096
"""Size of the cache of field masks. Requests use the same few sets of fields again and again."""


REPLY_FIELDS_KEPT = 64
"""As `MASKS_KEPT`, for `reply_fields`, whose entries are larger."""
_UNSET_IN_REPLIES: Final = {fact.name: encode_constant(np.array([fact.fill], fact.dtype)) for fact in FACTS}
_OF_NO_ROWS: Final = dict.fromkeys(DTYPES, b"")
"""A share of a batch may have no rows: one item would stand for at least one."""


class FieldMask:
    """A set of fields as bits: (word, bits) pairs."""

    __slots__ = ("words",)

    def __init__(self, numbers: Iterable[int]) -> None:
        words: dict[int, int] = {}
        for number in numbers:
            words[number // WORD] = words.get(number // WORD, 0) | 1 << number % WORD
        self.words = [(word, np.uint64(bits)) for word, bits in sorted(words.items())]


class RowStore:
    """Facts, fields and inline values of the rows of one table."""

    def __init__(self, table: str) -> None:
        self.table = table
        self.pages = RowPages()
        self.columns = {FATE.name: self.pages.fate} | {
            one.name: self.pages.column(one) for one in ATTRIBUTES if one is not FATE
        }
        """The columns of `ATTRIBUTES`."""
        self.facts = {name: self.columns[name] for name in DTYPES}
        self.facts_given: dict[str, None] = {}
        """Facts that some row has. All others are unset, and replies do not read them."""
        self.version = self.facts["policy_version"]
        self.stamped = self.columns["stamped"]
        """The table's clock when the row last got its policy version."""
        self.group_id = self.facts["group_id"]
        self.put_at = self.columns["age_s"]
        self.tasks_left = self.pages.column(_TASKS_LEFT)
        """Number of tasks that are not done with the row."""
        self.fields: dict[str, Field] = {}
        self.may_add: frozenset[str] | None = None
        """Names of undeclared fields that rows may add. None: any."""
        self.number: dict[str, int] = {}
        self.words: list[StateColumn] = []
        self.freed: list[StateColumn] = []
        """As `words`: which fields a row had until they were freed. Shorter than `words` until a later field is
        freed."""
        self._masks: dict[tuple[str, ...], FieldMask] = {}
        self._reply_fields: dict[tuple[str, ...], tuple[list[str], list[str], bytes]] = {}
        self.inline: dict[str, StateColumn] = {}
        self.keys: dict[int, str] = {}
        self.row_of_key: dict[str, int] = {}
        self.tags: dict[int, Tags] = {}
        self.tags_most = 0
        """The largest number of tags of a row since no row had any."""

    # ------------------------------------------------------------ fields

    def add_field(self, field: Field) -> None:
        """Declare a field that `check_fields` accepted. A field that exists already stays."""
        if field.name in self.fields:
            return
        self.number[field.name] = len(self.fields)
        self.fields[field.name] = field = known(field)
        if len(self.words) * WORD < len(self.fields):
            self.words.append(self.pages.column(_FIELDS))
        if field.inline:
            self.inline[field.name] = self.pages.column(Attribute(field.name, field.dtype))

    def check_fields(self, fields: Sequence[Field]) -> dict[str, Field]:
        """Return the fields of the table with `fields` added; raise if they contradict it or are too many."""
        if len(fields) > FIELDS_MAX:
            raise UsageError(f"a request defines {len(fields)} fields; at most {FIELDS_MAX} are allowed")
        new: dict[str, Field] = {}
        for field in fields:
            existing = self.fields.get(field.name) or new.setdefault(field.name, field)
            if existing != field:
                raise SchemaError(
                    f'field "{field.name}" of table "{self.table}" is {existing.describe()}, not {field.describe()}; '
                    "give values of the declared dtype and shape"
                )
        if len(self.fields) + len(new) > FIELDS_MAX:
            raise UsageError(
                f'table "{self.table}" would have {len(self.fields) + len(new)} fields; at most {FIELDS_MAX} are '
                "allowed"
            )
        return {**self.fields, **new} if new else self.fields

    def check_added(self, names: Iterable[str]) -> None:
        """Raise unless rows may add these fields, which the table does not have yet."""
        if self.may_add is None:
            return
        for name in names:
            if name not in self.may_add:
                raise SchemaError(not_taken(self.table, name, {*self.fields, *self.may_add}))

    def unknown_field(self, name: str) -> NotFound:
        """The error for a field that the table does not have."""
        return NotFound(
            f'field "{shortened(name, SHOWN_CHARS)}" is not in table "{self.table}"; it has {listing(self.fields)}'
        )

    def mask(self, names: Iterable[str]) -> FieldMask:
        """The mask of fields that the table has."""
        key = tuple(names)
        mask = self._masks.get(key)
        if mask is None:
            if len(self._masks) > MASKS_KEPT:
                self._masks.clear()
            mask = self._masks[key] = FieldMask(self.number[name] for name in key)
        return mask

    def reply_fields(self, names: Sequence[str]) -> tuple[list[str], list[str], bytes]:
        """Split fields that the table has into inline ones and others, and encode all their definitions for a reply."""
        key = tuple(names)
        fields = self._reply_fields.get(key)
        if fields is None:
            if len(self._reply_fields) > REPLY_FIELDS_KEPT:
                self._reply_fields.clear()
            inline = [name for name in key if name in self.inline]
            placed = [name for name in key if name not in self.inline]
            fields = self._reply_fields[key] = inline, placed, encode_fields([self.fields[name] for name in key])
        return fields

    def has_all(self, at: Index, mask: FieldMask) -> BoolArray:
        """Which rows have every field of `mask`."""
        if len(mask.words) == 1:
            ((word, bits),) = mask.words
            single: BoolArray = (self.words[word].a[at] & bits) == bits
            return single
        has = np.ones(self.pages.fate.a[at].size, np.bool_)
        for word, bits in mask.words:
            has &= (self.words[word].a[at] & bits) == bits
        return has

    def has_any(self, at: Index, mask: FieldMask) -> BoolArray:
        """Which rows have at least one field of `mask`."""
        has = np.zeros(self.pages.fate.a[at].size, np.bool_)
        for word, bits in mask.words:
            has |= (self.words[word].a[at] & bits) != 0
        return has

    def begin_fields(self, at: Index, mask: FieldMask) -> None:
        """Mark the fields of `mask` as set in new rows, which have no others."""
        for word, bits in mask.words:
            self.words[word].a[at] = bits

    def set_fields(self, at: Index, mask: FieldMask) -> None:
        """Mark the fields of `mask` as set, too."""
        for word, bits in mask.words:
            self.words[word].a[at] |= bits
        if self.freed:
            self._unmark_freed(at, mask)

    def clear_fields(self, at: Index, mask: FieldMask) -> None:
        """Mark the fields of `mask` as not set."""
        for word, bits in mask.words:
            self.words[word].a[at] &= ~bits
        if self.freed:
            self._unmark_freed(at, mask)

    def _unmark_freed(self, at: Index, mask: FieldMask) -> None:
        for word, bits in mask.words:
            if word < len(self.freed):
                self.freed[word].a[at] &= ~bits

    def mark_freed(self, at: Index, mask: FieldMask) -> None:
        """Mark the fields of `mask` as freed."""
        while len(self.freed) < len(self.words):
            self.freed.append(self.pages.column(_FREED))
        for word, bits in mask.words:
            self.words[word].a[at] &= ~bits
            self.freed[word].a[at] |= bits

    def were_freed(self, at: Index, name: str) -> BoolArray:
        """Which rows had the field until it was freed."""
        ((word, bits),) = self.mask((name,)).words
        if word >= len(self.freed):
            return np.zeros(self.pages.fate.a[at].size, np.bool_)
        freed: BoolArray = (self.freed[word].a[at] & bits) != 0
        return freed

    # ------------------------------------------------------------ snapshots

    def stored(self, at: IntArray, now: float) -> Columns:
        """The stored attributes of rows at positions `at`."""
        return {name: column.attribute.saved(column.a[at], now) for name, column in self.columns.items()}

    def restore(self, at: IntArray, stored: Columns, now: float) -> None:
        """Set the attributes of rows at positions `at` to stored ones."""
        for name, column in self.columns.items():
            column.a[at] = column.attribute.loaded(stored[name], now)
        self.facts_given = dict.fromkeys(self.facts)

    # ------------------------------------------------------------ rows that a request names

    def places(self, rows: IntArray) -> IntArray:
        """Positions of rows; `NotFound` names rows that are not resident."""
        at, resident = self.pages.find(rows)
        if not resident.all():
            gone = rows[~resident]
            never = gone[(gone < 0) | (gone >= self.pages.next_row)]
            if never.size:
                raise NotFound(
                    f'{numbered(never)} {agreed(never, "was", "were")} never put into table "{self.table}"; ids so far '
                    f"end at {self.pages.next_row - 1}"
                )
            fate = agreed(
                gone, "is finished and was freed, or was deleted", "are finished and were freed, or were deleted"
            )
            raise NotFound(f'{numbered(gone)} of table "{self.table}" {fate}')
        return at

    def live_places(self, rows: IntArray) -> IntArray:
        """Positions of rows; `NotFound` names rows that are not live (resident and without a fate)."""
        at = self.places(rows)
        ended = self.pages.fate.a[at] != LIVE
        if ended.any():
            fate = "done" if self.pages.fate.a[at[ended][0]] == DONE else "dropped"
            raise NotFound(
                f'{numbered(rows[ended])} of table "{self.table}" '
                f"{agreed(rows[ended], 'has ended: it was', 'have ended: they were')} {fate}, and cannot be "
                "changed"
            )
        return at

    # ------------------------------------------------------------ facts

    def check_keys(self, keys: Sequence[str], rows: IntArray | None) -> None:
        """Raise if a key names another row of the table. `rows` get the keys; None for new rows."""
        if self.row_of_key.keys().isdisjoint(keys):
            return
        for position, key in enumerate(keys):
            owner = self.row_of_key.get(key) if key else None
            if owner is not None and (rows is None or int(rows[position]) != owner):
                raise AlreadyExists(
                    f'key {key!r} of table "{self.table}" names row {owner}; a key names one row: give another key, or '
                    "update that row"
                )

    def set_facts(self, rows: IntArray, at: Index, facts: CheckedFacts) -> None:
        """Write the facts of rows at positions `at`."""
        for name, values in facts.numbers.items():
            self.set_fact(name, at, values)
        if facts.keys is not None:
            self._name(rows.tolist(), facts.keys)
        if facts.tags is not None:
            self._tag(rows.tolist(), facts.tags)

    def set_fact(self, name: str, at: Index, values: AnyArray) -> None:
        """Write one numeric fact of rows at positions `at`."""
        self.facts_given[name] = None
        self.facts[name].a[at] = values

    def reply_facts(self, at: Index, rows: int) -> dict[str, bytes]:
        """The numeric facts of that many rows as a reply carries them, by name."""
        unset = _UNSET_IN_REPLIES if rows else _OF_NO_ROWS
        if not self.facts_given:
            return unset
        return unset | {name: encode_constant(self.facts[name].a[at]) for name in self.facts_given}

    def _name(self, rows: list[int], keys: list[str]) -> None:
        self.unname(rows)
        named = {row: key for row, key in zip(rows, keys, strict=True) if key}
        self.keys |= named
        self.row_of_key |= zip(named.values(), named, strict=True)

    def unname(self, rows: list[int]) -> None:
        """Free the keys of rows."""
        for row in self.keys.keys() & rows:
            del self.row_of_key[self.keys.pop(row)]

    def _tag(self, rows: list[int], tags: list[Tags]) -> None:
        if not self.tags:
            self.tags_most = 0
        self.tags_most = max(self.tags_most, max(map(len, tags), default=0))
        given = dict(zip(rows, tags, strict=True))
        if not all(tags):
            for row in [row for row, of_row in given.items() if not of_row]:
                del given[row]
                self.tags.pop(row, None)
        self.tags |= given

    def set_inline(self, name: str, at: Index, values: AnyArray) -> None:
        """Write the values of an inline field."""
        self.inline[name].a[at] = values

    def free(self, rows: IntArray, at: Index) -> list[int]:
        """Remove rows at positions `at`. Returns the pages that have no rows left."""
        if self.keys or self.tags:
            gone = rows.tolist()
            self.unname(gone)
            for row in gone:
                self.tags.pop(row, None)
        return self.pages.free(rows, at)
