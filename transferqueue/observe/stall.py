"""Why a running queue does not move: the answer to `Observe("doctor")`, typed."""

from __future__ import annotations

import msgspec

from transferqueue.observe.stats import parse


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One sentence about a task (or, with task "", about its table). stalled: someone waits, and nothing that
    is under way here will end it."""

    task: str
    stalled: bool
    text: str


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """What every table has to say. A table without findings flows."""

    now_s: float
    tables: dict[str, list[Finding]]

    @property
    def stalled(self) -> list[str]:
        """Tables of which some part waits for what will not come by itself."""
        return [name for name, findings in self.tables.items() if any(finding.stalled for finding in findings)]


def diagnose(answer: object) -> Diagnosis:
    """What a server answered to `doctor`, typed; `ProtocolError` if it cannot be read."""
    return parse("doctor", answer, Diagnosis)
