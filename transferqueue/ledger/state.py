"""The whole state of a ledger: tables, channels, sessions, and their shared state."""

from __future__ import annotations

from dataclasses import dataclass, field

from transferqueue.errors import Disconnected, NotFound, listing
from transferqueue.ledger.requests import weight_channels
from transferqueue.ledger.requests.ack import expire_lease
from transferqueue.ledger.requests.pending_versions import PendingVersion
from transferqueue.ledger.requests.weight_channels import WeightChannelState
from transferqueue.ledger.rows import RowRecord
from transferqueue.ledger.session_state import SessionState
from transferqueue.ledger.table_state import SharedState, TableState
from transferqueue.ledger.tasks.task_state import TaskState


@dataclass(slots=True)
class LedgerState:
    """The state of a ledger. `now`: the latest time that a caller passed."""

    core: SharedState
    sessions: dict[int, SessionState] = field(default_factory=dict)
    tables: dict[str, TableState] = field(default_factory=dict)
    records: dict[str, RowRecord] = field(default_factory=dict)
    """What the tables that record their rows know of their records."""
    channels: dict[str, WeightChannelState] = field(default_factory=dict)
    dropped_tables: dict[str, int] = field(default_factory=dict)
    """Counts of rows put, done and dropped, summed over tables that were dropped."""
    now: float = float("-inf")

    def add(self, table: TableState) -> TableState:
        """Add a table, and return it."""
        self.tables[table.name] = table
        if table.record is not None:
            self.records[table.name] = table.record
        return table

    def remove(self, name: str) -> None:
        """Remove a table."""
        del self.tables[name]
        self.records.pop(name, None)

    def session(self, number: int) -> SessionState:
        """An open session; `Disconnected` if there is none."""
        session = self.sessions.get(number)
        if session is None or not session.open:
            raise Disconnected(f"session {number} is not open: it was closed, or fell silent; connect again")
        return session

    def table(self, name: str) -> TableState:
        """A table; `NotFound` lists those that exist."""
        table = self.tables.get(name)
        if table is None:
            raise NotFound(f'table "{name}" does not exist; there are {listing(self.tables)}')
        return table

    def task(self, table: str, name: str) -> tuple[TableState, TaskState]:
        """A task of a table; `NotFound` lists those it has."""
        table_state = self.table(table)
        task = table_state.tasks.get(name)
        if task is None:
            raise NotFound(f'task "{name}" is not in table "{table}"; it has {listing(table_state.tasks)}')
        return table_state, task

    def followers(self, channel: str) -> list[TableState]:
        """Tables whose policy version clock is the channel."""
        return [table for table in self.tables.values() if table.pacing and table.pacing.channel == channel]

    # ------------------------------------------------------------ the end of sessions

    def close_session(self, number: int) -> None:
        """End the leases of the session and release its reservations. No error if it is closed already."""
        gone = self.sessions.get(number)
        if gone is None or not gone.open:
            return
        gone.open = False
        self._end_leases(number)
        for table in self.tables.values():
            for reservation in table.flow.of(number):
                table.flow.close(reservation)
                table.wake_room()
        for channel in self.channels.values():
            channel.applied.pop(number, None)
            weight_channels.end_turn(channel, number, self.core.effects)
            if channel.pending is not None and channel.pending.session == number:
                self.give_up_version(
                    channel.pending, f"{self.core.labels.get(number, 'the session')}, which began it, is gone"
                )

    def give_up_version(self, pending: PendingVersion, why: str) -> None:
        """Give up a version in parts, and let the session that waits for them know."""
        weight_channels.give_up(self.channels[pending.channel], self.core.blocks, why)
        self.core.effects.wake("parts", pending.channel)

    def _end_leases(self, session: int) -> None:
        for lease in self.core.leases.of(session):
            mine = [replica for replica, holder in lease.holders.items() if holder == session]
            if all(replica in lease.acked for replica in mine):
                self.core.leases.leave(lease, session)
            elif lease.id in self.core.leases.by_id:
                expire_lease(self.tables[lease.table], lease, "its holder is gone", self.now)

    def end_pins(self, number: int) -> None:
        """Return the pins and grants of a closed session."""
        if self.sessions.pop(number, None) is not None:
            label = self.core.labels.pop(number, "")
            for table in self.tables.values():
                if table.record is not None:
                    table.record.remember_worker(number, label)
            self.core.last_message_at.pop(number, None)
            self.core.blocks.unpin_all(number)
            self.core.blocks.return_grants(number)
