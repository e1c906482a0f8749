"""What a check of this machine found: one value per thing looked at, with what to do about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

Verdict = Literal["ok", "warn", "fail"]


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One thing looked at. found: what is there. remedy: what to do; empty if and only if the verdict is ok."""

    subject: str
    verdict: Verdict
    found: str
    remedy: str = ""


def ok(subject: str, found: str) -> Check:
    """It is as it should be."""
    return Check(subject=subject, verdict="ok", found=found)


def warn(subject: str, found: str, remedy: str) -> Check:
    """It works, but less well, or not for every use."""
    return Check(subject=subject, verdict="warn", found=found, remedy=remedy)


def fail(subject: str, found: str, remedy: str) -> Check:
    """A queue will not run here before this is mended."""
    return Check(subject=subject, verdict="fail", found=found, remedy=remedy)


def tried(subject: str, attempt: Callable[[], str], *, otherwise: Verdict, remedy: str) -> Check:
    """Do `attempt`, which says what it found or raises OSError; then the verdict is `otherwise`."""
    try:
        return ok(subject, attempt())
    except OSError as error:
        found = f"{type(error).__name__}: {error.strerror or error}"
        return Check(subject=subject, verdict=otherwise, found=found, remedy=remedy)


def worst(checks: list[Check]) -> Verdict:
    """The gravest verdict among them; ok if there are none."""
    order: tuple[Verdict, ...] = ("fail", "warn", "ok")
    return next((verdict for verdict in order if any(check.verdict == verdict for check in checks)), "ok")
