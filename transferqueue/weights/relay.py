"""The relay between two queues, and the process that runs it between addresses. See the package for its guarantees."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from types import TracebackType
from typing import Final, Self

import transferqueue as tq
from transferqueue.client.client import Data
from transferqueue.client.operations import arguments as checks
from transferqueue.client.operations.pull import TRIES
from transferqueue.client.operations.weight_parts import release_all
from transferqueue.errors import Corruption, FlowSignal, NotFound, PeerError, UsageError
from transferqueue.limits import RELAY_PART_BYTES
from transferqueue.weights.fetching import Source
from transferqueue.weights.relay_publish import RelayPublisher

WAIT_S: Final = 600.0
"""A training step takes minutes. After this time without a new version, or a part of one, the relay reconnects, or
takes the next source."""
TRANSFER_S: Final = 60.0
"""Longest wait for memory on the host, which another process must free."""
AGAIN_S: Final = 1.0
"""Pause between an error of the network and the next attempt."""


class Crossing:
    """Carries versions from a source to a publisher."""

    def __init__(self, source: Source, publisher: RelayPublisher) -> None:
        self._source, self._publisher = source, publisher
        publisher.look()
        if publisher.version >= 0:
            with suppress(NotFound):  # the source is behind
                source.applied(publisher.version)

    def carry(self, wait_s: float, timeout_s: float) -> int:
        """Carry the newest version above that of the publisher, and return it: see `WeightRelay.carry`."""
        tries_left = TRIES
        is_whole = False
        while not is_whole:
            try:
                is_whole = self._carry_next(wait_s, timeout_s)
            except Corruption:  # bytes changed on the way; the next transfer may succeed
                tries_left -= 1
                if not tries_left:
                    raise
                self._publisher.give_up()
                self._source.begin_again()
        self._publisher.look()
        self._source.applied(self._publisher.version)
        return self._publisher.version

    def _carry_next(self, wait_s: float, timeout_s: float) -> bool:
        """Carry the next parts, or the rest of a published version. Returns whether it is published here now."""
        reply = self._source.next(self._publisher.version, wait_s, self._publisher.refused)
        parts = self._publisher.plan(reply)
        with closing(self._source.fetch(reply, [part.blocks for part in parts])) as arriving:
            for number, (part, tensors) in enumerate(zip(parts, arriving, strict=True), 1):
                is_last = not reply.pending and number == len(parts)
                try:
                    self._publisher.publish(part, tensors, reply, is_last=is_last, timeout_s=timeout_s)
                finally:
                    release_all(tensors, "it was published")
        return not reply.pending


class WeightRelay:
    """Carries versions of `channel` from the queue `source` into the queue `here`. The caller closes both queues.

    Not thread-safe. Close the relay, or use ``with``.

    Args:
        keep: the number of versions that the channel keeps in `here`.
        part_bytes: forward at least this much at once. A smaller version is published in one commit.
    """

    def __init__(
        self, source: tq.Queue, here: tq.Queue, channel: str, *, keep: int = 2, part_bytes: int = RELAY_PART_BYTES
    ) -> None:
        self._publisher = RelayPublisher(here.weights(channel, keep), checks.positive("part_bytes", part_bytes))
        self._crossing = Crossing(Source(source.weights(channel)), self._publisher)

    @property
    def version(self) -> int:
        """The newest version on this host; -1: none."""
        return self._publisher.version

    def carry(self, *, wait_s: float = WAIT_S, timeout_s: float = TRANSFER_S) -> int:
        """Carry the newest version above `version`, and return it. Its parts can be pulled here as they come.

        Waits up to `wait_s` seconds for a version to be published, or for the next part of one, and up to `timeout_s`
        for memory on this host. After an error the next call continues with the parts that have arrived.

        Args:
            wait_s: seconds; default 600.
            timeout_s: seconds; default 60.

        Raises:
            DeadlineExceeded: one of the times is over.
            VersionGivenUp: the source gave up the version of the parts that have arrived.
            UsageError: another process publishes on this host.
        """
        return self._crossing.carry(wait_s, timeout_s)

    def close(self) -> None:
        """Release the held version, and give up one that is on its way. The versions on this host stay. A second call
        does nothing."""
        self._publisher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class RelayProcess:
    """A relay between addresses. It runs until `stop`, reconnects after errors, and takes the next source when one is
    lost. The parts of a version that have arrived stay when it takes the next source: only the rest crosses.

    Args:
        sources: addresses or join tokens, used in turn. If a source is unreachable or has no new version within
            `wait_s` seconds, the next one is used.
        here: the address of this host's server.
        data: ``"remote"`` sends the bytes over the network even if the source is on this machine (for tests).
        part_bytes: see `WeightRelay`.
        tell: called with a line of text for each version carried, and for each error that is retried.
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
        part_bytes: int = RELAY_PART_BYTES,
        tell: Callable[[str], object],
    ) -> None:
        if not sources:
            raise UsageError(f'the relay of channel "{channel}" has no source; name at least one')
        self._sources, self._here, self._channel = list(sources), here, channel
        self._keep, self._data = keep, data
        self._wait_s, self._timeout_s, self._tell = wait_s, timeout_s, tell
        self._part_bytes = checks.positive("part_bytes", part_bytes)
        self._stopped = threading.Event()
        self._guard = threading.Lock()
        self._host: tq.Queue | None = None
        self._publisher: RelayPublisher | None = None
        self._source: tq.Queue | None = None

    def run(self) -> None:
        """Carry versions until `stop`. Errors of the network and of other processes are passed to `tell` and retried.

        Raises:
            UsageError: an address is invalid, or another process publishes the channel on this host.
        """
        try:
            for source in itertools.cycle(self._sources):
                try:
                    self._carry(source)
                except (PeerError, FlowSignal) as error:
                    if not self._stopped.is_set():
                        self._tell(f'channel "{self._channel}": {error}')
                if self._stopped.wait(AGAIN_S):
                    return
        finally:
            self._leave_host()

    def stop(self) -> None:
        """Make `run` return: at once, or while it connects, when the attempt ends. From any thread."""
        with self._guard:
            self._stopped.set()
            queues = self._source, self._host
        for queue in queues:
            if queue is not None:
                queue.close()

    def _carry(self, address: str) -> None:
        publisher = self._publisher_here()
        with tq.connect(address, label="weight relay", data=self._data) as source:
            with self._guard:
                self._source = source
            crossing = Crossing(Source(source.weights(self._channel)), publisher)
            while not self._stopped.is_set():
                version = crossing.carry(self._wait_s, self._timeout_s)
                self._tell(f'channel "{self._channel}": version {version} is here')

    def _publisher_here(self) -> RelayPublisher:
        """The publisher on this host. If the session with its server has ended, it begins anew."""
        if self._publisher is None or self._publisher.is_over:
            self._leave_host()
            host = tq.connect(self._here, label="weight relay")
            with self._guard:
                self._host = host
            self._publisher = RelayPublisher(host.weights(self._channel, self._keep), self._part_bytes)
        return self._publisher

    def _leave_host(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
        if self._host is not None:
            self._host.close()
        self._publisher = self._host = None
