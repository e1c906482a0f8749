"""Format numbers for people: bytes, counts, spans of time, rates. For sentences and screens."""

from __future__ import annotations

from typing import Final

_SIZES: Final = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_COUNTS: Final = ((10**9, "G"), (10**6, "M"), (10**3, "k"))
_COUNT_EXACT_BELOW: Final = 100_000
"""A count below this is written in full, so that a person can compare it with a limit."""


def size(nbytes: float) -> str:
    """Bytes: ``512 B``, ``1.5 MiB``, ``24 GiB``."""
    for unit, name in _SIZES:
        if abs(nbytes) >= unit:
            return f"{_short(nbytes / unit)} {name}"
    return f"{int(nbytes)} B"


def count(number: float) -> str:
    """Rows: ``840``, ``65,536``, ``1.2M``."""
    if abs(number) < _COUNT_EXACT_BELOW:
        return f"{int(number):,}"
    unit, name = next(scale for scale in _COUNTS if abs(number) >= scale[0])
    return f"{_short(number / unit)}{name}"


def span(seconds: float) -> str:
    """Time: ``85 ms``, ``8.2 s``, ``74 s``, ``3 min 12 s``, ``2 h 5 min``, ``4 d 3 h``."""
    if seconds < 0.9995:
        return f"{max(seconds, 0) * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 172_800:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def rate(per_s: float | None) -> str:
    """Rows per second: ``512``, ``0.4``, ``12.5k``; a dash where none is known yet."""
    if per_s is None:
        return "–"
    if 0 < per_s < 9.95:
        return f"{per_s:.1f}"
    return count(round(per_s)) if per_s < 10_000 else f"{_short(per_s / _scale(per_s)[0])}{_scale(per_s)[1]}"


def rows(number: int) -> str:
    """``1 row``, ``3 rows``."""
    return plural(number, "row")


def plural(number: int, noun: str) -> str:
    """``1 group``, ``3 groups``, ``2 batches``."""
    ending = "es" if noun.endswith(("ch", "s", "x")) else "s"
    return f"{count(number)} {noun}" if number == 1 else f"{count(number)} {noun}{ending}"


def _scale(number: float) -> tuple[int, str]:
    return next(scale for scale in _COUNTS if number >= scale[0])


def _short(number: float) -> str:
    """At most three digits, without a useless zero: ``1.2``, ``24``, ``310``."""
    return f"{number:.1f}".removesuffix(".0") if abs(number) < 99.95 else f"{number:.0f}"
