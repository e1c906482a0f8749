"""The command line, `transferqueue COMMAND`. `app` registers the commands.

This file loads with the core alone; typer and rich come with the extra ``[cli]``.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

from transferqueue.lazy import install_line


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code (see `transferqueue.cli.exit_codes`)."""
    try:
        return _run(arguments)
    except KeyboardInterrupt:  # while modules are loaded; `reported` has those of a command
        print("error: interrupted", file=sys.stderr)
        return 130


def _run(arguments: list[str] | None) -> int:
    missing = [name for name in ("typer", "rich") if find_spec(name) is None]
    if missing:
        needed = " and ".join(missing)
        print(f"error: the command line needs {needed}, not installed here: {install_line('cli')}", file=sys.stderr)
        return 2
    from transferqueue.cli.app import run

    return run(arguments)
