"""The sizes of the job's transformer. No torch here: processes without a model read them too."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a `Transformer`. context: tokens of prompt and response together.

    Raises `ValueError` when `width` is not a multiple of ``2 * heads`` (rotary embeddings turn pairs of channels).
    """

    vocabulary: int
    width: int
    layers: int
    heads: int
    hidden: int
    context: int

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width {self.width} is not a multiple of 2 x {self.heads} heads; rotary turns channel pairs"
            )
