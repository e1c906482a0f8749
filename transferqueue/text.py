r"""Text of others, made safe to show.

Labels, keys, tags, reasons and hosts are whatever a client says they are. Shown as they are, a control character in them moves the cursor,
changes colours or titles, answers on the terminal's behalf, or turns the order of a line around. So every screen, log line, error
from a peer and metric shows such characters as Python writes them: ``\x1b``, ``\u202e``.
"""

from __future__ import annotations

import re
from typing import Final

_JSON_KEPT: Final = re.compile(r"[^\x20-\x7e\n]")


def visible(text: str) -> str:
    r"""`text` with each character that does not print (controls, marks of direction, zero-width ones, line ends) escaped.

    >>> visible("worker\x1b[2J\u202e")
    'worker\\x1b[2J\\u202e'
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def visible_lines(text: str) -> str:
    """`visible` of each line: for text that has lines of its own."""
    return text if text.isprintable() else "\n".join(map(visible, text.split("\n")))


def visible_json(document: str) -> str:
    """A JSON document, as it is, but with characters that do not print written as JSON escapes them."""
    return _JSON_KEPT.sub(_escaped_in_json, document)


def _escaped_in_json(found: re.Match[str]) -> str:
    one = found.group()
    if one.isprintable():
        return one
    units = one.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at] << 8 | units[at + 1]:04x}" for at in range(0, len(units), 2))
