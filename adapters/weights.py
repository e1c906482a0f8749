"""Weight sources that engines read, and `WeightUpdater`, which keeps an engine at the newest version of a channel."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Final

import transferqueue as tq
from transferqueue.adapters.lora_weights import LORA_A, LORA_B, LORA_SCALE, adapted_layers, is_adapter, with_product
from transferqueue.adapters.protocols import TensorSpec, WeightSource
from transferqueue.errors import SchemaError, UsageError, listing
from transferqueue.lazy import renamed_names

if TYPE_CHECKING:
    import torch
    from torch import nn


_TRIES: Final = 3
"""How often a version is applied whose engine finds that it is kept no longer, each time a newer one."""


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

    Of tensors that were published in slices, one at a time is put together; of those with an adapter beside them
    (`adapters.lora_weights`), one at a time is merged with it.

    Args:
        address: of the queue.
        weights: the version, held for as long as the source is used. Only `metadata` works if it was pulled in part.
        merged: merge adapters into the weights beside them; default True. Else they come by `adapters` alone.

    Raises:
        SchemaError: adapters that do not fit the weights that they are published with.
    """

    def __init__(self, address: str, weights: tq.Weights, *, merged: bool = True) -> None:
        super().__init__(weights)
        specs = {name: TensorSpec(field.fixed, field.dtype) for name, field in weights.published().items()}
        self._weights, self._missing = weights, sorted(specs.keys() - weights.keys())
        layers = adapted_layers(specs)
        self._layers, self._adapted = layers if merged else {}, [*layers.values()]
        lost = [name.rpartition(".")[0] for name in weights.removed() if is_adapter(name)] if merged else []
        self._unmerged = {f"{layer}.weight" for layer in lost}
        """Weights that have lost the adapter which they were merged with in the version before."""
        self.rank = max((specs[f"{layer}.{LORA_A}"].shape[0] for layer in self._adapted), default=0)
        """Of its adapters; 0: it has none."""
        self._specs = {name: spec for name, spec in specs.items() if not is_adapter(name) and name != LORA_SCALE}
        self.address, self.channel, self.version = address, weights.channel, weights.version

    def metadata(self) -> Mapping[str, TensorSpec]:
        """Names, shapes and dtypes."""
        return self._specs

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in self._specs:
            yield name, self.tensor(name)

    def is_kept(self, channel: tq.WeightChannel, *, only: list[str] | None = None) -> bool:
        """Return whether the channel still has the version. Blocks for one call.

        Args:
            channel: the version's channel, as this process opened it.
            only: pull these tensors to find out; default None: none again, of a version that is here.
        """
        try:
            since = None if only else self._weights
            channel.pull(version=self.version, only=only, since=since, timeout_s=0.0).release()
        except tq.NotFound:
            return False
        return True

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor, merged with its adapter if it has one.

        Args:
            name: of the tensor.

        Raises:
            UsageError: the version was pulled in part.
        """
        if self._missing:
            raise UsageError(
                f'version {self.version} of channel "{self.channel}" is here without {listing(self._missing)}; pull '
                "all of it to read its tensors"
            )
        weight: torch.Tensor = self._weights[name]
        if (layer := self._layers.get(name)) is None:
            return weight
        a, b = self._weights[f"{layer}.{LORA_A}"], self._weights[f"{layer}.{LORA_B}"]
        return with_product(weight, a, b, float(self._weights[LORA_SCALE])).to(weight.dtype)

    def adapters(self) -> tuple[float, dict[str, tuple[torch.Tensor, torch.Tensor]]]:
        """Return the scale of all adapters, and A and B of each adapted layer."""
        pairs = {
            layer: (self._weights[f"{layer}.{LORA_A}"], self._weights[f"{layer}.{LORA_B}"]) for layer in self._adapted
        }
        return float(self._weights[LORA_SCALE]), pairs

    def changed(self) -> list[str]:
        """Return the names of the tensors that differ from the version that the weights were pulled ``since``, in
        order."""
        changed = self._weights.changed()
        moved = {
            name
            for name, layer in self._layers.items()
            if not changed.isdisjoint((f"{layer}.{LORA_A}", f"{layer}.{LORA_B}", LORA_SCALE))
        }
        return [name for name in self._specs if name in changed or name in moved or name in self._unmerged]

    @property
    def place(self) -> tuple[str, str, int]:
        """Address, channel and version: what a reader has that has these weights."""
        return self.address, self.channel, self.version

    def changes(self, place: tuple[str, str, int] | None) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
        """Yield the tensors that differ from the version at `place`, each with the positions of the elements that may
        differ, int64 ``[elements]`` (None: all); all tensors, if it is not known what differs from that version.

        Args:
            place: address, channel and version of other weights; None: of none.
        """
        import torch

        known = place == (self.address, self.channel, self._weights.since)
        for name in self.changed() if known else self._specs:
            in_part = known and name not in self._layers and name not in self._unmerged
            moved = self._weights.moved(name) if in_part else None
            yield name, self.tensor(name), None if moved is None else torch.from_numpy(moved)


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
    loader = ModuleLoader(module)
    loader.check(source)
    loader.load(source)


class ModuleLoader:
    """Copies weights into a module, by name; dtypes are converted. Tensors that a source lacks stay as they are.

    Of a version of a channel that was pulled with the version before as ``since``, it writes only the elements that
    changed: no other code may write the module's weights.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._place: tuple[str, str, int] | None = None
        """Of the version that the module has; None: it has weights of no channel, or some of two versions."""

    def check(self, source: WeightSource) -> None:
        """Check that the weights fit.

        Args:
            source: the weights.

        Raises:
            SchemaError: a tensor that the module does not have, or has in another shape.
        """
        check_fits(source, ModuleWeights(self._module).metadata())

    def load(self, source: WeightSource) -> None:
        """Copy weights that fit.

        Args:
            source: the weights.
        """
        import torch

        place, self._place = self._place, None
        tensors = self._module.state_dict()
        with torch.no_grad():
            if not isinstance(source, ChannelWeights):
                for name, tensor in source:
                    tensors[name].copy_(tensor)
                return
            for name, tensor, moved in source.changes(place):
                if moved is None or not tensors[name].is_contiguous():
                    tensors[name].copy_(tensor)
                else:
                    _copy_elements(tensors[name], tensor, moved)
        self._place = source.place


