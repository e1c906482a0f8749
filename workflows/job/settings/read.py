"""Reads a job from a TOML file: strict, with errors that name the key, its value, the rule and the remedy. No torch
here.

1. A file is a `Job`: each table of the file is a struct of `transferqueue.workflows.job.settings.job`. Unknown keys are
   refused, with the key that was probably meant, or the table that the key belongs to.
2. Changes (``trainer.lr=2e-6``) are applied before anything is checked. The value is TOML; a bare word is a text.
   Tables merge, arrays are replaced, and a number in a key is a place in an array (``engine.0.count=2``).
3. Every job passes `transferqueue.workflows.job.settings.rules.check`, whether it comes from a file or from Python.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from transferqueue.errors import NotFound, UsageError
from transferqueue.workflows.job.settings.changes import apply
from transferqueue.workflows.job.settings.describe import type_of
from transferqueue.workflows.job.settings.job import Job
from transferqueue.workflows.job.settings.keys import check_keys, refusal
from transferqueue.workflows.job.settings.resolve import resolve
from transferqueue.workflows.job.settings.rules import check

FILE_BYTES_MAX: Final = 1 << 20
"""A job file is a page of text; a larger file is something else."""

NAME_BYTES_MAX: Final = 200
"""A folder's name has at most 255 bytes, and the time follows the name of the job."""


def job_from_file(path: Path | str, set: Iterable[str] = ()) -> Job:  # noqa: A002  (the option's name)
    """Return the job that the file says, with everything left open filled in, checked by all rules that need no other
    file.

    set: changes, such as ``["trainer.lr=2e-6", "pacing.mode=sync"]``. Raises `NotFound` for a missing file,
    `UsageError` for text that is no TOML, unknown keys and values out of their range, `Impossible` for a job that could
    not progress.
    """
    values = read_toml(Path(path))
    for change in set:
        apply(values, change)
    return job_from_values(values, named=Path(path).stem)


def job_from_values(values: Mapping[str, Any], *, named: str = "") -> Job:
    """Return the job of plain values (a TOML file as a dict), as `job_from_file` does. named: its name if it gives
    none.

    >>> plain = {"model": {"path": "tiny"}, "data": {"path": "prompts.jsonl"}, "algorithm": {"kind": "grpo"}}
    >>> plain["reward"] = [{"function": "rewards:exact"}]
    >>> plain["engine"] = [{"kind": "transformers"}]
    >>> job_from_values(plain).algorithm.std
    'sample'
    """
    check_keys(values, Job, "")
    try:
        job = msgspec.convert(values, Job, strict=True)
    except msgspec.ValidationError as error:
        raise refusal(str(error), values, type_of) from error
    return checked(job, named=named)


def checked(job: Job, *, named: str = "") -> Job:
    """Return `job` with everything left open filled in, after all rules that need no file. For a job made in Python."""
    if named and not job.name:
        job = msgspec.structs.replace(job, name=named)
    _check_name(job.name)
    check(job)
    resolved = resolve(job)
    check(resolved)
    return resolved


def _check_name(name: str) -> None:
    """Refuse a name that cannot begin the name of a folder: that of the run is ``runs/NAME-TIME``."""
    if len(name.encode(errors="replace")) > NAME_BYTES_MAX or "/" in name or not name.isprintable():
        raise UsageError(
            f"name={name!r}: it is part of the folder of a run; give at most {NAME_BYTES_MAX} bytes of printable text "
            "without a slash"
        )


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file as plain values."""
    try:
        with path.open("rb") as opened:
            text = opened.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError as error:
        raise NotFound(f"job file {path} does not exist") from error
    except OSError as error:
        raise UsageError(f"job file {path} cannot be read: {error.strerror}") from error
    if len(text) > FILE_BYTES_MAX:
        raise UsageError(f"job file {path} is over {FILE_BYTES_MAX:,} bytes; a job file is a page of TOML")
    try:
        return tomllib.loads(text.decode("utf-8-sig"))  # some editors begin a file with a byte order mark
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"job file {path} is not TOML: {error}") from error
