"""`transferqueue keys`: make, list and revoke the keys of a server that listens at tcp, and print join tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from transferqueue.cli.options import directory_option
from transferqueue.cli.screens.terminal import say, say_fields

EXAMPLES = (
    ("transferqueue keys new rollout --role producer", "a key for rollout workers"),
    ("transferqueue keys token rollout tcp://10.0.0.7:7777", "a token to paste into connect()"),
    ("transferqueue keys list", "all keys"),
    ("transferqueue keys revoke rollout", "end it, at a running server too"),
)

commands = typer.Typer(
    help="Make, list and revoke keys of remote clients, and print join tokens.",
    no_args_is_help=True,
)

KeysOption = Annotated[
    Path | None,
    directory_option(
        "--keys",
        "Directory of the keys (0700). Default: $TRANSFERQUEUE_KEYS, else ~/.config/transferqueue.",
    ),
]
NameArgument = Annotated[str, typer.Argument(metavar="NAME", show_default=False, help="Name of the key.")]


@commands.command("new")
def new(
    name: NameArgument,
    role: Annotated[
        str,
        typer.Option(
            "--role",
            help="admin, producer, consumer, observer or shard; what each may do: `transferqueue docs security`.",
        ),
    ] = "producer",
    keys: KeysOption = None,
) -> None:
    """Make a key. The first one also makes the server's own. A running server accepts it at once."""
    from transferqueue.transport.security import keyring

    made = keyring.add(keys or keyring.default_directory(), name, role)
    say(f"made key {made.name}, role {made.role}")


@commands.command("list")
def show(keys: KeysOption = None) -> None:
    """List names, roles, public keys and when each was made. Prints no secret."""
    from transferqueue.transport.security import keyring

    for owner in keyring.load(keys or keyring.default_directory()).clients:
        say_fields(owner.name, owner.role, owner.pair.public, owner.made)


@commands.command("revoke")
def revoke(name: NameArgument, keys: KeysOption = None) -> None:
    """Revoke a key. A running server ends its sessions when it next wakes; SIGHUP wakes it."""
    from transferqueue.transport.security import keyring

    gone = keyring.revoke(keys or keyring.default_directory(), name)
    say(f"revoked key {gone.name}, role {gone.role}")


@commands.command("token")
def token(
    name: NameArgument,
    address: Annotated[
        str,
        typer.Argument(
            metavar="ADDRESS", show_default=False, help="The server as its clients see it: tcp://host:port."
        ),
    ],
    keys: KeysOption = None,
) -> None:
    """Print the join token of a key: a password for connect() or $TRANSFERQUEUE_TOKEN."""
    from transferqueue.transport.security import keyring
    from transferqueue.transport.security.keys import write_token

    say(write_token(keyring.token_of(keys or keyring.default_directory(), name, address)))
