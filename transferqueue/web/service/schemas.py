"""Bodies and answers of the HTTP service.

A body is a struct, so the code and the OpenAPI document share one definition. This module or the queue limits each
number, list and text. The service refuses a body over a limit before anything changes.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, dataclass_transform

import msgspec

from transferqueue.limits import ROWS_PER_REQUEST_MAX, TEXT_CHARS_MAX
from transferqueue.web.service.columns import PackedColumn, Values
from transferqueue.workflows.service.declaration import NAME, Name, Names

WAIT_S_MAX: Final = 300.0
"""Longest wait of one call; a client that wants to wait longer calls again."""

Wait = Annotated[float, msgspec.Meta(ge=0, le=WAIT_S_MAX)]
RowIds = Annotated[list[int], msgspec.Meta(min_length=1, max_length=ROWS_PER_REQUEST_MAX)]
RequestNumber = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
Columns = dict[Name, Values]
Text = Annotated[str, msgspec.Meta(max_length=TEXT_CHARS_MAX)]
Tag = str | int | float | bool


@dataclass_transform(frozen_default=True, kw_only_default=True)
class _Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all bodies. Refuses unknown members."""


class FactsBody(_Body):
    """Facts about rows beside their columns: one value for all rows, or a list with a value for each."""

    group_id: int | list[int] | None = None
    group_size: int | list[int] | None = None
    ordinal: int | list[int] | None = None
    policy_version: int | list[int] | None = None
    policy_version_max: int | list[int] | None = None
    tokens: int | list[int] | None = None
    priority: float | list[float] | None = None
    key: str | list[str] | None = None
    tags: dict[str, Tag] | list[dict[str, Tag]] | None = None

    def given(self) -> dict[str, Any]:
        """The facts that have a value."""
        return {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}


class PutPromptsData(_Body):
    """Prompts to put.

    Args:
        columns: One value for each prompt.
        samples: Rows of each prompt, which form a group.
    """

    columns: Columns
    samples: Annotated[int, msgspec.Meta(ge=1, le=ROWS_PER_REQUEST_MAX)] = 1
    facts: FactsBody = FactsBody()
    timeout_s: Wait = 30.0
    table: Name = NAME


class GetExperienceData(_Body):
    """Rows of a stage. Give exactly one of experience_count, groups and tokens.

    Args:
        at_least: Answer with fewer rows once this many are ready. null: wait for all.
        experience_columns: Columns of the answer. null: all that the stage needs.
        request: Only samples of this request of `generate`.
        packed: Answer with columns as bytes, even if lists would do.
    """

    experience_consumer_stage: Name
    experience_count: int | None = None
    groups: int | None = None
    tokens: int | None = None
    at_least: int | None = None
    experience_columns: Names | None = None
    request: RequestNumber | None = None
    timeout_s: Wait = 30.0
    lease_s: float | None = None
    packed: bool = False
    table: Name = NAME


class PutExperienceData(_Body):
    """Results of rows.

    Args:
        lease: The lease of the rows, which this call completes. null: late columns of `rows`.
        rows: Rows of the lease; null: all that are left of it. Without a lease, ids of rows.
    """

    columns: Columns = {}
    lease: Text | None = None
    rows: RowIds | None = None
    facts: FactsBody = FactsBody()
    table: Name = NAME


class ReleaseExperience(_Body):
    """Rows to hand back to other workers, or to drop.

    Args:
        rows: Rows of the lease. null: all that are left.
        failed: Count an attempt.
        columns: Partial results.
        drop: Drop the rows for this reason, for every stage. null: hand them back.
    """

    lease: Text
    rows: RowIds | None = None
    failed: bool = False
    reason: Text = ""
    columns: Columns = {}
    drop: Name | None = None


class RenewExperience(_Body):
    """More time for leased rows.

    Args:
        lease_s: Seconds from now. null: those of the stage.
    """

    lease: Text
    lease_s: float | None = None


