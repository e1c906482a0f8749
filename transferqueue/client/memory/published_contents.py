"""Copies of the weights that a session published last: the contents that its next differences are of."""

from __future__ import annotations

from typing import NamedTuple

from transferqueue.schema import Field
from transferqueue.storage.elements.dtypes import U8


class PublishedContent(NamedTuple):
    """A field, the checksum of its content, and the bytes."""

    field: Field
    sum: int
    memory: U8


class PublishedContents:
    """Contents of one weight channel, by field. `refused`: for each adapter, and None for the base, how many of the
    channel's differences readers had refused when it was published last."""

    def __init__(self) -> None:
        self.held: dict[str, PublishedContent] = {}
        self.refused: dict[str | None, int] = {}
