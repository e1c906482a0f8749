"""``python -m tests.house [trace]``: how much a reader of the package must take in.

Without a word: entries per folder, names used more than once, function lengths, lines per room, import circles, and the
places that check types of messages or reach through a ledger's state. ``trace``: the files and functions that one put
and one lease pass through.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Measure, print; 0."""
    options = argparse.ArgumentParser(prog="python -m tests.house", description=__doc__)
    options.add_argument("what", nargs="?", choices=["measure", "trace"], default="measure")
    options.add_argument("--tree", type=Path, default=ROOT, help="a checkout; with trace, the one that Python imports")
    options.add_argument("--base", type=Path, help="what --json wrote of another tree: print before → after")
    options.add_argument("--json", action="store_true", help="print JSON")
    options.add_argument("-v", "--verbose", action="store_true", help="print every name and place")
    given = options.parse_args()
    if given.what == "trace":
        from tests.house import trace

        found = trace.trace()
        sys.stdout.write(
            trace.text(found, _base(given.base), verbose=given.verbose) if not given.json else _json(found)
        )
    else:
        from tests.house import measure, report

        found = measure.measure(given.tree.resolve())
        sys.stdout.write(
            report.text(found, _base(given.base), verbose=given.verbose) if not given.json else _json(found)
        )
    return 0


def _json(found: object) -> str:
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def _base(path: Path | None) -> dict[str, object] | None:
    return None if path is None else json.loads(path.read_text())


if __name__ == "__main__":
    sys.exit(main())
