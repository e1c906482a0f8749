"""The commands, registered. Each lives in its own file and loads what it needs when it runs.

`transferqueue --help` must show in a blink: nothing here, or in the files imported here, loads numpy, a
client, a server or an engine at module level. `demo` is loaded only when it is asked for by name.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

import typer
import typer.core

from transferqueue.cli.commands import (
    chaos,
    check,
    compare_modes,
    doctor,
    inspect,
    keys,
    new_adapter,
    plan,
    relay,
    serve,
    shard,
    shim,
    snapshot,
    top,
    version,
)
from transferqueue.cli.exit_codes import reported

DEMO_MODULE: Final = "transferqueue.cli.commands.demo"
_DEMO_SUMMARY: Final = "Train a small transformer by asynchronous GRPO, every stage a process of its own."
_HELP_NAMES: Final = {"help_option_names": ["--help", "-h"]}
Example = tuple[str, str]
"""A command line to copy, and what it is for."""
EXAMPLES: Final[tuple[Example, ...]] = (
    ("transferqueue doctor", "is this machine fit for a queue?"),
    ("transferqueue serve", "start a server for this user"),
    ("transferqueue top", "watch what it does"),
)
DEMO_EXAMPLES: Final[tuple[Example, ...]] = (("transferqueue demo", "the default run, at most three minutes"),)


class Commands(typer.core.TyperGroup):
    """The group: it reports errors in one line, and loads `demo` when it is called."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was named."""
        with reported():
            return super().invoke(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that was named; the stand-in for `demo` gives way to the real one."""
        if args and args[0] == "demo" and "demo" in self.commands:
            self.commands["demo"] = _load_demo()
        return super().resolve_command(ctx, args)


def examples(lines: tuple[Example, ...]) -> str:
    """The end of a help page."""
    shown = [f"  [cyan]$ {command}[/cyan]\n    [dim]{purpose}[/dim]" for command, purpose in lines]
    return "\n".join(["[bold]Examples[/bold]", *shown])


def run(arguments: list[str] | None) -> int:
    """Parse `arguments` (None: those of the process), run the command, return its exit code."""
    try:
        app(arguments, prog_name="transferqueue")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0


def _group() -> typer.Typer:
    found = typer.Typer(
        cls=Commands,
        name="transferqueue",
        help="The queue between the stages of LLM post-training.",
        epilog=examples(EXAMPLES),
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings=_HELP_NAMES,
    )
    if find_spec(DEMO_MODULE) is not None:
        found.command("demo", help=_DEMO_SUMMARY)(_never_run)
    _add(found, "compare-modes", compare_modes.compare_modes, compare_modes.EXAMPLES)
    _add(found, "plan", plan.plan, plan.EXAMPLES)
    _add(found, "serve", serve.serve, serve.EXAMPLES)
    found.add_typer(shard.commands, name="shard", epilog=examples(shard.EXAMPLES), context_settings=_HELP_NAMES)
    _add(found, "relay", relay.relay, relay.EXAMPLES)
    _add(found, "top", top.top, top.EXAMPLES)
    _add(found, "inspect", inspect.inspect, inspect.EXAMPLES)
    _add(found, "doctor", doctor.doctor, doctor.EXAMPLES)
    _add(found, "check", check.check, check.EXAMPLES)
    _add(found, "chaos", chaos.chaos, chaos.EXAMPLES)
    _add(found, "snapshot", snapshot.snapshot, snapshot.SNAPSHOT_EXAMPLES)
    _add(found, "restore", snapshot.restore, snapshot.RESTORE_EXAMPLES)
    found.add_typer(keys.commands, name="keys", epilog=examples(keys.EXAMPLES), context_settings=_HELP_NAMES)
    _add(found, "new-adapter", new_adapter.new_adapter, new_adapter.EXAMPLES)
    _add(found, "shim", shim.shim, shim.EXAMPLES)
    _add(found, "version", version.version, version.EXAMPLES)
    return found


def _add(group: typer.Typer, name: str, command: Callable[..., None], lines: tuple[Example, ...]) -> None:
    group.command(name, epilog=examples(lines), context_settings=_HELP_NAMES)(command)


def _never_run() -> None:
    """Stands for `demo` in the list of commands; `Commands.resolve_command` puts the real one in its place."""


def _load_demo() -> Any:
    module = import_module(DEMO_MODULE)
    alone = typer.Typer(rich_markup_mode="rich", add_completion=False)
    _add(alone, "demo", module.demo, getattr(module, "EXAMPLES", DEMO_EXAMPLES))
    return typer.main.get_command(alone)


app: Final = _group()
