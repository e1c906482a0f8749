r"""Reward functions that many jobs use, in TRL's form: name them in a job file as
``transferqueue.workflows.job.rewards:exact_match``.

Each takes ``completions`` (texts, or conversations, whose last message counts) and returns one number for each, or None
where it does not apply. Keyword arguments with a default are set by ``args`` of the reward.

A job file that uses three of them::

    reward = [
        { function = "transferqueue.workflows.job.rewards:last_number" },
        { function = "transferqueue.workflows.job.rewards:matches", weight = 0.1, args = { pattern = "<b>.*</b>" } },
        { function = "transferqueue.workflows.job.rewards:too_long", weight = 0.5, args = { words_max = 200 } },
    ]
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, Final

_NUMBER: Final = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3})?")
_MARKED: Final = re.compile(r"####\s*([^\n]+)")
_BOXED: Final = "\\boxed{"


def text_of(completion: Any) -> str:
    """Return the text of a completion: itself, or the content of the last message of a conversation.

    >>> text_of([{"role": "assistant", "content": "4"}])
    '4'
    """
    if isinstance(completion, str):
        return completion
    content = completion[-1].get("content") if completion else ""
    return content if isinstance(content, str) else ""


def exact_match(completions: Sequence[Any], answer: Sequence[Any], *, ignore_case: bool = False) -> list[float]:
    r"""1 where the whole completion is the answer, white space at the ends apart; else 0.

    >>> exact_match([" Paris\n", "paris"], ["Paris", "Paris"])
    [1.0, 0.0]
    """
    fold = str.casefold if ignore_case else str
    return [
        float(fold(text_of(completion).strip()) == fold(str(right).strip()))
        for completion, right in zip(completions, answer, strict=True)
    ]


def contains_answer(completions: Sequence[Any], answer: Sequence[Any], *, ignore_case: bool = True) -> list[float]:
    """1 where the answer stands anywhere in the completion as words of its own; else 0.

    >>> contains_answer(["It is Paris.", "Parisian"], ["paris", "paris"])
    [1.0, 0.0]
    """
    flags = re.IGNORECASE if ignore_case else re.NOFLAG
    return [
        float(bool(re.search(rf"(?<!\w){re.escape(str(right).strip())}(?!\w)", text_of(completion), flags)))
        for completion, right in zip(completions, answer, strict=True)
    ]


def last_number(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    r"""1 where the completion's final number equals the answer's, else 0; None where the answer has no number.

    The final number of a text is the one in its last ``\boxed{...}``, else after its last ``####`` (as in GSM8K), else
    the last one. Numbers are compared by value: 1,000 is 1000.0.

    >>> last_number(["6 * 7 = 42", "#### 1,000", r"so \boxed{0.5}", "no idea"], ["#### 42", "1000.0", ".5", 3])
    [1.0, 1.0, 1.0, 0.0]
    """
    return [
        None if (right := final_number(str(value))) is None else float(final_number(text_of(completion)) == right)
        for completion, value in zip(completions, answer, strict=True)
    ]


def final_number(text: str) -> Decimal | None:
    r"""Return the final number of a text, as `last_number` finds it; None if it has none.

    >>> final_number(r"first 3, then \boxed{\frac{1}{2} = 0.5}, then 9")
    Decimal('0.5')
    """
    boxed = _last_boxed(text)
    marked = _MARKED.findall(text)
    source = boxed if boxed is not None else marked[-1] if marked else text
    numbers = _NUMBER.findall(source)
    try:
        return Decimal(numbers[-1].replace(",", "")) if numbers else None
    except InvalidOperation:
        return None


def _last_boxed(text: str) -> str | None:
    """Return what stands in the braces of the last box; None if no box is closed."""
    start = text.rfind(_BOXED)
    depth = 1
    for at in range(start + len(_BOXED), len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if not depth:
            return text[start + len(_BOXED) : at]
    return None


def matches(completions: Sequence[Any], *, pattern: str) -> list[float]:
    """1 where the whole completion matches the regular expression (a dot matches line ends too), else 0: a reward for a
    format.

    >>> matches(["<think>2+2</think>4", "4"], pattern="<think>.*</think>.+")
    [1.0, 0.0]
    """
    compiled = re.compile(pattern, re.DOTALL)
    return [float(bool(compiled.fullmatch(text_of(completion).strip()))) for completion in completions]


def too_long(completions: Sequence[Any], *, words_max: int) -> list[float]:
    """0 up to `words_max` words, then a penalty that falls to -1 at twice as many.

    >>> too_long(["a b", "a b c", "a b c d e f"], words_max=2)
    [0.0, -0.5, -1.0]
    """
    over = [len(text_of(completion).split()) - words_max for completion in completions]
    return [-min(1.0, words / words_max) if words > 0 else 0.0 for words in over]


def token_length(completion_ids: Sequence[Sequence[int]], *, tokens_max: int) -> list[float]:
    """Minus the share of `tokens_max` that a completion uses, at most -1: shorter is better.

    >>> token_length([[1, 2], [1, 2, 3, 4, 5]], tokens_max=4)
    [-0.5, -1.0]
    """
    return [-min(1.0, len(ids) / tokens_max) for ids in completion_ids]
