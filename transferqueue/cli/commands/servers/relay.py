"""`transferqueue relay`: fetch each version of the weights once for this host, and serve it here from shared memory."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Final

import typer

from transferqueue.cli.connection import ADDRESS_VARIABLE
from transferqueue.cli.logs import LogJsonOption, LogLevelOption, log_to_stderr
from transferqueue.cli.options import MEMORY, REACH, arena_bytes_option, size_in_bytes
from transferqueue.cli.screens.terminal import say, say_ready

if TYPE_CHECKING:
    from transferqueue.weights import RelayProcess

EXAMPLES = (
    (
        "transferqueue relay --from tcp://trainer:7777 --channel policy --serve ipc:///tmp/tq/weights.sock",
        "a server for this host's replicas, and the relay into it",
    ),
    (
        (
            "transferqueue relay --from tcp://trainer:7777 --channel policy --serve ipc:///tmp/tq/w.sock --serve "
            "tcp://0.0.0.0:7778"
        ),
        "the same, and other hosts' relays may take from it: --from tcp://THIS-HOST:7778",
    ),
    (
        (
            "transferqueue relay --from tcp://rack-1:7778 --from tcp://trainer:7777 --channel policy --into "
            "ipc:///tmp/tq/q.sock"
        ),
        "into a server that runs here; from the trainer while the first relay is gone",
    ),
)
STOP_S: Final = 2.0
"""How long to wait for a transfer when the relay stops. The next relay repeats a transfer that was cut short."""
LINK: Final = "Link"

SourcesOption = Annotated[
    list[str],
    typer.Option(
        "--from",
        metavar="ADDRESS",
        show_default=False,
        help="The trainer's server, or that of another relay; an address or a join token. Repeatable: tried in turn.",
        rich_help_panel=REACH,
    ),
]
ChannelOption = Annotated[
    str,
    typer.Option(
        "--channel",
        metavar="NAME",
        show_default=False,
        help="The weight channel.",
        rich_help_panel=REACH,
    ),
]
IntoOption = Annotated[
    str | None,
    typer.Option(
        "--into",
        metavar="ADDRESS",
        show_default=False,
        help=f"A server that runs on this host. Default, without --serve: ${ADDRESS_VARIABLE}.",
        rich_help_panel=REACH,
    ),
]
ServingOption = Annotated[
    list[str] | None,
    typer.Option(
        "--serve",
        metavar="ADDRESS",
        show_default=False,
        help="Be that server, at ipc://path or tcp://host:port; more tcp addresses may follow. It ends with the relay.",
        rich_help_panel=REACH,
    ),
]
ArenaBytesOption = Annotated[
    str | None,
    arena_bytes_option(
        "Ceiling of the memory of --serve: at least one version more than --keep.",
        panel=MEMORY,
    ),
]
KeepOption = Annotated[
    int,
    typer.Option(
        "--keep",
        min=1,
        help="Versions kept here.",
        rich_help_panel=MEMORY,
    ),
]
WaitSOption = Annotated[
    float | None,
    typer.Option(
        "--wait-s",
        min=0.1,
        show_default=False,
        help="When a source has nothing new, look again. Default: 600.",
        rich_help_panel=LINK,
    ),
]
PartBytesOption = Annotated[
    str | None,
    typer.Option(
        "--part-bytes",
        metavar="SIZE",
        show_default=False,
        help=(
            "Smallest part that is forwarded. Default: 4MiB. Above the size of a version: the relay forwards whole "
            "versions."
        ),
        rich_help_panel=LINK,
    ),
]
OverTheNetworkOption = Annotated[
    bool,
    typer.Option(
        "--remote",
        help="Bytes cross the network even from a source on this machine: a rehearsal.",
        rich_help_panel=LINK,
    ),
]


def relay(
    sources: SourcesOption,
    channel: ChannelOption,
    into: IntoOption = None,
    serving: ServingOption = None,
    arena_bytes: ArenaBytesOption = None,
    keep: KeepOption = 2,
    wait_s: WaitSOption = None,
    part_bytes: PartBytesOption = None,
    over_the_network: OverTheNetworkOption = False,
    log_level: LogLevelOption = None,
    log_json: LogJsonOption = False,
) -> None:
    """Fetch each version of the weights once for this host.

    Runs until Ctrl-C or SIGTERM. Only changed tensors cross the network. Replicas of this host pull from the relay's
    server, and other relays forward each part of a version from there while the rest arrives. Prints a line for each
    version, and for each network error before it tries again. With --serve, the first line is "ready" and its
    addresses.
    """
    log_to_stderr(log_level, as_json=log_json)
    from transferqueue.errors import UsageError
    from transferqueue.limits import RELAY_PART_BYTES
    from transferqueue.weights.relay import WAIT_S, RelayProcess

    target = into or (None if serving else os.environ.get(ADDRESS_VARIABLE))
    if (target is None) == (not serving):
        raise UsageError(
            f"the relay needs one server of this host, and --into {target} and --serve {serving} were given; give "
            "--into the address of one that runs, or --serve the address to be one at"
        )
    if arena_bytes and not serving:
        raise UsageError(f"--arena-bytes {arena_bytes} is for --serve; the server at {target} has its own")

    part = size_in_bytes(part_bytes) or RELAY_PART_BYTES

    def relay_into(address: str) -> RelayProcess:
        return RelayProcess(
            sources,
            address,
            channel,
            keep=keep,
            data="remote" if over_the_network else "auto",
            wait_s=wait_s or WAIT_S,
            part_bytes=part,
            tell=_tell,
        )

    if target is not None:
        relay_into(target).run()
    else:
        _serve(serving or [], size_in_bytes(arena_bytes), relay_into)


def _tell(line: str) -> None:
    say(f"relay: {line}", err=True)
    sys.stderr.flush()


class _RelayThread(threading.Thread):
    """Runs the relay beside the server of this process. An error of the relay stops the server too."""

    def __init__(self, process: RelayProcess) -> None:
        super().__init__(name="weight relay", daemon=True)
        self.process = process
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.process.run()
        except BaseException as error:  # noqa: BLE001  (raised again by the main thread)
            self.error = error
            os.kill(os.getpid(), signal.SIGTERM)


def _serve(addresses: Sequence[str], arena_bytes_max: int | None, relay_into: Callable[[str], RelayProcess]) -> None:
    """Run a server at these addresses, and the relay into it."""
    from transferqueue.server.process.serve import serve

    threads: list[_RelayThread] = []

    def ready(listening: list[str]) -> None:
        say_ready(listening)
        threads.append(_RelayThread(relay_into(next(address for address in listening if address.startswith("ipc:")))))
        threads[0].start()

    try:
        serve(addresses[0], tcp=addresses[1:], arena_bytes=arena_bytes_max, on_ready=ready)
    finally:
        for thread in threads:
            thread.process.stop()
            thread.join(STOP_S)
    if threads[0].error is not None:
        raise threads[0].error
