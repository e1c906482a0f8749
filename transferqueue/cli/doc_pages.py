"""The pages of the installed documentation: package data in a wheel, the files themselves in a checkout."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Final

from transferqueue.errors import NotFound

_MENTIONS_SHOWN: Final = 6
_HEADING_WEIGHT: Final = 20
"""A page whose heading has the words is about them."""
_NOT_FOR_USERS: Final = ("decisions", "architecture", "testing", "changelog", "contributing", "bench")
_PACKAGE: Final = Path(__file__).resolve().parent.parent
_SECTIONS: Final = ("learn", "how-to", "reference", "understand", "operate", "contribute", "decisions")
"""Folders of `docs/`, in the order of the site's navigation."""


def folder() -> Path:
    """The folder with README.md, docs/, examples/ and deploy/. `NotFound` for an installation without them."""
    for place in (_PACKAGE / "documentation", _PACKAGE.parent):
        if (place / "docs" / "learn" / "tour.md").exists():
            return place
    raise NotFound(f"this installation has no documentation in {_PACKAGE / 'documentation'}; install the wheel again")


def pages() -> dict[str, Path]:
    """Each page by its name, in the order of the site: ``tour``, ``drop-in``, ``reference/policies``, ``examples``."""
    root = folder()
    files = sorted(_files(root), key=lambda page: _place(page.relative_to(root)))
    return {_name(page.relative_to(root)): page for page in files}


def page(name: str, besides: Iterable[str] = ()) -> Path:
    """The page of this name, or the only one whose name ends so.

    Args:
        name: A name in any case, a path, or the last part of one.
        besides: Names other than pages that the error may suggest. Default: none.

    Raises:
        NotFound: No page has this name; the message lists up to five near names.
    """
    known = pages()
    wanted = name.lower().replace("_", "-").removesuffix(".md").removeprefix("docs/")
    last = wanted.rpartition("/")[2]
    same_end = [known[each] for each in known if each.rpartition("/")[2] == last]
    if wanted in known or len(same_end) == 1:
        return known.get(wanted) or same_end[0]
    raise NotFound(
        f'no page, command or public name is called "{name[:80]}"; {_near(name, [*known, *besides])}'
        "`transferqueue docs` lists the pages, and `transferqueue docs reference` the names"
    )


def mentions(words: str) -> dict[str, Path]:
    """The pages for users that speak of these words, those with them in a heading or most often first; at most six."""
    pattern = re.compile(rf"(?<!\w){re.escape(words)}s?(?!\w)", re.IGNORECASE)
    heading_pattern = re.compile(rf"^#.*{pattern.pattern}", re.IGNORECASE | re.MULTILINE)
    counts = {
        name: sum(
            weight * len(each.findall(path.read_text(encoding="utf-8")))
            for weight, each in ((1, pattern), (_HEADING_WEIGHT, heading_pattern))
        )
        for name, path in pages().items()
        if not name.startswith(_NOT_FOR_USERS)
    }
    most = sorted((name for name in counts if counts[name]), key=lambda name: -counts[name])[:_MENTIONS_SHOWN]
    return {name: pages()[name] for name in most}


def _near(name: str, known: Iterable[str]) -> str:
    """Up to five names like this one, by the whole name or by its last part, in any case."""
    by_letters: dict[str, str] = {}
    for each in known:
        by_letters.setdefault(each.lower(), each)
    wanted = name.lower()[:80]
    near = [*get_close_matches(wanted, by_letters, n=5), *get_close_matches(wanted.rpartition(".")[2], by_letters, n=2)]
    return f"near it are {', '.join(dict.fromkeys(by_letters[each] for each in near[:5]))}; " if near else ""


def heading(path: Path) -> str:
    """The title of a page."""
    return path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")


def _files(root: Path) -> Iterator[Path]:
    yield from root.glob("*.md")
    for below in (*(f"docs/{section}" for section in _SECTIONS), "deploy", "examples", "bench"):
        yield from (root / below).glob("*.md")


def _name(where: Path) -> str:
    parts = [part.lower().replace("_", "-") for part in where.with_suffix("").parts]
    parts = parts[1:] if parts[0] == "docs" else parts
    if parts[-1] == "readme" and len(parts) > 1:
        parts.pop()
    elif parts[0] in ("learn", "how-to", "understand", "operate", "contribute"):
        parts = parts[1:]  # the file's name is enough
    return "/".join(parts)


def _place(where: Path) -> tuple[int, str]:
    """Sort key: the README, the sections of the site, then the other pages."""
    if where.name == "README.md" and len(where.parts) == 1:
        return -1, ""
    section = where.parts[1] if where.parts[0] == "docs" else ""
    return _SECTIONS.index(section) if section else len(_SECTIONS), str(where)
