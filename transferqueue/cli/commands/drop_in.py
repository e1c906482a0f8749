"""`transferqueue drop-in`: switch the drop-in for ``transfer_queue`` on or off for a Python environment.

On is one ``.pth`` file beside the installed packages. Its line puts the folder of the drop-in before them, and imports
nothing. So a program that never imports ``transfer_queue`` pays nothing, and a file left behind by an uninstall does
nothing.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from transferqueue.cli.screens.terminal import say
from transferqueue.errors import UsageError

EXAMPLES = (
    ("transferqueue drop-in on", "`import transfer_queue` is the drop-in, in this environment"),
    ("transferqueue drop-in off", "`import transfer_queue` is the original again"),
    ("transferqueue drop-in status", "which of the two is imported"),
)
FILE: Final = "asyncflow_transferqueue_shim.pth"


def drop_in(
    switch: Annotated[
        Literal["on", "off", "status"], typer.Argument(help="Switch it, or show which is on.")
    ] = "status",
    site: Annotated[Path | None, typer.Option(help="The folder of packages. Default: that of this Python.")] = None,
) -> None:
    """Make `import transfer_queue` import the drop-in, or the original.

    Changes this Python environment. Running programs keep the module that they imported.
    """
    path = (site or Path(sysconfig.get_path("purelib"))) / FILE
    if switch != "status":
        _turn(path, on=switch == "on")
    say(f"on: import transfer_queue is the drop-in ({path})" if path.exists() else f"off: there is no {path}")


def _turn(path: Path, *, on: bool) -> None:
    from transferqueue.adapters.transfer_queue_hook import FOLDER

    try:
        if on:
            path.write_text(f"import sys; sys.path.insert(0, {FOLDER!r})\n")
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be changed: {error.strerror}; it must be in a folder of packages that you may write to. "
            "Use an environment of your own, or call activate() in the program"
        ) from error
