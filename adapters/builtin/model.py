"""The built-in model: a small causal transformer with Llama's parts, names of weights and function.

RMSNorm (arXiv 1910.07467) before each part, rotary positions (arXiv 2104.09864), SwiGLU (arXiv 2002.05202). Its
forward takes what engines and learners give to a model of transformers: rows padded on the left with a cache, or packed
rows.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from transferqueue.adapters.builtin import MARK
from transferqueue.adapters.builtin.tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCABULARY_SIZE
from transferqueue.adapters.engines.key_value_cache import GrowingCache
from transferqueue.adapters.weight_files import WEIGHTS, model_weight_files, write_tensors
from transferqueue.errors import NotFound, UsageError


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a `BuiltinModel`, by the names of Llama's configuration. `max_position_embeddings` counts the tokens of
    prompt and response together.

    Raises `UsageError` when hidden_size is not a multiple of twice the heads: rotary embeddings turn pairs of channels.
    """

    vocab_size: int = VOCABULARY_SIZE
    hidden_size: int = 128
    intermediate_size: int = 256
    num_hidden_layers: int = 2
    num_attention_heads: int = 8
    max_position_embeddings: int = 32

    def __post_init__(self) -> None:
        if self.hidden_size % (2 * self.num_attention_heads):
            raise UsageError(
                f"hidden_size={self.hidden_size} is not a multiple of 2 x "
                f"num_attention_heads={self.num_attention_heads}; rotary embeddings turn pairs of channels"
            )

    def get_text_config(self) -> Self:
        """Return the sizes, as configurations of transformers do."""
        return self

    def llama(self) -> dict[str, Any]:
        """Return the ``config.json`` of the same model as a ``LlamaForCausalLM``."""
        return {
            **vars(self),
            MARK: 1,
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_key_value_heads": self.num_attention_heads,
            "head_dim": self.hidden_size // self.num_attention_heads,
            "rms_norm_eps": torch.finfo(torch.float32).eps,
            "rope_theta": 10_000.0,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "bos_token_id": BOS_ID,
            "eos_token_id": EOS_ID,
            "pad_token_id": PAD_ID,
        }


class ModelOutput(NamedTuple):
    """The model's output: `logits`, float32 ``[rows, tokens, vocabulary]``, and `past_key_values`, the given cache."""

    logits: Tensor
    past_key_values: GrowingCache | None


class AttentionInRows(Protocol):
    """Attention of a packed batch (`scoring.row_attention.PackedRows`)."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend inside each row: query ``[1, heads, N, D]`` → ``[1, N, heads, D]``."""


class _Sees(NamedTuple):
    """What tokens attend to: their own rows, or what the mask says, with the tokens of a cache."""

    rows: AttentionInRows | None
    mask: Tensor | None
    cache: GrowingCache | None


class _Attention(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.heads = shape.num_attention_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(shape.hidden_size, shape.hidden_size, bias=False) for _ in range(4)
        )

    def forward(self, x_BTW: Tensor, turns: tuple[Tensor, Tensor], sees: _Sees, layer: int) -> Tensor:
        queries, keys, values = (
            project(x_BTW).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        queries, keys = _turned(queries, turns), _turned(keys, turns)
        if sees.rows is not None:
            return self.o_proj(sees.rows.attend(queries, keys, values).flatten(-2))  # type: ignore[no-any-return]
        if sees.cache is not None:
            keys, values = sees.cache.update(keys, values, layer)
        mixed = functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=sees.mask, is_causal=sees.mask is None
        )
        return self.o_proj(mixed.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


class _Gated(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x_BTW: Tensor) -> Tensor:
        gated_BTH = functional.silu(self.gate_proj(x_BTW)) * self.up_proj(x_BTW)
        return self.down_proj(gated_BTH)  # type: ignore[no-any-return]


class _Layer(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size)
        self.self_attn = _Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size)
        self.mlp = _Gated(shape)

    def forward(self, x_BTW: Tensor, turns: tuple[Tensor, Tensor], sees: _Sees, layer: int) -> Tensor:
        x_BTW = x_BTW + self.self_attn(self.input_layernorm(x_BTW), turns, sees, layer)
        return x_BTW + self.mlp(self.post_attention_layernorm(x_BTW))  # type: ignore[no-any-return]


class _Body(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size)


