"""Weights of a model with low-rank adapters, as a channel has them: the adapters beside the weights that stay.

A linear layer ``q_proj`` has its weight under the name of the model without adapters, ``q_proj.weight`` ``[out, in]``,
and beside it ``q_proj.lora_a`` ``[rank, in]`` and ``q_proj.lora_b`` ``[out, rank]``; ``lora_scale`` is alpha / rank of
all layers. Only A and B change, so a version is as large as they are. Whoever reads them merges: a layer computes with
``W + scale B A`` (Hu et al., "LoRA", arXiv 2106.09685, section 4.1).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from transferqueue.adapters.protocols import TensorSpec
from transferqueue.errors import SchemaError

if TYPE_CHECKING:
    from torch import Tensor

LORA_A: Final = "lora_a"
LORA_B: Final = "lora_b"
LORA_SCALE: Final = "lora_scale"


def is_adapter(name: str) -> bool:
    """Return whether a tensor of this name is a part of an adapter.

    Args:
        name: in the module.
    """
    return name.endswith((f".{LORA_A}", f".{LORA_B}"))


def with_product(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return ``W + scale B A``, computed in float32.

    Args:
        weight: W, or rows of it.
        a: whole.
        b: as many rows as `weight` has.
        scale: alpha / rank.
    """
    return weight.float() + scale * (b.float() @ a.float())


def adapted_layers(specs: Mapping[str, TensorSpec]) -> dict[str, str]:
    """Return the layer of each weight that has an adapter beside it.

    Args:
        specs: of all tensors, by name.

    Raises:
        SchemaError: an adapter without its weight or its other half, or of other shapes than they have, or adapters
            without their scale.

    Example:
        >>> shapes = {"q.weight": (4, 6), "q.lora_a": (2, 6), "q.lora_b": (4, 2), "lora_scale": ()}
        >>> adapted_layers({name: TensorSpec(shape, "float32") for name, shape in shapes.items()})
        {'q.weight': 'q'}
    """
    layers = dict.fromkeys(name.rpartition(".")[0] for name in specs if is_adapter(name))
    if layers and LORA_SCALE not in specs:
        raise SchemaError(f'adapters without tensor "{LORA_SCALE}": publish alpha / rank under that name')
    for layer in layers:
        _check(layer, specs)
    return {f"{layer}.weight": layer for layer in layers}


def _check(layer: str, specs: Mapping[str, TensorSpec]) -> None:
    for name in (f"{layer}.weight", f"{layer}.{LORA_A}", f"{layer}.{LORA_B}"):
        if name not in specs:
            raise SchemaError(
                f'layer "{layer}" has an adapter and no tensor "{name}": publish the adapters of the model that the '
                "other weights are of"
            )
    weight, a, b = (specs[f"{layer}.{part}"].shape for part in ("weight", LORA_A, LORA_B))
    rank = a[0] if a else 0
    wanted = ((rank, *weight[1:]), (*weight[:1], rank))
    if len(weight) != 2 or (a, b) != wanted:
        raise SchemaError(
            f'the adapter of layer "{layer}" has A {a} and B {b}; for a weight {weight} and rank {rank} they are '
            f"{wanted[0]} and {wanted[1]}"
        )
