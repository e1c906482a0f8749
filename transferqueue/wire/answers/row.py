"""One row's whole life."""

from __future__ import annotations

from typing import Annotated, Literal

from transferqueue.wire.answers.answer import Answer

Value = int | float | bool | str | None


class RowField(Answer, frozen=True, kw_only=True):
    """One field of the row: whether it arrived, and its value or the place of its bytes."""

    set: Annotated[bool, "Whether the row has it."]
    inline: Annotated[bool, "Whether its value lies in the ledger, with the row."] = False
    freed: Annotated[bool, "Whether it was freed though the row lives on."] = False
    value: Annotated[Value, "Of an inline field."] = None
    block: Annotated[int | None, "Number of the block of a field in the arena."] = None
    slot: Annotated[int | None, "Its row in that block."] = None
    shard: Annotated[int | None, "Where that block lies; -1: on the disk."] = None
    bytes: Annotated[int | None, "Size of the whole block."] = None


class RowTask(Answer, frozen=True, kw_only=True):
    """The row's state in one task. The last four are of a leased row, else None."""

    state: Annotated[str, "As `stats` counts rows; or `absent`: not for this task; or `gone`."]
    lacks: Annotated[list[str], "Fields it needs that are not set."] = []
    attempts: Annotated[int, "Leases of it that failed."] = 0
    lease: Annotated[int | None, "Number of the lease."] = None
    session: Annotated[int | None, "Who holds it."] = None
    held_s: Annotated[float | None, "Since it was leased."] = None
    left_s: Annotated[float | None, "Until the lease ends."] = None


class RowEvent(Answer, frozen=True, kw_only=True):
    """One event in the life of the row."""

    ago_s: Annotated[float, "Since it happened."]
    what: Annotated[str, "What happened."]
    task: Annotated[str, 'Or "": no task is concerned.'] = ""
    session: Annotated[int, "Who caused it; 0: no session."] = 0
    detail: Annotated[str, 'Or "".'] = ""


class RowLife(Answer, frozen=True, kw_only=True):
    """All facts that the server knows about a row. Of a freed row: those in a bounded history."""

    table: Annotated[str, "Its table."]
    row: Annotated[int, "Its id."]
    state: Annotated[Literal["live", "done", "dropped", "forgotten"], "Forgotten: it was put, and its history is gone."]
    reason: Annotated[str, 'Why it was dropped, or "".'] = ""
    age_s: Annotated[float | None, "Since it was put."] = None
    resident: Annotated[bool, "False: it was freed, and fields and tasks are empty."] = True
    put_by: Annotated[int | None, "The session that put it."] = None
    key: Annotated[str | None, "Its key."] = None
    tags: Annotated[dict[str, str | int | float | bool], "Its tags."] = {}
    group_id: Annotated[int, "Its group; -1: none."] = -1
    group_size: Annotated[int, "Rows of its group."] = 1
    ordinal: Annotated[int, "Its place in the data; -1: none."] = -1
    policy_version: Annotated[int, "Version from which its staleness counts, usually its first token's; -1: none."] = -1
    policy_version_max: Annotated[int, "Version of its last token; -1: none."] = -1
    tokens: Annotated[int, "Its length."] = 0
    priority: Annotated[float, "Higher is leased earlier, where the selector says so."] = 0.0
    fields: Annotated[dict[str, RowField], "Every field of the table."] = {}
    tasks: Annotated[dict[str, RowTask], "Every task of the table."] = {}
    events: Annotated[list[RowEvent], "What happened to it, oldest first."] = []
    events_complete: Annotated[bool, "False: older events were forgotten."] = True
    labels: Annotated[
        dict[str, str], "Names of the sessions above, by number as text; also of the latest 4,096 that ended."
    ] = {}

    def name_of(self, session: int | None) -> str:
        """The name of a session in it; "" for session 0 or None."""
        return self.labels.get(str(session), f"session {session}") if session else ""
