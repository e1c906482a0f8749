"""What a client knows of a table: its terms as last heard. Fields may have been added since by others."""

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
    """The terms of one table, shared by all handles of a client on it."""

    def __init__(self, found: m.TableTerms) -> None:
        self.name: Final = found.name
        self.last = found
        self.fields: dict[str, Field] = {}
        self._told: tuple[bytes, dict[str, Field], dict[str, Field]] = b"", {}, {}
        """Definitions, what was known when they came, and both together."""
        self._placed: tuple[dict[str, Field], dict[str, int]] = {}, {}
        """Fields, and the place of each among them."""
        self.forgotten = ""
        """A task of which a batch was collected that was neither acked nor released; "": none was, or it was logged."""
        self.forgotten_logged = False
        self.hear(found)

    def task(self, name: str) -> Task | None:
        """The task of that name, as last heard of; None if it was not."""
        return next((task for task in self.last.tasks if task.name == name), None)

    def hear(self, found: m.TableTerms) -> bool:
        """Take over what the server says now; whether the fields differ from what was known."""
        fields = {field.name: known(field) for field in found.fields}
        changed = fields != self.fields
        self.last = found
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
        """The server has accepted a commit with these fields, so this is what they are."""
        new = {field.name: field for field in fields if self.fields.get(field.name) != field}
        if new:
            self.fields = self.fields | new  # not changed in place: others compare and iterate

    def check_added(self, names: Iterable[str]) -> None:
        """`SchemaError` for a name that rows of the table may not add. The server refuses it too; here it costs no bytes."""
        if self.last.extra_fields is not False or self.fields.keys() >= set(names):
            return
        takes = {*self.fields, *(name for task in self.last.tasks for name in (*task.needs, *task.gives))}
        for name in names:
            if name not in takes:
                raise SchemaError(not_taken(self.name, name, takes))

    def told(self, definitions: bytes) -> Mapping[str, Field]:
        """All fields that are known, and those that a reply defines as it does. `ProtocolError` if `definitions` are none.

        Kept for the next reply: step after step both are the same.
        """
        before, fields, both = self._told
        if before != definitions or fields is not self.fields:
            fields = self.fields
            both = fields | {field.name: known(field) for field in decode_fields(definitions)}
            self._told = definitions, fields, both
        return both
