"""The answers of several coordinators together. Most deployments have one (`transferqueue docs coordinators`).

Tables and channels are merged. Any other figure, such as `server`, belongs to one coordinator: reading it from the
whole is an `AttributeError` that names `coordinators`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, TypeVar

from msgspec import UNSET

from transferqueue.wire.answers.answer import Answer
from transferqueue.wire.answers.doctor import DoctorAnswer
from transferqueue.wire.answers.sessions import Sessions
from transferqueue.wire.answers.stats import AuditAnswer, Stats

_T = TypeVar("_T", Stats, DoctorAnswer, Sessions)
_ABSENT: Final[Any] = UNSET


class UnreachableCoordinator(Answer, frozen=True, kw_only=True):
    """A coordinator that did not answer, and the error instead of its answer."""

    address: Annotated[str, "Where it should be."]
    unreachable: Annotated[str, "Why it did not answer."]


class _OfSeveral:
    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if value is UNSET:
            raise AttributeError(f"{name} belongs to one coordinator; read it from .coordinators[ADDRESS]")
        return value


class StatsOfSeveral(_OfSeveral, Stats, frozen=True, kw_only=True):
    """`Stats` of several coordinators."""


class DoctorAnswerOfSeveral(_OfSeveral, DoctorAnswer, frozen=True, kw_only=True):
    """`DoctorAnswer` of several coordinators."""


def by_coordinator(address: str, answer: _T) -> dict[str, _T | UnreachableCoordinator]:
    """The answer of each coordinator, by its address. `answer` is of the queue at `address`."""
    return answer.coordinators or {address: answer}


def stats_together(answers: Mapping[str, Stats | UnreachableCoordinator]) -> Stats:
    """The statistics of all coordinators; those of an only one unchanged."""
    if (only := _only(answers)) is not None:
        return only
    known = [answer for answer in answers.values() if isinstance(answer, Stats)]
    return StatsOfSeveral(
        tables=_merged(answer.tables for answer in known),
        channels=_merged(answer.channels for answer in known),
        coordinators=dict(answers),
        **dict.fromkeys(("now_s", "epoch", "sessions", "bytes", "waiting", "server"), _ABSENT),
    )


def audit_together(answers: Sequence[AuditAnswer]) -> AuditAnswer:
    """The books of all coordinators."""
    dropped = Counter[str]()
    for answer in answers:
        dropped.update(answer.dropped_tables)
    return AuditAnswer(
        balanced=all(answer.balanced for answer in answers),
        tables=_merged(answer.tables for answer in answers),
        dropped_tables=dict(dropped),
    )


def doctor_together(answers: Mapping[str, DoctorAnswer | UnreachableCoordinator]) -> DoctorAnswer:
    """The answers of all coordinators about waits; that of an only one unchanged."""
    if (only := _only(answers)) is not None:
        return only
    known = [answer for answer in answers.values() if isinstance(answer, DoctorAnswer)]
    return DoctorAnswerOfSeveral(
        tables=_merged(answer.tables for answer in known),
        pipelines=_merged(answer.pipelines for answer in known),
        channels=_merged(answer.channels for answer in known),
        coordinators=dict(answers),
        **dict.fromkeys(("now_s", "waiting", "sessions"), _ABSENT),
    )


def sessions_together(answers: Mapping[str, Sessions | UnreachableCoordinator]) -> Sessions:
    """The sessions of all coordinators; those of an only one unchanged."""
    if (only := _only(answers)) is not None:
        return only
    known = {address: answer for address, answer in answers.items() if isinstance(answer, Sessions)}
    together = {
        f"{address} {number}": session for address, answer in known.items() for number, session in answer.items()
    }
    return Sessions(together, answers)


def _only(answers: Mapping[str, _T | UnreachableCoordinator]) -> _T | None:
    """The answer of the only coordinator, which has no substitute."""
    answer, *others = answers.values()
    return None if others or isinstance(answer, UnreachableCoordinator) else answer


def _merged(parts: Any) -> dict[str, Any]:
    return {name: value for part in parts for name, value in part.items()}
