"""The way to a server: its address, and the keys to show there. From an address, a join token, or the environment."""

from __future__ import annotations

import os
from typing import Final

from transferqueue.errors import UsageError
from transferqueue.transport.keys import ClientKeys, is_token, read_token

TOKEN_VARIABLE: Final = "TRANSFERQUEUE_TOKEN"  # noqa: S105  (its name)


def way_in(address: str | None, key: str | None = None) -> tuple[str | None, ClientKeys | None]:
    """Where to connect (None: nowhere was said) and the keys for it (None: none).

    A token instead of an address says both. Else `key`, a token too, says who the client is, at a tcp address or, with
    none given, at its own. Where it is None, it is that of ``$TRANSFERQUEUE_TOKEN``; ``""`` is none.
    `UsageError` for what is no token, and for a key beside a token or an address that asks for none.
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
