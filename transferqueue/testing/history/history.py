"""Histories: the calls of clients and their results, one JSON line for each event.

A history is a sequence of events in the order in which one recorder saw them. `Invoked` is written before a
process makes a call, `Ended` after it: ``ok`` with the result, ``fail`` if the call certainly changed nothing,
``unknown`` otherwise (a lost server, a killed process, an interrupt). An operation without an end is under
way, or its process died. Values of columns appear as digests, one for each row, so a history contains no data.

`HistoryRecorder` writes a history of a real queue; `checker.check` checks it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal, dataclass_transform

import msgspec
import numpy as np
import xxhash

from transferqueue.errors import FlowSignal, UsageError
from transferqueue.policies import Pacing, Task

Digests = dict[str, list[str]]
"""Field -> digest of each row's value."""
Outcome = Literal["ok", "fail", "unknown"]


@dataclass_transform(frozen_default=True)
class HistoryEvent(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, forbid_unknown_fields=True):
    """Base of events, calls and results: a tagged JSON object."""


def name_of(event: HistoryEvent) -> str:
    """The name of an event, call or result in history files and in texts. It stays when a class is renamed."""
    return str(event.__struct_config__.tag)


# ---------------------------------------------------------------- calls


class PutCall(HistoryEvent, tag="Put"):
    """Put new rows. group_size, group_id, versions: one for each row, -1 where not given."""

    table: str
    rows: int
    digests: Digests = {}
    group_id: list[int] = []
    group_size: list[int] = []
    versions: list[int] = []
    reservation: int = 0


class UpdateCall(HistoryEvent, tag="Update"):
    """Add columns to existing rows."""

    table: str
    rows: list[int]
    digests: Digests = {}


class LeaseCall(HistoryEvent, tag="Lease"):
    """Lease rows of a task. `replicas` and `world` as in `m.LeaseRequest`."""

    table: str
    task: str
    wait_s: float = 0.0
    world: int = 1
    replicas: int = 1


class AckCall(HistoryEvent, tag="Ack"):
    """End rows of a lease as done, or as dropped for a reason; with results. step: the trainer's, -1: none."""

    table: str
    task: str
    lease: int
    rows: list[int]
    digests: Digests = {}
    drop: str = ""
    step: int = -1


class ReleaseCall(HistoryEvent, tag="Release"):
    """Release rows of a lease. failed: count it as a failed attempt."""

    table: str
    task: str
    lease: int
    rows: list[int]
    failed: bool = False


class DropCall(HistoryEvent, tag="Drop"):
    """Drop rows."""

    table: str
    rows: list[int]
    reason: str


class AdvanceCall(HistoryEvent, tag="Advance"):
    """Advance the policy version of a table."""

    table: str
    version: int


class RollbackCall(HistoryEvent, tag="Rollback"):
    """Return to an earlier step of the model: rows of later steps are leased again."""

    table: str


class SealCall(HistoryEvent, tag="Seal"):
    """Seal the table."""

    table: str


class ReserveCall(HistoryEvent, tag="Reserve"):
    """Reserve room to produce rows."""

    table: str
    rows: int


class UnreserveCall(HistoryEvent, tag="Unreserve"):
    """Return rows of a reservation that will not be produced. rows 0: all that are left."""

    table: str
    reservation: int
    rows: int = 0


class PublishCall(HistoryEvent, tag="Publish"):
    """Publish a version of the weights."""

    channel: str
    version: int
    digest: str


class PullCall(HistoryEvent, tag="Pull"):
    """Pull a version of the weights above `above`, or exactly `version`."""

    channel: str
    above: int = -1
    version: int = -1


class LookCall(HistoryEvent, tag="Look"):
    """Read the rows of a lease again. Contains the digests of the first read, or those of this one."""

    table: str
    lease: int


Call = (
    PutCall
    | UpdateCall
    | LeaseCall
    | AckCall
    | ReleaseCall
    | DropCall
    | AdvanceCall
    | RollbackCall
    | SealCall
    | ReserveCall
    | UnreserveCall
    | PublishCall
    | PullCall
    | LookCall
)


# ---------------------------------------------------------------- results


class RowsResult(HistoryEvent, tag="Rows"):
    """Ids of rows that were put, in order."""

    rows: list[int]


class LeasedResult(HistoryEvent, tag="Leased"):
    """The leased rows. clock: the trainer's version when they were leased, -1: none."""

    lease: int
    rows: list[int]
    digests: Digests = {}
    group_id: list[int] = []
    group_size: list[int] = []
    versions: list[int] = []
    clock: int = -1


