"""`transferqueue serve`: run a server until it is stopped."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import stat
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Final

import typer

from transferqueue.cli.connection import ADDRESS_VARIABLE
from transferqueue.cli.logs import LogJsonOption, LogLevelOption, log_to_stderr
from transferqueue.cli.options import (
    MEMORY,
    REACH,
    ArenaBytesOption,
    CarrierOption,
    SpillBytesOption,
    SpillDirOption,
    directory_option,
    runtime_option,
    size_in_bytes,
)
from transferqueue.cli.screens.terminal import say, say_ready
from transferqueue.observe.machine.runtime import RUNTIME_VARIABLE

EXAMPLES = (
    ("transferqueue serve", "for this user, at the default address"),
    ("transferqueue serve --arena-bytes 64GiB", "with room for 64 GiB of rows"),
    ("transferqueue serve --tcp 0.0.0.0:7777", "reachable from other machines too, with keys: transferqueue keys"),
    ("transferqueue serve --durability process --state DIR --supervise", "restarts after a crash, with all rows"),
    ("transferqueue serve --tcp 0.0.0.0:7777 --coordinator 1/2", "the first of two with tables each, used as one"),
    ("transferqueue serve --web 8787", "with a page that shows it live, at 127.0.0.1:8787"),
    (
        "transferqueue serve --http 8788 --tokens DIR",
        "with an HTTP service, for programs without this library",
    ),
    ("transferqueue serve --runtime /tmp/tq", "a second server, in a directory of its own"),
    ("transferqueue serve --address ipc:///tmp/tq/control.sock", "the same, by the address that clients give"),
)
SURVIVAL: Final = "Survival"
PEOPLE: Final = "People and HTTP"

AddressOption = Annotated[
    str | None,
    typer.Option(
        "--address",
        "-a",
        show_default=False,
        help=(
            f"Listen here: ipc://path or tcp://host:port. Default: ${ADDRESS_VARIABLE}, else control.sock in --runtime."
        ),
        rich_help_panel=REACH,
    ),
]
TcpOption = Annotated[
    list[str] | None,
    typer.Option(
        "--tcp",
        metavar="HOST:PORT",
        show_default=False,
        help="Listen here too; repeatable.",
        rich_help_panel=REACH,
    ),
]
RuntimeOption = Annotated[
    Path | None,
    runtime_option(
        f"Directory of the socket and of locks, made private (0700). Default: ${RUNTIME_VARIABLE}, else this user's.",
        panel=MEMORY,
    ),
]
KeysOption = Annotated[
    Path | None,
    directory_option(
        "--keys",
        "Directory of the keys that every tcp address asks for. Default: none at loopback addresses, "
        "else those of `transferqueue keys`, without which no other address is listened at.",
        panel=REACH,
    ),
]
PlainBytesOption = Annotated[
    bool,
    typer.Option(
        "--plain-bytes",
        help="With keys too, send columns to other machines unencrypted: several times as fast, for networks without "
        "eavesdroppers. Calls stay encrypted, and hand out the tickets without which the server sends no bytes.",
        rich_help_panel=REACH,
    ),
]
DurabilityOption = Annotated[
    str,
    typer.Option(
        "--durability",
        metavar="LEVEL",
        help="memory: rows end with the server; process: rows outlive the crash of any process; disk: rows outlive a "
        "reboot.",
        rich_help_panel=SURVIVAL,
    ),
]
StateOption = Annotated[
    Path | None,
    directory_option(
        "--state",
        "Directory of the state, for durability process and disk; made private (0700). The next server with the same "
        "directory continues.",
        panel=SURVIVAL,
    ),
]
AcceptLossOption = Annotated[
    bool,
    typer.Option(
        "--accept-loss",
        help="Start even if the files of --state are damaged or incomplete: move them to lost-N in it, free their "
        "shared memory, and begin anew. No effect on a whole state. Default: the server refuses to start.",
        rich_help_panel=SURVIVAL,
    ),
]
SnapshotsOption = Annotated[
    Path | None,
    directory_option(
        "--snapshots",
        "Directory under which clients name snapshots. Default: $TRANSFERQUEUE_SNAPSHOTS, else ./snapshots.",
        panel=MEMORY,
    ),
]
RecordsOption = Annotated[
    Path | None,
    directory_option(
        "--records",
        "Directory under which tables record their rows. Default: $TRANSFERQUEUE_RECORDS, else ./records.",
        panel=MEMORY,
    ),
]
CoordinatorOption = Annotated[
    str | None,
    typer.Option(
        "--coordinator",
        metavar="K/N",
        show_default=False,
        help="This server is number K of N that clients use as one, each with a part of the tables (`transferqueue "
        "docs cluster`); NAME:K/N also says of which deployment.",
        rich_help_panel=REACH,
    ),
]
WebOption = Annotated[
    str | None,
    typer.Option(
        "--web",
        metavar="PORT",
        show_default=False,
        help="Show a page at 127.0.0.1:PORT: tables, tasks, rates, waits, live. Prints a link, which is a password.",
        rich_help_panel=PEOPLE,
    ),
]
HttpOption = Annotated[
    str | None,
    typer.Option(
        "--http",
        metavar="PORT",
        show_default=False,
        help=(
            "Serve put_prompts_data, get_experience_data and the like over HTTP at 127.0.0.1:PORT; its page says how. "
            "Prints a link, too."
        ),
        rich_help_panel=PEOPLE,
    ),
]
TokensOption = Annotated[
    Path | None,
    directory_option(
        "--tokens",
        "Directory of three token files: page (for --web), service (for --http), metrics (for /metrics alone). Made "
        "if missing (0700, files 0600). Default: new tokens at each start, in the links.",
        panel=PEOPLE,
    ),
]
SupervisedOption = Annotated[
    bool,
    typer.Option(
        "--supervise",
        help="Restart the server when it crashes; clients of a durable server continue.",
        rich_help_panel=SURVIVAL,
    ),
]
LifelineOption = Annotated[
    bool,
    typer.Option(
        "--lifeline",
        help="Stop when the pipe at standard input closes: for a program that starts a server and may be killed.",
        rich_help_panel=SURVIVAL,
    ),
]


def serve(
    address: AddressOption = None,
    tcp: TcpOption = None,
    arena_bytes: ArenaBytesOption = None,
    runtime: RuntimeOption = None,
    keys: KeysOption = None,
    plain_bytes: PlainBytesOption = False,
    carrier: CarrierOption = None,
    durability: DurabilityOption = "memory",
    state: StateOption = None,
    accept_loss: AcceptLossOption = False,
    snapshots: SnapshotsOption = None,
    records: RecordsOption = None,
    spill_dir: SpillDirOption = None,
    spill_bytes: SpillBytesOption = None,
    coordinator: CoordinatorOption = None,
    web: WebOption = None,
    http: HttpOption = None,
    tokens: TokensOption = None,
    supervised: SupervisedOption = False,
    lifeline: LifelineOption = False,
    log_level: LogLevelOption = None,
    log_json: LogJsonOption = False,
) -> None:
    """Run a server.

    It stops at Ctrl-C or SIGTERM, and leaves no file behind, except in --state. Prints one line when it listens:
    "ready", then its addresses (and "web" or "http" and a link, with --web or --http). Clients give the first of them
    to connect().
    """
    log_to_stderr(log_level, as_json=log_json)
    from transferqueue.server.process.serve import serve as serve_until_stopped
    from transferqueue.server.process.supervisor import supervise

    if lifeline:
        _stop_with_standard_input()
    announce = _announcer({"web": web, "http": http}, tokens)
    arena_bytes_max = size_in_bytes(arena_bytes)
    listen_at = listening_address(address, runtime)

    def run() -> None:
        serve_until_stopped(
            listen_at,
            tcp=tcp or (),
            arena_bytes=arena_bytes_max,
            keys=keys,
            plain_bytes=plain_bytes,
            carrier=carrier,
            durability=durability,
            state=state,
            accept_loss=accept_loss,
            snapshots=snapshots,
            records=records,
            coordinator=coordinator,
            spill_dir=spill_dir,
            spill_bytes=size_in_bytes(spill_bytes),
            on_ready=announce,
        )

    if not supervised:
        run()
    elif code := supervise(run):
        raise typer.Exit(code)


def _stop_with_standard_input() -> None:
    """Have the kernel send SIGTERM when the writing end of the pipe at standard input closes.

    The signal goes to the whole process group if this process leads one: to a supervisor and to the server that it
    runs, so that neither outlives the program that started them, whichever of them was killed.
    """
    from transferqueue.errors import UsageError

    if not stat.S_ISFIFO(os.fstat(0).st_mode):
        raise UsageError("--lifeline needs a pipe as standard input; a terminal stops a server with Ctrl-C")
    pid = os.getpid()
    fcntl.fcntl(0, fcntl.F_SETSIG, signal.SIGTERM)
    fcntl.fcntl(0, fcntl.F_SETOWN, -pid if os.getpgrp() == pid else pid)
    fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([0], [], [], 0)[0]:  # it was closed before
        raise UsageError("--lifeline: standard input is closed, or was written to; nothing was started")


def _announcer(ports: Mapping[str, str | None], token_directory: Path | None) -> Callable[[list[str]], None]:
    """What to do when the server listens: print its addresses, start the pages that have a port, and print their links.

    The tokens are made here, once: the links of a supervised server stay valid when it is started again.
    """
    requested = {name: port for name, port in ports.items() if port is not None}
    if not requested and token_directory is None:
        return _announce
    from transferqueue.errors import UsageError
    from transferqueue.web.access import web_place
    from transferqueue.web.subprocesses import KINDS, check_installed, start_page
    from transferqueue.web.token import kept_tokens, new_tokens

    if not requested:
        raise UsageError(f"--tokens {token_directory} has the tokens of --web and --http; give one of them too")
    check_installed()
    places = {name: web_place(port) for name, port in requested.items()}
    tokens = new_tokens() if token_directory is None else kept_tokens(token_directory)
    pages: list[object] = []  # each page ends when the pipe to it is closed

    def announce(addresses: list[str]) -> None:
        started = {
            name: start_page(
                addresses[0],
                f"{place.host}:{place.port}",
                tokens[KINDS[name]],
                KINDS[name],
                metrics_token=tokens["metrics"],
            )
            for name, place in places.items()
        }
        pages.append(started)
        _announce(addresses)
        for name, (_, link) in started.items():
            say(f"{name} {link}")
        sys.stdout.flush()

    return announce


def listening_address(address: str | None, runtime: Path | None) -> str | None:
    """The address to listen at, None for the default one. `runtime` becomes the runtime directory of this process."""
    from transferqueue.errors import UsageError

    if runtime is None:
        return address or os.environ.get(ADDRESS_VARIABLE)
    if address and not address.startswith("tcp://"):
        raise UsageError(
            f"runtime {str(runtime)!r} and address {address!r} both name a directory; give one of them "
            "(the runtime directory of an ipc address is the one its socket is in)"
        )
    os.environ[RUNTIME_VARIABLE] = str(runtime.absolute())
    return address


def _announce(addresses: list[str]) -> None:
    say_ready(addresses)
    if sys.stderr.isatty():
        say(f'join it with connect("{addresses[0]}"); Ctrl-C stops it', err=True)
