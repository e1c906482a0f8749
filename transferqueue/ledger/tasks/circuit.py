"""Whether all leases of a task fail, so that the task is paused: a service that it calls is away, or its function is
broken.

The circuit of a task *opens* when `OUTAGE_LEASES` leases in a row failed, while no row was acked, and two of them had
no row in common and had rows that never failed before. So rows that fail again and again, alone or together, do not
open it. While it is open

- one lease at a time is given, a *trial*: the first after ``Retry.wait_s(1)``, the next ``wait_s(n + 1)`` after the
  n-th trial failed. A trial that ends otherwise, as by the death of its worker, is followed at once by the next one;
- failures do not count as attempts, but for an outage of more than `OUTAGE_S_MAX`: otherwise a table whose last rows
  all fail would not end;
- rows of a failed lease are *parked* until no other row is ready, or none is leased although a trial is due. So each
  row is tried once before any is tried twice, and a request for many rows finds them.

The first row that is acked closes it, and all rows that wait are ready at once. `rules.retry` carries this out.
"""

from __future__ import annotations

import msgspec
import numpy as np
from msgspec import structs

from transferqueue.ledger.arrays import IntArray
from transferqueue.limits import OUTAGE_LEASES, OUTAGE_S_MAX
from transferqueue.policies import Retry


class Circuit(msgspec.Struct, eq=False):
    """The circuit of one task; a subject of `Deadlines`: its deadline is that of the next trial.

    Args:
        failures: failed leases since a row was acked.
        opened: since when it is open; None: it is closed.
        trial: the leases of the trial that is under way: several if ranks share its batch.
        due: whether the next trial may begin.
    """

    table: str
    task: str
    deadline: float | None = None
    failures: int = 0
    opened: float | None = None
    trials: int = 0
    trial: dict[int, None] = {}
    due: bool = False
    _first: IntArray | None = None
    _apart: bool = False

    def reset(self) -> None:
        """Close the circuit: a row was acked."""
        for name, value in structs.asdict(Circuit(self.table, self.task)).items():
            setattr(self, name, value)

    @property
    def holds(self) -> bool:
        """Whether leases are refused now."""
        return self.opened is not None and (not self.due or bool(self.trial))

    def failed(self, lease: int, rows: IntArray, *, fresh: bool, now: float) -> bool:
        """Record a failed lease. `fresh`: some of its rows never failed before. Returns whether the wait for the next
        trial begins."""
        self.failures += 1
        if self.opened is not None:
            return lease in self.trial and self.deadline is None
        if fresh and self._first is None:
            self._first = rows
        elif fresh and self._first is not None and not self._apart:
            self._apart = not np.isin(rows, self._first).any()
        if self.failures < OUTAGE_LEASES or not self._apart:
            return False
        self.opened, self._first = now, None
        return True

    def begin(self, lease: int) -> None:
        """A lease was granted: it is a trial if the circuit is open."""
        if self.opened is not None:
            self.trial[lease] = None
            self.deadline = None

    def next_trial(self, retry: Retry) -> float:
        """Count a wait for a trial, and return its seconds."""
        self.trials, self.due = self.trials + 1, False
        return retry.wait_s(self.trials)

    def counts_failures(self, now: float) -> bool:
        """Whether failures count as attempts."""
        return self.opened is None or now - self.opened > OUTAGE_S_MAX

    def paused_s(self, now: float) -> float | None:
        """Seconds until the next trial, 0 if it may begin or is under way; None if the circuit is closed."""
        if self.opened is None:
            return None
        return 0.0 if self.due or self.deadline is None else max(0.0, self.deadline - now)
