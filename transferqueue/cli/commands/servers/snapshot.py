"""`transferqueue snapshot` writes all tables and weights to files; `transferqueue restore` reads them into an empty
server."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from transferqueue.cli.connection import address_of
from transferqueue.cli.options import AddressOption

if TYPE_CHECKING:
    from transferqueue.client import Queue

SNAPSHOT_EXAMPLES = (
    ("transferqueue snapshot run-7", "all tables and weights, while clients continue"),
    ("transferqueue snapshot run-7 --keep 5", "keeping the four before it"),
    ("transferqueue snapshot run-7 --address ADDRESS,ADDRESS", "each of several coordinators"),
)
RESTORE_EXAMPLES = (
    ("transferqueue restore run-7", "the newest snapshot of that directory, into a server without tables"),
    ("transferqueue restore run-7/000003", "that one"),
    ("transferqueue restore run-7 --address ADDRESS,ADDRESS", "into as many coordinators as it was taken of"),
)
SnapshotPath = Annotated[
    str, typer.Argument(metavar="PATH", show_default=False, help="Under the server's directory for snapshots.")
]
TimeoutOption = Annotated[float, typer.Option("--timeout", metavar="SECONDS", min=1, help="Give up after this time.")]


def snapshot(
    path: SnapshotPath,
    keep: Annotated[int, typer.Option("--keep", min=1, help="How many snapshots stay in PATH, the newest.")] = 2,
    timeout: TimeoutOption = 600.0,
    address: AddressOption = None,
) -> None:
    """Write all tables and weights to files.

    The files hold one moment, rows of all shards included, and open in any Arrow reader. Other clients continue
    meanwhile. A snapshot is whole or absent. Prints its path, a line for each coordinator. `transferqueue docs
    snapshots` describes the files.
    """

    def write(queue: Queue, progress: Callable[[int, int], None]) -> list[str]:
        return [made.path for made in queue.snapshot(path, keep=keep, timeout_s=timeout, progress=progress)]

    _carry_out(address, write)


def restore(path: SnapshotPath, timeout: TimeoutOption = 600.0, address: AddressOption = None) -> None:
    """Read a snapshot into a server without tables.

    Verifies the checksum of every file before it changes anything. Each of several coordinators restores its newest
    snapshot. Prints the path of each, and when it was made.
    """

    def read(queue: Queue, progress: Callable[[int, int], None]) -> list[str]:
        restored = queue.restore(path, timeout_s=timeout, progress=progress)
        return [f"{each.path}  made {each.made_at:%Y-%m-%dT%H:%M:%SZ}" for each in restored]

    _carry_out(address, read)


def _carry_out(address: str | None, act: Callable[[Queue, Callable[[int, int], None]], list[str]]) -> None:
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    from transferqueue.cli.connection import connected
    from transferqueue.cli.screens.terminal import console, say

    terminal = console()
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar = Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal)
    with connected(address_of(address), label="snapshot") as queue, bar:
        task = bar.add_task("")
        lines = act(queue, lambda done, total: bar.update(task, completed=done, total=max(done, total)))
    for line in lines:
        say(line)
