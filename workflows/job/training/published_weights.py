"""The weights of a model as its publisher names them, made a tensor or a layer at a time.

Some modules of transformers keep weights in other parts than their files (mixtures of experts stack those of all
experts). Weights of such a model are converted layer by layer (`layer_of`); that it is enough is tried before on
tensors without memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from transferqueue.adapters.builtin.model import BuiltinModel
from transferqueue.adapters.lora_weights import with_product
from transferqueue.adapters.scoring.lora import adapted_weights
from transferqueue.adapters.weight_files import Spec, TensorFiles, dtype_name
from transferqueue.adapters.weights import layer_of
from transferqueue.errors import UsageError


@dataclass(frozen=True)
class PublishedWeights:
    """Weights to be written. model: whose configuration they have; it may have no memory. specs: dtype and shape by
    name. tensors: in the same order, each made when it is taken."""

    model: Any
    specs: Mapping[str, Spec]
    tensors: Iterator[Tensor]


def published(model: Any, specs: Mapping[str, Spec], read: Callable[[str], Tensor]) -> PublishedWeights:
    """Return weights of `model` under the names of its publisher. specs: by the names of the module. read: returns a
    tensor by such a name."""
    left_out = getattr(model, "_keys_to_ignore_on_save", None) or ()
    specs = {name: spec for name, spec in specs.items() if name not in left_out}
    if isinstance(model, BuiltinModel):
        return PublishedWeights(model, specs, map(read, specs))
    whole = _specs(_converted(model, specs, _without_memory(specs).__getitem__))
    if whole == specs:
        return PublishedWeights(model, specs, map(read, specs))
    for parts in ([[name] for name in specs], _layers(specs)):
        found = [_specs(_converted(model, part, _without_memory(specs).__getitem__)) for part in parts]
        joined = {name: spec for each in found for name, spec in each.items()}
        if joined == whole and sum(map(len, found)) == len(whole):
            break
    else:
        parts, joined = [list(specs)], whole
    return PublishedWeights(model, joined, _in_turn(model, parts, read))


def with_adapters(
    model: Any, base: TensorFiles, adapters: TensorFiles, *, scale: float, dtype: str
) -> PublishedWeights:
    """Return the weights in `base` with the product of each adapter added to its weight. scale: alpha / rank. dtype: of
    floating weights. `UsageError` for adapters of another model."""
    layers = adapted_weights(adapters.names)
    for name, (a, b) in layers.items():
        wanted = (adapters.shape(b)[0], adapters.shape(a)[1])
        if base.shape(name) != wanted:
            raise UsageError(
                f"{name} has shape {base.shape(name)} in the base, and its adapter is for {wanted}: the model at "
                "model.path is another one than the run began with; put that back"
            )

    def read(name: str) -> Tensor:
        if name not in layers:
            return base.tensor(name, dtype)
        a, b = map(adapters.tensor, layers[name])
        return with_product(base.tensor(name), a, b, scale).to(getattr(torch, dtype))

    return PublishedWeights(model, {name: base.spec(name, dtype) for name in base.names}, map(read, base.names))


def _in_turn(model: Any, parts: Sequence[Sequence[str]], read: Callable[[str], Tensor]) -> Iterator[Tensor]:
    for names in parts:
        yield from _converted(model, names, read).values()


def _converted(model: Any, names: Sequence[str] | Mapping[str, Spec], read: Callable[[str], Tensor]) -> dict[str, Any]:
    from transformers.core_model_loading import revert_weight_conversion

    converted: dict[str, Any] = revert_weight_conversion(model, {name: read(name) for name in names})
    return converted


def _without_memory(specs: Mapping[str, Spec]) -> dict[str, Tensor]:
    return {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for name, (dtype, shape) in specs.items()
    }


def _specs(tensors: Mapping[str, Tensor]) -> dict[str, Spec]:
    return {name: (dtype_name(tensor), tuple(tensor.shape)) for name, tensor in tensors.items()}


def _layers(specs: Mapping[str, Spec]) -> list[list[str]]:
    layers: dict[str, list[str]] = {}
    for name in specs:
        layers.setdefault(layer_of(name), []).append(name)
    return list(layers.values())
