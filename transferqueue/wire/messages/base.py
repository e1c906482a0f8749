"""Base class of messages, and the bounded types of their fields."""

from __future__ import annotations

from typing import Annotated, dataclass_transform

import msgspec
from msgspec import Meta

from transferqueue.limits import (
    BLOCK_ROWS_MAX,
    FIELDS_MAX,
    ITEMS_MAX,
    KEY_CHARS_MAX,
    MESSAGE_BYTES_MAX,
    PID_MAX,
    PREDICATES_MAX,
    ROWS_DESCRIBED_MAX,
    TAG_CHARS_MAX,
    TAGS_MAX,
    TASKS_MAX,
    TEXT_CHARS_MAX,
)
from transferqueue.policies import Predicate, Task
from transferqueue.schema import Field

Bytes = Annotated[bytes, Meta(max_length=MESSAGE_BYTES_MAX)]
Rows = Bytes
I64 = Bytes
I32 = Bytes
F64 = Bytes
Name = Annotated[str, Meta(max_length=128)]
Text = Annotated[str, Meta(max_length=TEXT_CHARS_MAX)]
Key = Annotated[str, Meta(max_length=KEY_CHARS_MAX)]
WireTags = Annotated[
    dict[str, Annotated[str, Meta(max_length=TAG_CHARS_MAX)] | int | float | bool],
    Meta(max_length=TAGS_MAX + 1),
]
"""Tags of a row. The ledger's own bound is lower by one, and its error says so. The ledger also checks the names:
bounds here would double the time of decoding."""
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
Checksum = Annotated[int, Meta(ge=0)]
"""xxh3-64: any unsigned integer that a message can hold."""
Content = Annotated[bytes, Meta(max_length=16)]
"""xxh3-128 of the bytes of a block, big-endian; empty: not given."""
Path = Annotated[str, Meta(max_length=4096)]
FullPath = Annotated[str, Meta(max_length=2 * 4096)]
"""A `Path` that a client gave, under a directory of the server."""
Pid = Annotated[int, Meta(ge=0, le=PID_MAX)]
"""The number of a process; 0: not given."""
Secret = Annotated[bytes, Meta(min_length=32, max_length=32)]
Step = Annotated[int, Meta(ge=0, le=1 << 53)]
StepOrNone = Annotated[int, Meta(ge=-1, le=1 << 53)]
Fields = Annotated[list[Field], Meta(max_length=ITEMS_MAX)]
TableFields = Annotated[list[Field], Meta(max_length=2 * FIELDS_MAX)]
"""Fields of a table. The ledger's own bound is lower, and its error says so."""
TableNames = Annotated[list[Name], Meta(max_length=2 * FIELDS_MAX)]
Names = Annotated[list[Name], Meta(max_length=ITEMS_MAX)]
Counts = Annotated[list[Count], Meta(max_length=ITEMS_MAX)]
Tasks = Annotated[list[Task], Meta(max_length=2 * TASKS_MAX)]
Where = Annotated[list[Predicate], Meta(max_length=2 * PREDICATES_MAX)]
Keys = Annotated[list[Key], Meta(max_length=ROWS_DESCRIBED_MAX + 1)]
RowTags = Annotated[list[WireTags], Meta(max_length=ROWS_DESCRIBED_MAX + 1)]
"""Tags of the rows of a request. The ledger's own bound is lower by one, and its error says so."""
ReplyTags = Annotated[list[WireTags], Meta(max_length=BLOCK_ROWS_MAX)]


@dataclass_transform(frozen_default=True)
class Message(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """Base of all messages: a tagged array, unknown fields refused."""


def tag_of(message: Message | type[Message]) -> str:
    """The name of a message, or of its class, on the wire, in logs, in errors and in statistics: it stays when a class
    is renamed."""
    return str(message.__struct_config__.tag)


class DoneReply(Message, tag="Done"):
    """The request was accepted and has no other result. `rows`: the number of rows concerned."""

    rows: int = 0


class Failed(Message):
    """The request was refused, and nothing changed. `error`: a class name of transferqueue.errors."""

    error: Text
    text: Annotated[str, Meta(max_length=MESSAGE_BYTES_MAX)]
