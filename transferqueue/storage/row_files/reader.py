"""Reads the rows that tables with `Recorded` have written: while their server runs, and afterwards."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from transferqueue.errors import Corruption, DeadlineExceeded, NotFound, SchemaError, UsageError, listing
from transferqueue.lazy import install_line
from transferqueue.storage.row_files.files import (
    RecordedFile,
    check_footer,
    digests_of,
    directory_of,
    files_in,
    tables_in,
)

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.dataset as ds

T = TypeVar("T")
TRIES: Final = 5
"""Files may be removed while they are read, as the bounds of their table say. Then the reader begins again."""
SQL_MEMORY: Final = "4GiB"
SQL_THREADS: Final = 4
INTERRUPT_S: Final = 0.1
"""Time between two interrupts of a query that is late: one that comes between two of its stages is lost."""
JOB_ROWS: Final = "rows"
"""The folder of a job's run in which its tables are."""


class Damage(NamedTuple):
    """A part of a record that cannot be read. `row_group` is None for a whole file."""

    file: Path
    row_group: int | None
    why: str

    def __str__(self) -> str:
        part = "" if self.row_group is None else f", row group {self.row_group}"
        return f"{self.file}{part}: {self.why}"


class RecordedRows:
    """The recorded rows of one table. Each read sees the files that are whole at that moment.

    Polars, pandas, ``datasets`` and DuckDB take it as an Arrow stream or through `dataset`.

    Example:
        >>> import tempfile
        >>> import transferqueue as tq
        >>> folder = tempfile.mkdtemp()
        >>> with tq.connect("embedded") as queue:
        ...     table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])], retention=tq.Recorded(folder))
        ...     rows = table.put(x=[[1, 2], [3]])
        ...     table.lease("train", rows=2).ack()
        2
        >>> rows = tq.open_run(folder).table("t")
        >>> rows.arrow(columns=["_fate", "x"]).to_pylist()
        [{'_fate': 'done', 'x': [1, 2]}, {'_fate': 'done', 'x': [3]}]
    """

    def __init__(self, name: str, directory: Path) -> None:
        self.name: Final = name
        self._directory = directory
        self._damage: dict[tuple[Path, int | None], Damage] = {}
        self._schemas: dict[Path, Any] = {}

    def __repr__(self) -> str:
        return f"<RecordedRows {self.name!r} in {self._directory}>"

    @property
    def files(self) -> list[Path]:
        """The files, in the order in which they were written, damaged ones included."""
        return [one.path for one in files_in(self._directory)]

    @property
    def damaged(self) -> list[Damage]:
        """The files and row groups that reads so far left out, since they cannot be read."""
        return list(self._damage.values())

    def check(self) -> list[Damage]:
        """Read every byte of every file, and compare it with its checksums. Returns all that is damaged; later reads
        leave that out."""
        self._check_named("")
        return self.damaged

    def _check_named(self, text: str) -> None:
        """Check the files that an error names; all of them if it names none."""
        found = files_in(self._directory)
        for one in [one for one in found if str(one.path) in text] or found:
            self._check_file(one)

    def dataset(self) -> ds.Dataset:
        """The rows as an Arrow dataset, which reads only the columns and row groups that a query needs.

        Raises:
            SchemaError: a column has another type in another life of the table.
        """
        import pyarrow as pa
        import pyarrow.dataset as ds
        from pyarrow.fs import LocalFileSystem

        form = ds.ParquetFileFormat(
            default_fragment_scan_options=ds.ParquetFragmentScanOptions(page_checksum_verification=True)
        )
        whole = [one for one in files_in(self._directory) if self._opens(one)]
        fragments = [fragment for one in whole if (fragment := self._fragment(form, one)) is not None]
        schemas = [self._schemas[one.path] for one in whole]
        try:
            schema = (
                pa.unify_schemas(schemas).remove_metadata()
                if schemas
                else pa.schema([("_row", pa.int64()), ("_step", pa.int64())])
            )
        except pa.ArrowException as error:
            raise SchemaError(
                f'the files of table "{self.name}" do not fit together: {error}; read those of one life by `files`'
            ) from error
        return ds.FileSystemDataset(fragments, schema, form, LocalFileSystem())

    def arrow(
        self,
        columns: Sequence[str] | None = None,
        filter: Any = None,  # noqa: A002  (Arrow's word)
        *,
        timeout_s: float | None = None,
    ) -> pa.Table:
        """Read rows into memory.

        Args:
            columns: their names; default None: all. Those of lineage begin with ``_``.
            filter: an Arrow expression, such as ``pyarrow.compute.field("_step") == 7``; default None: all rows.
            timeout_s: ends a read that takes longer, after the part of a file that it reads; default None: none does.

        Raises:
            NotFound: a column that no file has.
            DeadlineExceeded: it took longer than `timeout_s`.
        """
        deadline = inf if timeout_s is None else time.monotonic() + timeout_s
        names = set(self.dataset().schema.names)
        for column in columns or ():
            if column not in names:
                raise NotFound(
                    f'column "{column}" is not in the record of "{self.name}"; it has {listing(sorted(names))}'
                )
        return _around([self], lambda: _scanned(self.dataset(), columns, filter, deadline))

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        """All rows as an Arrow stream."""
        return self.arrow().__arrow_c_stream__(requested_schema)

    # ------------------------------------------------------------ files

    def _opens(self, one: RecordedFile) -> bool:
        """Whether the file is whole as far as its footer says."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        if (one.path, None) in self._damage:
            return False
        if one.path in self._schemas:
            return True
        try:
            check_footer(one)
            self._schemas[one.path] = pq.read_schema(one.path)
        except FileNotFoundError:
            return False  # it was removed
        except (Corruption, OSError, pa.ArrowException) as error:
            self._add(one, None, error)
            return False
        return True

    def _fragment(self, form: Any, one: RecordedFile) -> Any:
        """The row groups of a file that can be read; None: none of them."""
        from pyarrow.fs import LocalFileSystem

        disk = LocalFileSystem()
        fragment = form.make_fragment(str(one.path), filesystem=disk)
        bad = {group for path, group in self._damage if path == one.path}
        if not bad:
            return fragment
        good = [group.id for group in fragment.row_groups if group.id not in bad]
        return form.make_fragment(str(one.path), filesystem=disk, row_groups=good) if good else None

    def _check_file(self, one: RecordedFile) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        if not self._opens(one):
            return
        before = len(self._damage)
        try:
            with pq.ParquetFile(one.path, page_checksum_verification=True) as file:
                for group in range(file.num_row_groups):
                    try:
                        file.read_row_group(group)
                    except (OSError, pa.ArrowException) as error:
                        self._add(one, group, error)
            if len(self._damage) == before and digests_of(one.path).body != one.body:
                self._add(one, None, Corruption("it was changed outside its pages"))
        except FileNotFoundError:
            return
        except (OSError, pa.ArrowException) as error:
            self._add(one, None, error)

    def _add(self, one: RecordedFile, group: int | None, error: Exception) -> None:
        why = str(error).splitlines()[0].removeprefix(f"{one.path} ")
        self._damage.setdefault((one.path, group), Damage(one.path, group, why))


class Run:
    """The recorded tables of a directory. Make one by `open_run`.

    Example:
        >>> import tempfile
        >>> import transferqueue as tq
        >>> tq.open_run(tempfile.mkdtemp()).tables
        []
    """

    def __init__(self, path: Path) -> None:
        self.path: Final = path
        self._tables: dict[str, RecordedRows] = {}

    def __repr__(self) -> str:
        return f"<Run {self.path} with {listing(self.tables)}>"

    @property
    def tables(self) -> list[str]:
        """Names of the tables that are recorded here, also those whose files are gone or yet to come."""
        return tables_in(self.path)

    def table(self, name: str | None = None) -> RecordedRows:
        """The rows of a table.

        Args:
            name: of the table; default None: the only one.

        Raises:
            NotFound: there is no such table, or there are several and none is named.
        """
        tables = self.tables
        if name is None and len(tables) == 1:
            name = tables[0]
        if name is None or name not in tables:
            which = "no table is named" if name is None else f'table "{name}" has no files'
            raise NotFound(f"{which} in {self.path}; it has {listing(tables)}")
        return self._tables.setdefault(name, RecordedRows(name, directory_of(self.path, name)))

    def sql(self, query: str, parameters: Sequence[Any] = (), *, timeout_s: float | None = None) -> pa.Table:
        """The result of one SELECT of DuckDB over the tables. It reads files of this record only, and writes none.

        Args:
            query: names each table of the run as in `tables`, quoted (``"a/b"``) if its name is no SQL name.
            parameters: the values of its ``?``, in order; default: it has none.
            timeout_s: ends a query that takes longer; default None: none does.

        Raises:
            UsageError: the query is no single SELECT, or fails; or DuckDB is not installed.
            DeadlineExceeded: it took longer than `timeout_s`.
        """
        duckdb = _duckdb()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        rows = [self.table(name) for name in self.tables]
        _check_names(f"the tables of {self.path}", [one.name for one in rows])

        def answer() -> Any:
            with duckdb.connect(":memory:", config=_SANDBOX) as connection:
                _check_select(duckdb, connection, query)
                for one in rows:
                    columns = _with_wide_halves(one.dataset())
                    _check_names(f'the columns of "{one.name}"', columns.schema.names)
                    connection.register(one.name, columns)
                try:
                    with _interrupted(connection, deadline):
                        return connection.sql(query, params=list(parameters) or None).to_arrow_table()
                except duckdb.Error as error:
                    if _OF_ARROW in str(error):
                        raise OSError(str(error)) from error
                    raise

        try:
            return _around(rows, answer)
        except duckdb.InterruptException as error:
            raise DeadlineExceeded(
                f"the query took longer than timeout_s={timeout_s:g}; name _step or _fate in where, or fewer columns"
            ) from error
        except (duckdb.Error, OSError) as error:
            raise UsageError(f"the query failed: {error}") from error

    @property
    def damaged(self) -> list[Damage]:
        """What reads so far left out, of all tables."""
        return [damage for one in list(self._tables.values()) for damage in one.damaged]


def _around(tables: list[RecordedRows], read: Callable[[], T]) -> T:
    """What `read` returns: again after a file was removed, and without what is damaged. `OSError` if neither is the
    cause of one."""
    for _ in range(TRIES):
        files, damaged = [one.files for one in tables], [len(one.damaged) for one in tables]
        try:
            return read()
        except OSError as error:
            if files != [one.files for one in tables]:
                continue
            for one in [one for one in tables if f"'{one.name}'" in str(error)] or tables:
                one._check_named(str(error))
            if damaged == [len(one.damaged) for one in tables]:
                raise
    return read()


def _scanned(dataset: ds.Dataset, columns: Sequence[str] | None, filter: Any, deadline: float) -> pa.Table:  # noqa: A002
    """Rows of a dataset, part by part. `DeadlineExceeded` from `deadline` on."""
    import pyarrow as pa

    scanner = dataset.scanner(columns=columns, filter=filter)
    batches = []
    for batch in scanner.to_batches():
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                "the read took longer than its timeout_s; filter by _step or _row, or name fewer columns"
            )
        batches.append(batch)
    return pa.Table.from_batches(batches, scanner.projected_schema)


@contextmanager
def _interrupted(connection: Any, deadline: float | None) -> Iterator[None]:
    """Interrupt what `connection` does in this block from `deadline` on."""
    if deadline is None:
        yield
        return
    ended = threading.Event()

    def interrupt() -> None:
        wait_s = max(0.0, deadline - time.monotonic())
        while not ended.wait(wait_s):
            connection.interrupt()
            wait_s = INTERRUPT_S

    thread = threading.Thread(target=interrupt, name="transferqueue query deadline", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _with_wide_halves(dataset: ds.Dataset) -> ds.Dataset:
    """The dataset with float16 values as float32, exactly: DuckDB reads no table that has the former."""
    import pyarrow as pa
    import pyarrow.dataset as ds
    from pyarrow.fs import LocalFileSystem

    def wide(kind: Any) -> Any:
        if pa.types.is_float16(kind):
            return pa.float32()
        if pa.types.is_large_list(kind):
            return pa.large_list(wide(kind.value_type))
        if pa.types.is_fixed_size_list(kind):
            return pa.list_(wide(kind.value_type), kind.list_size)
        return kind

    schema = pa.schema([field.with_type(wide(field.type)) for field in dataset.schema])
    if schema.equals(dataset.schema):
        return dataset
    return ds.FileSystemDataset([*dataset.get_fragments()], schema, dataset.format, LocalFileSystem())


_OF_ARROW: Final = "IOError: "
"""In the text of each error of a query that could not read a file."""
_SANDBOX: Final = {
    "enable_external_access": "false",
    "python_enable_replacements": "false",
    "memory_limit": SQL_MEMORY,
    "threads": str(SQL_THREADS),
    "temp_directory": "",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "lock_configuration": "true",
}


def _check_names(of: str, names: list[str]) -> None:
    """`UsageError` if SQL, which ignores case, takes one of these names for another."""
    by_name: dict[str, str] = {}
    for name in names:
        if (other := by_name.setdefault(name.lower(), name)) != name:
            raise UsageError(
                f'SQL cannot tell "{other}" and "{name}" of {of} apart, since it ignores case; read them by '
                "open_run(PATH).table(NAME).arrow()"
            )


def _check_select(duckdb: Any, connection: Any, query: str) -> None:
    statements = connection.extract_statements(query)
    if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
        kinds = listing([each.type.name for each in statements]) if statements else "nothing"
        raise UsageError(f"the query is {kinds}; give one SELECT: a record is only read")


def _duckdb() -> Any:
    try:
        import duckdb
    except ImportError as error:
        raise UsageError(
            f"SQL needs DuckDB: {install_line('query')}; or read the rows by open_run(PATH).table(NAME).arrow()"
        ) from error
    return duckdb


def open_run(path: str | Path) -> Run:
    """Open the record of a run: the directory that its tables' `Recorded` names, or the folder of a job's run.

    Args:
        path: the directory. It may be read while a server writes into it.

    Raises:
        NotFound: there is no such directory.

    Example:
        >>> import tempfile
        >>> import transferqueue as tq
        >>> tq.open_run(tempfile.mkdtemp()).tables
        []
    """
    directory = Path(path)
    if not directory.is_dir():
        raise NotFound(f"{directory} is no directory; name the one in which a server records rows")
    inner = directory / JOB_ROWS
    return Run(inner if inner.is_dir() and not tables_in(directory) else directory)


def rows_in(file: RecordedFile) -> list[int]:
    """The ids of the rows of a file. `Corruption` if it cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    check_footer(file)
    try:
        with pq.ParquetFile(file.path, page_checksum_verification=True) as opened:
            rows: list[int] = opened.read(columns=["_row"])["_row"].to_pylist()
            return rows
    except (OSError, pa.ArrowException) as error:
        raise Corruption(f"{file.path} is damaged: {error}; restore it from a copy") from error
