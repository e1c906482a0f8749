"""What is moved: rows, fields, dtypes, lengths and bytes, made from a seed, the same for every contender.

A workload is a value; `columns(workload, seed)` makes its bytes. A column is kept in one neutral form, `Flat`:
all elements in a row order, and how many belong to each row. Each contender turns that into the form its own
users would hold (torch tensors, jagged tensors, numpy arrays), before the clock starts; what it delivers is turned
back and compared byte for byte, after the clock stopped.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

KIB = 1 << 10
MIB = 1 << 20

Kind = Literal["dense", "ragged", "text", "image", "prompt"]
Bytes = npt.NDArray[np.uint8]
Counts = npt.NDArray[np.int64]

ITEM_BYTES = {"float32": 4, "int64": 8, "bfloat16": 2, "uint8": 1}


@dataclass(frozen=True)
class Workload:
    """`rows` rows of `fields` fields, `nbytes` bytes of values in all.

    get: fields that the reader asks for (0: all). pick: rows that it reads at random (0: all, in order).
    repeats: neighbouring rows that share one value (a prompt and its rollouts).
    """

    name: str
    kind: Kind
    rows: int
    fields: int
    nbytes: int
    dtype: str = "float32"
    get: int = 0
    pick: int = 0
    repeats: int = 1

    @property
    def names(self) -> list[str]:
        return [f"field_{number:03d}" for number in range(self.fields)]

    @property
    def wanted(self) -> list[str]:
        return self.names[: self.get] if self.get else self.names

    @property
    def elements(self) -> int:
        """Elements of one field over all rows (each shared value counted once)."""
        return self.nbytes // self.fields // ITEM_BYTES[self.dtype]

    @property
    def bytes_got(self) -> int:
        """Bytes of values that the reader receives."""
        share = len(self.wanted) / self.fields * (self.pick or self.rows) / self.rows
        return int(self.nbytes * self.repeats * share)


@dataclass(frozen=True)
class Flat:
    """One column: `values` (uint8, all rows one after another), `counts` bytes of each row, how to read them.

    shape: of every row where rows are alike. shapes: of each row, where more than the first dimension varies.
    """

    values: Bytes
    counts: Counts
    dtype: str
    kind: Kind
    shape: tuple[int, ...] = ()
    shapes: npt.NDArray[np.int64] | None = None
    repeats: int = 1

    @property
    def offsets(self) -> Counts:
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.counts)])

    def pick(self, rows: npt.NDArray[np.int64]) -> Flat:
        """The same column for some rows, in their order."""
        at = self.offsets
        parts = [self.values[at[row] : at[row + 1]] for row in rows.tolist()]
        shapes = None if self.shapes is None else self.shapes[rows]
        return replace(self, values=np.concatenate(parts), counts=self.counts[rows], shapes=shapes)


def _lengths(rng: np.random.Generator, rows: int, total: int) -> Counts:
    """Lengths of at least one that sum to `total`, skewed as answers are: a few are several times the mean."""
    return 1 + rng.multinomial(total - rows, rng.dirichlet(np.full(rows, 2.0))).astype(np.int64)


def _bytes(rng: np.random.Generator, size: int) -> Bytes:
    return rng.integers(0, 1 << 63, -(-size // 8), dtype=np.int64).view(np.uint8)[:size]


def _dense(workload: Workload, rng: np.random.Generator) -> Flat:
    item, width = ITEM_BYTES[workload.dtype], workload.elements // workload.rows
    counts = np.full(workload.rows, width * item, np.int64)
    return Flat(_bytes(rng, workload.rows * width * item), counts, workload.dtype, "dense", (width,))


def _ragged(workload: Workload, rng: np.random.Generator) -> Flat:
    item = ITEM_BYTES[workload.dtype]
    counts = _lengths(rng, workload.rows, workload.elements) * item
    return Flat(_bytes(rng, int(counts.sum())), counts, workload.dtype, "ragged")


def _text(workload: Workload, rng: np.random.Generator) -> Flat:
    counts = _lengths(rng, workload.rows, workload.nbytes // workload.fields)
    letters = rng.integers(97, 123, int(counts.sum()), dtype=np.uint8)
    return Flat(letters, counts, "uint8", "text")


def _image(workload: Workload, rng: np.random.Generator) -> Flat:
    """Pictures [height, width, 3] whose sides differ by up to three times."""
    side = np.sqrt(workload.nbytes / workload.fields / workload.rows / 3)
    sides = np.maximum(1, (side * rng.uniform(0.5, 1.5, (workload.rows, 2))).astype(np.int64))
    shapes = np.column_stack([sides, np.full(workload.rows, 3, np.int64)])
    counts = shapes.prod(axis=1)
    return Flat(_bytes(rng, int(counts.sum())), counts, "uint8", "image", shapes=shapes)


def _prompt(workload: Workload, rng: np.random.Generator) -> Flat:
    """One value that `repeats` neighbouring rows share; `rows` counts the rows, not the values."""
    groups = workload.rows // workload.repeats
    size = workload.nbytes // groups
    return Flat(
        _bytes(rng, groups * size),
        np.full(groups, size, np.int64),
        "uint8",
        "prompt",
        (size,),
        repeats=workload.repeats,
    )


_MAKE = {"dense": _dense, "ragged": _ragged, "text": _text, "image": _image, "prompt": _prompt}


def columns(workload: Workload, seed: int) -> dict[str, Flat]:
    """The workload's bytes; the same seed gives the same bytes on every machine."""
    rng = np.random.default_rng([seed, len(workload.name)])
    return {name: _MAKE[workload.kind](workload, rng) for name in workload.names}


