"""Finds the cause of a death in the output of a process: its first exception. The last one is often a consequence."""

from __future__ import annotations

import re
from typing import Final

_TRACEBACK: Final = "Traceback (most recent call last):"
_EXCEPTION: Final = re.compile(r"[A-Za-z_][\w.]*(:|\s*$)")
_CHARS_MAX: Final = 500


def first_exception(output: str) -> str:
    r"""Return the line that names the exception of the first traceback; "" without one.

    Lines of a logger have its prefix before each line of a traceback.

    >>> first_exception("E1 Traceback (most recent call last):\nE1   File ...\nE1 OSError: no disk\nTypeError: None")
    'OSError: no disk'
    """
    lines = output.splitlines()
    for at, line in enumerate(lines):
        prefix, mark, _ = line.partition(_TRACEBACK)
        if mark:
            rests = (rest[len(prefix) :] for rest in lines[at + 1 :] if rest.startswith(prefix))
            if found := next((rest for rest in rests if _EXCEPTION.match(rest)), ""):
                return found.strip()[:_CHARS_MAX]
    return ""
