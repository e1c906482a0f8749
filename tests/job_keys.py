"""Write the tables of keys in docs/reference/job-keys.md from `transferqueue.workflows.job.settings.job`.

``python -m tests.job_keys`` writes them; `tests/workflows/job/test_job_keys.py` fails if the page is not as this would
write it. A table stands between ``<!-- keys: TABLE -->`` and ``<!-- end -->``; ``job`` has the keys outside tables.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from transferqueue.workflows.job.settings.describe import OPEN, REQUIRED, Key, KeyTable, keys, tables

PAGE: Final = Path(__file__).resolve().parent.parent / "docs" / "reference" / "job-keys.md"
TABLES: Final = {table.name or "job": table for table in tables()}
_TABLE: Final = re.compile(r"(<!-- keys: ([\w.]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_COMMAND: Final = re.compile(r"`transferqueue docs ([\w-]+)`")


def page(text: str) -> str:
    """The page with its tables as the structs declare them."""
    return _TABLE.sub(lambda found: f"{found[1]}{_table(TABLES[found[2]])}{found[3]}", text)


def documented(text: str) -> list[str]:
    """The tables that a page has, in its order."""
    return [found[2] for found in _TABLE.finditer(text)]


def _table(table: KeyTable) -> str:
    about = [table.meaning, ""] if table.name else []
    head = ["| key | type | meaning | needed by |", "|---|---|---|---|"]
    lines = "\n".join([*about, *head, *map(_line, keys(table)), ""])
    return _COMMAND.sub(r"[\1](\1.md)", lines)


def _line(key: Key) -> str:
    name = key.name.rpartition(".")[2]
    shown = f"`{name}` {key.default}" if key.default in (OPEN, REQUIRED) else f"`{name} = {key.default}`"
    by_kind = f" Open: {key.by_kind}." if key.by_kind else ""
    return f"| {shown} | {key.type} | {key.meaning}{by_kind} | {key.needed_by} |"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
