"""The base of `WeightChannel` and `AsyncWeightChannel`, and the subscription, which is for threads."""

from __future__ import annotations

from types import TracebackType
from typing import ClassVar, Self

from transferqueue.client.client import ClientSession
from transferqueue.client.operations.pull import Weights, pull_weights
from transferqueue.client.operations.range_updates import KeptVersions
from transferqueue.client.session.operation_runner import run_sync
from transferqueue.storage.elements.process_bound import ProcessBound


class AsyncWeightChannelBase(ProcessBound):
    """A channel's name and session, without the verbs that talk to the server."""

    _remedy: ClassVar[str] = (
        "pass queue.address and the name of the channel, and open it there: tq.connect(address).weights(name)"
    )

    def __init__(self, client: ClientSession, name: str, kept: KeptVersions) -> None:
        self._client, self._name, self._kept = client, name, kept

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} at {self._client.address}>"

    @property
    def name(self) -> str:
        """The channel's name."""
        return self._name


class WeightChannelBase(AsyncWeightChannelBase):
    """A channel for threads, which can also be subscribed to."""

    def subscribe(self) -> Subscription:
        """Return a subscription, which pulls version after version.

        It fetches of each only what changed.

        Example:
            >>> import numpy as np
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     channel = queue.weights("policy")
            ...     with channel.subscribe() as subscription:
            ...         for version in (1, 2):
            ...             written = channel.publish(version, {"embed": np.full(2, version), "head": np.zeros(2)})
            ...             print(sorted(subscription.pull(timeout_s=10).changed()))
            ['embed', 'head']
            ['embed']
        """
        return Subscription(self._client, self._name)


class Subscription:
    """The versions of a channel as one reader takes them. Made by `WeightChannel.subscribe`.

    Each pull gets a newer version, and fetches only what changed. It releases the weights of the pull
    before as soon as it has succeeded. One thread at a time.
    """

    def __init__(self, client: ClientSession, channel: str) -> None:
        self._client, self._channel = client, channel
        self._held: Weights | None = None

    @property
    def version(self) -> int:
        """Version of the last pull; -1: none yet."""
        return -1 if self._held is None else self._held.version

    def pull(self, *, version: int | None = None, timeout_s: float | None = None) -> Weights:
        """Get the newest version above that of the last pull, or an exact one. Errors as of `WeightChannel.pull`.

        Args:
            version: get exactly this version; default None: the newest above the last one.
            timeout_s: seconds to wait; default None: no limit; 0: not at all.

        Returns:
            The weights, which the next pull releases.
        """
        before = self._held
        operation = pull_weights(self._client, self._channel, self.version, version, before, timeout_s)
        self._held = run_sync(self._client.connection, operation)
        if before is not None:
            before.release()
        return self._held

    def close(self) -> None:
        """Release the weights of the last pull. A second call does nothing."""
        if self._held is not None:
            self._held.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
