"""Which server a command speaks to, and a connection to it for the length of the command."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Final

import typer

if TYPE_CHECKING:
    from transferqueue.client import Queue

CONNECT_S: Final = 5.0
"""A person waits at the prompt: a server that answers does so in milliseconds."""


@contextmanager
def connected(address: str, *, label: str) -> Iterator[Queue]:
    """The queue at `address`; `Unreachable` when nothing answers within `CONNECT_S`."""
    import transferqueue

    with transferqueue.connect(address, timeout_s=CONNECT_S, label=label) as queue:
        yield queue


ADDRESS_VARIABLE: Final = "TRANSFERQUEUE_ADDRESS"

AddressOption = Annotated[
    str | None,
    typer.Option(
        "--address",
        "-a",
        metavar="ADDRESS",
        show_default=False,
        help="The server: ipc://path, tcp://host:port or a join token; of several coordinators all, joined by commas. "
        f"Default: ${ADDRESS_VARIABLE}, else "
        "$TRANSFERQUEUE_TOKEN, else the server of this user.",
    ),
]
AddressArgument = Annotated[
    str | None, typer.Argument(metavar="ADDRESS", show_default=False, help="The same as --address.")
]


def address_of(given: str | None) -> str:
    """`given`, else the environment's, else that of this user's server; of several coordinators, their addresses joined by
    commas. `UsageError` if it is not an address.

    Of a join token the address; its key goes to the environment, where `connect` finds it: what is printed is no secret.
    """
    from transferqueue.client.session.addresses import TOKEN_VARIABLE, named_server
    from transferqueue.transport import default_address, parse_address, split_addresses
    from transferqueue.transport.security.keys import is_token, read_token

    named = given or named_server() or default_address()
    ways = split_addresses(named)
    if tokens := [one for one in ways if is_token(one)]:
        os.environ[TOKEN_VARIABLE] = ",".join(tokens)
    return ",".join(read_token(one).address if is_token(one) else str(parse_address(one)) for one in ways)


def single_address_of(given: str | None, what: str) -> str:
    """`address_of` for what is done with one server alone."""
    from transferqueue.errors import UsageError
    from transferqueue.transport import split_addresses

    found = address_of(given)
    if len(split_addresses(found)) > 1:
        raise UsageError(f"{what} one coordinator, and {found} are several; give the address of one")
    return found
