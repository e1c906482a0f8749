"""An engine and a trainer that share a process and a device, in turn (mode ``colocated``).

1. The engine has the device until all rows of a step have come. Nothing is in it then: no row is generated ahead.
2. The trainer has it for the passes and the update. An engine that can sleep does, and frees the device's memory.
3. The trainer publishes the version, as in every mode: the channel is the table's clock, and others follow it. Then the
   engine wakes and takes the weights: from the trainer's own tensors where it computes in this process, from the
   channel's shared memory where it has processes of its own.
4. A row begins once the engine has the version of the table's clock, so a step's rows have one version.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol, runtime_checkable

from transferqueue.adapters.protocols import Generator, WeightSource
from transferqueue.adapters.weights import ChannelWeights
from transferqueue.errors import DeadlineExceeded
from transferqueue.workflows.flow.events import SWAP
from transferqueue.workflows.flow.stage import Context
from transferqueue.workflows.job.names import POLICY

OPEN_S: Final = 3600.0
"""Longest wait of the trainer for the start of its engine."""
WEIGHTS_S: Final = 600.0
"""Longest wait for a version that has been published."""
_OWN_PROCESSES: Final = ("vllm",)
"""Engines that compute in processes of their own."""


@runtime_checkable
class Sleeper(Protocol):
    """A generator that can give its device's memory to others for a while."""

    def sleep(self) -> None:
        """Free the memory. Requests that come meanwhile wait."""

    def wake(self) -> None:
        """Take the memory again."""


class DeviceTurns:
    """Whose turn it is. The generating stage calls `hosting` and `wait`, the trainer the others."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._engine: Generator | None = None
        self._give: Callable[[WeightSource, int], None] | None = None
        self._failure: BaseException | None = None
        self._is_trainers = False
        self.version = -1
        """Of the weights that the engine has."""

    # ------------------------------------------------------------ the generating stage

    @contextmanager
    def hosting(self, context: Context, engine: Generator, kind: str) -> Iterator[None]:
        """Let the trainer use an engine that has started. Blocks until it has handed the first version over."""
        self._give = _from_channel(context, engine) if kind in _OWN_PROCESSES else _from_trainer(context, engine)
        with self._changed:
            self._engine = engine
            self._changed.notify_all()
        self.wait(0, OPEN_S)
        yield

    def wait(self, version: int, timeout_s: float) -> None:
        """Wait until the engine has that version or a newer one. Raises `DeadlineExceeded` after `timeout_s`, and the
        error of `failed`."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._failure or self.version >= version, timeout_s):
                raise DeadlineExceeded(
                    f"weights of version {version} did not come within {timeout_s:g} s; the engine has {self.version}"
                )
            if self.version < version and self._failure is not None:
                raise self._failure

    def failed(self, failure: BaseException) -> None:
        """One side has ended: the next call that waits for it raises `failure`."""
        with self._changed:
            self._failure = failure
            self._changed.notify_all()

    # ------------------------------------------------------------ the trainer

    def to_trainer(self) -> None:
        """Take the device. Waits for the start of the engine; a second call does nothing."""
        engine = self._started()
        if not self._is_trainers and isinstance(engine, Sleeper):
            engine.sleep()
        self._is_trainers = True

    def to_engine(self) -> None:
        """Give the device back. A second call does nothing."""
        engine = self._started()
        if self._is_trainers and isinstance(engine, Sleeper):
            _free_cached()
            engine.wake()
        self._is_trainers = False

    def hand(self, version: int, source: WeightSource) -> None:
        """Give the device back, with a version that has been published, unless the engine has it. `source` must not
        change meanwhile."""
        self.to_engine()
        if version <= self.version or self._give is None:
            return
        self._give(source, version)
        with self._changed:
            self.version = version
            self._changed.notify_all()

    def _started(self) -> Generator:
        with self._changed:
            self._changed.wait_for(lambda: self._engine or self._failure, OPEN_S)
            if self._failure is not None:
                raise self._failure
            if self._engine is None:
                raise DeadlineExceeded(f"the engine of this process did not start within {OPEN_S:g} s; see its log")
            return self._engine


def _from_trainer(context: Context, engine: Generator) -> Callable[[WeightSource, int], None]:
    """Copy from tensor to tensor, in this process."""
    channel = context.weights.weights(POLICY)

    def give(source: WeightSource, version: int) -> None:
        with context.span(SWAP, version):
            engine.update_weights(source, version)
        channel.applied(version)

    return give


def _from_channel(context: Context, engine: Generator) -> Callable[[WeightSource, int], None]:
    """Let the engine's processes read the channel."""
    channel = context.weights.weights(POLICY)

    def give(source: WeightSource, version: int) -> None:
        with channel.pull(version=version, timeout_s=WEIGHTS_S) as weights, context.span(SWAP, version):
            engine.update_weights(ChannelWeights(context.weights.address, weights), version)
        channel.applied(version)

    return give


def _free_cached() -> None:
    """Return memory that torch keeps for its next tensors to the device."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
