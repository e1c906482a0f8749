"""The ack of several leases in one commit: of a step that was computed with the rows of many leases."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import numpy as np

from transferqueue.client.client import ClientSession
from transferqueue.client.operations import arguments as checks
from transferqueue.client.operations.lease import BatchLease, renew
from transferqueue.client.session.operation_runner import Operation, request_reply
from transferqueue.client.table_info import TableInfo
from transferqueue.errors import BatchEnded, LeaseExpired, UsageError, listing
from transferqueue.limits import LEASES_PER_REQUEST_MAX
from transferqueue.wire import messages as m


def ack_leases(client: ClientSession, terms: TableInfo, held: Iterable[BatchLease], step: int) -> Operation[int]:
    """Ack all rows that the leases still hold, in one request. Returns how many rows."""
    leases = checks.few("batches", held, LEASES_PER_REQUEST_MAX)
    _check(client, terms.name, leases)
    request = m.AckLeases(
        table=terms.name,
        leases=np.array([lease.number for lease in leases], "<i8").tobytes(),
        tokens=np.array([lease.token for lease in leases], "<i8").tobytes(),
        step=checks.step(step, -1),
    )
    try:
        reply = yield from request_reply(request, m.DoneReply)
    except LeaseExpired:
        yield from _find_lost(leases)
        raise
    for lease in leases:
        lease.take(None, "was acked")
    return reply.rows


def _check(client: ClientSession, table: str, leases: tuple[BatchLease, ...]) -> None:
    """Raise unless these are leases of one task of this table, each held by this connection, and each given once."""
    if not leases:
        raise UsageError(f'an ack of no batches of table "{table}" would change nothing; give at least one batch')
    for lease in leases:
        if lease.table != table or lease.client is not client:
            raise UsageError(
                f'lease {lease.number} of table "{lease.table}" is acked by a handle of table "{table}", perhaps of '
                "another connection; ack it with the table that leased it"
            )
    tasks = dict.fromkeys(lease.task for lease in leases)
    if len(tasks) > 1:
        raise UsageError(f"batches of tasks {listing(tasks)} are acked together; ack the batches of one task at a time")
    if len({lease.number for lease in leases}) < len(leases):
        raise UsageError(f"{len(leases)} batches are acked, and one of them is given twice; give each once")
    _check_held(leases)


def _check_held(leases: tuple[BatchLease, ...]) -> None:
    over = [lease.number for lease in leases if lease.ended or lease.lost]
    if not over:
        return
    for lease in leases:
        if lease.lost:
            lease.expire()
    kind = LeaseExpired if any(lease.expired for lease in leases) else BatchEnded
    raise kind(
        f"{len(over)} of {len(leases)} batches have ended (leases {listing(over)}), so none was acked; ack the others "
        "without them (batch.ended tells which)"
    )


def _find_lost(leases: tuple[BatchLease, ...]) -> Operation[None]:
    """Ask for each lease whether it is held, by renewing it, so that `ended` of each batch is true."""
    for lease in leases:
        with suppress(LeaseExpired):
            yield from renew(lease, None)
