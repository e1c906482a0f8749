"""Directories of one user, and of nobody else."""

from __future__ import annotations

from pathlib import Path


def make_directories(path: Path) -> None:
    """Make a directory, and those above it that are missing, for this user alone. One that is there stays as it is.

    Not ``mkdir(parents=True)``: that gives its mode to the last one only, and whoever may write to one above can put another in
    its place.
    """
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for one in reversed(missing):
        one.mkdir(mode=0o700, exist_ok=True)  # somebody else may make it at the same time
