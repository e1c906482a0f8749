"""Compute the bytes that a row must have from its number."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

NOISE_WORDS: Final = 1 << 15
SMALL_WORDS: Final = (16, 256)
"""A row of the paced table has 128 bytes to 2 KiB."""
LARGE_WORDS: Final = (6 << 10, 10 << 10)
"""A row of the table that fills the arena has 48 to 80 KiB."""


class Payload:
    """Ragged rows of 8-byte words: a slice of seeded noise, chosen by the row's number, each word xor that number.

    words: bounds of a row's length. No two numbers give the same bytes: where they share a slice, the xor differs.
    """

    def __init__(self, seed: int, words: tuple[int, int]) -> None:
        self._noise = np.random.default_rng(seed).integers(0, 1 << 62, NOISE_WORDS, dtype=np.int64)
        self._least, self._most = words

    def of(self, number: int) -> NDArray[np.int64]:
        """The value ``[words]`` of row `number`."""
        length = self._least + number * 31 % (self._most - self._least)
        start = number * 7919 % (NOISE_WORDS - length)
        return self._noise[start : start + length] ^ number

    def matches(self, number: int, words: NDArray[np.int64]) -> bool:
        """Whether every byte of a row is right."""
        return bool(np.array_equal(words, self.of(number)))


def reward_of(number: int) -> float:
    """The reward that row `number` must have."""
    return number % 1009 / 1009
