"""The description of a table that a client caches. Other clients may have added fields since."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from transferqueue.errors import SchemaError, listing
from transferqueue.errors.text import counted
from transferqueue.limits import CONTENTS_KNOWN
from transferqueue.schema import Field, known, not_taken
from transferqueue.wire import messages as m
from transferqueue.wire.codec import decode_fields

_log: Final = logging.getLogger("transferqueue.client")

_FATES: Final = {
    "DropStale": "they are dropped",
    "KeepStale": "it will not get them",
    "Requeue": "they go back to be made anew",
}
"""The fate of a row over the staleness bound, by the policy."""


class ReplyFields(NamedTuple):
    """Fields by name.

    Args:
        own: the fields of a reply, in the order of the table's.
        known: all known fields, replaced by those of the reply.
    """

    own: dict[str, Field]
    known: Mapping[str, Field]


class RecentContents:
    """The contents of values that this client committed last. Safe from any thread. The table may have lost them
    meanwhile."""

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
        """Task of a batch that was collected before it was acked or released, until the next lease logs it; "":
        none."""
        self.forgotten_logged = False
        self.of_puts: frozenset[str] = frozenset()
        """Fields that a task needs and none gives; empty once it was logged that a put lacks one."""
        self._told_missing = False
        self._told_stale_below = 0
        self.update_from(terms)

    def update_from(self, terms: m.TableTerms) -> bool:
        """Take over the terms that the server sent. Return whether the fields differ from those known before."""
        fields = {field.name: known(field) for field in terms.fields}
        changed = fields != self.fields
        self.last = terms
        self.time_limits = {task.name: task.held_s_max for task in terms.tasks}
        if not self._told_missing:
            given = {name for task in terms.tasks for name in task.gives}
            self.of_puts = frozenset(name for task in terms.tasks for name in task.needs if name not in given)
        if changed or list(fields) != list(self.fields):
            self.fields = fields
        return changed

    def learn(self, fields: Iterable[Field]) -> None:
        """Add the fields of a commit that the server has accepted."""
        new = {field.name: field for field in fields if self.fields.get(field.name) != field}
        if new:
            self.fields = self.fields | new  # a new dict: other threads iterate over the old one

    def check_added(self, names: Iterable[str]) -> None:
        """`SchemaError` for a field that rows of the table may not add. The server refuses it too, but only after the
        bytes are written."""
        if self.last.extra_fields is not False or self.fields.keys() >= set(names):
            return
        takes = {*self.fields, *(name for task in self.last.tasks for name in (*task.needs, *task.gives))}
        for name in names:
            if name not in takes:
                raise SchemaError(not_taken(self.name, name, takes))

    def tell_missing(self, columns: Iterable[str]) -> None:
        """Warn, once for each table: a put lacks a column that some task needs and none gives."""
        missing = self.of_puts - set(columns)
        waiting = [task.name for task in self.last.tasks if missing & set(task.needs)]
        self._told_missing, self.of_puts = True, frozenset()
        _log.warning(
            'a put into table "%s" has no %s, which no task gives: task %s will never get these rows, unless an update '
            "brings it",
            self.name,
            listing(missing),
            listing(waiting),
        )

    def tell_stale(self, rows: int, fresh_from: int) -> None:
        """Warn, once for each version of the trainer: rows are over the staleness bound when they are put."""
        pacing = self.last.pacing
        if pacing is None or fresh_from <= self._told_stale_below:
            return
        self._told_stale_below = fresh_from
        _log.warning(
            '%s of a put into table "%s" %s older than version %s, the oldest that task "%s" takes (max_staleness=%s): '
            "%s; put rows with the version of their weights (policy_version=), and reserve before you generate",
            counted(rows, "row"),
            self.name,
            "is" if rows == 1 else "are",
            fresh_from,
            pacing.task,
            pacing.max_staleness,
            _FATES.get(type(pacing.on_stale).__name__, "they follow the table's on_stale policy"),
        )

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
