"""`transferqueue doctor`: check whether this machine can run a queue, or explain why a running queue does not progress."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

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
from transferqueue.cli.screens.terminal import say

if TYPE_CHECKING:
    from rich.text import Text

    from transferqueue.observe.coordinators import UnreachableCoordinator
    from transferqueue.observe.diagnosis import Diagnosis

EXAMPLES = (
    ("transferqueue doctor", "check this machine, and explain what the queue of this user waits for, if one runs"),
    ("transferqueue doctor --arena-bytes 64GiB", "check it for an arena of 64 GiB"),
    ("transferqueue doctor ipc:///tmp/tq/control.sock", "explain what a running queue waits for"),
    ("transferqueue doctor tcp://trainer:7777 --table rollouts", "the same, of one table"),
)


def doctor(
    where: AddressArgument = None,
    address: AddressOption = None,
    table: Annotated[
        str, typer.Option("--table", "-t", autocompletion=complete_table, help="Explain this table only.")
    ] = "",
    arena_bytes: Annotated[
        str | None,
        arena_bytes_option(
            "Check that an arena of this size has room. Default: 8GiB.",
        ),
    ] = None,
    runtime: Annotated[Path | None, runtime_option("Check this runtime directory.")] = None,
    patience: Annotated[
        float,
        typer.Option("--patience", min=0.0, metavar="SECONDS", help="Report as stalled what has waited this long."),
    ] = 10.0,
    json: Annotated[bool, json_option("Print what was found as JSON.")] = False,
) -> None:
    """Check this machine, and explain what this user's queue waits for if one runs; or, with an address, explain the queue there.

    Of the machine: shared memory and memory, kernel features (each really tried), the runtime directory,
    limits and versions; each ok, to improve or to mend, with what to do (alone, with --json and no address). Of a queue: who waits, for what, what is
    missing and who holds it, in sentences. Ends with code 1 if something must be mended or a table is stalled:
    somebody has waited there for --patience seconds, a session that holds its rows was silent for as long, the last worker of a task
    with ready rows died that long ago, or a task can never progress; or if one of several coordinators is out of reach.
    """
    if where or address or table:
        _deployment(address_of(where or address), table, patience, json=json)
        return
    fit = _machine(arena_bytes, runtime, json=json)
    if not (json or arena_bytes or runtime) and (running := _running_server()):
        say("")
        _deployment(running, "", patience, json=False)
    if not fit:
        raise typer.Exit(MEND)


def _running_server() -> str | None:
    """The address of the server that the environment names, or of this user's server if its socket is there."""
    from transferqueue.client.session.addresses import named_server
    from transferqueue.transport import IpcAddress, default_address, parse_address

    if named_server():
        return address_of(None)
    own = parse_address(default_address())
    return str(own) if isinstance(own, IpcAddress) and os.path.lexists(own.path) else None


def _machine(arena_bytes: str | None, runtime: Path | None, *, json: bool) -> bool:
    """Print what was found; return whether nothing must be mended."""
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
    return worst([check for section in sections for check in section.checks]) != "fail"


def _deployment(address: str, table: str, patience_s: float, *, json: bool) -> None:
    from transferqueue.cli.connection import connected
    from transferqueue.cli.screens.terminal import console, show, show_json
    from transferqueue.observe.coordinators import UnreachableCoordinator, by_coordinator
    from transferqueue.observe.diagnosis import diagnose

    with connected(address, label="doctor") as queue:
        diagnoses = by_coordinator(
            queue.address, queue.doctor(table or None), lambda answer: diagnose(answer, patience_s=patience_s)
        )
    if json:
        show_json(diagnoses if len(diagnoses) > 1 else next(iter(diagnoses.values())))
    else:
        terminal = console()
        show(_lines(diagnoses, terminal.width), terminal)
    if any(isinstance(diagnosis, UnreachableCoordinator) or diagnosis.stalled for diagnosis in diagnoses.values()):
        raise typer.Exit(MEND)


def _lines(diagnoses: Mapping[str, Diagnosis | UnreachableCoordinator], width: int) -> list[Text]:
    """The findings of each coordinator, under its address if there are several."""
    from rich.text import Text

    from transferqueue.cli.screens.stall import stall_lines
    from transferqueue.cli.screens.unreachable import unreachable_lines
    from transferqueue.observe.coordinators import UnreachableCoordinator

    lines: list[Text] = []
    for address, diagnosis in diagnoses.items():
        if isinstance(diagnosis, UnreachableCoordinator):
            lines += [*unreachable_lines(diagnosis, width), Text()]
        else:
            lines += [Text(address, style="bold cyan"), *stall_lines(diagnosis, width), Text()]
    return lines[:-1] if len(diagnoses) > 1 else lines[1:-1]
