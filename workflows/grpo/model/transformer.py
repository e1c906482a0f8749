"""A small causal transformer: RMSNorm before each part, rotary positions, SwiGLU, and a cache of keys and values.

Rotary positions (RoFormer, arXiv 2104.09864) make attention depend on the distance between two tokens only. So a
prompt padded on the left gives the same log-probs as one without padding, once the pad keys are masked: all rows of a
batch can then generate in the same column of one rectangular cache. RMSNorm: arXiv 1910.07467. SwiGLU: arXiv
2002.05202.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from transferqueue.workflows.grpo.model.shape import ModelShape


class Cache:
    """Keys and values of the tokens seen so far: two float32 ``[layers, rows, heads, columns_max, channels]``.

    ``pads_B`` (int64 ``[rows]``) counts the pad columns at the left of each row, which no token attends to.
    """

    def __init__(self, shape: ModelShape, *, pads_B: Tensor, columns_max: int) -> None:
        if columns_max > shape.context:
            raise ValueError(f"a cache of {columns_max} columns exceeds the context of {shape.context} tokens")
        sizes = (shape.layers, len(pads_B), shape.heads, columns_max, shape.width // shape.heads)
        self.keys_LBHTC = torch.zeros(sizes)
        self.values_LBHTC = torch.zeros(sizes)
        self.pads_B = pads_B
        self.columns = 0

    def select(self, rows: Tensor) -> None:
        """Keep copies of ``rows`` (int64 indices, repeats allowed) in that order, and drop all others."""
        self.keys_LBHTC = self.keys_LBHTC.index_select(1, rows)
        self.values_LBHTC = self.values_LBHTC.index_select(1, rows)
        self.pads_B = self.pads_B.index_select(0, rows)

    def mask(self, queries: int) -> Tensor:
        """Return which columns each of the next ``queries`` tokens may see: bool ``[rows, 1, queries, columns]``."""
        keys = torch.arange(self.columns + queries)
        causal_QK = keys <= keys[self.columns :, None]
        real_BK = keys >= self.pads_B[:, None]
        # A pad column would see nothing and turn into NaN: let each token see itself.
        self_QK = keys == keys[self.columns :, None]
        return (causal_QK & real_BK[:, None, None, :]) | self_QK

    def extend(self, layer: int, keys_BHTC: Tensor, values_BHTC: Tensor) -> tuple[Tensor, Tensor]:
        """Write one layer's new keys and values behind the cached ones, and return views of all of them."""
        end = self.columns + keys_BHTC.shape[2]
        self.keys_LBHTC[layer, :, :, self.columns : end] = keys_BHTC
        self.values_LBHTC[layer, :, :, self.columns : end] = values_BHTC
        return self.keys_LBHTC[layer, :, :, :end], self.values_LBHTC[layer, :, :, :end]


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.project_in = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.project_out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x_BTW: Tensor, turns: Tensor, mask: Tensor | None, cache: Cache | None, layer: int) -> Tensor:
        heads_BHTC = [
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.project_in(x_BTW).chunk(3, -1)
        ]
        queries, keys, values = rotate(heads_BHTC[0], turns), rotate(heads_BHTC[1], turns), heads_BHTC[2]
        if cache is not None:
            keys, values = cache.extend(layer, keys, values)
        mixed = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, is_causal=mask is None)
        return self.project_out(mixed.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


class TransformerBlock(nn.Module):
    """Attention and a SwiGLU layer, each behind an RMSNorm and added to its input."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width)
        self.attention = Attention(shape)
        self.gate_norm = nn.RMSNorm(shape.width)
        self.gate_in = nn.Linear(shape.width, 2 * shape.hidden, bias=False)
        self.gate_out = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x_BTW: Tensor, turns: Tensor, mask: Tensor | None, cache: Cache | None, layer: int) -> Tensor:
        x_BTW = x_BTW + self.attention(self.attention_norm(x_BTW), turns, mask, cache, layer)
        gate, value = self.gate_in(self.gate_norm(x_BTW)).chunk(2, dim=-1)
        return x_BTW + self.gate_out(functional.silu(gate) * value)  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """A causal language model; its weights are a plain ``dict`` of name to float32 tensor (``state_dict``)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(TransformerBlock(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.turns_TC: Tensor
        self.register_buffer("turns_TC", rotary_turns(shape), persistent=False)

    def initialize(self, generator: torch.Generator) -> None:
        """Draw all matrices from ``generator``: normal, ``1 / sqrt(inputs)``, outputs of a block smaller by depth."""
        for name, weight in self.named_parameters():
            if weight.ndim < 2:
                continue
            scale = 1.0 if name == "embedding.weight" else 1 / math.sqrt(weight.shape[1])
            if name.endswith(("project_out.weight", "gate_out.weight")):
                scale /= math.sqrt(2 * self.shape.layers)
            nn.init.normal_(weight, std=scale * (0.02 if name == "embedding.weight" else 1.0), generator=generator)

    def features(
        self,
        tokens_BT: Tensor,
        *,
        cache: Cache | None = None,
        positions_BT: Tensor | None = None,
        mask_BTT: Tensor | None = None,
    ) -> Tensor:
        """Return the last layer's normalised output, float32 ``[rows, tokens, width]``, for int64 ``[rows, tokens]``.

        Without a cache, every token sees all earlier ones of its row (so pad on the right), unless ``mask_BTT`` (bool,
        ``[rows, tokens, tokens]``, query first) says which it sees and ``positions_BT`` (int64) where it stands. With
        a cache, the tokens follow the cached columns, which grow by them: pad on the left. Raises ``ValueError`` beyond
        the context.
        """
        turns, mask = self._turns(tokens_BT, cache, positions_BT), None
        if cache is not None:
            mask = cache.mask(tokens_BT.shape[1])
        elif mask_BTT is not None:
            mask = mask_BTT[:, None]
        x_BTW = self.embedding(tokens_BT)
        for layer, block in enumerate(self.blocks):
            x_BTW = block(x_BTW, turns, mask, cache, layer)
        if cache is not None:
            cache.columns += tokens_BT.shape[1]
        return self.norm(x_BTW)  # type: ignore[no-any-return]

    def forward(self, tokens_BT: Tensor, cache: Cache | None = None) -> Tensor:
        """Return logits of the token after each token, float32 ``[rows, tokens, vocabulary]``; see ``features``."""
        return self.head(self.features(tokens_BT, cache=cache))  # type: ignore[no-any-return]

    def _turns(self, tokens_BT: Tensor, cache: Cache | None, positions_BT: Tensor | None) -> Tensor:
        if positions_BT is not None:
            if (last := int(positions_BT.max())) >= self.shape.context:
                raise ValueError(f"position {last} is beyond the context of {self.shape.context} tokens")
            return self.turns_TC[positions_BT][:, None]
        first = 0 if cache is None else cache.columns
        end = first + tokens_BT.shape[1]
        if end > self.shape.context:
            raise ValueError(f"{end} tokens exceed the context of {self.shape.context}")
        return self.turns_TC[first:end]


def rotary_turns(shape: ModelShape) -> Tensor:
    """Return the rotation of each channel pair at each position, complex64 ``[context, channels / 2]``."""
    channels = shape.width // shape.heads
    speeds = 10_000.0 ** (-torch.arange(0, channels, 2) / channels)
    angles = torch.outer(torch.arange(shape.context), speeds)
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x_BHTC: Tensor, turns: Tensor) -> Tensor:
    """Turn neighbouring channel pairs of ``x_BHTC`` by ``turns`` (complex, broadcastable to ``[B, H, T, C / 2]``)."""
    pairs = torch.view_as_complex(x_BHTC.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2)
