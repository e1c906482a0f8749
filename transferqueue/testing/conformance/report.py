"""The outcomes of a conformance kit, one for each check: it holds, it does not, or the engine lacks support."""

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
    """The outcome of one check of one subject. text: of the engine; of a failed check, the rule and the traceback."""

    check: str
    verdict: Verdict
    text: str = ""


class RuleBroken(AssertionError):
    """The subject broke a rule of the kit; the text names the rule and the values."""


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
