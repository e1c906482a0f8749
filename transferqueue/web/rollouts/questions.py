"""Questions about recorded rows, as SELECTs with parameters. Does no I/O.

Nothing of a request becomes SQL text but the names of a table and of a column of the record, quoted. All values are
parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeVar

import msgspec

from transferqueue.errors import NotFound, UsageError, listing

PAGE_ROWS: Final = 50
"""Rows, or groups, of one answer."""
PAGES_MAX: Final = 2000
TEXT_MAX: Final = 256
"""Characters of a text in a question."""
GROUP_ROWS: Final = 64
"""Rows of a group that are shown beside each other."""
REWARDS: Final = ("rewards", "reward", "score")
"""Columns that are the reward, where none is chosen: the first that is there."""
RESPONSES: Final = ("response_ids", "completion_ids")
"""Columns with the tokens of the response: the first that is there."""
FINISH: Final = "finish_reason"

Text = Annotated[str, msgspec.Meta(max_length=TEXT_MAX)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Id = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Finite = Annotated[float, msgspec.Meta(ge=-1.7e308, le=1.7e308)]
Order = Literal["newest", "worst", "best", "longest", "shortest"]
AskedT = TypeVar("AskedT", bound=msgspec.Struct)


class RowFilter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which recorded rows, or groups with such rows, in which order. None: the filter does not apply.

    Attributes:
        table: Of the record.
        step: The first step; alone, the only one.
        until: The last step.
        reward: The column that counts as the reward. Default: the first of `REWARDS` that is there.
        reward_min: The least reward.
        reward_max: The greatest.
        tokens_min: The least number of tokens of the response.
        tokens_max: The greatest.
        finish: The finish reason.
        fate: Whether they were done or dropped.
        reason: Why they were dropped.
        worker: The name of a worker that an event of the row names.
        order: Newest: by step and row. Worst and best: by reward. Longest and shortest: by tokens. Of groups: newest,
            worst or best.
        equal: Of groups: only those whose rewards are all the same.
        page: Number of the page of `PAGE_ROWS`.
    """

    table: Text
    step: Count | None = None
    until: Count | None = None
    reward: Text = ""
    reward_min: Finite | None = None
    reward_max: Finite | None = None
    tokens_min: Count | None = None
    tokens_max: Count | None = None
    finish: Text | None = None
    fate: Literal["done", "dropped"] | None = None
    reason: Text | None = None
    worker: Text | None = None
    order: Order = "newest"
    equal: bool = False
    page: Annotated[int, msgspec.Meta(ge=0, le=PAGES_MAX)] = 0


