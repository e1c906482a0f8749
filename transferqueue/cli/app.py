"""Register the commands. Each is in its own file and imports what it needs when it runs.

`transferqueue --help` must start fast: neither this module nor a module that it imports loads numpy, a
client, a server or an engine. `demo` is imported only when it is called.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from typing import Annotated, Any, Final

import typer
import typer.core

from transferqueue.cli.commands import adopt, check_history, docs, drop_in, export, new_adapter, train, version
from transferqueue.cli.commands.looking import doctor, inspect, page, query, replay, samples, top, trace
from transferqueue.cli.commands.planning import plan, profile
from transferqueue.cli.commands.servers import keys, relay, serve, shard, snapshot
from transferqueue.cli.exit_codes import reported
from transferqueue.errors import UsageError

DEMO_MODULE: Final = "transferqueue.cli.commands.demo"
_DEMO_SUMMARY: Final = "Train a small model by asynchronous GRPO, each stage a process."
_HELP_NAMES: Final = {"help_option_names": ["--help", "-h"]}
PANELS: Final = {
    "Start": ("demo", "docs", "version"),
    "Train": ("train", "adopt", "export", "profile", "plan"),
    "Watch": ("top", "doctor", "inspect", "page", "samples", "query", "replay", "trace"),
    "Operate": ("serve", "shard", "relay", "keys", "snapshot", "restore"),
    "Develop": ("new-adapter", "check-history", "drop-in"),
}
"""The panels of the help page, and the commands of each, in the order in which it shows them."""
_PANEL_OF: Final = {name: panel for panel, names in PANELS.items() for name in names}
RENAMED: Final = {"check": "check-history", "shim": "drop-in"}
"""Commands of earlier trees, which are refused by their new names."""
Example = tuple[str, str]
"""A command line to copy, and its purpose."""
EXAMPLES: Final[tuple[Example, ...]] = (
    ("transferqueue doctor", "find the trouble of a running queue; with --machine, of this machine"),
    ("transferqueue serve", "start a server for this user"),
    ("transferqueue top", "watch it"),
    ("transferqueue docs", "read about it"),
)
DEMO_EXAMPLES: Final[tuple[Example, ...]] = (("transferqueue demo", "the default run, at most three minutes"),)


class Commands(typer.core.TyperGroup):
    """The group of commands. It reports errors in one line, and imports `demo` when it is called."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with reported():
            return super().invoke(ctx)

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of the commands, in the order of `PANELS`."""
        return [name for name in _PANEL_OF if name in self.commands]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command, and replace the placeholder of `demo` by the real command.

        Raises:
            UsageError: An argument is empty: it would name the present directory, or pass for an option that was left
                out. Or the command was renamed.
        """
        for before, argument in pairwise(["", *args]):
            if not argument or (argument.startswith("--") and argument.endswith("=")):
                raise UsageError(
                    f"{argument or before or 'the first argument'} has no value: perhaps a variable of the shell is "
                    "not set; leave the option out for its default"
                )
        if args and args[0] in RENAMED:
            raise UsageError(
                f"`transferqueue {args[0]}` is now `transferqueue {RENAMED[args[0]]}`, with the same options"
            )
        if args and args[0] == "demo" and "demo" in self.commands:
            self.commands["demo"] = _load_demo()
        return super().resolve_command(ctx, args)


def examples(lines: tuple[Example, ...]) -> str:
    """The examples at the end of a help page."""
    shown = [f"  [cyan]$ {command}[/cyan]\n    [dim]{purpose}[/dim]" for command, purpose in lines]
    return "\n".join(["[bold]Examples[/bold]", *shown])


def run(arguments: list[str] | None) -> int:
    """Parse `arguments` (None: those of the process), run the command, return its exit code."""
    try:
        app(arguments, prog_name="transferqueue")
    except SystemExit as exit_request:
        code = exit_request.code
        return code if isinstance(code, int) else int(code is not None)
    return 0


def _group() -> typer.Typer:
    group = typer.Typer(
        cls=Commands,
        name="transferqueue",
        help="The queue between the stages of LLM post-training.",
        epilog=examples(EXAMPLES),
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings=_HELP_NAMES,
    )
    group.callback()(_before)
    if find_spec(DEMO_MODULE) is not None:
        group.command("demo", help=_DEMO_SUMMARY, rich_help_panel=_PANEL_OF["demo"])(_never_run)
    _add(group, "docs", docs.docs, docs.EXAMPLES)
    _add(group, "version", version.version, version.EXAMPLES)
    _add(group, "train", train.train, train.EXAMPLES)
    _add(group, "adopt", adopt.adopt, adopt.EXAMPLES)
    _add(group, "export", export.export, export.EXAMPLES)
    _add(group, "profile", profile.profile, profile.EXAMPLES)
    _add(group, "plan", plan.plan, plan.EXAMPLES)
    _add(group, "top", top.top, top.EXAMPLES)
    _add(group, "doctor", doctor.doctor, doctor.EXAMPLES)
    _add(group, "inspect", inspect.inspect, inspect.EXAMPLES)
    _add(group, "page", page.page, page.EXAMPLES)
    _add(group, "samples", samples.samples, samples.EXAMPLES)
    _add(group, "query", query.query, query.EXAMPLES)
    _add(group, "replay", replay.replay, replay.EXAMPLES)
    _add(group, "trace", trace.trace, trace.EXAMPLES)
    _add(group, "serve", serve.serve, serve.EXAMPLES)
    _add_group(group, "shard", shard.commands, shard.EXAMPLES)
    _add(group, "relay", relay.relay, relay.EXAMPLES)
    _add_group(group, "keys", keys.commands, keys.EXAMPLES)
    _add(group, "snapshot", snapshot.snapshot, snapshot.SNAPSHOT_EXAMPLES)
    _add(group, "restore", snapshot.restore, snapshot.RESTORE_EXAMPLES)
    _add(group, "new-adapter", new_adapter.new_adapter, new_adapter.EXAMPLES)
    _add(group, "check-history", check_history.check_history, check_history.EXAMPLES)
    _add(group, "drop-in", drop_in.drop_in, drop_in.EXAMPLES)
    return group


def _add(group: typer.Typer, name: str, command: Callable[..., None], lines: tuple[Example, ...]) -> None:
    epilog = examples(lines)
    group.command(name, epilog=epilog, context_settings=_HELP_NAMES, rich_help_panel=_PANEL_OF[name])(command)


def _add_group(group: typer.Typer, name: str, commands: typer.Typer, lines: tuple[Example, ...]) -> None:
    epilog = examples(lines)
    group.add_typer(commands, name=name, epilog=epilog, context_settings=_HELP_NAMES, rich_help_panel=_PANEL_OF[name])


def _before(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """The queue between the stages of LLM post-training."""


def _print_version(asked: bool) -> None:
    if asked:
        version.version()
        raise typer.Exit


def _never_run() -> None:
    """Placeholder of `demo` in the list of commands; `Commands.resolve_command` replaces it."""


def _load_demo() -> Any:
    module = import_module(DEMO_MODULE)
    alone = typer.Typer(rich_markup_mode="rich", add_completion=False)
    _add(alone, "demo", module.demo, getattr(module, "EXAMPLES", DEMO_EXAMPLES))
    return typer.main.get_command(alone)


app: Final = _group()
