"""What a client knows of a table: its terms as last heard. Fields may have been added since by others."""

from __future__ import annotations

from collections.abc import Iterable

from transferqueue.schema import Field
from transferqueue.wire import messages as m


class Terms:
    """The terms of one table, shared by all handles of a client on it."""

    def __init__(self, found: m.TableTerms) -> None:
        self.last = found
        self.fields: dict[str, Field] = {}
        self.hear(found)

    @property
    def name(self) -> str:
        """The table's name."""
        return self.last.name

    def hear(self, found: m.TableTerms) -> bool:
        """Take over what the server says now; whether the fields differ from what was known."""
        fields = {field.name: field for field in found.fields}
        changed = fields != self.fields
        self.last, self.fields = found, fields
        return changed

    def learn(self, fields: Iterable[Field]) -> None:
        """The server has accepted a commit with these fields, so this is what they are."""
        self.fields |= {field.name: field for field in fields}