def _copy_elements(into: torch.Tensor, source: torch.Tensor, at: torch.Tensor) -> None:
    """Copy the elements at these positions of the flat tensors; only they go to another device."""
    values = source.reshape(-1)[at].to(into.device, into.dtype)
    into.view(-1)[at.to(into.device)] = values


def layer_of(name: str) -> str:
    """Return the layer that a tensor is part of: its name up to the first number, or its module's name.

    No engine joins tensors of two such layers into one of its own.

    Args:
        name: of the tensor, as in a checkpoint.

    Example:
        >>> layer_of("model.layers.3.mlp.up_proj.weight"), layer_of("lm_head.weight")
        ('model.layers.3', 'lm_head')
    """
    parts = name.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdigit()), None)
    return ".".join(parts[:-1] if number is None else parts[: number + 1])


def in_layers_of(changed: Collection[str], names: Iterable[str]) -> list[str]:
    """Return the names of the tensors in every layer that has a changed one, in order.

    Args:
        changed: names of tensors.
        names: of all tensors.

    Example:
        >>> in_layers_of(["a.0.q"], ["a.0.q", "a.0.k", "a.1.q"])
        ['a.0.q', 'a.0.k']
    """
    layers = set(map(layer_of, changed))
    return [name for name in names if layer_of(name) in layers]


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

    The updater holds the tensors of the version that it applied last, where they lie in memory of this process, so that
    of the next one only differences are fetched.

    Args:
        queue: the queue that the channel is of.
        channel: name of the weight channel.
        update: called with a weight source and its version, such as `Generator.update_weights`. It may be replaced.
        version: that the engine has already; default -1: none.
        reads_channel: `update` reads the channel itself, as engines of vLLM do (`reads_channel` of the generator); then
            no tensors but one are pulled here. Default False.
    """

    def __init__(
        self,
        queue: tq.Queue,
        channel: str,
        update: Callable[[WeightSource, int], object],
        version: int = -1,
        *,
        reads_channel: bool = False,
    ) -> None:
        self.version = version
        self.update = update
        self._address = queue.address
        self._channel = queue.weights(channel)
        self._reads_channel = reads_channel
        self._held: tq.Weights | None = None
        self._only: list[str] | None = None
        """The smallest tensor, by which a wait for a version pulls no others; None: no version was applied yet."""

    def follow(self, timeout_s: float = 0.0) -> bool:
        """Apply the newest version of the channel, if it is newer than the current one.

        An engine that reads the channel itself asks for the version by its number. If the channel keeps that version no
        longer, the newest one is applied instead.

        Args:
            timeout_s: seconds to wait for one; default 0: not at all.

        Returns:
            Whether there was one.
        """
        for tries_left in reversed(range(_TRIES)):
            try:
                weights = self.pull(above=self.version, timeout_s=timeout_s)
            except tq.DeadlineExceeded:
                return False
            try:
                self.apply(weights)
            except Exception:
                if (
                    not tries_left
                    or not self._reads_channel
                    or ChannelWeights(self._address, weights).is_kept(self._channel, only=self._only)
                ):
                    raise
            else:
                break
        return True

    def newer(self, timeout_s: float) -> bool:
        """Wait for a version that is newer than the current one, and apply nothing.

        Args:
            timeout_s: seconds to wait for one.

        Returns:
            Whether there is one.
        """
        try:
            self._channel.pull(above=self.version, only=self._only, since=self._held, timeout_s=timeout_s).release()
        except tq.DeadlineExceeded:
            return False
        return True

    def pull(self, *, above: int = -1, version: int | None = None, timeout_s: float | None = None) -> tq.Weights:
        """Pull a version for `apply`. Of what the engine has, only differences are fetched.

        Args:
            above: get the newest version above this one; default -1: any.
            version: get exactly this version; default None: the newest.
            timeout_s: seconds to wait; default None: no limit.

        Returns:
            The version.

        Raises:
            DeadlineExceeded: no such version was published in time.
            NotFound: the exact version is no longer kept.
        """
        only = self._only if self._reads_channel else None
        return self._channel.pull(above=above, version=version, since=self._held, only=only, timeout_s=timeout_s)

    def apply(self, weights: tq.Weights) -> None:
        """Apply a version that was pulled from the channel, newer or older than the current one. The updater releases
        it.

        Args:
            weights: the version.
        """
        try:
            self.update(ChannelWeights(self._address, weights), weights.version)
        except BaseException:
            weights.release()
            raise
        self._hold(weights)
        self.version = weights.version
        self._channel.applied(self.version)

    def _hold(self, weights: tq.Weights) -> None:
        """Hold the version in place of the one before, without memory of the server."""
        before, self._held = self._held, weights
        fields = weights.published()
        self._only = [min(weights, key=lambda name: prod(fields[name].fixed))]
        weights.unpin()
        if before is not None:
            before.release()


__getattr__ = renamed_names(__name__, {"Follower": "WeightUpdater", "Relay": "WeightHandoff"})
