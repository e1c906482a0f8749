"""A reward of tests, whose process loads nothing else: a module of tests would bring transformers."""

from collections.abc import Sequence
from typing import Any


def length(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """How long the completion is."""
    assert all(each.isdigit() for each in answer)
    return [float(len(text)) for text in completions]
