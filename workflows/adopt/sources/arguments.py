"""Reads the words of a command line: overrides (``a.b=c``) and options (``--key value``), as plain values."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

from transferqueue.workflows.adopt.sources.yaml_files import read_value

_OVERRIDE: Final = re.compile(r"(\+\+|\+|~)?([A-Za-z_][\w./@-]*)=(.*)", re.DOTALL)
_OPTION: Final = re.compile(r"--([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)


def overrides(words: Iterable[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the values of overrides in Hydra's form, and the words that are none.

    Read are ``a.b=c``, ``+a.b=c`` and ``++a.b=c``. A group (``a/b=c``, ``a@b=c``), a deletion (``~a.b``) and a sweep
    (``a=1,2``) are not, and come back as words.

    >>> overrides(["a.b=1e-6", "+c=[x,y]", "~d", "e/f=g", "h=1,2", "--i"])
    ({'a.b': 1e-06, 'c': ['x', 'y']}, ['~d', 'e/f=g', 'h=1,2', '--i'])
    """
    values: dict[str, Any] = {}
    others = []
    for word in words:
        found = _OVERRIDE.fullmatch(word)
        if found is None or found[1] == "~" or set(found[2]) & set("/@") or _is_sweep(found[3]):
            others.append(word)
        else:
            values[found[2]] = read_value(found[3]) if found[3] else ""
    return values, others


def _is_sweep(text: str) -> bool:
    return "," in text and not text.startswith(("[", "{", "'", '"'))


def options(words: Iterable[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the values of options, as texts, and the words before the first one.

    An option without a value is True, with several a list; ``--key=value`` works too. An option that comes twice has
    its last value.

    >>> options(["train.py", "--lr", "1e-6", "--flag", "--range", "0", "1", "--a=b"])
    ({'lr': '1e-6', 'flag': True, 'range': ['0', '1'], 'a': 'b'}, ['train.py'])
    """
    values: dict[str, Any] = {}
    others: list[str] = []
    current = ""
    for word in words:
        if found := _OPTION.fullmatch(word):
            current = found[1] if found[2] is None else ""
            values[found[1]] = True if found[2] is None else found[2]
        elif not current:
            others.append(word)
        elif values[current] is True:
            values[current] = word
        else:
            before = values[current]
            values[current] = [*before, word] if isinstance(before, list) else [before, word]
    return values, others
