"""What the weight channels of both APIs share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transferqueue.client.client import ClientSession

if TYPE_CHECKING:
    pass


class WeightChannelBase:
    """What the channels of both fronts share."""

    def __init__(self, client: ClientSession, name: str, keep: int) -> None:
        self._client, self._name, self._keep = client, name, keep

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} at {self._client.address}>"

    @property
    def name(self) -> str:
        """The channel's name."""
        return self._name
