r"""Escapes unprintable characters in text that other processes sent.

Clients choose labels, keys, tags, reasons and host names. A control character in them could move the cursor, change
colours or titles, send input on the terminal's behalf, or reverse the order of a line. So every screen, log line,
peer's error and metric shows such characters as Python writes them: ``\x1b``, ``\u202e``.
"""

from __future__ import annotations

import re
from typing import Final

SHOWN_CHARS: Final = 120
"""Characters of a caller's value that a message shows."""
TEXT_SHOWN_CHARS: Final = 2_000
"""Characters of an error's text: above, its middle is left out, so that its subject and its remedy are there."""
_DIGITS_MAX: Final = 40
_ITEMS_MAX: Final = 64
_JSON_KEPT: Final = re.compile(r"[^\x20-\x7e\n]")


def visible(text: str) -> str:
    r"""`text` with unprintable characters escaped: controls, direction marks, zero-width characters and line ends.

    >>> visible("worker\x1b[2J\u202e")
    'worker\\x1b[2J\\u202e'
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def shown(value: object, chars: int = SHOWN_CHARS) -> str:
    """The repr of a caller's value for a message, cut; an integer of very many digits as its number of bits. Never
    raises.

    >>> shown("a" * 1000, 12), shown(10**400), shown([1, "b"])
    ("'aaaaaaaaaaa...", 'an integer of 1,329 bits', "[1, 'b']")
    """
    if isinstance(value, int) and value.bit_length() > 4 * _DIGITS_MAX:
        return f"an integer of {value.bit_length():,} bits"  # Python refuses to write integers of over 4,300 digits
    try:
        is_long = type(value) in (str, bytes, list, tuple)
        text = repr(value[: max(chars, _ITEMS_MAX)] if is_long else value)  # type: ignore[index]
    except Exception:  # noqa: BLE001  (a repr of the caller's, inside a message about something else)
        text = f"<{type(value).__name__}>"
    return text if len(text) <= chars else f"{text[:chars]}..."


def shortened(text: str, chars: int = TEXT_SHOWN_CHARS) -> str:
    """`text`, or its beginning and end if it has more than `chars` characters.

    >>> shortened("x" * 100_000, 60)
    'xxxxxxxxxxxxxxxxxxxxxxxx... of 100,000 characters ...xxxxxxx'
    """
    if len(text) <= chars:
        return text
    note = f"... of {len(text):,} characters ..."
    tail = (chars - len(note)) // 4
    return f"{text[: chars - len(note) - tail]}{note}{text[len(text) - tail :]}"


def counted(number: int, noun: str, one: str = "", many: str = "") -> str:
    """A number with its noun, and the verb that agrees with it.

    >>> counted(1, "row", "is", "are"), counted(2, "row", "is", "are"), counted(0, "group")
    ('1 row is', '2 rows are', '0 groups')
    """
    words = f"{number} {noun}" if number == 1 else f"{number} {noun}s"
    verb = one if number == 1 else many
    return f"{words} {verb}" if verb else words


def visible_lines(text: str) -> str:
    """`visible` of each line of a text; line ends stay."""
    return text if text.isprintable() else "\n".join(map(visible, text.split("\n")))


def visible_json(document: str) -> str:
    """A JSON document with unprintable characters as JSON escapes."""
    return _JSON_KEPT.sub(_escaped_in_json, document)


def _escaped_in_json(match: re.Match[str]) -> str:
    char = match.group()
    if char.isprintable():
        return char
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at] << 8 | units[at + 1]:04x}" for at in range(0, len(units), 2))
