"""Sizes of a model, read from its ``config.json`` and the headers of its weights. No torch here."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from transferqueue.adapters.weights import checkpoint_specs

_PICKLED: Final = "pytorch_model*.bin"


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Sizes of a decoder.

    Args:
        parameters: numbers in its weights.
        layers: of the transformer.
        hidden: numbers of a token between layers.
        queries: numbers of a token's queries in a layer, all heads together.
        keys: numbers of a token's keys in a layer, as many as of its values.
        inner: numbers of a token within the feed-forward part.
        vocabulary: logits of a token.
    """

    parameters: int
    layers: int = 0
    hidden: int = 0
    queries: int = 0
    keys: int = 0
    inner: int = 0
    vocabulary: int = 0


def model_sizes(path: str) -> ModelSizes | None:
    """Return the sizes of the model in a directory; None if its weights are not on this machine.

    Args:
        path: a directory, or an id of the hub, which is not looked up.
    """
    folder = Path(path).expanduser()
    config = _config(folder)
    parameters = _parameters(folder, config)
    return _sizes(parameters, config.get("text_config", config)) if parameters else None


def positions_of(path: str) -> int:
    """Return the tokens of the longest row that the model in a directory takes, by its ``config.json``; 0: that says
    none, or is not on this machine.

    Rotary positions that are stretched (``rope_scaling``) count with their factor.
    """
    config = _config(Path(path).expanduser())
    config = config.get("text_config") or config
    stated = config.get("max_position_embeddings") or config.get("n_positions") or 0
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    original, factor = scaling.get("original_max_position_embeddings"), scaling.get("factor")
    stretched = int((original or stated) * factor) if isinstance(factor, int | float) else 0
    return max(int(stated), stretched)


def layer_names(path: str) -> set[str]:
    """Return the last part of the name of each layer with a weight of two dimensions in the files of a model; none if
    they are not on this machine."""
    specs = checkpoint_specs(Path(path).expanduser())
    return {
        name.removesuffix(".weight").rpartition(".")[2]
        for name, spec in specs.items()
        if name.endswith(".weight") and len(spec.shape) == 2
    }


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _parameters(folder: Path, config: Mapping[str, Any]) -> int:
    if specs := checkpoint_specs(folder):
        return sum(math.prod(spec.shape) for spec in specs.values())
    number_bytes = 4 if "float32" in (config.get("dtype"), config.get("torch_dtype")) else 2
    return sum(file.stat().st_size for file in folder.glob(_PICKLED)) // number_bytes


def _sizes(parameters: int, config: Mapping[str, Any]) -> ModelSizes:
    """By the names of Llama's configuration, which most decoders share, or of GPT-2's."""
    hidden = config.get("hidden_size") or config.get("n_embd") or 0
    heads = config.get("num_attention_heads") or config.get("n_head") or 1
    head = config.get("head_dim") or hidden // heads
    return ModelSizes(
        parameters=parameters,
        layers=config.get("num_hidden_layers") or config.get("n_layer") or 0,
        hidden=hidden,
        queries=heads * head,
        keys=(config.get("num_key_value_heads") or heads) * head,
        inner=config.get("intermediate_size") or config.get("n_inner") or 4 * hidden,
        vocabulary=config.get("vocab_size") or 0,
    )
