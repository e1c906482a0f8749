"""Asks the record of a run for what the page shows. Blocks: the page calls it in a thread of its own (`routes`).

A page of a list takes two reads: a SELECT finds the rows by the columns that it filters and sorts by, then the other
columns of these rows are read.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

import msgspec

import transferqueue as tq
from transferqueue.errors import DeadlineExceeded, NotFound, TransferQueueError, UsageError
from transferqueue.lazy import install_line
from transferqueue.storage.elements.values import decode
from transferqueue.web.rollouts.document import (
    COMPLETIONS,
    LINEAGE,
    PREVIEW_TOKENS,
    PROMPT_COLUMNS,
    TOKENS_MAX,
    RecordedLife,
    RowLine,
    content_of,
    joined,
    life_of,
    line_of,
    short_rows,
)
from transferqueue.web.rollouts.questions import (
    FINISH,
    GROUP_ROWS,
    PAGE_ROWS,
    RESPONSES,
    GroupName,
    RecordColumns,
    RowFilter,
    RowName,
    Select,
)
from transferqueue.web.rollouts.tokenizer import JOB_FILE, RunTexts

if TYPE_CHECKING:
    import pyarrow as pa

QUERY_S: Final = 20.0
"""Longest time of one question, looked at between its parts; a million rows take one or two seconds."""
_LINE: Final = ("_row", "_life", "_step", "_version", "_group_id", "_fate", "_reason", "_tokens", "_events", FINISH)


class RecordIndex(msgspec.Struct, frozen=True, kw_only=True):
    """What a record has. damaged: what its reads so far left out."""

    tables: list[str]
    damaged: list[str]


class AboutTable(msgspec.Struct, frozen=True, kw_only=True):
    """What the page offers of a table: its steps, the columns that may be the reward, and values to filter by.
    why_not: why its tokens have no texts; "": they have."""

    rows: int = 0
    first: int | None = None
    last: int | None = None
    rewards: list[str] = []
    finishes: list[str] = []
    reasons: list[str] = []
    workers: list[str] = []
    why_not: str = ""
    damaged: list[str] = []


class GroupLine(msgspec.Struct, frozen=True, kw_only=True):
    """A group in a list, with the least, mean and greatest reward of its rows."""

    group: str
    life: str
    step: int | None
    count: int
    least: float | None
    mean: float | None
    greatest: float | None


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """A page of a list. more: others follow. damaged: what was left out."""

    rows: list[RowLine] = []
    groups: list[GroupLine] = []
    more: bool = False
    damaged: list[str] = []


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of a group, the first one with its prompt. more: it has others, which are not shown."""

    rows: list[RecordedLife]
    more: bool


