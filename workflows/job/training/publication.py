"""Publishes weights beside the training: the trainer stands still only while they are copied to host memory.

1. The copy of step k begins when its update is done. Forward and backward passes read the weights and change none, so
   only the update of step k + 1 waits for the copy.
2. A thread copies, publishes the version, and only then acks the rows of the step. So a process that sees room for new
   rows finds the weights that learned from the old ones. Versions are published in order, one at a time.
3. An error of the thread is raised by the trainer's next call here: no step follows one that could not be published.
4. With sharded weights (FSDP2) every rank has a publisher, which copies and publishes the rank's own shards as one part
   of the version. Rank 0 begins the version, and its part, the last, makes all visible; then the step is acked. Nothing
   crosses between ranks but the number of the version. A version whose parts have not come after `PUBLISH_S` is
   abandoned: `VersionGivenUp` or `DeadlineExceeded` end the ranks, which start again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from queue import SimpleQueue
from typing import Any, Final

import torch
from torch import Tensor

import transferqueue as tq
from transferqueue.adapters.lora_weights import LORA_SCALE, is_adapter
from transferqueue.adapters.protocols import WeightSource
from transferqueue.adapters.scoring.lora import AdapterWeights
from transferqueue.errors import UsageError
from transferqueue.workflows.flow.events import PUBLISH, Event, TimeSpan
from transferqueue.workflows.job.training.rank_shards import RankShards

PUBLISH_S: Final = 600.0
"""Longest wait for memory for a version, and for its parts."""
THREAD: Final = "publication"


class HostCopy:
    """Copies of tensors in host memory, in buffers that are used again; pinned where the tensors are on a GPU.

    On a GPU the copies have a stream of their own: they wait for the update (`mark`), and later passes do not wait for
    them.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        self._buffers: dict[str, Tensor] = {}
        self._updated: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None

    def mark(self) -> None:
        """Note in the trainer's thread that all work that changes the weights has been given to the device."""
        if torch.cuda.is_available():
            self._updated = torch.cuda.Event()
            self._updated.record()

    def take(self, source: WeightSource) -> dict[str, Tensor]:
        """Copy the tensors and return the copies, which are valid until the next call. Floating tensors get the dtype
        of this object, but for adapters. Tensors that no step changes are copied once.

        Blocks until the copies are there.
        """
        frozen: Collection[str] = source.frozen if isinstance(source, AdapterWeights) else ()
        if self._updated is None:
            return {name: self._copied(name, tensor, frozen) for name, tensor in source}
        self._stream = self._stream or torch.cuda.Stream()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._updated)
            copies = {name: self._copied(name, tensor, frozen) for name, tensor in source}
        self._stream.synchronize()
        return copies

    def _copied(self, name: str, tensor: Tensor, frozen: Collection[str]) -> Tensor:
        if name in frozen and name in self._buffers:
            return self._buffers[name]
        return self._buffer(name, tensor).copy_(tensor.detach(), non_blocking=tensor.is_cuda)

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        cast = self._dtype is not None and tensor.is_floating_point() and not is_adapter(name) and name != LORA_SCALE
        dtype = self._dtype if cast else tensor.dtype
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != dtype:
            buffer = torch.empty(tensor.shape, dtype=dtype, pin_memory=tensor.is_cuda)
            self._buffers[name] = buffer
        return buffer