class ReservedResult(HistoryEvent, tag="Reserved"):
    """A reservation."""

    reservation: int
    rows: int


class PulledResult(HistoryEvent, tag="Pulled"):
    """The pulled weights."""

    version: int
    digest: str


class LookedResult(HistoryEvent, tag="Looked"):
    """The values that were read. same: whether they equal those of the first read."""

    same: bool


Result = RowsResult | LeasedResult | ReservedResult | PulledResult | LookedResult


# ---------------------------------------------------------------- events


class Declared(HistoryEvent):
    """A table and its terms. `whole`: the history has every row that was ever put into it."""

    table: str
    tasks: list[Task]
    rows_max: int
    pacing: Pacing | None = None
    bytes_max: int | None = None
    whole: bool = True
    at: float = 0.0


class Invoked(HistoryEvent):
    """A process begins an operation. op: the number of the operation, used once. at: seconds of the recorder's
    clock."""

    op: int
    process: str
    at: float
    call: Call


class Ended(HistoryEvent):
    """An operation ended, with this outcome."""

    op: int
    at: float
    outcome: Outcome
    result: Result | None = None
    error: str = ""


class Died(HistoryEvent):
    """A process died. Its operations under way have an unknown outcome; its leases and reservations return."""

    process: str
    at: float


class Counted(HistoryEvent):
    """The server's counts of a table. drained: it is sealed, every task reached its end, and no operation is under
    way."""

    table: str
    at: float
    rows_put: int
    rows_live: int
    rows_done: int
    dropped: dict[str, int] = {}
    rows_resident: int = 0
    bytes: int = 0
    drained: bool = False


class Finished(HistoryEvent):
    """The history is over. A wait that has not ended is stuck."""

    at: float


Line = Declared | Invoked | Ended | Died | Counted | Finished
_encode: Final = msgspec.json.Encoder().encode
_decoder: Final[msgspec.json.Decoder[Line]] = msgspec.json.Decoder(Line)


def write_line(line: Line) -> bytes:
    """One line of a history file, with its end."""
    return _encode(line) + b"\n"


def read(path: Path) -> Iterator[Line]:
    """The events of a history file. `UsageError` names the first line that is not an event."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _read_line(path, number, line)


def _read_line(path: Path, number: int, line: bytes) -> Line:
    try:
        return _decoder.decode(line)
    except msgspec.MsgspecError as error:
        raise UsageError(
            f"line {number} of {path} is no event of a history: {error}; give a file that a HistoryRecorder wrote"
        ) from error


def merge(histories: Iterable[Iterable[Line]]) -> Iterator[Line]:
    """Merge histories that were recorded at the same time by the same clock; operations are numbered anew."""
    numbers: dict[tuple[int, int], int] = {}
    tagged = [[(line.at, at, line) for line in history] for at, history in enumerate(histories)]
    for _, at, line in heapq.merge(*tagged, key=lambda entry: entry[0]):
        if isinstance(line, Invoked):
            numbers[at, line.op] = len(numbers) + 1
        if isinstance(line, Invoked | Ended):
            line = msgspec.structs.replace(line, op=numbers.get((at, line.op), 0))
        if not isinstance(line, Finished):
            yield line
    yield Finished(max((entry[-1][0] for entry in tagged if entry), default=0.0))


def certain(error: BaseException) -> bool:
    """Whether a call that raised this certainly changed nothing."""
    return isinstance(error, UsageError | FlowSignal)


def digest(value: Any) -> str:
    """Digest of one row's value: a dense array, tensor, text, bytes or plain value."""
    if isinstance(value, dict | list | tuple | None):
        value = msgspec.msgpack.encode(value, order="deterministic")
    elif hasattr(value, "detach"):
        value = _tensor_bytes(value)
    elif isinstance(value, str):
        value = value.encode()
    elif not isinstance(value, bytes | bytearray | memoryview):
        value = np.ascontiguousarray(value).tobytes()
    return xxhash.xxh3_64_hexdigest(value)


def _tensor_bytes(tensor: Any) -> bytes:
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data: bytes = flat.view(torch.uint8).numpy().tobytes()
    return data


def digests(values: Iterable[Any]) -> list[str]:
    """Digest of each row's value."""
    return [digest(value) for value in values]


def digest_of_mapping(values: Mapping[str, Any]) -> str:
    """One digest of named values; their order does not matter."""
    return digest({name: digest(values[name]) for name in sorted(values)})
