"""The outcomes of a conformance kit: one for each check, and how a check reports that an engine does not support
something."""

from __future__ import annotations

import enum
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from transferqueue.adapters.protocols import Unsupported
from transferqueue.lazy import renamed_names

S = TypeVar("S")


class Verdict(enum.Enum):
    """Outcome of one check."""

    PASSED = "yes"
    UNSUPPORTED = "no"
    """The engine raised `Unsupported`, as it must."""
    FAILED = "FAILED"


@dataclass(frozen=True)
class CheckOutcome:
    """The outcome of one check of one subject. text: the text of the engine; or what a failed check says, such as the
    rule that does not hold, and the traceback, which ends with it again."""

    check: str
    verdict: Verdict
    text: str = ""


class RuleBroken(AssertionError):
    """A rule of the kit was broken; the text says which, and how."""


def require(holds: bool, rule: str, seen: object = "") -> None:
    """Raise `RuleBroken` unless `holds`. Not an assert statement: the kit checks under ``python -O`` too."""
    if not holds:
        raise RuleBroken(f"{rule}; seen: {seen}" if seen != "" else rule)


def run(checks: Iterable[Callable[[S], None]], subject: S) -> list[CheckOutcome]:
    """Run all checks on a subject; none stops another."""
    return [judge(check, subject) for check in checks]


def judge(check: Callable[[S], None], subject: S) -> CheckOutcome:
    """Run one check; an error that it raises becomes its outcome."""
    try:
        check(subject)
    except Unsupported as error:
        return CheckOutcome(check.__name__, Verdict.UNSUPPORTED, str(error))
    except Exception as error:  # noqa: BLE001  (it is the outcome)
        said = str(error) or type(error).__name__
        return CheckOutcome(check.__name__, Verdict.FAILED, f"{said}\n\n{traceback.format_exc()}")
    return CheckOutcome(check.__name__, Verdict.PASSED)


__getattr__ = renamed_names(__name__, {"Broken": "RuleBroken", "Outcome": "CheckOutcome"})
