"""Histories: what clients asked of a queue and what they were told, one JSON line each.

A history is a sequence of events in the order in which they happened as one observer saw them. `Invoked` says that a
process is about to do something; `Ended` how that went: ``ok`` with what it was told, ``fail`` if it was certainly not
done, ``unknown`` if nobody can say (a lost server, a killed process, an interrupt). An operation without end is under
way, or its process is gone. Values of columns appear as digests, one a row, so a history holds no data.

`Recorder` writes one from a real queue, the simulator from a simulated one, `checker.check` judges both.
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


# ---------------------------------------------------------------- calls


class PutCall(HistoryEvent, tag="Put"):
    """New rows. group_size, group_id, versions: one a row, -1 where unsaid."""

    table: str
    rows: int
    digests: Digests = {}
    group_id: list[int] = []
    group_size: list[int] = []
    versions: list[int] = []
    reservation: int = 0


class UpdateCall(HistoryEvent, tag="Update"):
    """More columns for rows that exist."""

    table: str
    rows: list[int]
    digests: Digests = {}


class LeaseCall(HistoryEvent, tag="Lease"):
    """Rows of a task. replicas, world: as in `m.Lease`."""

    table: str
    task: str
    wait_s: float = 0.0
    world: int = 1
    replicas: int = 1


class AckCall(HistoryEvent, tag="Ack"):
    """Rows of a lease are done, or dropped with a reason; with results. step: the trainer's, -1: none."""

    table: str
    task: str
    lease: int
    rows: list[int]
    digests: Digests = {}
    drop: str = ""
    step: int = -1


class ReleaseCall(HistoryEvent, tag="Release"):
    """Rows of a lease go back. failed: as a failed attempt."""

    table: str
    task: str
    lease: int
    rows: list[int]
    failed: bool = False


class DropCall(HistoryEvent, tag="Drop"):
    """Rows end as dropped."""

    table: str
    rows: list[int]
    reason: str


class AdvanceCall(HistoryEvent, tag="Advance"):
    """The clock of a table moves."""

    table: str
    version: int


class RollbackCall(HistoryEvent, tag="Rollback"):
    """The model is as it was: rows of later steps are given out again."""

    table: str


class SealCall(HistoryEvent, tag="Seal"):
    """No more rows enter."""

    table: str


class ReserveCall(HistoryEvent, tag="Reserve"):
    """Permission to produce rows."""

    table: str
    rows: int


class UnreserveCall(HistoryEvent, tag="Unreserve"):
    """Rows of a reservation will not come. rows 0: all that are left."""

    table: str
    reservation: int
    rows: int = 0


class PublishCall(HistoryEvent, tag="Publish"):
    """A version of the weights."""

    channel: str
    version: int
    digest: str


class PullCall(HistoryEvent, tag="Pull"):
    """A version of the weights above `above`, or exactly `version`."""

    channel: str
    above: int = -1
    version: int = -1


class LookCall(HistoryEvent, tag="Look"):
    """What the process sees of a lease that it still views: the digests of its first look, or those of another one."""

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
    """Rows lent. clock: the trainer's version at the hand-over, -1: none."""

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
    """Weights, as they were read."""

    version: int
    digest: str


class LookedResult(HistoryEvent, tag="Looked"):
    """What was seen. same: whether it is what was seen first."""

    same: bool


Result = RowsResult | LeasedResult | ReservedResult | PulledResult | LookedResult


# ---------------------------------------------------------------- events


class Declared(HistoryEvent):
    """A table and its terms. whole: everything that was ever put into it is in the history."""

    table: str
    tasks: list[Task]
    rows_max: int
    pacing: Pacing | None = None
    bytes_max: int | None = None
    whole: bool = True
    at: float = 0.0


class Invoked(HistoryEvent):
    """A process begins an operation. op: its number, used once. at: seconds of the observer's clock."""

    op: int
    process: str
    at: float
    call: Call


class Ended(HistoryEvent):
    """How an operation went."""

    op: int
    at: float
    outcome: Outcome
    result: Result | None = None
    error: str = ""


class Died(HistoryEvent):
    """A process is gone: what it had not heard the end of is unknown, and what it held returns."""

    process: str
    at: float


class Counted(HistoryEvent):
    """What the server says of a table. drained: sealed, every task has had the end, and nobody does anything more."""

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
    """The observation is over. Whoever still waits has waited too long."""

    at: float


Line = Declared | Invoked | Ended | Died | Counted | Finished
_encode: Final = msgspec.json.Encoder().encode
_decoder: Final[msgspec.json.Decoder[Line]] = msgspec.json.Decoder(Line)


def write_line(line: Line) -> bytes:
    """One line of a history file, with its end."""
    return _encode(line) + b"\n"


def read(path: Path) -> Iterator[Line]:
    """The events of a history file. `UsageError` names the first line that is none."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _read_line(path, number, line)


def _read_line(path: Path, number: int, line: bytes) -> Line:
    try:
        return _decoder.decode(line)
    except msgspec.MsgspecError as error:
        raise UsageError(
            f"line {number} of {path} is no event of a history: {error}; give a file that a Recorder wrote"
        ) from error


def merge(histories: Iterable[Iterable[Line]]) -> Iterator[Line]:
    """One history of several that were observed at the same time by the same clock; operations are numbered anew."""
    numbers: dict[tuple[int, int], int] = {}
    tagged = [[(line.at, at, line) for line in history] for at, history in enumerate(histories)]
    for _, at, line in heapq.merge(*tagged, key=lambda one: one[0]):
        if isinstance(line, Invoked):
            numbers[at, line.op] = len(numbers) + 1
        if isinstance(line, Invoked | Ended):
            line = msgspec.structs.replace(line, op=numbers.get((at, line.op), 0))
        if not isinstance(line, Finished):
            yield line
    yield Finished(max((one[-1][0] for one in tagged if one), default=0.0))


def certain(error: BaseException) -> bool:
    """Whether a call that raised this certainly changed nothing."""
    return isinstance(error, UsageError | FlowSignal)


def digest(value: Any) -> str:
    """Digest of one row's value: its bytes, whatever dense array, tensor, text, bytes or plain value it is."""
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
    """One digest of named values, in whatever order they are named."""
    return digest({name: digest(values[name]) for name in sorted(values)})
