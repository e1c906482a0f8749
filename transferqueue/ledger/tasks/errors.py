"""Why leases of a task failed: the last few kinds of errors, each with how often it came."""

from __future__ import annotations

from dataclasses import dataclass, field

from transferqueue.limits import ERROR_TEXT_CHARS_MAX, TASK_ERRORS_MAX
from transferqueue.wire.answers.stats import TaskError


@dataclass(slots=True, eq=False)
class ErrorCount:
    """One kind of error. `worker`: the label of the session that reported it last."""

    first: float
    last: float
    count: int = 0
    worker: str = ""


@dataclass(slots=True, eq=False)
class TaskErrors:
    """The kinds of errors of one task, by type and text, the latest last. The oldest is forgotten first."""

    _kinds: dict[tuple[str, str], ErrorCount] = field(default_factory=dict)

    def add(self, reason: str, worker: str, now: float) -> None:
        """Count a failure. `reason` is ``"KeyError: 'answer'"``, or any text; the part before ": " is the type if it is
        a name."""
        kind = _parsed(reason)
        error = self._kinds.pop(kind, None) or ErrorCount(now, now)
        error.count, error.worker, error.last = error.count + 1, worker, now
        self._kinds[kind] = error
        if len(self._kinds) > TASK_ERRORS_MAX:
            del self._kinds[next(iter(self._kinds))]

    def view(self, now: float) -> list[TaskError]:
        """The errors as reports show them, the latest first."""
        return [
            TaskError(
                type=name,
                text=text,
                worker=error.worker,
                count=error.count,
                first_s=now - error.first,
                last_s=now - error.last,
            )
            for (name, text), error in reversed(self._kinds.items())
        ]

    def latest(self, now: float) -> str:
        """The latest error in words: ``KeyError 'answer', 28 times, the last 2 s ago, by reward-0``; "" if there is
        none."""
        if not self._kinds:
            return ""
        (name, text), error = next(reversed(self._kinds.items()))
        words = " ".join(f"{name} {text}".split()) or "no reason"
        times = f"{error.count} times, the last" if error.count > 1 else "once,"
        return f"{words}, {times} {now - error.last:.0f} s ago, by {error.worker}"

    @property
    def last(self) -> tuple[str, str]:
        """The latest error, and the worker that reported it."""
        if not self._kinds:
            return "", ""
        (name, text), error = next(reversed(self._kinds.items()))
        return f"{name}: {text}" if name else text, error.worker


def _parsed(reason: str) -> tuple[str, str]:
    name, colon, text = reason.partition(":")
    if not colon or not name.isidentifier():
        name, text = "", reason
    return name[:ERROR_TEXT_CHARS_MAX], text.strip()[:ERROR_TEXT_CHARS_MAX]
