"""How a command ends: its exit code, and one line when it failed.

====  ==========================================================================================
code  meaning
====  ==========================================================================================
0     done; for `serve` and `top`, which have no other end, also Ctrl-C
1     `doctor` found something to mend; `check` or `chaos` found a promise broken
2     the call is wrong: an option, an address, a name that does not exist, a missing extra
3     the other side: nothing answered, the server is gone, memory cannot grow
4     a wait ended by its deadline
5     a defect of the queue itself
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
from transferqueue.errors import FlowSignal, PeerError, TransferQueueError, UsageError

MEND: Final = 1
USAGE: Final = 2
PEER: Final = 3
FLOW: Final = 4
DEFECT: Final = 5
INTERRUPTED: Final = 130

_CODES: Final = ((UsageError, USAGE), (PeerError, PEER), (FlowSignal, FLOW))
_EXTRAS: Final = {
    "torch": "torch",
    "tensordict": "torch",
    "reasoning_gym": "demo",
    "matplotlib": "demo",
    "ray": "ray",
    "vllm": "vllm",
}
"""The extra that brings each optional library."""


def exit_code(error: TransferQueueError) -> int:
    """The code of the branch of the error tree that `error` is on."""
    return next((code for branch, code in _CODES if isinstance(error, branch)), DEFECT)


@contextmanager
def reported() -> Iterator[None]:
    """Turn what a command raises into one line on stderr and an exit code. Defects of Python code pass through."""
    try:
        yield
    except TransferQueueError as error:
        say_error(str(error))
        raise typer.Exit(exit_code(error)) from error
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        say_error(
            f'this command needs {error.name}, not installed here; pip install "asyncflow-transferqueue[{extra}]"'
        )
        raise typer.Exit(USAGE) from error
    except KeyboardInterrupt as error:
        say_error("interrupted")
        raise typer.Exit(INTERRUPTED) from error


def say_error(text: str) -> None:
    """``error: text`` as one line on stderr; a terminal wraps it, a pipe does not."""
    line = Text("error: ", style="bold red").append(" ".join(text.split()), style="default not bold")
    console(stderr=True).print(line, soft_wrap=True)
