"""Rows of a reply: their facts as arrays, their columns made when they are first used."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from functools import cached_property
from html import escape
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Final, NoReturn, Self, cast

import numpy as np
from numpy.typing import NDArray

from transferqueue.client.operations.column_source import ColumnSource
from transferqueue.errors import UsageError, listing
from transferqueue.errors.text import counted, shortened
from transferqueue.policies import Tags
from transferqueue.storage.columns.column import Column
from transferqueue.storage.columns.export import arrow_type
from transferqueue.storage.columns.joined import Tree
from transferqueue.storage.elements.process_bound import ProcessBound
from transferqueue.storage.elements.torch_interop import require_torch
from transferqueue.wire import codec
from transferqueue.wire import messages as m

if TYPE_CHECKING:
    import pyarrow as pa
    from tensordict import TensorDict


HTML_ROWS: Final = 8
"""Rows that a notebook shows."""
HTML_COLUMNS: Final = 16
"""Columns that a notebook shows."""
_HTML_TITLE_CHARS: Final = 400


def rows_read(
    rows: object, table: str, ids: bytes, columns: Collection[str], facts: Collection[str], *, overwrite: bool
) -> m.RowsRead:
    """The state of these rows when they were read, as the condition of an update.

    Args:
        rows: the rows as they were read or leased.
        table: name of the table that is updated.
        ids: of the rows that the update names.
        columns: the fields that the update brings.
        facts: the facts that it sets. With tags among them, the tags that were read count too.
        overwrite: whether it replaces values. If not, a value that another process wrote refuses it anyway.

    Raises:
        UsageError: `rows` are no rows that were read or leased, are other rows, or have nothing that could change; or
            the read lacks a column that the update replaces, so that the write of another process could be lost.
    """
    if not isinstance(rows, RowsBase):
        raise UsageError(f"if_unchanged is {type(rows).__name__}; give the rows as table.read or a lease brought them")
    if f'table "{table}"' not in rows._source.subject:
        raise UsageError(
            f'if_unchanged has rows of {rows._source.subject}, and the update is of table "{table}"; read the rows '
            "there"
        )
    content = rows._content
    if content.rows != ids:
        raise UsageError(
            f"if_unchanged has rows {rows.rows[:5].tolist()}{'...' * (len(rows) > 5)}, and the update names others, or "
            "another order; read the rows that it names"
        )
    tags = "tags" in facts
    if not (rows.fields or tags):
        raise UsageError("if_unchanged has no columns, so nothing of it could change; read the fields that must not")
    if overwrite:
        _check_replaced(rows, columns)
    if not columns:
        _check_facts(facts)
    placed = [m.BlocksRead(part.fields, _blocks_of(part, len(rows))) for part in content.parts]
    return m.RowsRead(content.inline, placed, rows.tags if tags else None)


def _check_replaced(rows: RowsBase, columns: Collection[str]) -> None:
    """Raise `UsageError` for a column that was not read. A read of no fields (``fields=()``) asks for the tags alone to
    be compared."""
    unread = sorted(set(columns) - set(rows.fields))
    if unread and (rows.fields or (isinstance(rows, Rows) and rows.left_out)):
        raise UsageError(
            f"if_unchanged has {listing(rows.fields)}, and the update replaces {listing(unread)} too, where a write "
            "after the read would be lost; read it first: table.read(rows, "
            f"fields={sorted({*rows.fields, *unread})[:12]}), or, if the rows do not have it yet, leave out "
            "overwrite=True, and the update then refuses to replace a value"
        )


def _check_facts(facts: Collection[str]) -> None:
    """Raise `UsageError` for facts of an update without columns, except tags: nothing compares them."""
    if unread := set(facts) - {"tags"}:
        raise UsageError(
            f"if_unchanged compares columns and tags, and the update sets {listing(unread)}, where a write after the "
            "read would be lost; keep the value in a column or a tag, or leave if_unchanged out"
        )


def _blocks_of(part: m.ReplyColumns, rows: int) -> bytes:
    """The number of the block in which each row has the fields of `part`."""
    numbers = np.array([block.block for block in part.blocks], "<i8")
    blocks = numbers[codec.decode_constant(part.block_of_row, "<i4", part.values(rows))]
    if (tree := part.tree) is not None:
        blocks = blocks[np.frombuffer(tree.node_of_row, "<i4")]
    return codec.encode_constant(blocks)


class RowKeys(list[str]):
    """Keys of rows, one each. Called, it gives the names of the columns, which is what ``dict(batch)`` and ``**batch``
    ask for."""

    def __init__(self, keys: Iterable[str], fields: tuple[str, ...]) -> None:
        super().__init__(keys)
        self._fields = fields

    def __call__(self) -> tuple[str, ...]:
        """Names of the columns."""
        return self._fields


class RowsBase(ProcessBound):
    """Rows with their facts and lazy columns: the base of `Rows` and of the batches of both APIs.

    ``len(rows)`` is the number of rows; ``rows["field"]`` is a `Column`, nothing of which is copied before one of its
    views is asked for; but one of which rows continue others is joined at once, and `tree` copies nothing of it. Facts
    are arrays in the order of `rows`, this process's own. ``dict(rows)`` and ``**rows`` are its columns by name;
    iteration gives their names, in the order of the table.
    """

    _remedy: ClassVar[str] = (
        "pass its values (.arrow(), dict of .numpy() or .list()), or lease the rows where they are needed"
    )

    _content: m.ReplyRows
    _source: ColumnSource

    def __len__(self) -> int:
        return len(self._content.rows) // 8

    def __getitem__(self, field: str) -> Column:
        """The column of a field. `NotFound` if it is not among `fields`; `BatchEnded` after the end."""
        return self._source.column(field)

    def __contains__(self, field: object) -> bool:
        return field in self._source.fields

    def __iter__(self) -> Iterator[str]:
        """Names of the fields, as of a dict."""
        return iter(self.fields)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {counted(len(self), 'row')}: {', '.join(self.fields) or 'no columns'}>"

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the columns that came."""
        return tuple(self._source.fields)

    @cached_property
    def rows(self) -> NDArray[np.int64]:
        """Row ids ``[rows]``."""
        return codec.decode_constant(self._content.rows, "<i8", len(self))

    @cached_property
    def policy_version(self) -> NDArray[np.int64]:
        """Oldest policy version that produced a trainable token of each row ``[rows]``; -1: never stamped."""
        return codec.decode_constant(self._content.policy_version, "<i8", len(self))

    @cached_property
    def policy_version_max(self) -> NDArray[np.int64]:
        """Newest policy version that produced a token of each row ``[rows]``; -1: never stamped."""
        return codec.decode_constant(self._content.policy_version_max, "<i8", len(self))

    @cached_property
    def group_id(self) -> NDArray[np.int64]:
        """Group of each row ``[rows]``; -1: none."""
        return codec.decode_constant(self._content.group_id, "<i8", len(self))

    @cached_property
    def group_size(self) -> NDArray[np.int32]:
        """Rows that the group of each row has when it is whole ``[rows]``."""
        return codec.decode_constant(self._content.group_size, "<i4", len(self))

    @cached_property
    def ordinal(self) -> NDArray[np.int64]:
        """Place of each row in its group, or in a data set, as its producer numbered it ``[rows]``; -1: not said."""
        return codec.decode_constant(self._content.ordinal, "<i8", len(self))

    @cached_property
    def tokens(self) -> NDArray[np.int64]:
        """Tokens of each row ``[rows]``, as told or taken at the put."""
        return codec.decode_constant(self._content.tokens, "<i8", len(self))

    @cached_property
    def priority(self) -> NDArray[np.float64]:
        """Priority of each row ``[rows]``."""
        return codec.decode_constant(self._content.priority, "<f8", len(self))

    @property
    def keys(self) -> RowKeys:
        """Key of each row; an empty string where there is none. ``keys()``, as of a mapping, are the names of the
        columns."""
        return RowKeys(self._content.keys if self._content.keys is not None else [""] * len(self), self.fields)

    def tree(self, field: str) -> Tree:
        """The values of a field as a forest, in which what rows continue (``put(parent=...)``) is there once.

        ``rows[field]`` joins them: each row whole, in memory of this process. A tree copies nothing of what lies in
        memory that this process maps. It is of the stored values, also where `device` put the columns.

        Args:
            field: the name of the column.

        Returns:
            The stored values, the one that each continues, and that of each row. Without an edge if no row continues
            another.

        Raises:
            NotFound: the field is not among `fields`.
            BatchEnded: the batch has ended, or the rows were released.
            UsageError: only a slice of the field was asked for.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     table = queue.create_table("t", tasks=[tq.Task("train", needs=["ids"])])
            ...     first = table.put(ids=[[1, 2, 3]])
            ...     second = table.put(ids=[[4]], parent=first)
            ...     rows = table.read([first[0], second[0]])
            ...     tree = rows.tree("ids")
            ...     print(rows["ids"].list(), tree.nodes.list(), tree.parents)
            [[1, 2, 3], [1, 2, 3, 4]] [[1, 2, 3], [4]] [-1  0]
        """
        return self._source.tree(field)

    def items(self) -> Iterator[tuple[str, Column]]:
        """Iterate over names and columns, as of a dict.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
            ...     ids = table.put(x=[1, 2], text=["a", "b"])
            ...     values = {name: column.list() for name, column in table.read(ids).items()}
            >>> values
            {'x': [1, 2], 'text': ['a', 'b']}
        """
        return ((name, self[name]) for name in self.fields)

    def values(self) -> Iterator[Column]:
        """Iterate over the columns, as of a dict.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
            ...     ids = table.put(x=[1, 2], text=["a", "b"])
            ...     dtypes = [column.dtype for column in table.read(ids).values()]
            >>> dtypes
            ['int64', 'str']
        """
        return (self[name] for name in self.fields)

    @property
    def tags(self) -> list[Tags]:
        """Tags of each row; an empty dict where there are none."""
        return self._content.tags if self._content.tags is not None else [{} for _ in range(len(self))]

    def arrow(self, *, facts: bool = False) -> pa.Table:
        """Return all columns as an Arrow table, for polars, duckdb or Parquet.

        The table keeps the memory alive by itself.

        Args:
            facts: put `row_id`, `key`, `group_id`, `group_size`, `ordinal`, `policy_version`, `policy_version_max`,
                `tokens` and `priority` of each row before the columns; default False.

        Raises:
            BatchEnded: the batch has ended, or the rows were released.
            UsageError: `facts` is True and a column has the name of a fact.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
            ...     ids = table.put(x=[1, 2], text=["a", "b"])
            ...     frame = table.read(ids).arrow()
            >>> frame.to_pydict()
            {'x': [1, 2], 'text': ['a', 'b']}
        """
        import pyarrow as pa

        fact_columns = self._facts() if facts else {}
        if both := fact_columns.keys() & set(self.fields):
            raise UsageError(
                f"column {min(both)!r} has the name of a fact, so the table would have it twice; leave facts=True out"
            )
        return pa.table(fact_columns | {name: self[name].arrow() for name in self.fields})

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        """`arrow()` by Arrow's C data interface, for any library that takes it: ``polars.DataFrame(batch)``,
        ``pandas.DataFrame.from_arrow(batch)``, ``duckdb.sql("select * from batch")``. The memory lives as long as the
        other library holds it, also after the end."""
        return self.arrow().__arrow_c_stream__(requested_schema)

    def __arrow_c_schema__(self) -> Any:
        """The schema of `arrow()` by Arrow's C data interface. Reads no values."""
        import pyarrow as pa

        return pa.schema(
            [(name, arrow_type(field)) for name, field in self._source.fields.items()]
        ).__arrow_c_schema__()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NoReturn:
        """Refuse: numpy, and pandas through it, would make an array of the names of the columns."""
        raise UsageError(
            f"a {type(self).__name__} has columns of different types, so it is no array; take one column, "
            "batch[name].numpy(), or a data frame: pandas.DataFrame.from_arrow(batch), batch.arrow().to_pandas(), or "
            "polars.DataFrame(batch)"
        )

    def _ipython_key_completions_(self) -> list[str]:
        """The names that a notebook or IPython completes after ``batch[``."""
        return list(self.fields)

    def _repr_html_(self) -> str:
        """A table for notebooks: the first rows and columns, each value shortened. Reads only those, in memory that
        this process has."""
        names, count = self.fields[:HTML_COLUMNS], min(len(self), HTML_ROWS)
        columns = [["row_id", *map(str, self.rows[:count].tolist())]]
        for name in names:
            shown = self[name].shown(count)
            columns.append([name, *([shown] * count if isinstance(shown, str) else shown)])
        lines = "".join(
            f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>" for line in zip(*columns, strict=True)
        )
        left = [counted(len(self) - count, "row")] * (len(self) > count)
        left += [counted(len(self.fields) - len(names), "column")] * (len(self.fields) > len(names))
        more = f"<p>not shown: {' and '.join(left)}</p>" if left else ""
        return f"<p>{escape(shortened(repr(self), _HTML_TITLE_CHARS))}</p><table>{lines}</table>{more}"

    def _facts(self) -> dict[str, Any]:
        return {
            "row_id": self.rows,
            "key": list(self.keys),
            "group_id": self.group_id,
            "group_size": self.group_size,
            "ordinal": self.ordinal,
            "policy_version": self.policy_version,
            "policy_version_max": self.policy_version_max,
            "tokens": self.tokens,
            "priority": self.priority,
        }

    def tensordict(self) -> TensorDict:
        """Return all columns as a `tensordict.TensorDict` of batch size ``[rows]``. Needs torch and tensordict.

        Dense columns become tensors, ragged ones jagged nested tensors, and text, bytes and plain values non-tensor
        data.

        Raises:
            BatchEnded: the batch has ended, or the rows were released.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
            ...     ids = table.put(x=[1, 2], text=["a", "b"])
            ...     tensors = table.read(ids).tensordict()
            >>> tensors["x"]
            tensor([1, 2])
        """
        tensordict = require_torch("tensordict")
        columns: dict[str, Any] = {}
        for name, field in self._source.fields.items():
            column = self[name]
            if field.dense:
                columns[name] = column.torch()
            elif field.ragged:
                columns[name] = column.nested()
            else:
                columns[name] = tensordict.NonTensorStack(*column.list())
        return cast("TensorDict", tensordict.TensorDict(columns, batch_size=[len(self)]))


