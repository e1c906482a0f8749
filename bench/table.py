"""The table of required figures, as Markdown for the README.

    python -m bench.table [RECORD] [--into README.md]

Without a record: the newest in bench/records. `--into` replaces what stands between ``<!-- bench:begin -->`` and
``<!-- bench:end -->`` of that file. Exit code 1 with `--strict` if a figure is missed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.figures import Figure, figures
from bench.harness import RECORDS, Record, load_record

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
OUTCOMES = {True: "yes", False: "**no**", None: "not measured"}


def newest() -> Path:
    """The newest record of `bench.run`, whose names begin with their time. Raises FileNotFoundError if there is none."""
    found = sorted(RECORDS.glob("[0-9]*.json"))
    if not found:
        raise FileNotFoundError(f"no record in {RECORDS}; make one with `make bench`")
    return found[-1]


def _line(figure: Figure) -> str:
    cells = (figure.work, figure.against, figure.required, figure.shown or "—", OUTCOMES[figure.met], figure.detail)
    return "| " + " | ".join(cells) + " |"


def caption(record: Record) -> str:
    """One sentence: where, when and how busy the machine was."""
    machine, load = record.machine, record.load["before"][0]
    modified = " (with changes)" if record.commit["modified"] else ""
    return (
        f"{machine['cores']} cores ({machine['processor']}), {machine['memory_bytes'] / 2**30:.0f} GiB, "
        f"Python {machine['python']}; commit {record.commit['id'][:9]}{modified}, {record.started[:10]}, "
        f"load {load:.1f} at the start. Times are ours / theirs, medians of one run: compare ratios, not times."
    )


def markdown(record: Record) -> str:
    """The table, its header and its caption."""
    head = ["| work | against | required | measured | met | ours / theirs |", "|---|---|---|---|---|---|"]
    return "\n".join([*head, *map(_line, figures(record)), "", caption(record)])


def insert(page: str, table: str) -> str:
    """The page with the table between its marks. Raises ValueError if it has none."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} followed by {END}; put both on lines of their own")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Print the table of required figures.")
    parser.add_argument("record", nargs="?", type=Path)
    parser.add_argument("--into", type=Path)
    parser.add_argument("--strict", action="store_true")
    chosen = parser.parse_args()
    record = load_record(chosen.record or newest())
    table = markdown(record)
    if chosen.into:
        chosen.into.write_text(insert(chosen.into.read_text(), table))
    else:
        print(table)
    return 1 if chosen.strict and any(figure.met is False for figure in figures(record)) else 0


if __name__ == "__main__":
    sys.exit(main())
