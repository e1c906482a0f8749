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
        help=f"The server: ipc://path or tcp://host:port. Default: ${ADDRESS_VARIABLE}, else the server of this user.",
    ),
]
AddressArgument = Annotated[
    str | None, typer.Argument(metavar="ADDRESS", show_default=False, help="The same as --address.")
]


def address_of(given: str | None) -> str:
    """`given`, else the environment's, else that of this user's server. `UsageError` if it is not an address."""
    from transferqueue.transport import default_address, parse_address

    return str(parse_address(given or os.environ.get(ADDRESS_VARIABLE) or default_address()))
