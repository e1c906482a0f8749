r"""Escapes unprintable characters in text that other processes sent.

Clients choose labels, keys, tags, reasons and host names. A control character in them could move the cursor, change colours or titles,
send input on the terminal's behalf, or reverse the order of a line. So every screen, log line, peer's error and metric shows such
characters as Python writes them: ``\x1b``, ``\u202e``.
"""

from __future__ import annotations

import re
from typing import Final

_JSON_KEPT: Final = re.compile(r"[^\x20-\x7e\n]")


def visible(text: str) -> str:
    r"""`text` with unprintable characters escaped: controls, direction marks, zero-width characters and line ends.

    >>> visible("worker\x1b[2J\u202e")
    'worker\\x1b[2J\\u202e'
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


ERROR_CHARS_MAX: Final = 2000
"""Of the text of an error: it may echo a value of any size. Errors cannot import `limits`, which raises them."""
SHOWN_CHARS_MAX: Final = 128
"""Of a value that an error echoes: what names and short lists have."""
_LONG_WORD: Final = re.compile(r"(\S{40})\S{160,}")
_TAIL_CHARS: Final = 800
"""What is kept of the end, where the remedy stands."""


def shown(value: object) -> str:
    """`repr` of a value for an error, of at most about `SHOWN_CHARS_MAX` characters, also where Python refuses to write it.

    >>> shown("x" * 100_000), shown(10**5000)
    ("'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx...", 'an int of 16610 bits')
    """
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of over 4,300 digits, or deep nesting
        return f"an int of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
    return text if len(text) <= SHOWN_CHARS_MAX else f"{text[:40]}..."


def cut(text: str) -> str:
    """A text of at most about `ERROR_CHARS_MAX` characters. In a longer one, words of hundreds of characters are cut first, then the middle.

    >>> cut("name " + "x" * 100_000 + " is too long")
    'name xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx... is too long'
    """
    if len(text) > ERROR_CHARS_MAX:
        text = _LONG_WORD.sub(r"\1...", text)
    left_out = len(text) - ERROR_CHARS_MAX
    if left_out <= 0:
        return text
    return f"{text[: ERROR_CHARS_MAX - _TAIL_CHARS]} ... {left_out:,} characters ... {text[-_TAIL_CHARS:]}"


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
