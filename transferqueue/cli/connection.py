"""Find the server of a command, and connect to it for the time of the command."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from transferqueue.client import Queue

CONNECT_S: Final = 5.0
"""A person waits at the prompt, and a server that runs answers in milliseconds."""


@contextmanager
def connected(address: str, *, label: str) -> Iterator[Queue]:
    """Connect to the queue at `address`. `Unreachable` if nothing answers within `CONNECT_S`."""
    import transferqueue

    check_sockets(address)
    with transferqueue.connect(address, timeout_s=CONNECT_S, label=label) as queue:
        yield queue


def check_sockets(address: str) -> None:
    """`Unreachable` at once if a socket file is missing or no process listens, instead of a wait.

    A server that was killed leaves its socket file, and the kernel refuses the connection. The command waits
    for a slow or stopped server.
    """
    from transferqueue.errors import Unreachable
    from transferqueue.transport import check_listening, parse_address, split_addresses

    for place in map(parse_address, split_addresses(address)):
        try:
            check_listening(place)
        except (FileNotFoundError, ConnectionRefusedError) as error:
            reason = "there is no such socket" if isinstance(error, FileNotFoundError) else "nothing listens there"
            raise Unreachable(
                f"no server runs at {place}: {reason}; start one: transferqueue serve --address {place}"
            ) from error
        except OSError:
            continue  # no answer, or not for this user: connect() says more


ADDRESS_VARIABLE: Final = "TRANSFERQUEUE_ADDRESS"


def address_of(option: str | None) -> str:
    """The address in `option`, else in the environment, else of this user's server. `UsageError` if it is not an
    address.

    The addresses of several coordinators stay joined by commas. Of a join token this returns the address only, so that
    no secret is printed, and puts the token into the environment, where `connect` finds it.
    """
    from transferqueue.client.session.addresses import TOKEN_VARIABLE, named_server
    from transferqueue.transport import default_address, parse_address, split_addresses
    from transferqueue.transport.security.keys import is_token, read_token

    parts = split_addresses(option or named_server() or default_address())
    if tokens := [part for part in parts if is_token(part)]:
        os.environ[TOKEN_VARIABLE] = ",".join(tokens)
    return ",".join(read_token(part).address if is_token(part) else str(parse_address(part)) for part in parts)


def single_address_of(option: str | None, purpose: str) -> str:
    """`address_of` for a command that works with one server; `purpose` begins the error if there are several."""
    from transferqueue.errors import UsageError
    from transferqueue.transport import split_addresses

    address = address_of(option)
    if len(split_addresses(address)) > 1:
        raise UsageError(f"{purpose} one coordinator, and {address} are several; give the address of one")
    return address
