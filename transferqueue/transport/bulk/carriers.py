"""What carries columns between a client and a shard whose memory it cannot map: the stream of the bulk protocol, or a
plug-in beside it.

A package registers a carrier in its ``pyproject.toml``, under the name that users give to ``--bytes``; ``nixl`` comes
with this package::

    [project.entry-points."transferqueue.carriers"]
    mine = "transferqueue_mine:MyCarrier"

A carrier moves the bytes of reads and writes whose requests and acknowledgements cross over a connection of the bulk
protocol (`protocol.ReadRanges`, `protocol.WriteRanges`). Where it fails the stream carries the bytes. Nothing encrypts
what it moves.
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
    """A plug-in that moves columns beside the stream. Constructed with the whole setting, such as ``nixl`` or
    ``nixl:tcp``, of which the part before the colon names the plug-in; `UsageError` for a setting that it does not
    know. Its `str` is the setting."""

    def describe(self) -> str:
        """What it uses on this machine, for `doctor`; may take seconds. `UsageError` if it cannot work here."""

    def open_client(self) -> Any:
        """Its part in one client session, a `client.memory.carrier.SessionCarrier`."""

    def open_shard(self, backing: Any) -> Any:
        """Its part in a shard with this `ArenaBacking`, a `server.shards.carrier.ShardCarrier`; may take a second.
        `UsageError` if it cannot work here."""


def chosen_carrier(setting: str | None = None) -> Carrier | None:
    """The carrier of this setting, None for the stream alone.

    Args:
        setting: The name of a carrier, or ``stream``; None: what `TRANSFERQUEUE_BYTES` says, else ``stream``.

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
            f"bytes={setting!r} is no carrier of columns; there are {', '.join([STREAM, *places])} (--bytes, or "
            f"{BYTES_VARIABLE} in the environment)"
        )
    carrier: Carrier = CARRIERS.load(name)(setting)
    return carrier
