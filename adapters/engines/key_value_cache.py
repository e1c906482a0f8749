"""Key-value caches with room to grow, and joining rows of several caches into one.

transformers' dynamic layer copies the whole cache for each token. `GrowingStates` writes a token in place; it copies
only when its room is used up. Rows are aligned at their last token, so that rows of any length are one batch: a shorter
row has padding on its left, which the attention mask hides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from torch import Tensor

ROOM_TOKENS: Final = 64
"""Least room of a new buffer, in tokens beyond those that it begins with."""

Part = tuple[Any, Tensor, int]
"""A cache, places of rows in it, and how many of their last tokens are copied."""


class GrowingStates:
    """One layer: ``keys`` and ``values`` are views ``[rows, heads, tokens, width]`` of buffers with room for more
    tokens.
    """

    keys: Tensor
    values: Tensor

    def __init__(self) -> None:
        super().__init__()
        self._buffers: list[Tensor] = []

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append the states of new tokens; return all of them."""
        start = self.keys.shape[-2] if self._buffers else 0
        end = start + key_states.shape[-2]
        if not self._buffers or self._buffers[0].shape[-2] < end:
            self._make_room(key_states, value_states, end)
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, start:end] = states
        return self._show(end)

    def begin(self, parts: Sequence[tuple[Any, Tensor, int]], tokens: int) -> None:
        """Take rows of other layers, in order, with their last token at the end of `tokens`."""
        columns = [[(getattr(layer, name)[rows], last) for layer, rows, last in parts] for name in ("keys", "values")]
        self._buffers = [_aligned(states, tokens) for states in columns]
        self._show(tokens)

    def _make_room(self, key_states: Tensor, value_states: Tensor, end: int) -> None:
        start, capacity = end - key_states.shape[-2], max(end + ROOM_TOKENS, 2 * (end - key_states.shape[-2]))
        used = (self.keys, self.values) if start else ()
        self._buffers = [_room(states, len(states), capacity) for states in (key_states, value_states)]
        for buffer, states in zip(self._buffers, used, strict=False):
            buffer[:, :, :start] = states

    def _show(self, end: int) -> tuple[Tensor, Tensor]:
        self.keys, self.values = (buffer[:, :, :end] for buffer in self._buffers)
        return self.keys, self.values


class GrowingCache:
    """The cache of a model with so many `layers`."""

    def __init__(self, layers: int) -> None:
        self.layers = [GrowingStates() for _ in range(layers)]

    def update(self, key_states: Tensor, value_states: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Append the states of new tokens in a layer; return all of them."""
        return self.layers[layer].update(key_states, value_states)


def joined(empty: Any, parts: Sequence[Part]) -> tuple[Any, int]:
    """Fill an empty cache with the rows of `parts`, in order; return it and its number of tokens: that of the longest
    part. Copies each row once.
    """
    tokens = max(last for _, _, last in parts)
    for number, layer in enumerate(empty.layers):
        layer.begin([(part.layers[number], rows, last) for part, rows, last in parts], tokens)
    return empty, tokens


def _room(like: Tensor, rows: int, tokens: int) -> Tensor:
    """Return a buffer whose values are not set: a token is written before it is shown."""
    return like.new_empty(rows, like.shape[1], tokens, like.shape[3])


def _aligned(parts: Sequence[tuple[Tensor, int]], tokens: int) -> Tensor:
    first = parts[0][0]
    rows = sum(len(states) for states, _ in parts)
    buffer = _room(first, rows, tokens + ROOM_TOKENS)
    at = 0
    for states, last in parts:
        buffer[at : at + len(states), :, : tokens - last] = 0  # padding must be finite: attention multiplies it by 0
        if last:
            buffer[at : at + len(states), :, tokens - last : tokens] = states[:, :, states.shape[2] - last :]
        at += len(states)
    return buffer
