"""`transferqueue doctor`: find the trouble of a running queue, or, with --machine, of this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from transferqueue.cli.commands.looking.look import look
from transferqueue.cli.completion import complete_table
from transferqueue.cli.connection import address_of
from transferqueue.cli.exit_codes import MEND
from transferqueue.cli.options import (
    AddressArgument,
    AddressOption,
    arena_bytes_option,
    json_option,
    runtime_option,
    size_in_bytes,
)

if TYPE_CHECKING:
    from rich.text import Text

    from transferqueue.client import Queue
    from transferqueue.observe.verdict import QueueReport
    from transferqueue.wire.answers.coordinators import UnreachableCoordinator
    from transferqueue.wire.answers.stats import Stats

EXAMPLES = (
    ("transferqueue doctor", "the trouble of this user's queue in one sentence; its stages; its waits"),
    ("transferqueue doctor tcp://trainer:7777 --table rollouts", "of one table of another queue"),
    ("transferqueue doctor --machine", "can this machine run a queue?"),
    ("transferqueue doctor --machine --arena-bytes 64GiB", "and an arena of 64 GiB?"),
)


def doctor(
    where: AddressArgument = None,
    address: AddressOption = None,
    table: Annotated[
        str, typer.Option("--table", "-t", autocompletion=complete_table, help="Explain this table only.")
    ] = "",
    patience: Annotated[
        float,
        typer.Option(
            "--patience",
            min=0.0,
            metavar="SECONDS",
            help="Report waits, silences and absences that last this long.",
        ),
    ] = 10.0,
    machine: Annotated[bool, typer.Option("--machine", help="Check this machine instead of a queue.")] = False,
    arena_bytes: Annotated[
        str | None,
        arena_bytes_option("With --machine: check that an arena of this size has room. Default: 8GiB."),
    ] = None,
    runtime: Annotated[Path | None, runtime_option("With --machine: check this runtime directory.")] = None,
    json: Annotated[bool, json_option("Print the report as JSON.")] = False,
) -> None:
    """Find the trouble of a running queue, or of this machine.

    Prints the verdict in one sentence, then each stage with its workers, then each wait with its reason. For the
    verdict, doctor follows each wait to its cause: a task without a worker, a task whose leases all fail, silent
    workers with rows, a column that no task gives, a full table, rows that are all stale. Warnings of a training run,
    such as processes that were started again, follow. Exits with code 1 for a cause that ends only if someone acts and
    that has lasted --patience seconds, or if a coordinator is out of reach.

    With --machine: checks shared memory and memory, kernel features (it tries each), the runtime directory, limits and
    versions. Each is ok, to improve or to mend, with the remedy. Exits with code 1 if something must be mended.
    """
    _check_options(where or address or table, machine=machine, of_machine=bool(arena_bytes or runtime))
    if machine:
        _machine(arena_bytes, runtime, json=json)
    else:
        with _or_the_machine(named=bool(where or address)):
            _deployment(address_of(where or address), table, patience, json=json)


@contextmanager
def _or_the_machine(*, named: bool) -> Iterator[None]:
    """Where no server was named and none runs, name the check of the machine."""
    from transferqueue.errors import Unreachable

    try:
        yield
    except Unreachable as error:
        if named:
            raise
        raise Unreachable(f"{error}; to check this machine: transferqueue doctor --machine") from error


def _check_options(queue: str | None, *, machine: bool, of_machine: bool) -> None:
    """`UsageError` for options that do not go together."""
    from transferqueue.errors import UsageError

    if machine and queue:
        raise UsageError(f"--machine checks this machine, and {queue!r} names a queue; ask about one of them")
    if of_machine and not machine:
        raise UsageError("--arena-bytes and --runtime are of the machine; add --machine")


def _machine(arena_bytes: str | None, runtime: Path | None, *, json: bool) -> None:
    """Check this machine and print the checks."""
    from transferqueue.cli.screens.machine import machine_lines
    from transferqueue.cli.screens.terminal import console, show, show_json
    from transferqueue.observe.machine.check import check_machine
    from transferqueue.observe.machine.result import worst
    from transferqueue.observe.machine.runtime import default_runtime

    sections = check_machine(runtime=runtime or default_runtime(), arena_bytes=size_in_bytes(arena_bytes))
    if json:
        show_json(sections)
    else:
        terminal = console()
        show(machine_lines(sections, terminal.width), terminal)
    if worst([check for section in sections for check in section.checks]) == "fail":
        raise typer.Exit(MEND)


def _deployment(address: str, table: str, patience_s: float, *, json: bool) -> None:
    from transferqueue.cli.connection import connected
    from transferqueue.cli.screens.terminal import console, show, show_json
    from transferqueue.observe.coordinators import Look
    from transferqueue.observe.verdict import report
    from transferqueue.wire.answers.coordinators import UnreachableCoordinator

    with connected(address, label="doctor") as queue:
        found = look(queue, table)
        warnings = _warnings(queue, [one.stats for one in found.values() if isinstance(one, Look)])
    reports = {
        place: report(one.stats, one.doctor, patience_s=patience_s) if isinstance(one, Look) else one
        for place, one in found.items()
    }
    if json:
        show_json(reports if len(reports) > 1 else next(iter(reports.values())))
    else:
        terminal = console()
        show([*_lines(reports, terminal.width), *warnings], terminal)
    if any(isinstance(one, UnreachableCoordinator) or one.verdict.trouble for one in reports.values()):
        raise typer.Exit(MEND)


def _warnings(queue: Queue, stats: Sequence[Stats]) -> list[Text]:
    """What programs warn of on the page, such as a training run of processes that it started again."""
    from rich.text import Text

    from transferqueue.errors import DeadlineExceeded, NotFound, UsageError
    from transferqueue.observe.figure_table import VALUE, decode, has_figures

    lines: list[Text] = []
    for channel in (name for each in stats for name in each.channels if has_figures(name)):
        with (
            suppress(DeadlineExceeded, NotFound, UsageError),  # gone meanwhile, or written by another program
            queue.weights(channel).pull(timeout_s=0.0) as pulled,
        ):
            table = decode(bytes(pulled.numpy()[VALUE]))
            lines += [Text(f"{table.title}: {text}", style="yellow") for text in table.warnings]
    return [Text(), *lines] if lines else []


def _lines(reports: Mapping[str, QueueReport | UnreachableCoordinator], width: int) -> list[Text]:
    """The report of each coordinator, under its address if there are several."""
    from rich.text import Text

    from transferqueue.cli.screens.doctor import doctor_lines
    from transferqueue.cli.screens.unreachable import unreachable_lines
    from transferqueue.wire.answers.coordinators import UnreachableCoordinator

    lines: list[Text] = []
    for address, report in reports.items():
        head = [Text(address, style="bold cyan")] if len(reports) > 1 else []
        if isinstance(report, UnreachableCoordinator):
            lines += [*unreachable_lines(report, width), Text()]
        else:
            lines += [*head, *doctor_lines(report, width), Text()]
    return lines[:-1]
