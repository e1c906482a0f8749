"""`transferqueue shard` adds this machine's memory to a deployment as a shard; `transferqueue shard drain` removes a
shard."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Annotated, NoReturn

import typer

from transferqueue.cli.connection import single_address_of
from transferqueue.cli.logs import LogJsonOption, LogLevelOption, log_to_stderr
from transferqueue.cli.options import MEMORY, REACH, AddressOption, ArenaBytesOption, CarrierOption, size_in_bytes
from transferqueue.cli.screens.terminal import say_ready

EXAMPLES = (
    ("transferqueue shard", "add this machine's memory to the server of this user"),
    (
        "transferqueue shard --join tqjoin_... --arena-bytes 64GiB",
        "to one on another machine, by a token of role shard",
    ),
    (
        "transferqueue shard --store mooncake://10.0.0.5:50051 --arena-bytes 64GiB",
        "one whose bytes lie in a Mooncake Store",
    ),
    ("transferqueue shard drain 2", "shard 2 takes no more rows, and ends when nothing is left in it"),
)
commands = typer.Typer(invoke_without_command=True, rich_markup_mode="rich")


JoinOption = Annotated[
    str | None,
    typer.Option(
        "--join",
        "--address",
        "-a",
        metavar="ADDRESS",
        show_default=False,
        help="The server: ipc://path, tcp://host:port or a join token. Default: as of all commands.",
        rich_help_panel=REACH,
    ),
]
StoreOption = Annotated[
    str,
    typer.Option(
        "--store",
        metavar="ADDRESS",
        show_default=False,
        help="Keep the bytes in another store: mooncake://host:port of a Mooncake master, file:///directory, or one "
        "that a package registers; --arena-bytes limits them. Default: shared memory of this machine.",
        rich_help_panel=MEMORY,
    ),
]
HostOption = Annotated[
    str | None,
    typer.Option(
        "--host",
        metavar="NAME",
        show_default=False,
        help="The name by which other machines reach this one. Default: the address from which it reaches the server; "
        "loopback if the server listens at a socket file.",
        rich_help_panel=REACH,
    ),
]
LabelOption = Annotated[str, typer.Option("--label", metavar="TEXT", help="Its name in `top`.")]


@commands.callback()
def shard(
    context: typer.Context,
    address: JoinOption = None,
    arena_bytes: ArenaBytesOption = None,
    store: StoreOption = "",
    host: HostOption = None,
    carrier: CarrierOption = None,
    label: LabelOption = "shard",
    log_level: LogLevelOption = None,
    log_json: LogJsonOption = False,
) -> None:
    """Add this machine's memory to a deployment.

    Runs until the shard is drained, or until Ctrl-C or SIGTERM. A put goes to the shard of its machine while that has
    room; a read fetches rows from any shard. When a shard stops, tasks make its rows again if they give all lost
    fields; the others are dropped ("lost"). Drain it first. Prints one line when it has joined: "ready", then the
    address at which others fetch its bytes.
    """
    log_to_stderr(log_level, as_json=log_json)
    if context.invoked_subcommand is not None:
        return
    from transferqueue.client.session.addresses import endpoint
    from transferqueue.cluster.shard import ShardProcess, serve_shard

    server = single_address_of(address, "a shard adds its memory to")
    place, keys = endpoint(server)
    process = ShardProcess(
        place or server,
        arena_bytes=size_in_bytes(arena_bytes),
        store=store,
        host=host,
        carrier=carrier,
        keys=keys,
        label=label,
    )
    previous_handler = signal.signal(signal.SIGTERM, _stop)
    try:
        serve_shard(process, lambda endpoint: say_ready([endpoint]))
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


@commands.command()
def drain(
    number: Annotated[
        int,
        typer.Argument(metavar="NUMBER", min=0, show_default=False, help="The number of the shard, as `top` shows it."),
    ],
    address: AddressOption = None,
) -> None:
    """Put no more rows into a shard. It stops after its last row is done and its last view is released."""
    from transferqueue.cli.connection import connected

    with connected(single_address_of(address, "a shard is of"), label="drain") as queue:
        queue.drain_shard(number)


def _stop(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(0)
