"""`transferqueue top`: watch tables, tasks, rates and waits, live."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated

import typer

from transferqueue.cli.commands.looking.look import look
from transferqueue.cli.connection import address_of
from transferqueue.cli.options import AddressArgument, AddressOption, json_option

if TYPE_CHECKING:
    from rich.text import Text

    from transferqueue.client import Queue
    from transferqueue.observe.frame import StatsFrame
    from transferqueue.wire.answers.coordinators import UnreachableCoordinator

EXAMPLES = (
    ("transferqueue top", "the server of this user, twice a second; q or Ctrl-C ends it"),
    ("transferqueue top tcp://trainer:7777 --interval 5", "another server, every five seconds"),
    ("transferqueue top --once", "one frame, for a log"),
    ("transferqueue top --once --json", "the same for a machine; keys in `transferqueue docs figures`"),
)


def top(
    where: AddressArgument = None,
    address: AddressOption = None,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
    json: Annotated[bool, json_option("Print frames as JSON, one document each.")] = False,
    interval: Annotated[
        float, typer.Option("--interval", "-i", min=0.05, max=3600.0, metavar="SECONDS", help="Time between frames.")
    ] = 0.5,
) -> None:
    """Watch tables, tasks, rates and waits, live.

    A frame begins with the verdict in one sentence. Then it shows rows pending, ready, leased and done; rates, bytes,
    age and staleness; and each wait with its reason. `top` asks the server twice a frame. Rates are of the time between
    two frames, --interval apart; --once also looks twice. Without a terminal it prints frame after frame. It shows
    several coordinators (addresses joined by commas) one beneath the other; with --json each is a document.
    """
    from transferqueue.cli.connection import connected
    from transferqueue.cli.screens.terminal import console

    with connected(address_of(where or address), label="top") as queue, suppress(KeyboardInterrupt):
        if once or json or not console().is_terminal:
            _print_frames(queue, interval, once=once, json=json)
        else:
            _show_live(queue, interval)


def _print_frames(queue: Queue, interval: float, *, once: bool, json: bool) -> None:
    """Print frames with rates, one after the other; only one if `once`."""
    from transferqueue.cli.screens.terminal import console, show, show_json
    from transferqueue.observe.frame import frames

    terminal, before = console(), look(queue)
    while True:
        time.sleep(interval)
        after = look(queue)
        shown, before = frames(before, after), after
        if json:
            for frame in shown:
                show_json(frame)
        else:
            show(_lines(shown, terminal.width), terminal)
        if once:
            return


def _show_live(queue: Queue, interval: float) -> None:
    """Redraw the terminal in place until q is pressed. The first frame appears at once, without rates."""
    from rich.live import Live
    from rich.text import Text

    from transferqueue.cli.screens.terminal import console
    from transferqueue.observe.frame import frames

    terminal, before = console(), None
    with _single_keys(), Live(console=terminal, screen=True, auto_refresh=False) as live:
        while True:
            after = look(queue)
            lines = _lines(frames(before or {}, after), terminal.width)
            live.update(Text("\n").join(lines), refresh=True)
            before = after
            if _quit_within(interval):
                return


def _lines(shown: Iterable[StatsFrame | UnreachableCoordinator], width: int) -> list[Text]:
    """The lines of all coordinators, one below the other."""
    from rich.text import Text

    from transferqueue.cli.screens.top import top_lines
    from transferqueue.cli.screens.unreachable import unreachable_lines
    from transferqueue.wire.answers.coordinators import UnreachableCoordinator

    parts = [
        unreachable_lines(frame, width) if isinstance(frame, UnreachableCoordinator) else top_lines(frame, width)
        for frame in shown
    ]
    return [line for part in parts for line in (*part, Text())][:-1]


def _quit_within(seconds: float) -> bool:
    """Wait until the next frame is due. True as soon as q is pressed."""
    if not sys.stdin.isatty():
        time.sleep(seconds)
        return False
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if select.select([sys.stdin], [], [], left)[0] and os.read(sys.stdin.fileno(), 1) in (b"q", b"Q", b""):
            return True
    return False


@contextmanager
def _single_keys() -> Iterator[None]:
    """Read keys one by one, without echo, while the block runs."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
