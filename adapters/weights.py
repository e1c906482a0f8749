"""Weights on the way from a learner to a generator, a tensor at a time: what engines read, whatever they come from."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import transferqueue as tq
from transferqueue.adapters.protocols import TensorSpec, WeightSource
from transferqueue.errors import SchemaError, listing
from transferqueue.lazy import renamed_names

if TYPE_CHECKING:
    import torch
    from torch import nn


class TensorWeights:
    """Tensors by name as a weight source: a state dict, or a version pulled from a channel (`transferqueue.Weights`)."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def metadata(self) -> Mapping[str, TensorSpec]:
        """Names, shapes and dtypes."""
        return {name: spec(tensor) for name, tensor in self._tensors.items()}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._tensors.items()


class ChannelWeights(TensorWeights):
    """A version pulled from a channel, and where it came from: an engine in another process reads it there itself."""

    def __init__(self, address: str, weights: tq.Weights) -> None:
        super().__init__(weights.torch())
        self.address, self.channel, self.version = address, weights.channel, weights.version


class ModuleWeights(TensorWeights):
    """Parameters and buffers of a module, as its state dict names them; not copied, so valid until the next step.

    Tensors that are tied to one before them (an embedding used as the output layer) are left out, as engines expect. Shards
    are gathered one tensor at a time while iterating, which every rank must do, in the same order.
    """

    def __init__(self, module: nn.Module) -> None:
        state = module.state_dict(keep_vars=True)  # tied parameters are one object; their data would be two
        first = {id(tensor): name for name, tensor in reversed(state.items())}
        super().__init__({name: tensor.detach() for name, tensor in state.items() if first[id(tensor)] == name})

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._tensors.items():
            gather = getattr(tensor, "full_tensor", None)
            yield name, gather() if callable(gather) else tensor


def spec(tensor: torch.Tensor) -> TensorSpec:
    """Shape and dtype of a tensor."""
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def check_fits(source: WeightSource, wanted: Mapping[str, TensorSpec]) -> None:
    """`SchemaError` unless each tensor of `source` is wanted, in that shape. A wanted one may be missing: it is tied,
    or did not change. The dtype may differ: engines convert."""
    for name, given in source.metadata().items():
        if name not in wanted:
            raise SchemaError(f'tensor "{name}" is not one of the model; it has {listing(wanted)}')
        if given.shape != wanted[name].shape:
            raise SchemaError(f'tensor "{name}" has shape {given.shape}; the model has {wanted[name].shape}')


class WeightHandoff:
    """Where an engine in another process finds weights: in their channel, or in one of this side's own if they are in none."""

    _CHANNEL: Final = "relay"

    def __init__(self) -> None:
        self._queue: tq.Queue | None = None
        self._published = -1

    def place(self, source: WeightSource) -> tuple[tuple[str, str], int]:
        """Address and channel, and the version's number there. Weights of a channel lie there; others are published."""
        if isinstance(source, ChannelWeights):
            return (source.address, source.channel), source.version
        if self._queue is None:
            self._queue = tq.connect(label="weights relay")
        self._published += 1
        self._queue.weights(self._CHANNEL, keep=1).publish(self._published, dict(source))
        return (self._queue.address, self._CHANNEL), self._published

    def close(self) -> None:
        """End its queue. Again: nothing."""
        if self._queue is not None:
            self._queue.close()
            self._queue = None


def checkpoint_specs(directory: Path) -> dict[str, TensorSpec]:
    """Names and shapes of the tensors in a directory of safetensors files, read from their headers alone."""
    found: dict[str, TensorSpec] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, entry in header.items():
            if name != "__metadata__":
                found[name] = TensorSpec(tuple(entry["shape"]), entry["dtype"].lower())
    return found


class WeightUpdater:
    """Keeps an engine at the newest version of a channel.

    `follow` waits at the server for a newer version (nobody polls), gives it to `update`, and reports it as applied.
    Where it runs decides what an update costs: called between two batches, nothing changes under a completion;
    called from a thread beside the engine, weights change in flight and generation never stops.
    """

    def __init__(
        self, queue: tq.Queue, channel: str, update: Callable[[WeightSource, int], object], version: int = -1
    ) -> None:
        self.version = version
        self._address = queue.address
        self._channel = queue.weights(channel)
        self._update = update

    def follow(self, timeout_s: float = 0.0) -> bool:
        """Apply the newest version above the current one; wait at most `timeout_s` for it. Whether there was one."""
        try:
            weights = self._channel.pull(above=self.version, timeout_s=timeout_s)
        except tq.DeadlineExceeded:
            return False
        with weights:
            self._update(ChannelWeights(self._address, weights), weights.version)
        self.version = weights.version
        self._channel.applied(self.version)
        return True


__getattr__ = renamed_names(__name__, {"Follower": "WeightUpdater", "Relay": "WeightHandoff"})
