"""Low-rank adapters: a model whose weights stay as they are, with a small trained product beside each linear layer.

A layer computes ``x W' + (alpha / rank) x A' B'``; A is ``[rank, in]``, B ``[out, rank]`` and 0 at the start (Hu et
al., "LoRA", arXiv 2106.09685, section 4.1). W keeps its name, A and B stand beside it (``q_proj.weight``,
``q_proj.lora_a``, ``q_proj.lora_b``), so engines and checkpoints know the model. Published are W, once, and A and B of
each version, which readers merge (`adapters.lora_weights`); or ``W + (alpha / rank) B A``, computed a tensor at a time:
the trained model never holds them, and W is not rounded again at each publication, as merging and unmerging in place
would.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from transferqueue.adapters.lora_weights import LORA_A, LORA_B, LORA_SCALE, is_adapter, with_product
from transferqueue.adapters.protocols import TensorSpec, Unsupported
from transferqueue.adapters.weight_files import write_tensors
from transferqueue.adapters.weight_shards import is_sharded, like, shard_of
from transferqueue.adapters.weights import ChannelWeights, ModuleWeights
from transferqueue.errors import UsageError, listing


class LoraLinear(nn.Linear):
    """A linear layer with a trained product of low rank. Made of a plain one by `add_lora`."""

    lora_a: nn.Parameter
    lora_b: nn.Parameter
    lora_scale: float

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's own name for it)
        """See the module."""
        low = linear(linear(input.to(self.lora_a.dtype), self.lora_a), self.lora_b)
        return super().forward(input) + (low * self.lora_scale).to(input.dtype)

    def merged(self) -> Tensor:
        """Return ``W + (alpha / rank) B A`` in the dtype of W, computed in float32. Gathers shards."""
        weight, a, b = (whole(part.detach()) for part in (self.weight, self.lora_a, self.lora_b))
        return with_product(weight, a, b, self.lora_scale).to(weight.dtype)

    def merged_shard(self) -> Tensor:
        """As `merged`, sharded as W is: each rank computes its own rows. Gathers A, which is small, so every rank must
        call it."""
        weight, b = self.weight.detach(), self.lora_b.detach()
        if not is_sharded(weight):
            return self.merged()
        rows, rows_of_b = (shard_of(name, part).values for name, part in (("weight", weight), ("lora_b", b)))
        local = with_product(rows, whole(self.lora_a.detach()), rows_of_b, self.lora_scale)
        return like(weight, local.to(weight.dtype))


def add_lora(
    model: nn.Module,
    *,
    rank: int,
    alpha: float = 16.0,
    targets: Collection[str] = (),
    dtype: torch.dtype | None = None,
) -> list[str]:
    """Give linear layers of a model a trained product of low rank, and freeze all else.

    Call it before the model is sharded and before its optimizer is made. A is drawn from torch's global generator. On
    the meta device there is nothing to draw: see `load_sharded`.

    Args:
        model: the model, which is changed.
        rank: of the products, at least 1.
        alpha: the products are scaled by ``alpha / rank``; above 0; default 16.0.
        targets: last parts of the layers' names, such as ``["q_proj", "v_proj"]``; default (): all linear layers but
            the output layer.
        dtype: of A and B; default None: that of the layer's weight.

    Returns:
        The names of the layers.

    Raises:
        UsageError: a rank below 1, an alpha of 0 or less, a target that is no linear layer, or a model that has
            adapters.
        Unsupported: there is no linear layer.
    """
    if rank < 1 or not alpha > 0:
        raise UsageError(f"rank={rank}, alpha={alpha}: give a rank of at least 1 and a positive alpha")
    if has_lora(model):
        raise UsageError(f"{type(model).__name__} has adapters already")
    score, output = getattr(model, "score", None), getattr(model, "get_output_embeddings", None)
    left_out = (score, output() if callable(output) else None)
    layers = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and all(module is not layer for layer in left_out)
    }
    if not layers:
        raise Unsupported(f"{type(model).__name__} has no linear layers (torch.nn.Linear) to adapt; train it whole")
    layers = _targeted(layers, targets) if targets else layers
    model.requires_grad_(requires_grad=False)
    if isinstance(score, nn.Module):
        score.requires_grad_()  # of a critic: it may have started at 0
    for layer in layers.values():
        _adapt(layer, rank, alpha, dtype)
    return list(layers)


def _targeted(layers: Mapping[str, nn.Linear], targets: Collection[str]) -> dict[str, nn.Linear]:
    parts = {name: name.rpartition(".")[2] for name in layers}
    if missing := [target for target in targets if target not in parts.values()]:
        raise UsageError(
            f"no linear layer that can have adapters is called {listing(missing)}; there are "
            f"{listing(sorted(set(parts.values())))}"
        )
    return {name: layer for name, layer in layers.items() if parts[name] in targets}


def load_adapter(model: nn.Module, directory: str | Path) -> None:
    """Set the adapters of a model to those of a directory in the format of peft.

    Call it after `add_lora`. A rank of a sharded model sets its part.

    Args:
        model: a model with adapters, of the rank and the layers of those in the directory.
        directory: has ``adapter_model.safetensors``.

    Raises:
        UsageError: a directory that cannot be read, or adapters of another rank or other layers.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = Path(directory).expanduser() / "adapter_model.safetensors"
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise UsageError(f'adapters "{file}" cannot be read: {error}; give a directory that peft wrote') from error
    own = {peft_name(name): part for name, part in model.named_parameters() if is_adapter(name)}
    shapes = [{name: tuple(part.shape) for name, part in parts.items()} for parts in (own, tensors)]
    if shapes[0] != shapes[1]:
        differing = sorted(name for name, _ in set(shapes[0].items()) ^ set(shapes[1].items()))
        raise UsageError(
            f'adapters "{directory}" are of another model, or of other layers: {listing(dict.fromkeys(differing))} '
            "differ; give those of this model"
        )
    for name, part in own.items():
        shard = shard_of(name, part)
        shard.values.copy_(tensors[name][shard.first :][: len(shard.values)])


