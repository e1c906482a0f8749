"""The probe: the one process without faults. It calls the server all the time, and records when the server answers.

Lines of its event log: ``call`` with the time at which each answered call began; ``again`` for a call without answer;
``audit`` with the server's own account; ``spill`` with the spilled blocks, at the end; ``turns`` with the times of the
server's turns; ``broken``. The parent sends it the lines ``seal`` and ``end``, and reads its reports on the
tables.
"""

from __future__ import annotations

import os
import select
import time
from typing import Any, Final

import msgspec

import transferqueue as tq
from tests.chaos.process_context import ProcessContext
from tests.chaos.roles import FLOOD, PACED, ROWS_MAX, make_tables
from transferqueue.wire.answers.stats import TurnStats

EVERY_S: Final = 0.02
AUDIT_EVERY: Final = 25
"""Calls between two audits: about one in half a second."""


class Probe:
    """The work of the probe. commands: a pipe from the parent; news: a pipe to the parent."""

    def __init__(self, context: ProcessContext, commands: int, news: int) -> None:
        self._context, self._commands, self._news = context, commands, news

    def run(self) -> None:
        """Make the tables, call the server until the command to end, and write the last audit to the event log."""
        with self._context.endpoint.connect() as queue:
            make_tables(queue)
            self._tell("ready", {})
            calls = 0
            while (command := self._command()) != "end":
                if command == "seal":
                    for name in (PACED, FLOOD):
                        queue.table(name).seal()
                self._ask(queue, calls)
                calls += 1
            self._context.log.write("audit", queue.audit().tables)
            self._context.log.write("spill", queue.stats().server.spill)
            self._turns(queue)

    def _command(self) -> str:
        ready, _, _ = select.select([self._commands], [], [], EVERY_S)
        return os.read(self._commands, 64).decode().strip() or "end" if ready else ""

    def _ask(self, queue: tq.Queue, calls: int) -> None:
        began = time.monotonic()
        try:
            queue.tables()
            self._context.log.write("call", began)
            if calls % AUDIT_EVERY == 0:
                self._audit(queue)
        except tq.PeerError as error:
            self._context.log.write("broken", f"a server of this machine was lost: {type(error).__name__}: {error}")
            raise

    def _audit(self, queue: tq.Queue) -> None:
        tables = queue.audit().tables
        for name, rows in tables.items():
            if not rows.balanced:
                self._context.log.write("broken", f"table {name} does not balance: {rows}")
            if rows.rows_live > ROWS_MAX[name]:
                self._context.log.write(
                    "broken", f"table {name} has {rows.rows_live} live rows, of at most {ROWS_MAX[name]}"
                )
        self._turns(queue)
        self._tell("rows", {name: rows.rows_done for name, rows in tables.items()})

    def _turns(self, queue: tq.Queue) -> None:
        stats = queue.stats()
        turns = stats.server.turns
        self._context.log.write("turns", stats.epoch, {kind: _longest(histogram) for kind, histogram in turns.items()})

    def _tell(self, kind: str, what: dict[str, Any]) -> None:
        os.write(self._news, msgspec.json.encode([kind, what]) + b"\n")


def _longest(turns: TurnStats) -> dict[str, Any]:
    """The members of the figures of one kind of turns that the report needs."""
    return {name: getattr(turns, name) for name in ("longest_s", "longest_of", "busiest_s", "busiest_of", "late")}
