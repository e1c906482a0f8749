"""Batches that clients leased over HTTP. Each lease has a name that cannot be guessed.

- A lease ends when all its rows are acked, released or dropped, or at its deadline, which the queue keeps. `HttpLeases`
  forgets it then, so a client that vanished costs nothing.
- `HttpLeases` remembers for a while how a lease ended. A call that is repeated because its answer was lost learns how
  the lease ended, and changes nothing.
- Calls about one lease run one at a time.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from typing import Final

import transferqueue as tq
from transferqueue.errors import Full, LeaseExpired

LEASES_MAX: Final = 4096
"""Bound on open leases. Each may hold a view of shared memory."""
REMEMBERED_MAX: Final = 16_384
"""Bound on remembered ends of leases, some hundred bytes each."""


class HttpLease:
    """A batch, its remaining rows, and a lock for the calls about it."""

    def __init__(self, batch: tq.AsyncBatch, expiry: asyncio.TimerHandle) -> None:
        self.batch, self.expiry, self.lock = batch, expiry, asyncio.Lock()
        self.left = set(batch.rows.tolist())


class HttpLeases:
    """All leases of one process; used from one event loop."""

    def __init__(self) -> None:
        self._open: dict[str, HttpLease] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()

    def check_room(self) -> None:
        """`Full` if no lease can be added."""
        if len(self._open) >= LEASES_MAX:
            raise Full(f"{LEASES_MAX} batches are leased, which is the most; give some back, or ask for shorter leases")

    def add(self, batch: tq.AsyncBatch) -> str:
        """Add the lease of a batch, and return its name."""
        name = secrets.token_urlsafe(12)
        self._open[name] = HttpLease(batch, self._timer(name, batch.lease_s))
        return name

    def find(self, name: str) -> HttpLease:
        """The open lease of this name. `LeaseExpired`, with the way it ended, if it has."""
        lease = self._open.get(name)
        if lease is None:
            how = self._ended.get(name, "is none that was leased here, or one that ended long ago")
            raise LeaseExpired(f'lease "{name[:40]}" {how}; nothing was changed: get other rows')
        return lease

    def renewed(self, name: str, lease_s: float) -> None:
        """Extend a lease to `lease_s` seconds from now."""
        lease = self._open[name]
        lease.expiry.cancel()
        lease.expiry = self._timer(name, lease_s)

    def end(self, name: str, how: str) -> None:
        """End a lease.

        Args:
            name: Its name.
            how: Completes "lease … " in the answer to later calls.
        """
        lease = self._open.pop(name, None)
        if lease is None:
            return
        lease.expiry.cancel()
        self._ended[name] = how
        if len(self._ended) > REMEMBERED_MAX:
            self._ended.popitem(last=False)

    def _timer(self, name: str, lease_s: float) -> asyncio.TimerHandle:
        expired = "has expired, and its rows went to others"
        return asyncio.get_running_loop().call_later(lease_s, self.end, name, expired)