class BuiltinModel(nn.Module):
    """A causal language model, with random weights of `seed`; see `from_pretrained` for trained ones."""

    takes_trees = True
    """Rows are packed, and may form trees (`scoring.plan`): `forward` takes ``packed_rows``."""

    def __init__(self, shape: ModelShape, *, seed: int = 0) -> None:
        super().__init__()
        self.config = shape
        self.model = _Body(shape)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        cosines, sines = _rotary(shape)
        self.cosines_TC: Tensor
        self.sines_TC: Tensor
        self.register_buffer("cosines_TC", cosines, persistent=False)
        self.register_buffer("sines_TC", sines, persistent=False)
        self._initialize(torch.Generator().manual_seed(seed))

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return self.lm_head.weight.device

    def get_output_embeddings(self) -> nn.Linear:
        """Return the output layer."""
        return self.lm_head

    def new_cache(self) -> GrowingCache:
        """Return an empty cache for `forward`."""
        return GrowingCache(self.config.num_hidden_layers)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: GrowingCache | None = None,
        packed_rows: AttentionInRows | None = None,
        logits_to_keep: int = 0,
        **_: Any,
    ) -> ModelOutput:
        """Return logits of the token after each of `input_ids`, int64 ``[rows, tokens]``.

        `attention_mask` says which columns, cached ones included, have a token (for rows padded on the left).
        `position_ids` are the positions of the tokens (None: in order). `packed_rows` says how rows lie in a packed
        batch, which has no mask. Without both a token sees all earlier ones. Only the last `logits_to_keep` tokens get
        logits (0: all).
        """
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        turns = self.cosines_TC[position_ids][:, None], self.sines_TC[position_ids][:, None]
        mask = _mask(input_ids, attention_mask) if packed_rows is None else None
        sees = _Sees(packed_rows, mask, past_key_values)
        x_BTW = self.model.embed_tokens(input_ids)
        for number, layer in enumerate(self.model.layers):
            x_BTW = layer(x_BTW, turns, sees, number)
        return ModelOutput(self.lm_head(self.model.norm(x_BTW[:, -logits_to_keep:])), past_key_values)

    def save_pretrained(self, directory: str | Path, **_: Any) -> None:
        """Write ``config.json`` and ``model.safetensors``, which other engines read too. Options of transformers are
        not read."""
        place = Path(directory)
        place.mkdir(parents=True, exist_ok=True)
        self.save_config(place)
        write_tensors(place / WEIGHTS, self.state_dict())

    def save_config(self, directory: Path) -> None:
        """Write ``config.json``, for weights in the dtype that they have here."""
        config = {**self.config.llama(), "torch_dtype": str(self.lm_head.weight.dtype).removeprefix("torch.")}
        (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> Self:
        """Load what `save_pretrained` wrote. Raises `NotFound` for a missing file, `UsageError` for weights that do not
        fit.
        """
        from safetensors.torch import load_file

        model, place = cls.of_config(directory), Path(directory).expanduser()
        try:
            files = model_weight_files(place) or [place / WEIGHTS]
            weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
        except OSError as error:
            raise _not_loaded(directory, error) from error
        try:
            model.load_state_dict(weights)
        except RuntimeError as error:
            raise UsageError(
                f'model "{directory}" has weights of another shape than its config.json: {error}'
            ) from error
        return model

    @classmethod
    def of_config(cls, directory: str | Path) -> Self:
        """Return a model of the sizes of the one in a directory, with random weights. Raises `NotFound` if it has no
        ``config.json``."""
        try:
            config = json.loads((Path(directory).expanduser() / "config.json").read_bytes())
        except OSError as error:
            raise _not_loaded(directory, error) from error
        return cls(ModelShape(**{name: config[name] for name in ModelShape.__dataclass_fields__}))

    def _initialize(self, generator: torch.Generator) -> None:
        """Draw all matrices: normal, ``1 / sqrt(inputs)``, outputs of a layer smaller by depth."""
        for name, weight in self.named_parameters():
            if weight.ndim < 2:
                continue
            std = 0.02 if "embed_tokens" in name else 1 / math.sqrt(weight.shape[1])
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std /= math.sqrt(2 * self.config.num_hidden_layers)
            nn.init.normal_(weight, std=std, generator=generator)


def _not_loaded(directory: str | Path, error: OSError) -> NotFound:
    return NotFound(f'model "{directory}" cannot be loaded: {error}; make one with `transferqueue demo`')


def _mask(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor | None:
    """Return which columns each of the last tokens may see: bool ``[rows, 1, tokens, columns]``; None: all earlier
    ones.
    """
    if attention_mask is None:
        return None
    real_BK, tokens = attention_mask.bool(), input_ids.shape[1]
    if tokens == 1:
        return real_BK[:, None, None]
    columns_K = torch.arange(real_BK.shape[1], device=real_BK.device)
    own_T1 = columns_K[-tokens:, None]
    # A pad column would see nothing and turn into NaN: let each token see itself.
    return ((columns_K <= own_T1) & real_BK[:, None, None]) | (columns_K == own_T1)


def _rotary(shape: ModelShape) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of each channel pair at each position, ``[positions, channels / 2]``."""
    channels = shape.hidden_size // shape.num_attention_heads
    speeds = 10_000.0 ** (-torch.arange(0, channels, 2) / channels)
    angles = torch.outer(torch.arange(shape.max_position_embeddings), speeds)
    return angles.cos(), angles.sin()


def _turned(x_BHTC: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Turn channel i of the first half with channel i of the second, as Llama does."""
    cosines, sines = turns
    first, second = x_BHTC.chunk(2, -1)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], -1)
