"""The stalls of the last hour, in the doctor's words. Pure."""

from __future__ import annotations

from collections import deque
from typing import Final

import msgspec

from transferqueue.observe.diagnosis import Diagnosis, Finding

STALLS_MAX: Final = 50
"""Ended stalls that are kept: the newest."""


class Stall(msgspec.Struct, frozen=True):
    """A table did not progress. table: "" where the request that waited concerns no table. text: the doctor's first finding, as it was
    when the stall was last seen. from_s, until_s: when it was first seen, and first no longer seen (None: it lasts), by the server's
    clock."""

    table: str
    text: str
    from_s: float
    until_s: float | None = None


class Stalls:
    """Keeps what stalls now, and the stalls that ended."""

    def __init__(self) -> None:
        self._lasting: dict[str, Stall] = {}
        self._ended: deque[Stall] = deque(maxlen=STALLS_MAX)

    @property
    def all(self) -> list[Stall]:
        """Ended ones, the oldest first, then those that last."""
        return [*self._ended, *self._lasting.values()]

    def see(self, now_s: float, diagnosis: Diagnosis) -> None:
        """Note what the doctor found at `now_s`."""
        if any(stall.from_s > now_s for stall in self.all):  # another server, whose clock began anew
            self._lasting.clear()
            self._ended.clear()
        found = {name: text for name, text in _stalled(diagnosis) if text}
        for name in [name for name in self._lasting if name not in found]:
            self._ended.append(msgspec.structs.replace(self._lasting.pop(name), until_s=now_s))
        for name, text in found.items():
            began = self._lasting[name].from_s if name in self._lasting else now_s
            self._lasting[name] = Stall(name, text, began)

    def forget(self, before_s: float) -> None:
        """Forget stalls that ended before `before_s`."""
        while self._ended and (self._ended[0].until_s or 0.0) < before_s:
            self._ended.popleft()


def _stalled(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """The stalled tables, each with the first finding that says so."""
    told = [*diagnosis.tables.items(), ("", diagnosis.elsewhere)]
    return [(name, _first(findings)) for name, findings in told]


def _first(findings: list[Finding]) -> str:
    return next((finding.text for finding in findings if finding.stalled), "")
