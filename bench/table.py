"""The table of required figures, as Markdown.

    python -m bench.table [RECORD] [--into docs/understand/benchmarks.md]

Without a record: the newest run in bench/records. `--into` replaces what stands between ``<!-- bench:begin -->`` and
``<!-- bench:end -->`` of that file. Exit code 1 with `--strict` if a figure is missed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.figures import Figure, figures
from bench.run_record import RECORDS, RunRecord, load_run

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
OUTCOMES = {True: "yes", False: "**no**", None: "not measured"}


def newest() -> Path:
    """The newest run of `bench.run`, whose folder's name begins with its time. Raises FileNotFoundError if there is
    none."""
    found = sorted(path for path in RECORDS.glob("[0-9]*") if path.is_dir())
    if not found:
        raise FileNotFoundError(f"no run in {RECORDS}; make one with `make bench`")
    return found[-1]


def _line(figure: Figure) -> str:
    cells = (figure.work, figure.shown or "—", figure.required, OUTCOMES[figure.met], figure.against, figure.detail)
    return "| " + " | ".join(cells) + " |"


def caption(record: RunRecord) -> str:
    """One sentence: where, when and how busy the machine was."""
    first = record.first
    machine, memory = first.machine, int(first.machine["memory_bytes"]) / 2**30
    return (
        f"{machine['cores']} cores ({machine['processor']}), {memory:.0f} GiB, "
        f"Python {machine['python']}; commit {first.commit}, {first.start[:10]}, "
        f"load {first.load['start']:.1f} at the start. Times are ours / theirs, medians of one run: compare ratios, "
        "not times."
    )


def markdown(record: RunRecord) -> str:
    """The table, its header and its caption."""
    head = ["| work | measured | required | met | against | ours / theirs |", "|---|---|---|---|---|---|"]
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
    record = load_run(chosen.record or newest())
    table = markdown(record)
    if chosen.into:
        chosen.into.write_text(insert(chosen.into.read_text(), table))
    else:
        print(table)
    return 1 if chosen.strict and any(figure.met is False for figure in figures(record)) else 0


if __name__ == "__main__":
    sys.exit(main())
