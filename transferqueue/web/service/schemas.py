"""Bodies and answers of the HTTP service.

A body is a struct, so the code and the OpenAPI document have one definition of it. Every number, list and
text in it is bounded here or by the queue. A body over a bound is refused before anything is changed.
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
    """Base of all of them: no member that is not named here is read."""


class FactsBody(_Body):
    """What is said of rows beside their columns: one value for all, or a list with one for each."""

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
    """Prompts, one value of each column for each; each becomes `samples` rows of one group."""

    columns: Columns
    samples: Annotated[int, msgspec.Meta(ge=1, le=ROWS_PER_REQUEST_MAX)] = 1
    facts: FactsBody = FactsBody()
    timeout_s: Wait = 30.0
    table: Name = NAME


class GetExperienceData(_Body):
    """Rows of a stage: exactly one of experience_count, groups, tokens says how many; fewer come once `at_least` are
    ready.

    experience_columns: those that are wanted (null: all that the stage needs). packed: as bytes, even where lists would
    do. request: only samples of this request of `generate`.
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
    """Results of rows that were got (`lease`; all that are left of it, or `rows` of it), which are done with that.
    Without a lease: columns that come late, of `rows` by their ids."""

    columns: Columns = {}
    lease: Text | None = None
    rows: RowIds | None = None
    facts: FactsBody = FactsBody()
    table: Name = NAME


class ReleaseExperience(_Body):
    """Rows that go back to others: `failed` counts as an attempt. Columns say how far they are. drop: they end instead,
    as dropped for this reason, for every stage."""

    lease: Text
    rows: RowIds | None = None
    failed: bool = False
    reason: Text = ""
    columns: Columns = {}
    drop: Name | None = None


class RenewExperience(_Body):
    """More time for rows that were got: `lease_s` seconds from now (null: as the stage has it)."""

    lease: Text
    lease_s: float | None = None


class WeightSyncNotify(_Body):
    """Weights of `version` are there. notice: any JSON, such as where; tensors: where they travel through the queue."""

    version: Annotated[int, msgspec.Meta(ge=0)]
    notice: Any = None
    tensors: dict[Name, PackedColumn] = {}
    timeout_s: Wait = 30.0
    table: Name = NAME


class GetWeights(_Body):
    """The newest version above `above`, waited for. tensors: with them, not only their names and shapes."""

    above: Annotated[int, msgspec.Meta(ge=-1)] = -1
    tensors: bool = False
    timeout_s: Wait = 30.0
    table: Name = NAME


class UpdateBody(_Body):
    """Weights for all engines, as `version` (null: the one after the newest)."""

    weights: dict[Name, PackedColumn]
    version: Annotated[int, msgspec.Meta(ge=0)] | None = None
    timeout_s: Wait = 30.0
    table: Name = NAME


class PromptBody(_Body):
    """A prompt as token ids, and how many samples of it are wanted."""

    ids: Annotated[list[Tokens], msgspec.Meta(min_length=1)]
    samples: Annotated[int, msgspec.Meta(ge=1, le=ROWS_PER_REQUEST_MAX)] = 1


class GenerateBody(_Body):
    """A request of samples. scores: expected length of each prompt's answers, of which only the order counts; expected:
    the same in tokens.

    number: of the request (null: a random one); if rows of this number are there, they are not put again.
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
    """A job as it is declared now."""

    table: str
    stages: list[str]


class PromptRows(_Body):
    """Ids of the rows, those of one prompt together."""

    rows: list[int]


class VersionBody(_Body):
    """The version under which the weights were published."""

    version: int


class SampleRequest(_Body):
    """A request by its number, and how many samples of it are to come."""

    request: int
    left: int


class Experience(_Body):
    """Rows that are leased for `lease_s` seconds. version: the trainer's when they were handed over (-1: it never
    said).

    Facts have one value for each row: -1 where it was not said.
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
    """rows: how many this call was about. left: how many of the lease are left; 0 ends it."""

    rows: int
    left: int


class LeaseTime(_Body):
    """For how long from now."""

    lease_s: float


class TensorBody(_Body, omit_defaults=True):
    """A tensor: its elements in C order, little-endian; null where only its shape was asked for."""

    dtype: str
    shape: list[int]
    data: bytes | None = None


class WeightsBody(_Body):
    """A version: what was said with it, and its tensors."""

    version: int
    notice: Any
    tensors: dict[str, TensorBody]


class DoneBody(_Body):
    """It is so."""


class Status(_Body):
    """Every row that was ever put: live, done or dropped for a reason; `transferqueue docs figures` has the keys of
    `stats`.
    """

    stats: dict[str, Any]


class ErrorBody(_Body):
    """What every refusal says. error: its name; EndOfTable, DeadlineExceeded and LeaseExpired are no faults."""

    error: str
    text: str
