"""`transferqueue version`."""

from __future__ import annotations

import typer

EXAMPLES = (("transferqueue version", "the version of this installation"),)


def version() -> None:
    """Print the version of TransferQueue."""
    from transferqueue.observe.libraries import version as installed

    typer.echo(f"transferqueue {installed()}")