class Publisher:
    """Publishes the weights of a trainer on a channel, in a thread of its own, and acks each step after its version.

    dtype: of the published floating tensors; None: as they are. background False: `publish` returns when all is done.
    rank, ranks: of those that publish one version together (rule 4). emit: called with the time of each publication.
    figures: called with its bytes and seconds. hand: called with each published version and its weights, before its
    step is acked. Call from one thread; `close` ends the thread.
    """

    def __init__(
        self,
        channel: tq.WeightChannel,
        *,
        dtype: torch.dtype | None = None,
        background: bool = True,
        rank: int = 0,
        ranks: int = 1,
        emit: Callable[[Event], None] = lambda event: None,
        figures: Callable[..., None] = lambda kind, **values: None,
        hand: Callable[[int, WeightSource], None] = lambda version, source: None,
    ) -> None:
        self._channel, self._emit, self._figures, self._hand = channel, emit, figures, hand
        self._background, self._rank, self._ranks = background, rank, ranks
        self._copy = HostCopy(dtype)
        self._copied, self._done = threading.Event(), threading.Event()
        self._copied.set()
        self._done.set()
        self._error: BaseException | None = None
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._stood_still_s = self._unreported_s = 0.0
        self._thread = threading.Thread(target=self._serve, name=THREAD, daemon=True)
        self._thread.start()

    def begin(self, version: int) -> int:
        """Begin a version of several ranks, once the one before is published. Rank 0 only. Returns its number; 0 where
        one rank publishes all."""
        self.wait()
        return self._channel.begin(version, parts=self._ranks, length_s=PUBLISH_S) if self._ranks > 1 else 0

    def publish(
        self, version: int, source: WeightSource, then: Callable[[], object] = lambda: None, *, pending: int = 0
    ) -> None:
        """Publish `source` as `version`, then call `then` (in the publication's thread). pending: number of a version
        of several ranks.

        Waits until the step before is published. `source` must not change until `wait_copied` returns.
        """
        self.wait()
        started = time.monotonic()
        self._copied.clear()
        self._done.clear()
        self._copy.mark()
        self._work.put(lambda: self._publish(version, source, then, pending, started))
        if not self._background:
            self._done.wait()
            self._stood(started)
            self.wait()

    def ack(self, then: Callable[[], object]) -> None:
        """Ack a step that publishes no version, in order."""
        self.wait()
        self._copied.set()
        self._done.clear()
        self._work.put(lambda: self._finish(then))

    def wait_copied(self) -> None:
        """Wait until the weights may change."""
        started = time.monotonic()
        self._copied.wait()
        self._stood(started)
        self._raise()

    def _stood(self, since: float) -> None:
        waited = time.monotonic() - since
        self._stood_still_s += waited
        self._unreported_s += waited

    def wait(self) -> None:
        """Wait until everything is published and acked; raise what went wrong."""
        self._done.wait()
        self._raise()

    def stood_still_s(self) -> float:
        """Return for how many seconds the trainer stood still for weights since the last call."""
        stood, self._stood_still_s = self._stood_still_s, 0.0
        return stood

    def close(self) -> None:
        """End the thread when its work is done. A second call does nothing."""
        if self._thread.is_alive():
            self._work.put(None)
            self._thread.join()

    # ------------------------------------------------------------ the thread

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001  (raised in the trainer's thread)
                self._error = error
            finally:
                self._copied.set()
                self._done.set()

    def _publish(
        self, version: int, source: WeightSource, then: Callable[[], object], pending: int, asked: float
    ) -> None:
        copies = self._copy.take(source)
        self._copied.set()
        started = time.monotonic()
        tensors: dict[str, Any] = source.slices(copies) if isinstance(source, RankShards) else dict(copies)
        written = self._channel.publish(version, tensors, pending=pending, part=self._rank, timeout_s=PUBLISH_S)
        ended = time.monotonic()
        self._emit(TimeSpan(name=PUBLISH, start=started, end=ended, version=version))
        stood, self._unreported_s = self._unreported_s, 0.0
        self._figures(
            "publication",
            rank=self._rank,
            version=version,
            bytes=written,
            copy_s=started - asked,
            stood_still_s=stood,
            seconds=ended - asked,
        )
        self._hand(version, source)
        then()

    def _finish(self, then: Callable[[], object]) -> None:
        then()

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error


def next_version(latest: int, step: int) -> int:
    """Return the version of `step`: versions only rise, and are the steps until a step was taken back.

    >>> next_version(6, 7), next_version(9, 7)
    (7, 10)
    """
    if step < 0:
        raise UsageError(f"step {step}: the first weights are those of step 0")
    return max(latest + 1, step)
