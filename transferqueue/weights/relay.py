"""A relay: weights cross into a host once, however many replicas it has, and are served there from shared memory.

The law:

1. A host has a server of its own, and one relay into it. The relay pulls each version from a *source*, which is the trainer's
   deployment or the server of another relay, and publishes it here under the same number. Replicas pull here, whether
   they were there before, come late, or replace one that died. So relays make a chain or a tree by addresses alone.
2. What is compared with is what is kept here, not what was received: so only tensors that changed cross, also after the
   relay or its source was started again.
3. A version is here whole or not at all: a relay that dies on the way leaves nothing, and the next begins that version anew.
   One that falls behind takes the newest next; versions between are not carried.
4. Bytes are received once, copied once into the arena, and let go. Memory is what the channel keeps, one version more while
   the next is written, and what was received of that.
5. A checksum travels with each tensor from the origin: it is compared after each hop, and again when a replica pulls.
6. `publish` never waits for a relay. `applied`, at the source, says what its relays have, and how late.
7. Versions never go back. A source whose newest is below what is here is waited for: a trainer that begins anew at lower
   numbers needs relays that begin anew too.

A hop is carried whole before the next begins: the last of a chain has a version after the sum of all transfers. For many hosts,
take a tree.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

import transferqueue as tq
from transferqueue.client.client import Data
from transferqueue.errors import DeadlineExceeded, FlowSignal, NotFound, PeerError, UsageError

WAIT_S: Final = 600.0
"""A training step takes minutes; a source that has nothing new for so long is looked at again, or left for the next one."""
TRANSFER_S: Final = 60.0
"""A version is written here by then: it waits for memory that somebody else must let go."""
AGAIN_S: Final = 1.0
"""Between an error of the network and the next attempt."""


class WeightRelay:
    """Carries versions of `channel` from the queue `source` into the queue `here`; both are the caller's to close.

    keep: versions kept here. One thread at a time.
    """

    def __init__(self, source: tq.Queue, here: tq.Queue, channel: str, *, keep: int = 2) -> None:
        self._source, self._here = source.weights(channel), here.weights(channel, keep)
        self._held: tq.Weights | None = None
        with suppress(DeadlineExceeded):  # nothing is here yet
            self._hold()
            with suppress(NotFound):  # the source is behind
                self._source.applied(self.version)

    @property
    def version(self) -> int:
        """The newest version that is here; -1: none."""
        return -1 if self._held is None else self._held.version

    def carry(self, *, wait_s: float = WAIT_S, timeout_s: float = TRANSFER_S) -> int:
        """Carry the newest version above `version`, and return it.

        Waits up to `wait_s` for one to be published, and up to `timeout_s` for memory here: `DeadlineExceeded` then. What fails
        is carried by the next call. `UsageError` if somebody else publishes here.
        """
        with self._source.pull(self.version, since=self._held, timeout_s=wait_s) as weights:
            self._here.mirror(weights, timeout_s=timeout_s)
        self._hold()
        self._source.applied(self.version)
        return self.version

    def _hold(self) -> None:
        """Hold the newest version that is here, to compare the next one with."""
        before = self._held
        self._held = self._here.pull(self.version, since=before, timeout_s=0)
        if before is not None:
            before.release()

    def close(self) -> None:
        """Let go of what is compared with; what is here stays. Again: nothing."""
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
    """A relay by addresses, for as long as it is not told to stop: it connects again, and takes another source where one is gone.

    sources: addresses or join tokens, tried in turn: one that is gone, or has nothing new within `wait_s`, gives way
    to the next. here: address of this host's server. data: ``"remote"`` has bytes cross the network even where the source is on
    this machine, as a rehearsal. tell: given a line of text for each version carried and each error of others.
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
        """Carry until `stop`. Raises `UsageError`, such as for an address that is none or a channel that others publish here;
        what the network and other processes do wrong is told, and tried again."""
        for source in itertools.cycle(self._sources):
            try:
                self._carry(source)
            except (PeerError, FlowSignal) as error:
                if not self._stopped.is_set():
                    self._tell(f'channel "{self._channel}": {error}')
            if self._stopped.wait(AGAIN_S):
                return

    def stop(self) -> None:
        """Have `run` return soon: at once, or where it connects, when that ends. From any thread."""
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