class RecordBrowser:
    """The recorded rows in a folder of a run, or in the directory of a `Recorded`.

    Args:
        path: The folder.

    Raises:
        NotFound: There is no such folder, or it is neither that of a run nor a record.
        UsageError: DuckDB is not installed.
    """

    def __init__(self, path: Path) -> None:
        if find_spec("duckdb") is None:
            raise UsageError(f"the page of a run needs DuckDB, not installed here: {install_line('query')}")
        self.name: Final = str(path)
        self.path: Final = path.absolute()
        self._run = tq.open_run(self.path)
        if not self._run.tables and not (path / JOB_FILE).exists():
            raise NotFound(
                f"{path} is neither the folder of a job's run (it has no {JOB_FILE}) nor a record (no table has files "
                "in it); name the folder that `transferqueue train` printed, or the directory of a tq.Recorded"
            )
        self._texts: RunTexts | None = None
        self._reading = Lock()

    def index(self) -> RecordIndex:
        """Its tables. The folder of a job may have got its rows since it was opened."""
        if not self._run.tables:
            self._run = tq.open_run(self.path)
        return RecordIndex(tables=self._run.tables, damaged=self._damaged())

    def about(self, table: str) -> AboutTable:
        """What the page offers of a table. Reads the tokenizer at the first call."""
        columns = self._columns(table)
        if not columns.has_rows:
            return AboutTable()
        deadline = _Deadline()
        answers = {name: self._ask(select, deadline).to_pylist() for name, select in columns.about().items()}
        (counts,) = answers.pop("counts")
        default = columns.reward()
        return AboutTable(
            rows=counts["count"],
            first=counts["first"],
            last=counts["last"],
            why_not=self.texts().why_not if columns.response else "",
            damaged=self._damaged(),
            rewards=sorted(columns.numbers, key=lambda name: (name != default, name)),
            **{name: [str(line["value"]) for line in lines] for name, lines in answers.items()},
        )

    def rows(self, wanted: RowFilter) -> Page:
        """A page of rows."""
        columns = self._columns(wanted.table)
        reward = columns.reward(wanted.reward)
        if not columns.has_rows:
            return Page()
        deadline = _Deadline()
        found = self._ids(columns.rows(wanted), deadline)
        shown = [name for name in (*_LINE, reward, *RESPONSES, *COMPLETIONS) if name in columns.names]
        decoder = self.texts().decode
        rows = self._read(wanted.table, found[:PAGE_ROWS], shown, PREVIEW_TOKENS, deadline)
        return Page(
            rows=[line_of(row, reward, decoder) for row in rows], more=len(found) > PAGE_ROWS, damaged=self._damaged()
        )

    def groups(self, wanted: RowFilter) -> Page:
        """A page of groups."""
        columns = self._columns(wanted.table)
        if not columns.has_rows:
            return Page()
        lines = self._ask(columns.groups(wanted), _Deadline()).to_pylist()
        groups = [GroupLine(group=str(line.pop("number")), **line) for line in lines[:PAGE_ROWS]]
        return Page(groups=groups, more=len(lines) > PAGE_ROWS, damaged=self._damaged())

    def row(self, wanted: RowName) -> RecordedLife:
        """One row: of the newest life, if none is named. `NotFound` if it is not recorded."""
        columns = self._columns(wanted.table)
        reward = columns.reward(wanted.reward)
        whole = self._whole(wanted.table)
        read = list(self._read(wanted.table, [(wanted.life, wanted.row)], whole, TOKENS_MAX, _Deadline()))
        if not read:
            raise NotFound(
                f'row {wanted.row} of "{wanted.table}" is not recorded: it lives, or its file is gone or damaged'
            )
        newest = max(read, key=lambda row: row["_ended_at"])
        return self._life(wanted.table, newest, reward, TOKENS_MAX)

    def group(self, wanted: GroupName) -> Group:
        """The rows of a group. `NotFound` if none is recorded."""
        columns = self._columns(wanted.table)
        reward = columns.reward(wanted.reward)
        deadline = _Deadline()
        ids = self._ids(columns.members(wanted), deadline) if columns.has_rows else []
        if not ids:
            raise NotFound(f'group {wanted.group} of "{wanted.table}" has no recorded rows')
        shown, whole = ids[:GROUP_ROWS], self._whole(wanted.table)
        prompt = [name for name in whole if name in (*LINEAGE, *PROMPT_COLUMNS)]
        answer = [name for name in whole if name not in PROMPT_COLUMNS]
        (first, *_) = [*self._read(wanted.table, shown[:1], prompt, TOKENS_MAX, deadline), {}]
        each = TOKENS_MAX // len(shown)
        lives: list[RecordedLife] = []
        for row in self._read(wanted.table, shown, answer, each, deadline):
            deadline.left_s()
            lives.append(self._life(wanted.table, row if lives else joined(first, row), reward, each))
        return Group(rows=lives, more=len(ids) > GROUP_ROWS)

    def texts(self) -> RunTexts:
        """What the folder says of its rows. Reads the tokenizer at the first call."""
        with self._reading:  # the threads of the record and of live rows ask
            if self._texts is None:
                self._texts = RunTexts(self.path)
            return self._texts

    # ------------------------------------------------------------ reads

    def _damaged(self) -> list[str]:
        return [str(damage) for damage in self._run.damaged]

    def _columns(self, table: str) -> RecordColumns:
        import pyarrow as pa

        schema = self._run.table(table).dataset().schema
        numbers = [
            field.name
            for field in schema
            if not field.name.startswith("_") and (pa.types.is_integer(field.type) or pa.types.is_floating(field.type))
        ]
        return RecordColumns(table, schema.names, numbers)

    def _ask(self, select: Select, deadline: _Deadline) -> pa.Table:
        with deadline.explained():
            return self._run.sql(select.sql, select.values, timeout_s=deadline.left_s())

    def _ids(self, select: Select, deadline: _Deadline) -> list[tuple[str, int]]:
        """The lives and ids of rows."""
        return [(row["_life"], row["_row"]) for row in self._ask(select, deadline).to_pylist()]

    def _whole(self, table: str) -> list[str]:
        """The columns of a whole row: all but arrays of several dimensions, such as routes."""
        import pyarrow as pa

        schema = self._run.table(table).dataset().schema
        return [field.name for field in schema if field.name.startswith("_") or not _is_deep(pa, field.type)]

    def _read(
        self, table: str, ids: Sequence[tuple[str, int]], columns: Sequence[str], most: int, deadline: _Deadline
    ) -> Iterator[dict[str, Any]]:
        """These rows, in this order, with values decoded and lists cut to `most`. An id with life "" stands for the row
        in each life."""
        import pyarrow.compute as pc

        if not ids:
            return
        rows = self._run.table(table)
        schema = rows.dataset().schema
        kinds = {name: (schema.field(name).metadata or {}).get(b"transferqueue.dtype", b"") for name in columns}
        values = [name for name, kind in kinds.items() if kind == b"value"]
        with deadline.explained():
            wanted_rows = pc.field("_row").isin([row for _, row in ids])
            found = short_rows(rows.arrow(columns, filter=wanted_rows, timeout_s=deadline.left_s()), most)
        by_id = {(row["_life"], row["_row"]): row for row in found}
        wanted = [key for key in ids if key in by_id] if ids[0][0] else list(by_id)
        for key in wanted:
            row = by_id[key]
            yield row | {name: _decoded(row[name]) for name in values}

    def _life(self, table: str, row: dict[str, Any], reward: str, tokens_max: int) -> RecordedLife:
        texts = self.texts()
        return life_of(table, row, content_of(row, reward, texts.terms, texts.decode, tokens_max))


class _Deadline:
    """The time of one question, of all its parts together."""

    def __init__(self) -> None:
        self._at = time.monotonic() + QUERY_S

    def left_s(self) -> float:
        """Seconds that are left. `DeadlineExceeded` if none are."""
        left_s = self._at - time.monotonic()
        if left_s <= 0:
            raise self._late()
        return left_s

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Say of a part that is late what a person can do."""
        try:
            yield
        except DeadlineExceeded as error:
            raise self._late() from error

    def _late(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"the question takes longer than {QUERY_S:g} s; give a step or a fate, or leave out worker and tokens"
        )


def _is_deep(pa: Any, kind: Any) -> bool:
    """Whether a type is lists of lists."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return bool(pa.types.is_nested(kind.value_type))
    return False


def _decoded(stored: bytes | None) -> Any:
    """A plain value; its bytes, if this process lacks what it is made of."""
    if stored is None:
        return None
    try:
        return decode(stored, "value")
    except TransferQueueError:
        return stored
