"""Which server a command speaks to, when it is not told: one rule for all commands."""

from __future__ import annotations

import os
from typing import Annotated, Final

import typer

ADDRESS_VARIABLE: Final = "TRANSFERQUEUE_ADDRESS"

AddressOption = Annotated[
    str | None,
    typer.Option(
        "--address",
        "-a",
        metavar="ADDRESS",
        show_default=False,
        help=f"The server: ipc://path, tcp://host:port or a join token. Default: ${ADDRESS_VARIABLE}, else "
        "$TRANSFERQUEUE_TOKEN, else the server of this user.",
    ),
]
AddressArgument = Annotated[
    str | None, typer.Argument(metavar="ADDRESS", show_default=False, help="The same as --address.")
]


def address_of(given: str | None) -> str:
    """`given`, else the environment's, else that of this user's server. `UsageError` if it is not an address.

    Of a join token the address; its key goes to the environment, where `connect` finds it: what is printed is no secret.
    """
    from transferqueue.client.joining import TOKEN_VARIABLE
    from transferqueue.transport import default_address, parse_address
    from transferqueue.transport.keys import is_token, read_token

    named = given or os.environ.get(ADDRESS_VARIABLE) or os.environ.get(TOKEN_VARIABLE) or default_address()
    if not is_token(named):
        return str(parse_address(named))
    os.environ[TOKEN_VARIABLE] = named
    return read_token(named).address
