"""The weight channel: versioned publication of model weights to generators. `Queue.weights` makes its handles.

On one machine a version is blocks in the arena, which every process maps: `publish` writes the tensors once, and each `pull` views
them. Only tensors that changed are written, and a replica that holds an earlier version fetches only those.

Other hosts have a `WeightRelay` each. A version crosses into such a host once, however many replicas the host has, and they pull it
from shared memory there. Rules of a relay:

1. A host has a server of its own, and one relay that publishes into it. The relay pulls each version from a *source*, which is the
   trainer's deployment or the server of another relay, and publishes it on its host under the same number. Replicas pull on their
   host, whether they started early, come late, or replace one that died. So relays form a chain or a tree by addresses alone.
2. The relay compares a new version with the version on its host, so only tensors that changed cross, also after the relay or its
   source restarted.
3. A version is on the host whole or not at all. A relay that dies during a transfer leaves nothing, and the next relay starts that
   version again. A relay that falls behind takes the newest version next; it skips those between.
4. Bytes are received once, copied once into the arena, and released. The host's memory holds the versions that the channel keeps,
   one more while the next is written, and what was received of that one.
5. A checksum travels with each tensor from the origin. It is compared after each hop, and again when a replica pulls.
6. `publish` never waits for a relay. `applied`, at the source, tells which version its relays have, and how late they are.
7. Versions never decrease. If the newest version of the source is below that on the host, the relay waits. A trainer that restarts
   at lower numbers needs relays that restart too.

A hop carries a whole version before the next hop begins, so the last host of a chain has it after the sum of all transfers. For many
hosts, use a tree.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

import transferqueue as tq
from transferqueue.client.aio.weight_channel import AsyncWeightChannel
from transferqueue.client.client import Data
from transferqueue.client.handles.weights import Subscription
from transferqueue.client.operations.weights import Weights
from transferqueue.client.sync.weight_channel import WeightChannel
from transferqueue.errors import DeadlineExceeded, FlowSignal, NotFound, PeerError, UsageError
from transferqueue.lazy import renamed_names

__all__ = ["AsyncWeightChannel", "RelayProcess", "Subscription", "WeightChannel", "WeightRelay", "Weights"]

__getattr__ = renamed_names(__name__, {"Carrier": "RelayProcess", "Relay": "WeightRelay"})

WAIT_S: Final = 600.0
"""A training step takes minutes. After this long without a new version the relay reconnects, or takes the next source."""
TRANSFER_S: Final = 60.0
"""Longest wait for memory on the host, which another process must free."""
AGAIN_S: Final = 1.0
"""Pause between an error of the network and the next attempt."""


class WeightRelay:
    """Carries versions of `channel` from the queue `source` into the queue `here`. The caller closes both queues.

    keep: how many versions the channel keeps in `here`. Not thread-safe. Close the relay, or use ``with``.
    """

    def __init__(self, source: tq.Queue, here: tq.Queue, channel: str, *, keep: int = 2) -> None:
        self._source, self._here = source.weights(channel), here.weights(channel, keep)
        self._held: tq.Weights | None = None
        with suppress(DeadlineExceeded):  # the host has no version yet
            self._hold()
            with suppress(NotFound):  # the source is behind
                self._source.applied(self.version)

    @property
    def version(self) -> int:
        """The newest version on this host; -1: none."""
        return -1 if self._held is None else self._held.version

    def carry(self, *, wait_s: float = WAIT_S, timeout_s: float = TRANSFER_S) -> int:
        """Carry the newest version above `version`, and return it.

        Waits up to `wait_s` seconds for a version to be published, and up to `timeout_s` for memory on this host; then raises
        `DeadlineExceeded`. After an error the next call tries again. `UsageError` if another process publishes on this host.
        """
        with self._source.pull(self.version, since=self._held, timeout_s=wait_s) as weights:
            self._here.mirror(weights, timeout_s=timeout_s)
        self._hold()
        self._source.applied(self.version)
        return self.version

    def _hold(self) -> None:
        """Hold the newest version on this host: the next one is compared with it."""
        before = self._held
        self._held = self._here.pull(self.version, since=before, timeout_s=0)
        if before is not None:
            before.release()

    def close(self) -> None:
        """Release the version that is held. The versions on this host stay. A second call does nothing."""
        if self._held is not None:
            self._held.release()
            self._held = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class RelayProcess:
    """A relay between addresses. It runs until `stop`, reconnects after errors, and takes the next source when one is lost.

    sources: addresses or join tokens, used in turn. If a source is unreachable or has no new version within `wait_s` seconds, the next
    one is used. here: the address of this host's server. data: ``"remote"`` sends the bytes over the network even if the source is on
    this machine (for tests). tell: called with a line of text for each version carried, and for each error that is retried.
    """

    def __init__(
        self,
        sources: Sequence[str],
        here: str,
        channel: str,
        *,
        keep: int = 2,
        data: Data = "auto",
        wait_s: float = WAIT_S,
        timeout_s: float = TRANSFER_S,
        tell: Callable[[str], object],
    ) -> None:
        if not sources:
            raise UsageError(f'channel "{channel}" is to be carried from nowhere; name at least one source')
        self._sources, self._here, self._channel = list(sources), here, channel
        self._keep, self._data = keep, data
        self._wait_s, self._timeout_s, self._tell = wait_s, timeout_s, tell
        self._stopped = threading.Event()
        self._guard = threading.Lock()
        self._open: tuple[tq.Queue, ...] = ()

    def run(self) -> None:
        """Carry versions until `stop`. Errors of the network and of other processes are passed to `tell` and retried.

        Raises `UsageError`, such as for an invalid address, or for a channel that another process publishes on this host.
        """
        for source in itertools.cycle(self._sources):
            try:
                self._carry(source)
            except (PeerError, FlowSignal) as error:
                if not self._stopped.is_set():
                    self._tell(f'channel "{self._channel}": {error}')
            if self._stopped.wait(AGAIN_S):
                return

    def stop(self) -> None:
        """Make `run` return: at once, or while it connects, when the attempt ends. From any thread."""
        with self._guard:
            self._stopped.set()
            queues = self._open
        for queue in queues:
            queue.close()

    def _carry(self, address: str) -> None:
        with (
            tq.connect(self._here, label="weight relay") as here,
            tq.connect(address, label="weight relay", data=self._data) as source,
            WeightRelay(source, here, self._channel, keep=self._keep) as relay,
        ):
            with self._guard:
                self._open = source, here
            while not self._stopped.is_set():
                version = relay.carry(wait_s=self._wait_s, timeout_s=self._timeout_s)
                self._tell(f'channel "{self._channel}": version {version} is here')
