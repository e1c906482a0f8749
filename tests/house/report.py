"""The figures as text, alone or as before → after."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

FOLDERS_SHOWN: Final = 20
NAMES_SHOWN: Final = 8
PLACES_SHOWN: Final = 6
IMPORTS_SHOWN: Final = 4


def text(now: Mapping[str, Any], base: Mapping[str, Any] | None = None, *, verbose: bool = False) -> str:
    """A section for each figure. verbose: with every name and place, not the first few."""
    return "\n".join(_sections(now, base, verbose)) + "\n"


def _sections(now: Mapping[str, Any], base: Mapping[str, Any] | None, verbose: bool) -> Iterator[str]:
    was = base or {}
    yield _count("lines", was.get("lines"), now["lines"])
    yield _count("modules", was.get("modules"), now["modules"])
    yield from _table("\nentries per folder, without __init__.py", was.get("folders"), now["folders"], verbose)
    yield from _table("\nlines per room", was.get("lines per room"), now["lines per room"], True)
    yield "\nfunctions"
    for name in ("count", "median lines", "p90 lines"):
        yield "  " + _count(name, was.get("functions", {}).get(name), now["functions"][name])
    yield from (f"  {length:5}  {name}" for name, length in now["functions"]["longest"].items())
    for title in ("class names used more than once", "file names used more than once"):
        yield ""
        yield _count(title, _size(was.get(title)), len(now[title]))
        shown = sorted(now[title].items(), key=lambda item: (-len(item[1]), item[0]))
        for name, places in shown if verbose else shown[:NAMES_SHOWN]:
            yield f"  {len(places):3} {name}: {', '.join(places)}"
        yield from _more(shown, NAMES_SHOWN, verbose)
    yield from _circles(now["circles"], was.get("circles", {}), verbose)
    for title in ("ledger.state in server", "message types by isinstance", "message types by match"):
        yield ""
        yield _count(title, _size(was.get(title)), len(now[title])) + f" ({_by_room(now[title])})"
        yield from (f"  {place}" for place in (now[title] if verbose else now[title][:PLACES_SHOWN]))
        yield from _more(now[title], PLACES_SHOWN, verbose)


def _size(value: Any) -> int | None:
    return None if value is None else len(value)


def _count(name: str, was: float | None, now: float) -> str:
    return f"{name}: {now:,g}" if was is None else f"{name}: {was:,g} → {now:,g}"


def _table(title: str, was: Mapping[str, int] | None, now: Mapping[str, int], everything: bool) -> Iterator[str]:
    yield title + (": before → after" if was is not None else "")
    names = [*now, *(name for name in was or () if name not in now)]
    names.sort(key=lambda name: -max(now.get(name, 0), (was or {}).get(name, 0)))
    for name in names if everything else names[:FOLDERS_SHOWN]:
        before = "" if was is None else f"{was.get(name, '-'):>7} →"
        yield f"  {before}{now.get(name, '-'):>7}  {name}"
    yield from _more(names, FOLDERS_SHOWN, everything)


def _circles(now: Mapping[str, Any], was: Mapping[str, Any], verbose: bool) -> Iterator[str]:
    yield "\nimport circles"
    for title, found in now.items():
        yield "  " + _count(title, _size(was.get(title)), len(found))
        for circle in found:
            yield f"    {', '.join(circle['members'])}"
            imports = circle["imports"]
            yield from (f"        {one}" for one in (imports if verbose else imports[:IMPORTS_SHOWN]))
            yield from _more(imports, IMPORTS_SHOWN, verbose)


def _by_room(places: Sequence[str]) -> str:
    rooms = Counter(place.split(".")[1] for place in places)
    return ", ".join(f"{room} {count}" for room, count in rooms.most_common())


def _more(found: Sequence[object], shown: int, verbose: bool) -> Iterator[str]:
    if not verbose and len(found) > shown:
        yield f"      and {len(found) - shown} more: -v"
