"""Weight sources that engines read, and `WeightUpdater`, which keeps an engine at the newest version of a channel."""

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
    """A weight source over tensors by name.

    Args:
        tensors: a state dict, or a version pulled from a channel (`transferqueue.Weights`). Not copied.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def metadata(self) -> Mapping[str, TensorSpec]:
        """Names, shapes and dtypes."""
        return {name: spec(tensor) for name, tensor in self._tensors.items()}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._tensors.items()


class ChannelWeights(TensorWeights):
    """A version pulled from a channel, with the address of the channel: an engine in another process reads it there
    itself.

    Of tensors that were published in slices, one at a time is put together.

    Args:
        address: of the queue.
        weights: the version, held for as long as the source is used.
    """

    def __init__(self, address: str, weights: tq.Weights) -> None:
        super().__init__(weights)
        self._fields = weights.fields()
        self.address, self.channel, self.version = address, weights.channel, weights.version

    def metadata(self) -> Mapping[str, TensorSpec]:
        """Names, shapes and dtypes."""
        return {name: TensorSpec(field.fixed, field.dtype) for name, field in self._fields.items()}


class ModuleWeights(TensorWeights):
    """A weight source over a module's parameters and buffers, named as in its state dict.

    The tensors are not copied: they are valid until the next step. Tied tensors (an embedding that is also the output
    layer) occur once, as engines expect. Shards are gathered one tensor at a time during iteration, so every rank must
    iterate, in the same order.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        state = module.state_dict(keep_vars=True)  # tied parameters are one object; their data would be two
        first = {id(tensor): name for name, tensor in reversed(state.items())}
        super().__init__({name: tensor.detach() for name, tensor in state.items() if first[id(tensor)] == name})

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._tensors.items():
            gather = getattr(tensor, "full_tensor", None)
            yield name, gather() if callable(gather) else tensor

    def sharded(self) -> Mapping[str, torch.Tensor]:
        """Return the tensors as they are: shards are not gathered."""
        return self._tensors


def spec(tensor: torch.Tensor) -> TensorSpec:
    """Return shape and dtype of a tensor.

    Args:
        tensor: a torch tensor.
    """
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def check_fits(source: WeightSource, wanted: Mapping[str, TensorSpec]) -> None:
    """Check that each tensor of a source is wanted, in this shape. Dtypes may differ: engines convert.

    Args:
        source: the weights. Tensors may be missing: they are tied or unchanged.
        wanted: the tensors of the model, by name.

    Raises:
        SchemaError: a tensor that is not wanted, or in another shape.
    """
    for name, offered in source.metadata().items():
        if name not in wanted:
            raise SchemaError(f'tensor "{name}" is not one of the model; it has {listing(wanted)}')
        if offered.shape != wanted[name].shape:
            raise SchemaError(f'tensor "{name}" has shape {offered.shape}; the model has {wanted[name].shape}')


def copy_weights(source: WeightSource, module: nn.Module) -> None:
    """Copy tensors into a module, by name; dtypes are converted. Tensors that the source lacks stay as they are.

    Args:
        source: the weights.
        module: the module.

    Raises:
        SchemaError: a tensor that the module does not have, or has in another shape. Nothing was copied.
    """
    check_fits(source, ModuleWeights(module).metadata())
    copy_fitting_weights(source, module)


def copy_fitting_weights(source: WeightSource, module: nn.Module) -> None:
    """Copy tensors into a module, as `copy_weights`, from a source that `check_fits` has accepted.

    Args:
        source: the weights.
        module: the module.
    """
    import torch

    tensors = module.state_dict()
    with torch.no_grad():
        for name, tensor in source:
            tensors[name].copy_(tensor)


class WeightHandoff:
    """Gives engines in other processes a channel to read weights from.

    It is the channel that the weights came from, or one that this object publishes.
    """

    _CHANNEL: Final = "relay"

    def __init__(self) -> None:
        self._queue: tq.Queue | None = None
        self._published = -1

    def place(self, source: WeightSource) -> tuple[tuple[str, str], int]:
        """Return where the weights of a source can be read.

        Weights that come from a channel stay there; others are published to a queue that this object embeds.

        Args:
            source: the weights.

        Returns:
            Address and channel, and the version there.
        """
        if isinstance(source, ChannelWeights):
            return (source.address, source.channel), source.version
        if self._queue is None:
            self._queue = tq.connect(label="weights relay")
        self._published += 1
        self._queue.weights(self._CHANNEL, keep=1).publish(self._published, dict(source))
        return (self._queue.address, self._CHANNEL), self._published

    def close(self) -> None:
        """Close the embedded queue. A second call does nothing."""
        if self._queue is not None:
            self._queue.close()
            self._queue = None


def checkpoint_specs(directory: Path) -> dict[str, TensorSpec]:
    """Read shapes and dtypes of the tensors in a directory of safetensors files. Only the headers are read.

    Args:
        directory: with ``*.safetensors`` files.

    Returns:
        Shape and dtype of each tensor, by name; empty if there are no such files.
    """
    specs: dict[str, TensorSpec] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, entry in header.items():
            if name != "__metadata__":
                specs[name] = TensorSpec(tuple(entry["shape"]), entry["dtype"].lower())
    return specs


class WeightUpdater:
    """Keeps an engine at the newest version of a channel.

    `follow` waits at the server for a newer version, passes it to `update`, and reports it as applied. Call it between
    two batches, and no completion sees a change of weights. Call it in a thread beside the engine, and weights change
    in flight while generation continues.

    Args:
        queue: the queue that the channel is of.
        channel: name of the weight channel.
        update: called with a weight source and its version, such as `Generator.update_weights`.
        version: that the engine has already; default -1: none.
    """

    def __init__(
        self, queue: tq.Queue, channel: str, update: Callable[[WeightSource, int], object], version: int = -1
    ) -> None:
        self.version = version
        self._address = queue.address
        self._channel = queue.weights(channel)
        self._update = update

    def follow(self, timeout_s: float = 0.0) -> bool:
        """Apply the newest version of the channel, if it is newer than the current one.

        Args:
            timeout_s: seconds to wait for one; default 0: not at all.

        Returns:
            Whether there was one.
        """
        try:
            weights = self._channel.pull(above=self.version, timeout_s=timeout_s)
        except tq.DeadlineExceeded:
            return False
        self.apply(weights)
        return True

    def apply(self, weights: tq.Weights) -> None:
        """Apply a version that was pulled from the channel, newer or older than the current one, and release it.

        Args:
            weights: the version.
        """
        with weights:
            self._update(ChannelWeights(self._address, weights), weights.version)
        self.version = weights.version
        self._channel.applied(self.version)


__getattr__ = renamed_names(__name__, {"Follower": "WeightUpdater", "Relay": "WeightHandoff"})
