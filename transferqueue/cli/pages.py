"""The pages of the documentation that this installation has: in a wheel as package data, in a checkout where they are
written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Final

from transferqueue.errors import NotFound

_PACKAGE: Final = Path(__file__).resolve().parent.parent
_FIRST: Final = ("readme", "tour", "guides", "recipes", "concepts", "reference", "operations")
"""What a newcomer reads first; other pages follow by name."""


def folder() -> Path:
    """The folder with README.md, docs/, examples/ and deploy/. `NotFound` for an installation without them."""
    for place in (_PACKAGE / "documentation", _PACKAGE.parent):
        if (place / "docs" / "TOUR.md").exists():
            return place
    raise NotFound(f"this installation has no documentation in {_PACKAGE / 'documentation'}; install the wheel again")


def pages() -> dict[str, Path]:
    """Each page by its name: ``tour``, ``drop-in``, ``guides/embed``, ``reference/policies``, ``examples``."""
    found = {_name(page.relative_to(folder())): page for page in _files(folder())}
    return dict(sorted(found.items(), key=lambda entry: (_rank(entry[0]), entry[0])))


def page(name: str, besides: Iterable[str] = ()) -> Path:
    """The page of this name, or whose last part it is. `NotFound` lists names that are near.

    besides: names that are no pages, which the error may list, too.
    """
    known = pages()
    wanted = name.lower().replace("_", "-").removesuffix(".md").removeprefix("docs/")
    same_end = [known[each] for each in known if each.rpartition("/")[2] == wanted]
    if wanted in known or len(same_end) == 1:
        return known.get(wanted) or same_end[0]
    raise NotFound(
        f'no page and no public name is called "{name[:80]}"; {_near(name, [*known, *besides])}'
        "`transferqueue docs` lists the pages, and `transferqueue docs reference` the names"
    )


def _near(name: str, known: Iterable[str]) -> str:
    """The names most like this one, by all of it or by its last part; in small letters or as they are."""
    by_letters: dict[str, str] = {}
    for each in known:
        by_letters.setdefault(each.lower(), each)
    wanted = name.lower()[:80]
    near = [*get_close_matches(wanted, by_letters, n=4), *get_close_matches(wanted.rpartition(".")[2], by_letters, n=2)]
    return f"near it are {', '.join(dict.fromkeys(by_letters[each] for each in near[:4]))}; " if near else ""


def heading(path: Path) -> str:
    """The title of a page."""
    return path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")


def _files(root: Path) -> Iterator[Path]:
    yield from root.glob("*.md")
    for below in ("docs", "docs/guides", "docs/reference", "docs/decisions", "deploy", "examples", "bench"):
        yield from (root / below).glob("*.md")


def _name(where: Path) -> str:
    parts = [part.lower().replace("_", "-") for part in where.with_suffix("").parts]
    parts = parts[1:] if parts[0] == "docs" else parts
    return "/".join(parts[:-1] if parts[-1] == "readme" and len(parts) > 1 else parts)


def _rank(name: str) -> int:
    top = name.partition("/")[0]
    return _FIRST.index(top) if top in _FIRST else len(_FIRST) + ("/" in name)
