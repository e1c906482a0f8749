"""Converts the job's transformer to a Llama and back: the same function, under the names that engines know.

Two things differ. Our rotary embedding turns neighbouring channels together, Llama's turns channel i of the first half with channel i of the
second; so the rows of query and key matrices are permuted within each head. And our model has queries, keys and values in one
matrix, gate and value in another, which are split. Nothing is rounded: both directions are exact.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from transferqueue.workflows.grpo.model.shape import ModelShape
from transferqueue.workflows.grpo.model.tokenizer import BOS_ID, EOS_ID, PAD_ID

if TYPE_CHECKING:
    from transferqueue.workflows.grpo.model.transformer import Transformer

_PARTS = {
    "input_layernorm": "attention_norm",
    "self_attn.o_proj": "attention.project_out",
    "post_attention_layernorm": "gate_norm",
    "mlp.down_proj": "gate_out",
}
_OUTSIDE = {
    "model.embed_tokens.weight": "embedding.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
}


def llama_config(shape: ModelShape) -> dict[str, Any]:
    """Return the ``config.json`` of the same model as a ``LlamaForCausalLM``."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.width,
        "intermediate_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "head_dim": shape.width // shape.heads,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": torch.finfo(torch.float32).eps,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "torch_dtype": "float32",
    }


def to_llama(weights: Mapping[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    """Convert a state dict of `Transformer` to Llama's names. Tensors are contiguous; those that need no change are shared."""
    renamed = {theirs: weights[ours] for theirs, ours in _OUTSIDE.items()}
    for layer in range(shape.layers):
        theirs, ours = f"model.layers.{layer}.", f"blocks.{layer}."
        renamed |= {f"{theirs}{name}.weight": weights[f"{ours}{part}.weight"] for name, part in _PARTS.items()}
        query, key, value = weights[f"{ours}attention.project_in.weight"].chunk(3)
        renamed[f"{theirs}self_attn.q_proj.weight"] = _per_head(query, shape, _halves)
        renamed[f"{theirs}self_attn.k_proj.weight"] = _per_head(key, shape, _halves)
        renamed[f"{theirs}self_attn.v_proj.weight"] = value
        gate, up = weights[f"{ours}gate_in.weight"].chunk(2)
        renamed[f"{theirs}mlp.gate_proj.weight"], renamed[f"{theirs}mlp.up_proj.weight"] = gate, up
    return {name: tensor.contiguous() for name, tensor in renamed.items()}


def from_llama(weights: Mapping[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    """Invert `to_llama`: return the state dict of `Transformer`."""
    renamed = {ours: weights[theirs] for theirs, ours in _OUTSIDE.items()}
    for layer in range(shape.layers):
        theirs, ours = f"model.layers.{layer}.", f"blocks.{layer}."
        renamed |= {f"{ours}{part}.weight": weights[f"{theirs}{name}.weight"] for name, part in _PARTS.items()}
        attention = theirs + "self_attn."
        renamed[f"{ours}attention.project_in.weight"] = torch.cat(
            [
                _per_head(weights[f"{attention}q_proj.weight"], shape, _neighbours),
                _per_head(weights[f"{attention}k_proj.weight"], shape, _neighbours),
                weights[f"{attention}v_proj.weight"],
            ]
        )
        renamed[f"{ours}gate_in.weight"] = torch.cat(
            [weights[f"{theirs}mlp.{name}_proj.weight"] for name in ("gate", "up")]
        )
    return renamed


def is_llama(weights: Mapping[str, Tensor]) -> bool:
    """Whether a state dict has Llama's names."""
    return _OUTSIDE.keys() <= weights.keys()


def _per_head(matrix_OI: Tensor, shape: ModelShape, reorder: Callable[[Tensor], Tensor]) -> Tensor:
    heads_HCI = matrix_OI.unflatten(0, (shape.heads, -1))
    return reorder(heads_HCI).reshape(matrix_OI.shape)


def _halves(heads_HCI: Tensor) -> Tensor:
    """Reorder channels to 0 2 4 … 1 3 5 …: neighbours move half a head apart."""
    return torch.cat([heads_HCI[:, 0::2], heads_HCI[:, 1::2]], dim=1)


def _neighbours(heads_HCI: Tensor) -> Tensor:
    """Invert `_halves`."""
    return torch.stack(heads_HCI.chunk(2, dim=1), dim=2).flatten(1, 2)


def save_llama(model: Transformer, directory: Path) -> Path:
    """Write a directory that engines load: ``config.json`` and ``model.safetensors``. Needs safetensors."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(llama_config(model.shape), indent=1))
    save_file(to_llama(model.state_dict(), model.shape), directory / "model.safetensors", metadata={"format": "pt"})
    return directory
