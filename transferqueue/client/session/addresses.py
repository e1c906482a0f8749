"""Find the addresses of servers and the keys to show there, from arguments, join tokens or the environment."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from transferqueue.errors import UsageError
from transferqueue.transport import default_address, is_served, parse_address, runtime_directory, split_addresses
from transferqueue.transport.security.keys import ClientKeys, is_token, read_token
from transferqueue.transport.system.private_files import private_directory

TOKEN_VARIABLE: Final = "TRANSFERQUEUE_TOKEN"  # noqa: S105  (its name)

ADDRESS_VARIABLE: Final = "TRANSFERQUEUE_ADDRESS"
EMBEDDED: Final = "embedded"
"""In place of an address: an embedded server, whatever the environment says."""


def named_server() -> str | None:
    """The server that the environment names, as an address or a join token: ``$TRANSFERQUEUE_ADDRESS``, else
    ``$TRANSFERQUEUE_TOKEN``.

    None: it names none. Commands and `connect` follow it where they are given no address
    (`transferqueue docs environment`). `UsageError` if the variable is set and empty: what should have filled it has
    failed, and another server would be the wrong one.
    """
    for name, named in (
        (ADDRESS_VARIABLE, os.environ.get(ADDRESS_VARIABLE)),
        (TOKEN_VARIABLE, os.environ.get(TOKEN_VARIABLE)),
    ):
        if named is not None and not named.strip():
            raise UsageError(f"{name} is set and empty; give it the address of the server, or unset it")
        if named is not None:
            return named
    return None


def running_server() -> str | None:
    """The address of this user's server, where commands look too: in the runtime directory. None if none runs there.

    `UsageError` if the directory is open to other users: the server in it may be theirs.
    """
    own = default_address()
    if not is_served(own):
        return None
    private_directory(runtime_directory())
    return own


def endpoints(address: str | Sequence[str] | None, key: str | None = None) -> list[tuple[str, ClientKeys | None]]:
    """`endpoint` for each of several coordinators, joined by commas or in a list. Empty if neither arguments nor
    environment say where.

    If the key or the environment has several tokens, each is for the address that it names; a single token is for all.
    """
    tokens = split_addresses(os.environ.get(TOKEN_VARIABLE, "") if key is None else key)
    if address is None:
        pairs = [endpoint(None, token if len(tokens) > 1 else key) for token in tokens]
    else:
        pairs = [endpoint(text, _key_at(text, tokens) if len(tokens) > 1 else key) for text in listed(address)]
    return [(place, keys) for place, keys in pairs if place is not None]


def listed(address: str | Sequence[str]) -> list[str]:
    """The addresses of the coordinators as a list. `UsageError` for an empty one."""
    given: object = address
    texts = given if isinstance(given, Sequence) and not isinstance(given, str | bytes) else [given]
    addresses = [
        one for text in texts for one in (split_addresses(text) if isinstance(text, str) else [_refused(text)])
    ]
    if not addresses:
        raise UsageError(
            "the list of addresses is empty; give those of all coordinators, or none for an embedded server"
        )
    return addresses


def _refused(text: object) -> str:
    return str(parse_address(text))


def _key_at(address: str, tokens: list[str]) -> str | None:
    """The token for this address; None if it is a token itself, or needs none."""
    if not address.startswith("tcp://"):
        return None
    for token in tokens:
        if read_token(token).address == address:
            return token
    raise UsageError(f"none of the {len(tokens)} join tokens given is for {address}; give one of each coordinator")


def endpoint(address: str | None, key: str | None = None) -> tuple[str | None, ClientKeys | None]:
    """Where to connect (None: not given) and the keys for it (None: none).

    A token in place of the address gives both. Otherwise `key`, also a token, says who the client is: at the tcp
    address, or at the token's own address if none is given. key: None: the token of ``$TRANSFERQUEUE_TOKEN``; ``""``:
    none. `UsageError` for an invalid token, and for a key beside a token or beside an address that needs none.
    """
    if is_token(address):
        if key:
            raise UsageError("a join token was given as the address and another as the key; give one of them")
        token = read_token(address)
        return token.address, token.keys
    if not key and (key is not None or not (address is None or str(address).startswith("tcp://"))):
        return address, None
    named = key or os.environ.get(TOKEN_VARIABLE)
    if not named:
        return address, None
    token = read_token(named)
    return address or token.address, token.keys
