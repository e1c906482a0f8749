"""Cached description of a table. Other clients may have added fields since."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from transferqueue.errors import SchemaError
from transferqueue.limits import CONTENTS_KNOWN
from transferqueue.schema import Field, known, not_taken
from transferqueue.wire import messages as m
from transferqueue.wire.codec import decode_fields


class ReplyFields(NamedTuple):
    """own: the fields of a reply, in the order of the table's. known: all known fields, replaced by those of the reply."""

    own: dict[str, Field]
    known: Mapping[str, Field]


class RecentContents:
    """The contents of interned values that this client committed last. Safe from any thread. The table may have lost them meanwhile."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._contents: dict[bytes, None] = {}

    def add(self, contents: Iterable[bytes]) -> None:
        """These were committed. Of all, the latest `CONTENTS_KNOWN` are kept."""
        with self._guard:
            for content in contents:
                self._contents.pop(content, None)
                self._contents[content] = None
            while len(self._contents) > CONTENTS_KNOWN:
                del self._contents[next(iter(self._contents))]

    def among(self, contents: Iterable[bytes]) -> frozenset[bytes]:
        """Those of `contents` that are kept."""
        with self._guard:
            return frozenset(content for content in contents if content in self._contents)


class TableInfo:
    """The terms and fields of one table, shared by all handles of a client on it."""

    def __init__(self, terms: m.TableTerms) -> None:
        self.name: Final = terms.name
        self.last = terms
        self.fields: dict[str, Field] = {}
        self._last_reply: tuple[bytes, dict[str, Field], ReplyFields] = b"", {}, ReplyFields({}, {})
        """Definitions of the last reply, the fields known when it came, and what became of them."""
        self.time_limits: dict[str, float] = {}
        """For how many seconds a worker may hold rows of each task that this client has heard of, at most."""
        self.contents: Final = RecentContents()
        self.forgotten = ""
        """Task of a batch that was collected before it was acked or released, until the next lease logs it; "": none."""
        self.forgotten_logged = False
        self.hear(terms)

    def hear(self, terms: m.TableTerms) -> bool:
        """Take over the terms that the server sent. Return whether the fields differ from those known before."""
        fields = {field.name: known(field) for field in terms.fields}
        changed = fields != self.fields
        self.last = terms
        self.time_limits = {task.name: task.held_s_max for task in terms.tasks}
        if changed or list(fields) != list(self.fields):
            self.fields = fields
        return changed

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

    def reply_fields(self, definitions: bytes) -> ReplyFields:
        """The fields that a reply defines. `ProtocolError` if `definitions` cannot be decoded.

        Cached for the next reply, which mostly defines the same.
        """
        before, fields, reply = self._last_reply
        if before != definitions or fields is not self.fields:
            fields = self.fields
            own = {field.name: known(field) for field in decode_fields(definitions)}
            place = {name: at for at, name in enumerate(fields)}
            names = sorted(own, key=lambda name: place.get(name, len(place)))
            reply = ReplyFields({name: own[name] for name in names}, fields | own)
            self._last_reply = definitions, fields, reply
        return reply
