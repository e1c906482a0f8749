"""The page of a run's folder, which ``transferqueue page RUN`` serves: its recorded rows, and while the run goes on,
its queue.

It is a process of its own with a low priority: what it reads and computes takes no time of the job's.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import transferqueue as tq
from transferqueue.errors import TransferQueueError
from transferqueue.transport import TcpAddress
from transferqueue.web.access import AccessPolicy, web_place
from transferqueue.web.connections import Server, configured, listening
from transferqueue.web.page.app import CONNECTIONS_MAX, make_run_page
from transferqueue.web.rollouts.record import RecordBrowser
from transferqueue.web.token import new_token
from transferqueue.workflows.job.run.server import running_address

CONNECT_S: Final = 5.0
_NICE: Final = 10


def serve_run(run: Path, where: str, tell: Callable[[str], None]) -> None:
    """Serve the page of the run in folder `run` until Ctrl-C.

    Args:
        run: The folder of a job's run, or the directory of a record.
        where: ``[HOST:]PORT`` to listen at, of this machine; port 0: any.
        tell: Gets the link, which has the token: a password.

    Raises:
        NotFound: `run` is neither a run nor a record.
        UsageError: `where` is no address of this machine alone, or DuckDB is not installed.
        AddressInUse: Another process listens there.
    """
    place, record = web_place(where), RecordBrowser(run)
    os.nice(_NICE)
    os.environ.update(HF_HUB_OFFLINE="1")  # a folder may name a tokenizer of the hub; the page asks no other host
    with suppress(KeyboardInterrupt):
        asyncio.run(_serve(record, place, tell))


async def _serve(record: RecordBrowser, place: TcpAddress, tell: Callable[[str], None]) -> None:
    token = new_token()
    with listening(place) as listener:
        here = TcpAddress(place.host, listener.getsockname()[1])
        async with _queue_of(record.path) as (queue, why_not):
            app = make_run_page(queue, AccessPolicy(here, token, new_token()), record, why_not)
            tell(f"http://{here.host}:{here.port}/?token={token}")
            await Server(configured(app, CONNECTIONS_MAX)).serve(sockets=[listener])


@asynccontextmanager
async def _queue_of(run: Path) -> AsyncIterator[tuple[tq.AsyncQueue | None, str]]:
    """A connection to the queue of a run, or None and why: "" if it does not run."""
    queue, why_not, address = None, "", ""
    try:
        if address := running_address(run):
            queue = await tq.aconnect(address, timeout_s=CONNECT_S, label="web page")
    except TransferQueueError as error:
        if not address or running_address(run):
            why_not = f"its queue cannot be shown: {error}"
    try:
        yield queue, why_not
    finally:
        if queue is not None:
            await queue.close()
