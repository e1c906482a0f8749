"""The base of `Table` and `AsyncTable`."""

from __future__ import annotations

from typing import ClassVar

from transferqueue.client.client import ClientSession
from transferqueue.client.table_info import TableInfo
from transferqueue.errors.text import counted
from transferqueue.limits import Limits
from transferqueue.policies import Pacing, Retention, Task
from transferqueue.schema import Field
from transferqueue.storage.elements.process_bound import ProcessBound


class TableBase(ProcessBound):
    """A table without the verbs that talk to the server: its terms, as this client last heard them."""

    _remedy: ClassVar[str] = (
        "pass queue.address and the name of the table, and open it there: tq.connect(address).table(name)"
    )

    def __init__(self, client: ClientSession, terms: TableInfo) -> None:
        self._client, self._terms = client, terms

    @property
    def name(self) -> str:
        """The table's name."""
        return self._terms.name

    @property
    def fields(self) -> dict[str, Field]:
        """Fields by name, as this client last heard of them; `Queue.table` asks again."""
        return dict(self._terms.fields)

    @property
    def tasks(self) -> dict[str, Task]:
        """Tasks by name, as this client last heard of them."""
        return {task.name: task for task in self._terms.last.tasks}

    @property
    def limits(self) -> Limits:
        """The most rows and bytes that the table may hold."""
        return self._terms.last.limits

    @property
    def pacing(self) -> Pacing | None:
        """How far production may run ahead; None: only the limits bound it."""
        return self._terms.last.pacing

    @property
    def retention(self) -> Retention:
        """When rows are freed."""
        return self._terms.last.retention

    def __repr__(self) -> str:
        """The facts that this client knows already. No server is asked (`stats` asks)."""
        terms = self._terms.last
        tasks = f"tasks {', '.join(self.tasks)}" if terms.tasks else "no tasks"
        state = f"{', sealed' if terms.sealed else ''}{', closed' if self._client.closed else ''}"
        return (
            f"<{type(self).__name__} {self.name!r} at {self._client.address}: "
            f"{counted(len(self._terms.fields), 'field')}, {tasks}, at most {counted(terms.limits.rows, 'row')}{state}>"
        )
