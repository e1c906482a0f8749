"""Compares our losses and advantages with those of the libraries installed here:
``python -m bench.agreement --into docs/reference/losses.md``."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from bench.agreement.batches import worst_of_losses, worst_of_values

LIBRARIES = ("trl", "verl")
BEGIN, END = "<!-- agreement:begin -->\n", "<!-- agreement:end -->"
HEAD = "| kind | library | loss | gradient |\n|---|---|---|---|\n"


def rows_of(library: str) -> Iterator[str]:
    """Compare with one library and give the rows of the table as they are measured."""
    name = f"{library} {importlib.metadata.version(library)}"
    theirs = importlib.import_module(f"bench.agreement.of_{library}")
    for case in theirs.CASES:
        loss, gradient = worst_of_losses(case)
        yield f"| {case.kind} | {name} | {loss:.0e} | {gradient:.0e} |\n"
    for values in theirs.VALUES:
        yield f"| advantages, {values.kind} | {name} | {worst_of_values(values):.0e} | |\n"


def written(page: str, measured: dict[str, list[str]]) -> str:
    """Return the page with the rows of the measured libraries in its table; those of others stay."""
    before, rest = page.split(BEGIN)
    table, after = rest.split(END)
    rows = table.splitlines(keepends=True)[2:]
    kept = {library: [row for row in rows if f"| {library} " in row] for library in LIBRARIES}
    return before + BEGIN + HEAD + "".join(chain.from_iterable({**kept, **measured}.values())) + END + after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, metavar="PAGE", help="write the rows into the table of this page")
    options = parser.parse_args()
    measured: dict[str, list[str]] = {}
    for library in filter(importlib.util.find_spec, LIBRARIES):
        measured[library] = []
        for row in rows_of(library):
            print(row, end="", flush=True)
            measured[library].append(row)
    if options.into:
        options.into.write_text(written(options.into.read_text(), measured))


if __name__ == "__main__":
    main()
