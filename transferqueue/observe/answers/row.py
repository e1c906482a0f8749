"""The answer to `Observe("row")`, typed: one row's whole life, as `transferqueue docs observing` describes it."""

from __future__ import annotations

from typing import Literal

import msgspec

Value = int | float | bool | str | None


class RowField(msgspec.Struct, frozen=True, kw_only=True):
    """One field of the row: whether it arrived, and its value or the place of its bytes."""

    set: bool
    inline: bool
    value: Value
    block: int | None
    slot: int | None
    shard: int | None
    bytes: int | None


class RowTask(msgspec.Struct, frozen=True, kw_only=True):
    """Where the row stands for one task. state: as `stats` counts them, or absent (not for this task) or gone."""

    state: str
    lacks: list[str]
    attempts: int
    lease: int | None
    session: int | None
    held_s: float | None
    left_s: float | None


class RowEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event in the life of the row. session: 0 if none caused it. task: "" if none is concerned."""

    ago_s: float
    what: str
    task: str
    session: int
    detail: str


class RowLife(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the server knows of a row. labels: the names of the sessions in it, by their numbers as text."""

    table: str
    row: int
    state: Literal["live", "done", "dropped", "forgotten"]
    reason: str
    age_s: float | None
    resident: bool
    put_by: int | None
    key: str | None
    tags: dict[str, str | int | float | bool]
    group_id: int
    group_size: int
    ordinal: int
    policy_version: int
    policy_version_max: int
    tokens: int
    priority: float
    fields: dict[str, RowField]
    tasks: dict[str, RowTask]
    events: list[RowEvent]
    events_complete: bool
    labels: dict[str, str] = {}

    def name_of(self, session: int | None) -> str:
        """The name of a session in it; "" where there is none."""
        return self.labels.get(str(session), f"session {session}") if session else ""