class WeightSyncNotify(_Body):
    """Announcement of a version of the weights.

    Args:
        notice: Any JSON, such as a path.
        tensors: The weights, if they travel through the queue.
    """

    version: Annotated[int, msgspec.Meta(ge=0)]
    notice: Any = None
    tensors: dict[Name, PackedColumn] = {}
    timeout_s: Wait = 30.0
    table: Name = NAME


class GetWeights(_Body):
    """Request for the newest version above `above`.

    Args:
        tensors: Answer with values, not only with names and shapes.
    """

    above: Annotated[int, msgspec.Meta(ge=-1)] = -1
    tensors: bool = False
    timeout_s: Wait = 30.0
    table: Name = NAME


class UpdateBody(_Body):
    """Weights for all engines.

    Args:
        version: null: the one after the newest.
    """

    weights: dict[Name, PackedColumn]
    version: Annotated[int, msgspec.Meta(ge=0)] | None = None
    timeout_s: Wait = 30.0
    table: Name = NAME


class PromptBody(_Body):
    """A prompt as token ids, and its number of samples."""

    ids: Annotated[list[Tokens], msgspec.Meta(min_length=1)]
    samples: Annotated[int, msgspec.Meta(ge=1, le=ROWS_PER_REQUEST_MAX)] = 1


class GenerateBody(_Body):
    """Request for samples.

    Args:
        scores: A score for each prompt that orders the expected lengths of its answers.
        expected: The expected length of each prompt's answers, in tokens.
        number: Number of the request; rows of this number are not put again. null: a random one.
    """

    prompts: Annotated[list[PromptBody], msgspec.Meta(min_length=1, max_length=ROWS_PER_REQUEST_MAX)]
    scores: list[float] | None = None
    expected: list[Tokens] | None = None
    number: RequestNumber | None = None
    timeout_s: Wait = 30.0
    table: Name = NAME


class TableBody(_Body):
    """A job by the name of its table."""

    table: Name = NAME


# ---------------------------------------------------------------- answers


class JobBody(_Body):
    """A declared job."""

    table: str
    stages: list[str]


class PromptRows(_Body):
    """Ids of the rows, those of one prompt together."""

    rows: list[int]


class VersionBody(_Body):
    """The version under which the weights were published."""

    version: int


class SampleRequest(_Body):
    """A request of `generate`.

    Args:
        request: Its number.
        left: Samples still to come.
    """

    request: int
    left: int


class Experience(_Body):
    """Leased rows. Facts have a value for each row, -1 if unknown.

    Args:
        lease_s: Seconds from now until the lease ends.
        version: The trainer's version at the lease. -1: the trainer has reported none.
    """

    lease: str
    lease_s: float
    version: int
    rows: list[int]
    columns: dict[str, Values]
    policy_version: list[int]
    group_id: list[int]
    group_size: list[int]
    tokens: list[int]
    keys: list[str]


class LeaseRemainder(_Body):
    """Rows of the call and of the lease.

    Args:
        rows: Number of rows that the call settled.
        left: Number of rows left in the lease; 0 ends it.
    """

    rows: int
    left: int


class LeaseTime(_Body):
    """The time of a lease from now."""

    lease_s: float


class TensorBody(_Body, omit_defaults=True):
    """A tensor.

    Args:
        data: Elements in C order, little-endian. null: the request asked for shapes only.
    """

    dtype: str
    shape: list[int]
    data: bytes | None = None


class WeightsBody(_Body):
    """A version of the weights: its notice and its tensors."""

    version: int
    notice: Any
    tensors: dict[str, TensorBody]


class DoneBody(_Body):
    """The call is done."""


class Status(_Body):
    """Counts of all rows that were ever put.

    Args:
        stats: Figures of the table; `transferqueue docs figures` explains the keys.
    """

    stats: dict[str, Any]


class ErrorBody(_Body):
    """A refusal.

    Args:
        error: Name of the error; EndOfTable, DeadlineExceeded and LeaseExpired are no faults.
        text: Its text.
    """

    error: str
    text: str
