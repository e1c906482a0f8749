"""`transferqueue new-adapter`: write the skeleton of an adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from transferqueue.cli.screens.terminal import say

EXAMPLES = (
    (
        "transferqueue new-adapter mine",
        "a generator: ./transferqueue_mine, with tests that skip its unwritten methods",
    ),
    ("transferqueue new-adapter length --kind stage", "a function over rows"),
)


def new_adapter(
    name: Annotated[str, typer.Argument(help="Lower-case letters, digits and underscores.")],
    kind: Annotated[Literal["generator", "learner", "stage"], typer.Option(help="Kind of adapter.")] = "generator",
    directory: Annotated[Path, typer.Option(help="Parent of its folder.")] = Path(),
) -> None:
    """Write the skeleton of an adapter.

    Writes its module, its conformance tests, and its package with the entry point. `transferqueue docs
    writing-an-adapter` explains the next steps.
    """
    from transferqueue.adapters.skeletons import write

    files = write(name, kind, directory)
    for path in files:
        say(str(path))
    say(f"now: cd {files[0].parent} && pip install -e '.[test]' && pytest")
