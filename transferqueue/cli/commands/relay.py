"""`transferqueue relay`: weights cross into this host once, and are served here from shared memory."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Final

import typer

from transferqueue.cli.connection import ADDRESS_VARIABLE
from transferqueue.cli.screens.terminal import say

if TYPE_CHECKING:
    from transferqueue.weights import RelayProcess

EXAMPLES = (
    (
        "transferqueue relay --from tcp://trainer:7777 --channel policy --serve ipc:///tmp/tq/weights.sock",
        "a server for this host's replicas, and the relay into it",
    ),
    (
        "transferqueue relay --from tcp://trainer:7777 --channel policy --serve ipc:///tmp/tq/w.sock --serve tcp://0.0.0.0:7778",
        "the same, and other hosts' relays may take from it: --from tcp://THIS-HOST:7778",
    ),
    (
        "transferqueue relay --from tcp://rack-1:7778 --from tcp://trainer:7777 --channel policy --into ipc:///tmp/tq/q.sock",
        "into a server that runs here; from the trainer while the first relay is gone",
    ),
)
STOP_S: Final = 2.0
"""What is being carried then is carried by the next relay."""


def relay(
    sources: Annotated[
        list[str],
        typer.Option(
            "--from",
            metavar="ADDRESS",
            show_default=False,
            help="The trainer's server, or that of another relay; an address or a join token. Repeatable: tried in turn.",
        ),
    ],
    channel: Annotated[str, typer.Option("--channel", metavar="NAME", show_default=False, help="The weight channel.")],
    into: Annotated[
        str | None,
        typer.Option(
            "--into",
            metavar="ADDRESS",
            show_default=False,
            help=f"A server that runs on this host. Default, without --serve: ${ADDRESS_VARIABLE}.",
        ),
    ] = None,
    serving: Annotated[
        list[str] | None,
        typer.Option(
            "--serve",
            metavar="ADDRESS",
            show_default=False,
            help="Be that server, at ipc://path or tcp://host:port; more tcp addresses may follow. It ends with the relay.",
        ),
    ] = None,
    arena_bytes: Annotated[
        str | None,
        typer.Option(
            "--arena-bytes",
            metavar="SIZE",
            show_default=False,
            help="Ceiling of the memory of --serve: at least one version more than --keep.",
        ),
    ] = None,
    keep: Annotated[int, typer.Option("--keep", min=1, help="Versions kept here.")] = 2,
    wait_s: Annotated[
        float | None,
        typer.Option(
            "--wait-s", min=0.1, show_default=False, help="When a source has nothing new, look again. Default: 600."
        ),
    ] = None,
    over_the_network: Annotated[
        bool, typer.Option("--remote", help="Bytes cross the network even from a source on this machine: a rehearsal.")
    ] = False,
) -> None:
    """Carry each version of a weight channel into this host once, and serve it here, until Ctrl-C or SIGTERM.

    Only tensors that changed cross. Replicas of this host pull from the relay's server. One line tells of each version carried, and of
    each error of the network, after which it is tried again. With --serve, the first line is "ready" and its addresses.
    """
    from transferqueue.errors import UsageError
    from transferqueue.weights import WAIT_S, RelayProcess

    place = into or (None if serving else os.environ.get(ADDRESS_VARIABLE))
    if (place is None) == (not serving):
        raise UsageError(
            f"the relay needs one server of this host, and --into {place} and --serve {serving} were given; give --into the address "
            "of one that runs, or --serve the address to be one at"
        )
    if arena_bytes and not serving:
        raise UsageError(f"--arena-bytes {arena_bytes} is for --serve; the server at {place} has its own")

    def carrier(here: str) -> RelayProcess:
        return RelayProcess(
            sources,
            here,
            channel,
            keep=keep,
            data="remote" if over_the_network else "auto",
            wait_s=wait_s or WAIT_S,
            tell=_tell,
        )

    if place is not None:
        carrier(place).run()
    else:
        _serve(serving or [], arena_bytes, carrier)


def _tell(line: str) -> None:
    say(f"relay: {line}", err=True)
    sys.stderr.flush()


class _Beside(threading.Thread):
    """A carrier beside the server of this process, which it stops if it ends by an error."""

    def __init__(self, carrier: RelayProcess) -> None:
        super().__init__(name="weight relay", daemon=True)
        self.carrier = carrier
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.carrier.run()
        except BaseException as error:  # noqa: BLE001  (raised again by the main thread)
            self.error = error
            os.kill(os.getpid(), signal.SIGTERM)


def _serve(addresses: Sequence[str], arena_bytes: str | None, make: Callable[[str], RelayProcess]) -> None:
    """Be the server, with a carrier into it."""
    from transferqueue.limits import parse_bytes
    from transferqueue.server.process.serve import serve

    threads: list[_Beside] = []

    def ready(listening: list[str]) -> None:
        say(" ".join(["ready", *listening]))
        sys.stdout.flush()
        threads.append(_Beside(make(next(one for one in listening if one.startswith("ipc:")))))
        threads[0].start()

    ceiling = parse_bytes(arena_bytes) if arena_bytes else None
    try:
        serve(addresses[0], tcp=addresses[1:], arena_bytes=ceiling, on_ready=ready)
    finally:
        for thread in threads:
            thread.carrier.stop()
            thread.join(STOP_S)
    if threads[0].error is not None:
        raise threads[0].error
