"""The capability matrix: the outcomes of the kits, stored as records and written into a page.

A record is one file, ``KIND-ADAPTER.json``, of one run of one kit on one subject. A page gets a table for each kind,
between two markers; nothing in it is written by hand::

    python -m tests.engines.matrix --records docs/conformance --into docs/reference/engines.md
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from transferqueue.errors import TransferQueueError, UsageError
from transferqueue.testing.conformance.report import CheckOutcome, Verdict

KINDS: Final = ("generator", "learner", "stage", "scorer")
BEGIN: Final = "<!-- conformance: written by tests.engines.matrix -->"
END: Final = "<!-- /conformance -->"


class MatrixRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The outcomes of one kit for one subject, its engine and version (`against`), and the day of the run (`on`)."""

    adapter: str
    kind: str
    against: str
    on: str
    outcomes: tuple[CheckOutcome, ...]

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f'record of "{self.adapter}": kind {self.kind!r} is not one of {", ".join(KINDS)}')

    @property
    def file(self) -> str:
        """Name of its file."""
        return f"{self.kind}-{self.adapter}.json"


def save(record: MatrixRecord, directory: Path) -> None:
    """Write a record, over the one before it."""
    directory.mkdir(parents=True, exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(record), indent=1).decode() + "\n"
    (directory / record.file).write_text(text, encoding="utf-8")


def load(directory: Path) -> list[MatrixRecord]:
    """All records of a directory, by name. `UsageError` for a file that is not a record."""
    return [_read(path) for path in sorted(directory.glob("*.json"))]


def _read(path: Path) -> MatrixRecord:
    try:
        return msgspec.json.decode(path.read_bytes(), type=MatrixRecord)
    except (msgspec.DecodeError, UsageError) as error:
        raise UsageError(f"{path.name} is not a conformance record: {error}; run its tests again") from error


def render(records: Iterable[MatrixRecord]) -> str:
    """The tables, as Markdown: a row for each check, a column for each adapter."""
    kept_records = list(records)
    tables = [_table(kind, [record for record in kept_records if record.kind == kind]) for kind in KINDS]
    return "\n".join(table for table in tables if table)


def _table(kind: str, records: Sequence[MatrixRecord]) -> str:
    if not records:
        return ""
    checks = list(dict.fromkeys(outcome.check for record in records for outcome in record.outcomes))
    lines = [
        _line(f"a {kind}", (f"`{record.adapter}`" for record in records)),
        _line("---", ("---" for _ in records)),
        *(_line(check.replace("_", " "), (_verdict(record, check) for record in records)) for check in checks),
        _line("run against", (record.against for record in records)),
        _line("on", (record.on for record in records)),
    ]
    return "\n".join([*lines, *_reasons(records), ""])


def _line(first: str, rest: Iterable[str]) -> str:
    return f"| {' | '.join([first, *rest])} |"


def _verdict(record: MatrixRecord, check: str) -> str:
    return next((outcome.verdict.value for outcome in record.outcomes if outcome.check == check), "not run")


def _reasons(records: Sequence[MatrixRecord]) -> list[str]:
    """The reason of each "no", as the adapter gives it."""
    reasons = {
        f"- `{record.adapter}`: {outcome.text}"
        for record in records
        for outcome in record.outcomes
        if outcome.verdict is Verdict.UNSUPPORTED
    }
    return ["", *sorted(reasons)] if reasons else []


def written(page: str, tables: str) -> str:
    """The page with new tables between its markers; `UsageError` if it lacks them."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UsageError(f"the page has no place for the tables; give it the lines {BEGIN} and {END}")
    return f"{before}{begin}\n\n{tables}\n{end}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the tables, or with ``--check`` report whether they agree with the records."""
    parser = argparse.ArgumentParser(prog="python -m tests.engines.matrix", description=__doc__)
    parser.add_argument("--records", type=Path, required=True, help="directory of records")
    parser.add_argument("--into", type=Path, required=True, help="Markdown page with the two markers")
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if the page is out of date")
    options = parser.parse_args(arguments)
    try:
        page = options.into.read_text(encoding="utf-8")
        new = written(page, render(load(options.records)))
    except (OSError, TransferQueueError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if options.check:
        return int(page != new)
    options.into.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
