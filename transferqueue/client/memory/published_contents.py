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
    """Contents of one weight channel, by field. `refused`: differences of it that readers had refused at the last
    publication."""

    def __init__(self) -> None:
        self.held: dict[str, PublishedContent] = {}
        self.refused = 0
