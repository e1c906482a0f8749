"""Batches that were lent over HTTP, by a name that nobody can guess.

The law:

- A loan ends with its rows (given back, released, dropped), or with its deadline, which the queue keeps; `HttpLeases` forgets it then
  too, so a client that vanished costs nothing.
- How a loan ended is remembered for a while: a call that comes again, because its answer was lost, is told what became of the
  first, and changes nothing.
- One call at a time about one loan: others wait for it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from typing import Final

import transferqueue as tq
from transferqueue.errors import Full, LeaseExpired

LOANS_MAX: Final = 4096
"""Open at once: each may hold a view of shared memory."""
REMEMBERED_MAX: Final = 16_384
"""Ends of loans that are remembered, some hundred bytes each."""


class HttpLease:
    """A batch, which rows of it are left, and the turn of those who speak about it."""

    def __init__(self, batch: tq.AsyncBatch, forget: asyncio.TimerHandle) -> None:
        self.batch, self.forget, self.turn = batch, forget, asyncio.Lock()
        self.left = set(batch.rows.tolist())


class HttpLeases:
    """All loans of one process; used from one event loop."""

    def __init__(self) -> None:
        self._open: dict[str, HttpLease] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()

    def check_room(self) -> None:
        """`Full` if no batch could be lent."""
        if len(self._open) >= LOANS_MAX:
            raise Full(f"{LOANS_MAX} batches are lent, which is the most; give some back, or ask for shorter leases")

    def lend(self, batch: tq.AsyncBatch) -> str:
        """The name of a new loan."""
        name = secrets.token_urlsafe(12)
        self._open[name] = HttpLease(batch, self._timer(name, batch.lease_s))
        return name

    def find(self, name: str) -> HttpLease:
        """An open loan; `LeaseExpired` says what became of one that is none."""
        found = self._open.get(name)
        if found is None:
            how = self._ended.get(name, "is none that was lent here, or one that ended long ago")
            raise LeaseExpired(f'lease "{name[:40]}" {how}; nothing was changed: get other rows')
        return found

    def renewed(self, name: str, lease_s: float) -> None:
        """The loan lasts so long from now."""
        loan = self._open[name]
        loan.forget.cancel()
        loan.forget = self._timer(name, lease_s)

    def end(self, name: str, how: str) -> None:
        """The loan is over; `how` completes "lease … " for whoever asks again."""
        loan = self._open.pop(name, None)
        if loan is None:
            return
        loan.forget.cancel()
        self._ended[name] = how
        if len(self._ended) > REMEMBERED_MAX:
            self._ended.popitem(last=False)

    def _timer(self, name: str, lease_s: float) -> asyncio.TimerHandle:
        expired = "has expired, and its rows went to others"
        return asyncio.get_running_loop().call_later(lease_s, self.end, name, expired)
