"""Exit codes of the commands, and the line that a failed command prints.

====  ==========================================================================================
code  meaning
====  ==========================================================================================
0     done; for `serve`, `top` and `trace`, which end in no other way, also Ctrl-C
1     `doctor` found a trouble, or something to mend; `check-history`: a broken promise
2     the call is wrong: an option, an address, a name that does not exist, an extra that is not installed
3     the peer failed: nothing answered, the server is gone, memory cannot grow
4     a wait ended by its deadline
5     a defect of the queue itself
71    `serve`: an operation was interrupted between its writes, or memory is exhausted; start it again
74    `serve`: the disk of its state is full or gives errors; nothing is damaged; start it again
130   interrupted (Ctrl-C) before it was done
====  ==========================================================================================
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import typer
from rich.text import Text

from transferqueue.cli.screens.terminal import console
from transferqueue.errors import DiskFailed, FlowSignal, LedgerTorn, PeerError, TransferQueueError, UsageError
from transferqueue.lazy import EXTRAS, install_line

MEND: Final = 1
BROKEN: Final = 1
USAGE: Final = 2
PEER: Final = 3
FLOW: Final = 4
DEFECT: Final = 5
TORN: Final = 71
DISK: Final = 74
INTERRUPTED: Final = 130

_CODES: Final = ((DiskFailed, DISK), (UsageError, USAGE), (PeerError, PEER), (FlowSignal, FLOW))


def exit_code(error: TransferQueueError) -> int:
    """The exit code for `error`, by its branch of the error tree (`transferqueue.errors`)."""
    return next((code for branch, code in _CODES if isinstance(error, branch)), DEFECT)


@contextmanager
def reported() -> Iterator[None]:
    """Turn a typed error into one line on stderr and an exit code. Other exceptions pass: they are defects, shown with
    a traceback."""
    try:
        yield
    except TransferQueueError as error:
        say_error(str(error))
        raise typer.Exit(exit_code(error)) from error
    except (LedgerTorn, MemoryError) as error:
        say_error(str(error) or "the memory of this process is exhausted")
        raise typer.Exit(TORN) from error
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        explained = f"this command needs {error.name}, not installed here: {install_line(extra)}"
        say_error(str(error) if "pip install" in str(error) else explained)
        raise typer.Exit(USAGE) from error
    except KeyboardInterrupt as error:
        say_error("interrupted")
        raise typer.Exit(INTERRUPTED) from error


def say_error(text: str) -> None:
    """Print ``error: text`` to stderr as one line; a terminal wraps it, a pipe does not."""
    line = Text("error: ", style="bold red").append(" ".join(text.split()), style="default not bold")
    console(stderr=True).print(line, soft_wrap=True)