def _adapt(layer: nn.Linear, rank: int, alpha: float, dtype: torch.dtype | None) -> None:
    place: dict[str, Any] = {"device": layer.weight.device, "dtype": dtype or layer.weight.dtype}
    layer.__class__ = LoraLinear
    layer.lora_a = nn.Parameter(new_adapter(LORA_A, torch.empty(rank, layer.in_features, **place)))
    layer.lora_b = nn.Parameter(new_adapter(LORA_B, torch.empty(layer.out_features, rank, **place)))
    layer.lora_scale = alpha / rank  # type: ignore[assignment]


def new_adapter(name: str, values: Tensor) -> Tensor:
    """Fill a whole tensor with the values that the adapter of this name begins with: A from torch's global generator.

    Args:
        name: of the parameter.
        values: which are changed, and returned.
    """
    return nn.init.zeros_(values) if name.endswith(LORA_B) else nn.init.kaiming_uniform_(values, a=math.sqrt(5))


def has_lora(model: nn.Module) -> bool:
    """Return whether `add_lora` was called with the model.

    Args:
        model: the model.
    """
    return any(isinstance(module, LoraLinear) for module in model.modules())


def published_weights(model: nn.Module) -> ModuleWeights | MergedWeights:
    """Return the weights that engines take, under the names of the model without adapters.

    They are valid until the next step: only merged ones are copied.

    Args:
        model: the model, with or without adapters.
    """
    return MergedWeights(model) if has_lora(model) else ModuleWeights(model)


class MergedWeights:
    """A weight source (`protocols.WeightSource`) over a model with adapters: each product is added to its weight when
    the tensor is yielded.

    Every rank of a sharded model must iterate, in the same order.
    """

    def __init__(self, model: nn.Module) -> None:
        self._plain = ModuleWeights(model)
        self._layers = {
            f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, LoraLinear)
        }

    def metadata(self) -> Mapping[str, TensorSpec]:
        """Names, shapes and dtypes."""
        return {name: spec for name, spec in self._plain.metadata().items() if not is_adapter(name)}

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._plain:
            if not is_adapter(name):
                layer = self._layers.get(name)
                yield name, tensor if layer is None else layer.merged()

    def sharded(self) -> Mapping[str, Tensor]:
        """Return the tensors, sharded as they are: each rank merges its own rows. Every rank must call it."""
        return {
            name: self._layers[name].merged_shard() if name in self._layers else tensor
            for name, tensor in self._plain.sharded().items()
            if not is_adapter(name)
        }


class AdapterWeights:
    """A weight source over a model with adapters, as it is trained: its weights, A and B beside them, and their scale.

    The tensors are not copied: they are valid until the next step.

    Args:
        model: a model with adapters.

    Raises:
        UsageError: a model without adapters.
    """

    def __init__(self, model: nn.Module) -> None:
        self._plain = ModuleWeights(model)
        self._scale = torch.tensor(_scale_of(model), dtype=torch.float32)
        self.frozen = frozenset(name for name, part in model.named_parameters() if not part.requires_grad)
        """Names of the tensors that no step changes."""

    def metadata(self) -> Mapping[str, TensorSpec]:
        """Names, shapes and dtypes."""
        return {**self._plain.metadata(), LORA_SCALE: TensorSpec((), "float32")}

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._plain
        yield LORA_SCALE, self._scale


