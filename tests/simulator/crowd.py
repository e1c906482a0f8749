"""Processes that have many calls at once beside another job, and end in every way while these wait or have just become
due.

They give back whatever they get, as the client of a caller that went away does, so the other job takes its course. What
is tested is that the server serves everybody else, and forgets them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from tests.simulator import job
from tests.simulator.job import SimJob, Steps
from transferqueue.errors import Unreachable
from transferqueue.policies import Compare
from transferqueue.wire import messages as m

if TYPE_CHECKING:
    from tests.simulator.machine import SimServer
    from tests.simulator.process import Process
    from transferqueue.ledger.state import LedgerState

PROCESSES: Final = 3
CALLS_MAX: Final = 6
"""The most calls that a process begins at a time."""
ROWS: Final = 60
"""About as many rows as the other job puts."""
READ_MAX: Final = 10
"""The most rows of a read: some of several shards."""
PAUSE_S: Final = 0.4
"""The longest pause between two such times."""
ENDS: Final = 0.25
"""Probability that a process ends after it."""
GOODBYE_S: Final = 0.05
"""A process waits so long for its Goodbye to arrive."""


class CrowdJob(SimJob):
    """Some processes that lease rows of a task of another job, read any rows, and, with `memory`, ask for some."""

    def __init__(self, table: str, task: str, *, memory: bool) -> None:
        self.table = table
        self._task: Final = task
        self._memory: Final = memory
        self._members: dict[str, Process] = {}

    def roles(self) -> dict[str, Callable[[Process], Steps]]:
        """See `SimJob`."""
        return {f"crowd {number}": self._press for number in range(PROCESSES)}

    def judge(self, state: LedgerState) -> None:
        """See `SimJob`. The other job says what must be."""

    def _press(self, process: Process) -> Steps:
        chance = process.world.random
        self._members[process.name] = process
        while not process.world.healed:
            for _ in range(chance.randint(1, CALLS_MAX)):
                process.send_unawaited(self._request(process))
            yield chance.uniform(0.0, PAUSE_S)
            if process.world.strikes(ENDS, "crowd: a process ended with calls open"):
                yield from self._end(process)

    def _request(self, process: Process) -> m.Request:
        chance = process.world.random
        lease = partial(
            m.LeaseRequest,
            self.table,
            self._task,
            rows=chance.randint(1, 4),
            at_least=1,
            wait_s=chance.uniform(0.1, 2.0),
        )
        kind = chance.randrange(8)
        if kind == 0:
            return lease(where=[Compare("tokens", ">=", 0)])
        if kind == 1 and self._memory:
            return m.Grant(job.ROW_BYTES, wait_s=chance.uniform(0.0, 0.5))
        if kind == 2:
            return m.ReadRequest(self.table, limit=chance.randint(1, READ_MAX))
        if kind == 3:
            rows = sorted({chance.randrange(ROWS) for _ in range(chance.randint(1, 4))})
            return m.ReadRequest(self.table, job.pack(rows))
        return lease()

    def _end(self, process: Process) -> Steps:
        """End as a process does: by Goodbye, killed, with its connection closed, with its key withdrawn, or after it
        read no answer."""
        server, peer = process.server, process.connection.peer
        way = process.world.random.randrange(5)
        if way == 0:
            process.send_unawaited(m.Goodbye())
            yield GOODBYE_S
        elif way == 1:
            process.world.after(0.0, partial(server.connection_lost, peer))
        elif way == 2:
            server.unread.add(peer)
            yield PAUSE_S
        elif way == 3:
            process.world.after(0.0, partial(self._withdraw_key, server))
        raise Unreachable("this process was killed")

    def _withdraw_key(self, server: SimServer) -> None:
        """All these processes have one key. Who is left of them gets no answer any more, and ends."""
        members = [process for process in self._members.values() if process.alive]
        server.withdraw_keys(process.number for process in self._members.values())
        for process in members:
            process.kill()