class TableName(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the record."""

    table: Text


class RowName(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One recorded row, by its id in a life of its table. reward: as in `RowFilter`."""

    table: Text
    row: Count
    life: Text = ""
    reward: Text = ""


class GroupName(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One recorded group, by its number in a life of its table. reward: as in `RowFilter`."""

    table: Text
    group: Id
    life: Text
    reward: Text = ""


class Select(NamedTuple):
    """A SELECT and the values of its ``?``."""

    sql: str
    values: list[Any]


def asked(kind: type[AskedT], words: Mapping[str, str]) -> AskedT:
    """Parse the words of a request; empty ones are left out. `UsageError` names the first that does not fit."""
    given = {name: value for name, value in words.items() if value}
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        takes = listing(field.encode_name for field in msgspec.structs.fields(kind))
        raise UsageError(f"the question is not understood: {error}; it takes {takes}") from error


class RecordColumns:
    """The columns of a table's record, and which of them has which part in a question.

    Args:
        table: Its name.
        names: Of its columns.
        numbers: Those with one number for each row.
    """

    def __init__(self, table: str, names: Collection[str], numbers: Collection[str]) -> None:
        self.table, self.names, self.numbers = table, names, numbers

    @property
    def has_rows(self) -> bool:
        """Whether any file is there."""
        return "_fate" in self.names

    def reward(self, chosen: str = "") -> str:
        """The column that counts as the reward; "": there is none. `NotFound` for one that is no column of numbers."""
        if chosen and chosen not in self.numbers:
            raise NotFound(
                f'column "{chosen}" of "{self.table}" is no column with one number for each row; those are '
                f"{listing(sorted(self.numbers)) or 'none'}"
            )
        return chosen or next((name for name in REWARDS if name in self.numbers), "")

    @property
    def response(self) -> str:
        """The column with the tokens of the response; "": there is none."""
        return next((name for name in RESPONSES if name in self.names), "")

    def rows(self, wanted: RowFilter) -> Select:
        """A page of rows: their lives and ids, one more than `PAGE_ROWS` if others follow."""
        where, values = self._where(wanted)
        return Select(
            f"select _life, _row from {_quoted(self.table)} where {where} order by {self._order(wanted)} "  # noqa: S608
            f"limit {PAGE_ROWS + 1} offset {wanted.page * PAGE_ROWS}",
            values,
        )

    def groups(self, wanted: RowFilter) -> Select:
        """A page of the groups that have rows of the filter: life, number, step, rows, and the least, mean and greatest
        reward, each of the whole group."""
        where, values = self._where(wanted)
        table = _quoted(self.table)
        reward = self._reward(wanted) if wanted.equal or self.reward(wanted.reward) else "null::double"
        same = f"having count({reward}) > 1 and min({reward}) = max({reward})" if wanted.equal else ""
        by = {"worst": "mean nulls last", "best": "mean desc nulls last"}.get(wanted.order, "max(_row) desc")
        return Select(
            f"select _life as life, _group_id as number, max(_step) as step, count(*) as count, "  # noqa: S608
            f"min({reward}) as least, avg({reward}) as mean, max({reward}) as greatest from {table} "
            f"where _group_id >= 0 and (_life, _group_id) in (select (_life, _group_id) from {table} where {where}) "
            f"group by _life, _group_id {same} "
            f"order by {by}, number, life limit {PAGE_ROWS + 1} offset {wanted.page * PAGE_ROWS}",
            values,
        )

    def members(self, wanted: GroupName) -> Select:
        """The rows of a group, in the order of their ids."""
        return Select(
            f"select _life, _row from {_quoted(self.table)} where _group_id = ? and _life = ? "  # noqa: S608
            f"order by _row limit {GROUP_ROWS + 1}",
            [wanted.group, wanted.life],
        )

    def about(self) -> dict[str, Select]:
        """What the page offers: steps and counts, finish reasons, reasons of drops, workers of the newest step."""
        table = _quoted(self.table)
        selects = {
            "counts": f"select count(*) as count, min(_step) as first, max(_step) as last from {table}",  # noqa: S608
            "reasons": f"select distinct _reason as value from {table} where _fate = 'dropped' and _reason is not null",  # noqa: S608
            "workers": f"select distinct e.worker as value from (select unnest(_events) as e from {table} "  # noqa: S608
            f"where _step = (select max(_step) from {table})) where e.worker is not null",
        }
        if FINISH in self.names:
            selects["finishes"] = f"select distinct {FINISH} as value from {table} where {FINISH} is not null"  # noqa: S608
        return {
            name: Select(sql if name == "counts" else f"{sql} order by 1 limit {PAGE_ROWS}", [])
            for name, sql in selects.items()
        }

    def _where(self, wanted: RowFilter) -> Select:
        """The condition of a filter, and its values."""
        conditions: list[str] = ["true"]
        values: list[Any] = []

        def add(condition: str, value: Any) -> None:
            if value is not None:
                conditions.append(condition)
                values.append(value)

        if wanted.step is not None and wanted.until is None:
            add("_step = ?", wanted.step)
        else:
            add("_step >= ?", wanted.step)
            add("_step <= ?", wanted.until)
        add("_fate = ?", wanted.fate)
        add("_reason = ?", wanted.reason)
        if wanted.reward_min is not None or wanted.reward_max is not None:
            add(f"{self._reward(wanted)} >= ?", wanted.reward_min)
            add(f"{self._reward(wanted)} <= ?", wanted.reward_max)
        if wanted.tokens_min is not None or wanted.tokens_max is not None:
            add(f"{self.length} >= ?", wanted.tokens_min)
            add(f"{self.length} <= ?", wanted.tokens_max)
        if wanted.finish is not None:
            if FINISH not in self.names:
                raise NotFound(f'the record of "{self.table}" has no column "{FINISH}"; leave out finish')
            add(f"{FINISH} = ?", wanted.finish)
        add("len([e for e in _events if e.worker = ?]) > 0", wanted.worker)
        return Select(" and ".join(conditions), values)

    @property
    def length(self) -> str:
        """The number of tokens of a row as SQL: those of the response, else as it was put."""
        response = self.response
        return f"coalesce(len({_quoted(response)}), _tokens)" if response else "_tokens"

    def _reward(self, wanted: RowFilter) -> str:
        """The reward of a row as SQL. One that is not a number is none: SQL would rank it above all others."""
        column = self.reward(wanted.reward)
        if not column:
            raise UsageError(
                f'the record of "{self.table}" has no column of rewards ({", ".join(REWARDS)}); choose one of its '
                f"numbers as the reward: {listing(sorted(self.numbers)) or 'it has none'}"
            )
        return f"nullif({_quoted(column)}::double, 'nan'::double)"

    def _order(self, wanted: RowFilter) -> str:
        if wanted.order == "newest":
            return "_step desc nulls last, _row, _life"
        by = self._reward(wanted) if wanted.order in ("worst", "best") else self.length
        down = "desc" if wanted.order in ("best", "longest") else ""
        return f"{by} {down} nulls last, _row, _life"


def _quoted(name: str) -> str:
    """A name as SQL."""
    return '"' + name.replace('"', '""') + '"'
