"""`transferqueue version`."""

from __future__ import annotations

from transferqueue.cli.screens.terminal import say

EXAMPLES = (("transferqueue version", "the version of this installation"),)


def version() -> None:
    """Print the version of TransferQueue."""
    from transferqueue.observe.machine.libraries import version as installed

    say(f"transferqueue {installed()}")
