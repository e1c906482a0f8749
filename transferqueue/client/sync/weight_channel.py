"""A weight channel: versioned publication of model weights to whoever generates with them."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from transferqueue.client.handles.weights import WeightChannelBase
from transferqueue.client.operations.publish import publish_weights
from transferqueue.client.operations.weights import (
    TURN_S,
    Weights,
    acquire_update_slot,
    mirror_weights,
    pull_weights,
    release_update_slot,
    report_applied,
)
from transferqueue.client.session.run import run_sync
from transferqueue.limits import TIMEOUT_S_DEFAULT
from transferqueue.storage.elements.process_bound import Staying

if TYPE_CHECKING:
    pass


class WeightChannel(Staying, WeightChannelBase):
    """Versioned publication of weights. Made by `Queue.weights`; any process may publish or pull."""

    elsewhere: ClassVar[str] = (
        "pass queue.address and the name of the channel, and open it there: tq.connect(address).weights(name)"
    )

    def publish(
        self,
        version: int,
        tensors: Mapping[str, Any],
        *,
        adapter: str | None = None,
        timeout_s: float = TIMEOUT_S_DEFAULT,
    ) -> None:
        """Publish all `tensors` (torch or numpy, by name) as `version`, in one commit; versions ascend.

        Written once, into shared memory, from whatever device they are on; tensors that are as in the newest version are
        not written: their bytes are part of both. adapter: `tensors` are those of this adapter (such as a LoRA's), and the
        version is the newest with that adapter replaced or added; `NotFound` without a base.
        Tables whose pacing names this channel advance their clock. The oldest versions beyond `keep` end; who still views
        one keeps it. Waits up to `timeout_s` for memory.
        """
        operation = publish_weights(self._client, self._name, self._keep, version, tensors, adapter, timeout_s)
        run_sync(self._client.connection, operation)

    def mirror(self, weights: Weights, *, timeout_s: float = TIMEOUT_S_DEFAULT) -> None:
        """Publish weights that were pulled from another channel, such as another deployment's, as the version they are there:
        base and adapters, in one commit, as they arrived (views that were changed in place since do not match their checksums,
        and are refused by whoever pulls them). Otherwise as `publish`; what is unchanged here is neither read nor written.
        """
        run_sync(self._client.connection, mirror_weights(self._client, self._name, self._keep, weights, timeout_s))

    def pull(
        self,
        above: int = -1,
        *,
        version: int | None = None,
        since: Weights | None = None,
        timeout_s: float = TIMEOUT_S_DEFAULT,
    ) -> Weights:
        """The newest version above `above` (or exactly `version`), waiting up to `timeout_s` for it.

        since: weights that are held, not released, whose unchanged tensors are shared, not fetched; `Weights.changed`
        says which are new. Checksums of what is new are compared: `Corruption` if they do not match twice.
        """
        return run_sync(
            self._client.connection, pull_weights(self._client, self._name, above, version, since, timeout_s)
        )

    def subscribe(self) -> Subscription:
        """Version after version, of each what changed."""
        return Subscription(self)

    def applied(self, version: int) -> None:
        """This process generates with `version` from now on; that is a fact of its own, recorded beside publication."""
        run_sync(self._client.connection, report_applied(self._name, version))

    @contextmanager
    def turn(
        self, *, at_once: int = 1, length_s: float = TURN_S, timeout_s: float = TIMEOUT_S_DEFAULT
    ) -> Generator[None]:
        """Change weights while at most `at_once` sessions do: generation as a whole never stops. Waits up to `timeout_s`.

        The turn ends with the block, with this session, or after `length_s`: who is dead or slow does not block the others.
        """
        run_sync(self._client.connection, acquire_update_slot(self._name, at_once, length_s, timeout_s))
        try:
            yield
        finally:
            run_sync(self._client.connection, release_update_slot(self._name))


class Subscription:
    """The versions of a channel as one reader takes them: each pull gives what is newer, and fetches only what changed.

    The weights of the pull before are released by the next, as soon as that has succeeded. One thread at a time.
    """

    def __init__(self, channel: WeightChannel) -> None:
        self._channel = channel
        self._held: Weights | None = None

    @property
    def version(self) -> int:
        """Version of the last pull; -1: none yet."""
        return -1 if self._held is None else self._held.version

    def pull(self, *, version: int | None = None, timeout_s: float = TIMEOUT_S_DEFAULT) -> Weights:
        """The newest version above the last (or exactly `version`), waiting up to `timeout_s` for it."""
        before = self._held
        self._held = self._channel.pull(self.version, version=version, since=before, timeout_s=timeout_s)
        if before is not None:
            before.release()
        return self._held

    def close(self) -> None:
        """Release what is held. Again: nothing."""
        if self._held is not None:
            self._held.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
