"""Options that several commands share. An option of one command alone is declared in that command's file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from transferqueue.cli.connection import ADDRESS_VARIABLE

REACH: Final = "Reach"
MEMORY: Final = "Memory and files"
"""Panels of the help pages on which shared options stand."""

AddressOption = Annotated[
    str | None,
    typer.Option(
        "--address",
        "-a",
        metavar="ADDRESS",
        show_default=False,
        help="The server: ipc://path, tcp://host:port or a join token; of several coordinators all, joined by commas. "
        f"Default: ${ADDRESS_VARIABLE}, else "
        "$TRANSFERQUEUE_TOKEN, else the server of this user.",
    ),
]
AddressArgument = Annotated[
    str | None, typer.Argument(metavar="ADDRESS", show_default=False, help="The same as --address.")
]


def arena_bytes_option(help_text: str, *, panel: str | None = None) -> Any:
    """The option ``--arena-bytes``: a size as text; `size_in_bytes` reads it."""
    return typer.Option("--arena-bytes", metavar="SIZE", show_default=False, rich_help_panel=panel, help=help_text)


ArenaBytesOption = Annotated[
    str | None,
    arena_bytes_option(
        "Ceiling of the memory for rows, such as 64GiB. Default: 8GiB, less where shared memory has less.",
        panel=MEMORY,
    ),
]
CarrierOption = Annotated[
    str | None,
    typer.Option(
        "--bytes",
        metavar="CARRIER",
        show_default=False,
        rich_help_panel=REACH,
        help="The carrier of columns to and from other machines: stream (a connection), or an installed "
        "carrier such as nixl (one-sided, over RDMA; needs the extra nixl and an RDMA device), which encrypts nothing. "
        "Default: $TRANSFERQUEUE_BYTES, else stream.",
    ),
]


def size_in_bytes(text: str | None) -> int | None:
    """A size such as ``64GiB`` in bytes, None where no size is given. `UsageError` if it is not a size."""
    from transferqueue.limits import parse_bytes

    return parse_bytes(text) if text else None


def runtime_option(help_text: str, *, panel: str | None = None) -> Any:
    """The option ``--runtime``: the directory of a server's socket and locks."""
    return typer.Option("--runtime", show_default=False, rich_help_panel=panel, help=help_text)


def directory_option(name: str, help_text: str, *, panel: str | None = None) -> Any:
    """An option whose value is a directory. The help text names the default."""
    return typer.Option(name, metavar="DIR", show_default=False, rich_help_panel=panel, help=help_text)


def folder_to_write(option: str, folder: Path) -> Path:
    """Make `folder` if it is missing, before the work whose results go there. `UsageError` if it cannot be made, or not
    be written to."""
    from transferqueue.errors import UsageError

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{option} {folder} cannot be made: {error.strerror}; name another folder") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"{option} {folder} cannot be written to; name a folder of your own")
    return folder


def file_to_write(option: str, file: Path) -> Path:
    """Make the folder of `file` if it is missing, before the work whose result goes there. `UsageError` if the file
    cannot be written."""
    from transferqueue.errors import UsageError

    if file.is_dir() or (file.exists() and not os.access(file, os.W_OK)):
        raise UsageError(f"{option} {file} is {'a folder' if file.is_dir() else 'not writable'}; name another file")
    folder_to_write(option, file.parent)
    return file


SpillDirOption = Annotated[
    Path | None,
    directory_option(
        "--spill-dir",
        "Directory on a disk, made private (0700). When the arena fills, the server moves rows there that no client "
        "reads; a lease or a read loads them back. Needs --spill-bytes. Nothing in it outlives the process. Default: "
        "producers wait for memory.",
        panel=MEMORY,
    ),
]
SpillBytesOption = Annotated[
    str | None,
    typer.Option(
        "--spill-bytes",
        metavar="SIZE",
        show_default=False,
        rich_help_panel=MEMORY,
        help="The most bytes in --spill-dir, such as 200GiB.",
    ),
]


def json_option(help_text: str) -> Any:
    """The option ``--json``: print for programs."""
    return typer.Option("--json", help=help_text)