def _scale_of(model: nn.Module) -> float:
    """Return alpha / rank. `UsageError` for a model without adapters."""
    layers = [module for module in model.modules() if isinstance(module, LoraLinear)]
    if not layers:
        raise UsageError(f"{type(model).__name__} has no adapters; call add_lora first")
    return layers[0].lora_scale


def save_adapter(model: nn.Module, directory: str | Path, *, base: str) -> None:
    """Write the adapters in the format of the library peft, for engines and tools that read it.

    Every rank of a sharded model must call it; each writes the same.

    Args:
        model: the model.
        directory: where the files are written; made if it does not exist.
        base: path or id of the model without adapters.

    Raises:
        UsageError: a model without adapters.
    """
    tensors = {
        peft_name(name): whole(part.detach()).contiguous()
        for name, part in model.named_parameters()
        if is_adapter(name)
    }
    _write_adapter(Path(directory), tensors, peft_config(model, base))


def save_published_adapter(source: ChannelWeights, directory: str | Path) -> None:
    """Write the adapters of a version of a channel in the format of the library peft, for engines that read it.

    Args:
        source: the version, all of it here.
        directory: where the files are written; made if it does not exist.

    Raises:
        UsageError: a version without adapters.
    """
    if not source.rank:
        raise UsageError(f'version {source.version} of channel "{source.channel}" has no adapters')
    scale, layers = source.adapters()
    tensors = {
        peft_name(f"{layer}.{part}"): values.contiguous()
        for layer, pair in layers.items()
        for part, values in zip((LORA_A, LORA_B), pair, strict=True)
    }
    _write_adapter(Path(directory), tensors, _peft_config(source.rank, scale, layers, ""))


def _write_adapter(directory: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    write_tensors(directory / "adapter_model.safetensors", tensors)
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def peft_config(model: nn.Module, base: str) -> dict[str, Any]:
    """Return peft's ``adapter_config.json`` of a model whose base is at `base`. `UsageError` if it has no adapters."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}
    if not layers:
        raise UsageError(f"{type(model).__name__} has no adapters; call add_lora first")
    first = next(iter(layers.values()))
    return _peft_config(first.lora_a.shape[0], first.lora_scale, layers, base)


def _peft_config(rank: int, scale: float, layers: Collection[str], base: str) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": scale * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.rpartition(".")[2] for name in layers}),
    }


def peft_name(name: str) -> str:
    """Return peft's name of a trained weight of a model with adapters.

    >>> peft_name("model.q_proj.lora_a")
    'base_model.model.model.q_proj.lora_A.weight'
    """
    for own, theirs in ((LORA_A, "lora_A.weight"), (LORA_B, "lora_B.weight")):
        if name.endswith(f".{own}"):
            name = name.removesuffix(own) + theirs
    return f"base_model.model.{name}"


def adapted_weights(names: Collection[str]) -> dict[str, tuple[str, str]]:
    """Return the weights that adapters belong to, each with peft's names of its A and B.

    Args:
        names: of the adapters, as peft has them.

    >>> adapted_weights(["base_model.model.q.lora_A.weight", "base_model.model.q.lora_B.weight"])
    {'q.weight': ('base_model.model.q.lora_A.weight', 'base_model.model.q.lora_B.weight')}
    """
    ends = ".lora_A.weight"
    layers = [name.removesuffix(ends) for name in names if name.endswith(ends)]
    return {
        f"{layer.removeprefix('base_model.model.')}.weight": (f"{layer}{ends}", f"{layer}.lora_B.weight")
        for layer in layers
    }


def merge_lora(model: nn.Module) -> None:
    """Add each product to its weight, and turn the layers into plain ones again.

    Args:
        model: a model with adapters, whole on this process; it is changed.
    """
    for layer in [module for module in model.modules() if isinstance(module, LoraLinear)]:
        layer.weight.data = layer.merged()
        del layer.lora_a, layer.lora_b, layer.lora_scale
        layer.__class__ = nn.Linear  # type: ignore[assignment]


def whole(tensor: Tensor) -> Tensor:
    """Gather a tensor if it is a shard."""
    gather = getattr(tensor, "full_tensor", None)
    gathered: Tensor = gather() if callable(gather) else tensor
    return gathered