class Rows(RowsBase):
    """Rows that were read without a lease. Made by `Table.read`.

    The memory of their columns is pinned at the server until `release`, the end of a ``with`` block, or until this
    object is collected. A view that was taken before stays valid for as long as it is held, and may be changed in
    place, which no other process sees. After the end, using a column is `BatchEnded`.

    Example:
        >>> import transferqueue as tq
        >>> with tq.connect("embedded") as queue:
        ...     table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
        ...     group = {"group_id": 0, "group_size": 2, "ordinal": [0, 1]}
        ...     facts = {"policy_version": 3, "policy_version_max": 4, "tokens": [7, 9], "priority": 0.5}
        ...     ids = table.put(x=[1, 2], key=["a", "b"], tags={"split": "test"}, **group, **facts)
        ...     table.update(ids[:1], note=["first"])
        ...     read = table.read(ids)
        >>> len(read), read.rows, read.fields, read.left_out
        (2, array([0, 1]), ('x',), ('note',))
        >>> read.keys, read.tags[0], read.priority, read.tokens
        (['a', 'b'], {'split': 'test'}, array([0.5, 0.5]), array([7, 9]))
        >>> read.group_id, read.group_size, read.ordinal
        (array([0, 0]), array([2, 2], dtype=int32), array([0, 1]))
        >>> read.policy_version, read.policy_version_max
        (array([3, 3]), array([4, 4]))
    """

    def __init__(self, content: m.ReplyRows, source: ColumnSource, left_out: tuple[str, ...] = ()) -> None:
        self._content, self._source = content, source
        self._left_out = left_out

    @property
    def left_out(self) -> tuple[str, ...]:
        """Fields of the table, as this client last heard of them, that did not come since not all of these rows have
        them yet."""
        return self._left_out

    def __repr__(self) -> str:
        missing = f"; left out, as not all rows have them: {', '.join(self._left_out)}" if self._left_out else ""
        ended = f", {self._source.ended}" if self._source.ended else ""
        return f"{super().__repr__()[:-1]}{missing}{ended}>"

    def release(self) -> None:
        """Return the memory of the columns. Views that were taken before stay valid. A second call does nothing.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
            ...     ids = table.put(x=[1, 2], text=["a", "b"])
            ...     read = table.read(ids)
            ...     values = read["x"].numpy()
            ...     read.release()
            >>> values  # a view that was taken before
            array([1, 2])
        """
        self._source.end("was released")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
