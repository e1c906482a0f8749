"""Options that several commands share. An option of one command alone is declared in that command's file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from transferqueue.cli.connection import ADDRESS_VARIABLE

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


def arena_bytes_option(help_text: str) -> Any:
    """The option ``--arena-bytes``: a size as text; `size_in_bytes` reads it."""
    return typer.Option("--arena-bytes", metavar="SIZE", show_default=False, help=help_text)


ArenaBytesOption = Annotated[
    str | None,
    arena_bytes_option(
        "Ceiling of the memory for rows, such as 64GiB. Default: 8GiB, less where shared memory has less.",
    ),
]
CarrierOption = Annotated[
    str | None,
    typer.Option(
        "--bytes",
        metavar="CARRIER",
        show_default=False,
        help="What carries columns to and from clients elsewhere: stream (a connection), or a carrier beside it, such "
        "as nixl (over RDMA, one-sided; needs the extra nixl and an RDMA device). A carrier encrypts nothing. "
        "Default: $TRANSFERQUEUE_BYTES, else stream.",
    ),
]


def size_in_bytes(text: str | None) -> int | None:
    """A size such as ``64GiB`` in bytes, None where no size is given. `UsageError` if it is not a size."""
    from transferqueue.limits import parse_bytes

    return parse_bytes(text) if text else None


def runtime_option(help_text: str) -> Any:
    """The option ``--runtime``: the directory of a server's socket and locks."""
    return typer.Option("--runtime", show_default=False, help=help_text)


def directory_option(name: str, help_text: str) -> Any:
    """An option whose value is a directory; the help says what stands for it where none is given."""
    return typer.Option(name, metavar="DIR", show_default=False, help=help_text)


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
        "Directory on a disk, made private (0700), to which rows that nobody reads go when the arena fills; they come "
        "back when they are leased or read. Needs --spill-bytes. Nothing in it outlives the process. Default: "
        "producers wait for memory.",
    ),
]
SpillBytesOption = Annotated[
    str | None,
    typer.Option(
        "--spill-bytes",
        metavar="SIZE",
        show_default=False,
        help="The most bytes in --spill-dir, such as 200GiB.",
    ),
]


def json_option(help_text: str) -> Any:
    """The option ``--json``: print for programs."""
    return typer.Option("--json", help=help_text)
