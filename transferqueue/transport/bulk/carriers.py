"""Carriers of columns between a client and a shard whose memory it cannot map: the stream of the bulk protocol, or a
plug-in beside it.

A package registers a carrier in its ``pyproject.toml``, under the name that users give to ``--bytes``; ``nixl`` comes
with this package::

    [project.entry-points."transferqueue.carriers"]
    mine = "transferqueue_mine:MyCarrier"

A carrier moves the bytes of reads and writes. Their requests and acknowledgements cross over a connection of the bulk
protocol (`protocol.ReadRanges`, `protocol.WriteRanges`). If the carrier fails, the stream carries the bytes. Bytes that
a carrier moves are not encrypted.
"""

from __future__ import annotations

import os
from typing import Any, Final, Protocol

from transferqueue.errors import UsageError
from transferqueue.lazy import Plugins

BYTES_VARIABLE: Final = "TRANSFERQUEUE_BYTES"
STREAM: Final = "stream"
CARRIERS: Final = Plugins(
    "transferqueue.carriers", {"nixl": "transferqueue.adapters.carriers.nixl.carrier:NixlCarrier"}
)


class Carrier(Protocol):
    """A plug-in that moves columns beside the stream. Its `str` is its setting.

    The constructor takes the whole setting, such as ``nixl`` or ``nixl:tcp``; the part before the colon names the
    plug-in. It raises `UsageError` for an unknown setting.
    """

    def describe(self) -> str:
        """The devices that it uses here, for `doctor`; may take seconds. `UsageError` if it cannot work here."""

    def open_client(self) -> Any:
        """Its part in one client session, a `client.memory.carrier.SessionCarrier`."""

    def open_shard(self, backing: Any) -> Any:
        """Its part in a shard with this `ArenaBacking`, a `server.shards.carrier.ShardCarrier`; may take a second.
        `UsageError` if it cannot work here."""


def chosen_carrier(setting: str | None = None) -> Carrier | None:
    """The carrier of this setting, None for the stream alone.

    Args:
        setting: The name of a carrier, or ``stream``; None: the value of `TRANSFERQUEUE_BYTES`, else ``stream``.

    Raises:
        UsageError: There is no such carrier.

    Example:
        >>> chosen_carrier("stream") is None, str(chosen_carrier("nixl:tcp"))
        (True, 'nixl:tcp')
    """
    setting = setting if setting is not None else os.environ.get(BYTES_VARIABLE) or STREAM
    if setting == STREAM:
        return None
    name, places = setting.partition(":")[0], CARRIERS.places
    if name not in places:
        raise UsageError(
            f"bytes={setting!r} is no carrier of columns; choose one of {', '.join([STREAM, *places])} (--bytes, or "
            f"{BYTES_VARIABLE} in the environment)"
        )
    carrier: Carrier = CARRIERS.load(name)(setting)
    return carrier
