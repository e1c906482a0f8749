"""Cached description of a table. Other clients may have added fields since."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, TypeVar

from transferqueue.errors import SchemaError
from transferqueue.policies import Task
from transferqueue.schema import Field, known, not_taken
from transferqueue.wire import messages as m
from transferqueue.wire.codec import decode_fields

C = TypeVar("C")


class TableInfo:
    """The terms and fields of one table, shared by all handles of a client on it."""

    def __init__(self, terms: m.TableTerms) -> None:
        self.name: Final = terms.name
        self.last = terms
        self.fields: dict[str, Field] = {}
        self._last_reply: tuple[bytes, dict[str, Field], dict[str, Field]] = b"", {}, {}
        """Definitions of the last reply, the fields known when it came, and both together."""
        self._placed: tuple[dict[str, Field], dict[str, int]] = {}, {}
        """Fields, and the position of each."""
        self.forgotten = ""
        """Task of a batch that was collected before it was acked or released, until the next lease logs it; "": none."""
        self.forgotten_logged = False
        self.hear(terms)

    def task(self, name: str) -> Task | None:
        """The task of that name; None if this client has not heard of it."""
        return next((task for task in self.last.tasks if task.name == name), None)

    def hear(self, terms: m.TableTerms) -> bool:
        """Take over the terms that the server sent. Return whether the fields differ from those known before."""
        fields = {field.name: known(field) for field in terms.fields}
        changed = fields != self.fields
        self.last = terms
        if changed or list(fields) != list(self.fields):
            self.fields = fields
        return changed

    def ordered(self, columns: dict[str, C]) -> dict[str, C]:
        """Columns in the order of the table's fields."""
        if self._placed[0] is not self.fields:
            self._placed = self.fields, {name: at for at, name in enumerate(self.fields)}
        at = self._placed[1]
        if len(columns) < 2:
            return columns
        return {name: columns[name] for name in sorted(columns, key=lambda name: at.get(name, len(at)))}

    def learn(self, fields: Iterable[Field]) -> None:
        """Add the fields of a commit that the server has accepted."""
        new = {field.name: field for field in fields if self.fields.get(field.name) != field}
        if new:
            self.fields = self.fields | new  # a new dict: other threads iterate over the old one

    def check_added(self, names: Iterable[str]) -> None:
        """`SchemaError` for a field that rows of the table may not add. The server refuses it too, but only after the bytes are written."""
        if self.last.extra_fields is not False or self.fields.keys() >= set(names):
            return
        takes = {*self.fields, *(name for task in self.last.tasks for name in (*task.needs, *task.gives))}
        for name in names:
            if name not in takes:
                raise SchemaError(not_taken(self.name, name, takes))

    def reply_fields(self, definitions: bytes) -> Mapping[str, Field]:
        """All known fields, replaced by those that a reply defines. `ProtocolError` if `definitions` cannot be decoded.

        Cached for the next reply, which mostly defines the same.
        """
        before, fields, both = self._last_reply
        if before != definitions or fields is not self.fields:
            fields = self.fields
            both = fields | {field.name: known(field) for field in decode_fields(definitions)}
            self._last_reply = definitions, fields, both
        return both
