"""The result of a check of this machine, with a remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

Verdict = Literal["ok", "warn", "fail"]


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one check: the state found, and the remedy, empty if and only if the verdict is ok."""

    subject: str
    verdict: Verdict
    found: str
    remedy: str = ""


def ok(subject: str, found: str) -> Check:
    """A check without a problem."""
    return Check(subject=subject, verdict="ok", found=found)


def warn(subject: str, found: str, remedy: str) -> Check:
    """A check whose subject works less well, or not for every use."""
    return Check(subject=subject, verdict="warn", found=found, remedy=remedy)


def fail(subject: str, found: str, remedy: str) -> Check:
    """A check whose subject prevents a queue from running here."""
    return Check(subject=subject, verdict="fail", found=found, remedy=remedy)


def tried(subject: str, attempt: Callable[[], str], *, otherwise: Verdict, remedy: str) -> Check:
    """Call `attempt`, which returns the state found. If it raises OSError, the verdict is `otherwise`."""
    try:
        return ok(subject, attempt())
    except OSError as error:
        finding = f"{type(error).__name__}: {error.strerror or error}"
        return Check(subject=subject, verdict=otherwise, found=finding, remedy=remedy)


def worst(checks: list[Check]) -> Verdict:
    """The worst verdict; ok if there are no checks."""
    order: tuple[Verdict, ...] = ("fail", "warn", "ok")
    return next((verdict for verdict in order if any(check.verdict == verdict for check in checks)), "ok")
