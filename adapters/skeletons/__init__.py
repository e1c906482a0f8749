"""Template files of a new adapter, one set for each kind; `transferqueue new-adapter` writes them."""

from __future__ import annotations

import re
from pathlib import Path
from string import Template
from typing import Final

from transferqueue.errors import AlreadyExists, UsageError

KINDS: Final = ("generator", "learner", "stage")
_NAME: Final = re.compile(r"[a-z][a-z0-9_]*")
_HERE: Final = Path(__file__).parent


def write(name: str, kind: str, directory: Path) -> list[Path]:
    """Write the package ``transferqueue_NAME`` into a new folder of `directory`, and return its files.

    The package runs as written: its tests skip unimplemented parts. Raises `UsageError` for an invalid name or
    kind, and `AlreadyExists` if the folder exists; nothing is written then.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(f"adapter name {name!r}: give lower-case letters, digits and underscores, a letter first")
    if kind not in KINDS:
        raise UsageError(f"adapter kind {kind!r} is not one of {', '.join(KINDS)}")
    folder = directory / f"transferqueue_{name}"
    words = {"name": name, "Name": "".join(word.capitalize() for word in name.split("_"))}
    texts = {path: _text(template, words) for path, template in _files(folder, name, kind).items()}
    try:
        folder.mkdir(parents=True)
    except FileExistsError as error:
        raise AlreadyExists(f"{folder} is there already; give another name or directory") from error
    except OSError as error:
        raise UsageError(f"{folder} cannot be made: {error.strerror}; give another directory") from error
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return list(texts)


def _files(folder: Path, name: str, kind: str) -> dict[Path, str]:
    return {
        folder / "pyproject.toml": "pyproject.txt",
        folder / f"transferqueue_{name}.py": f"{kind}.txt",
        folder / f"test_{name}.py": f"{kind}.test.txt",
    }


def _text(template: str, words: dict[str, str]) -> str:
    return Template((_HERE / template).read_text(encoding="utf-8")).substitute(words)