def picked(workload: Workload, seed: int) -> npt.NDArray[np.int64]:
    """Which rows the reader asks for, when it picks at random."""
    return np.random.default_rng([seed, 7]).permutation(workload.rows)[: workload.pick].astype(np.int64)


def same_rows(expected: Flat, values: Bytes, counts: Counts) -> bool:
    """Whether the same rows were delivered, to the byte, in whatever order: for contenders that keep none."""
    return sorted(_digests(expected.values, expected.counts)) == sorted(_digests(values, counts))


def _digests(values: Bytes, counts: Counts) -> list[bytes]:
    ends = np.cumsum(counts)
    spans = zip((ends - counts).tolist(), ends.tolist(), strict=True)
    return [hashlib.blake2b(values[start:end], digest_size=16).digest() for start, end in spans]


def same(expected: Flat, values: Bytes, counts: Counts) -> bool:
    """Whether what was delivered is what was put, to the byte."""
    if expected.repeats > 1:
        rows = np.repeat(np.arange(len(expected.counts)), expected.repeats)
        return bool(np.array_equal(expected.counts[rows], counts)) and _same_shared(expected, values)
    return bool(np.array_equal(expected.counts, counts) and np.array_equal(expected.values, values))


def _same_shared(expected: Flat, values: Bytes) -> bool:
    groups = len(expected.counts)
    shared = expected.values.reshape(groups, 1, -1)
    got = values.reshape(groups, expected.repeats, -1)
    return all(np.array_equal(shared[group, 0], row) for group in range(groups) for row in got[group])


DENSE = 32 * MIB
_DENSE_FIELDS = {f"dense_{n}": Workload(f"dense_{n}", "dense", 1024, n, DENSE) for n in (1, 8, 32, 128)}
_RAGGED_FIELDS = {f"ragged_{n}": Workload(f"ragged_{n}", "ragged", 1024, n, DENSE) for n in (1, 8, 32, 128)}
_SIZES = {
    f"size_{size // KIB}KiB": Workload(f"size_{size // KIB}KiB", "dense", 64, 1, size)
    for size in (256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB)
}
_OTHERS = (
    Workload("ragged_bf16", "ragged", 1024, 8, DENSE, "bfloat16"),
    Workload("tokens", "ragged", 1024, 4, 8 * MIB, "int64"),
    Workload("text", "text", 1024, 2, 8 * MIB, "uint8"),
    Workload("images", "image", 256, 1, DENSE, "uint8"),
    Workload("two_of_32", "dense", 1024, 32, DENSE, get=2),
    Workload("random_dense", "dense", 1024, 8, DENSE, pick=256),
    Workload("random_ragged", "ragged", 1024, 8, DENSE, pick=256),
    Workload("shared_prompt", "prompt", 64, 1, 8 * MIB, "uint8", repeats=8),
)

WORKLOADS: dict[str, Workload] = {
    **_DENSE_FIELDS,
    **_RAGGED_FIELDS,
    **_SIZES,
    **{workload.name: workload for workload in _OTHERS},
}
"""Every workload by its name."""
