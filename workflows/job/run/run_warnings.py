"""Warnings of a run, in words: the rules of thumb of its figures, figures that are not finite, and incidents, such as
rows that fail and processes that die.

1. A rule that breaks in `Rule.patience` steps in a row is told once. While it lasts, and when it comes back, it is told
   again only `PAUSE_STEPS` steps after it was told.
2. Of the incidents of a kind, the first `TOLD_MAX` are told one by one, and those after them by their number, with that
   of all by cause.
3. The warnings follow from the steps and incidents alone: a resumed run has those of what it read back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

import msgspec

from transferqueue.errors.text import counted
from transferqueue.workflows.job.run.figures import Judged, Rule, Step, described, not_finite, numbers
from transferqueue.workflows.job.settings.job import Job

PAUSE_STEPS: Final = 50
TOLD_MAX: Final = 20
EARLIER_STEPS: Final = 200
"""Steps before that a rule sees."""
NOT_FINITE: Final = "not finite"
_FINITE: Final = Rule(
    about="", breaks=lambda at: "", remedy="lower trainer.lr, and see in steps.jsonl which was first", patience=1
)


class RunWarning(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong with a run, in words, and what to do. figure: whose rule broke, or `NOT_FINITE`. since: the first
    of the latest steps in a row in which it did; first, last: of all of them; steps: their number."""

    figure: str
    wrong: str
    remedy: str
    since: int
    first: int
    last: int
    steps: int

    @property
    def text(self) -> str:
        """As it is told while it lasts."""
        return f"{self.wrong}{f' since step {self.since}' if self.since < self.last else ''}: {self.remedy}"

    @property
    def text_of_all(self) -> str:
        """As the summary says it."""
        if self.steps == 1:
            return f"{self.wrong}, in step {self.first}: {self.remedy}"
        return f"{self.wrong} in {counted(self.steps, 'step')}, {self.first} to {self.last}: {self.remedy}"


class RunWarnings:
    """Watches the steps of a run, in their order."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._earlier: list[Step] = []
        self._since: dict[str, int] = {}
        """For each rule that broke in the newest step, the first of the steps in a row in which it did."""
        self._in_row: dict[str, int] = {}
        self._told: dict[str, int] = {}
        self._all: dict[str, RunWarning] = {}
        self._incidents: Counter[str] = Counter()
        self._causes: dict[str, Counter[str]] = {}
        """Incidents of each kind by cause, where they have one."""

    @property
    def all(self) -> list[RunWarning]:
        """Each rule that was told of, with its latest words, in the order of their first steps."""
        return sorted(self._all.values(), key=lambda warning: warning.first)

    @property
    def recent(self) -> list[str]:
        """The texts of the warnings of the last `PAUSE_STEPS` steps. For a rule that no longer breaks, the text says in
        which steps it did."""
        now = {*self._since, *(name for name in self._all if name.partition("/")[0] in self._incidents)}
        return [
            warning.text if warning.figure in now else warning.text_of_all
            for warning in self.all
            if warning.last > self.newest - PAUSE_STEPS
        ]

    @property
    def newest(self) -> int:
        """Number of the newest step; 0 before the first."""
        return int(self._earlier[-1]["step"]) if self._earlier else 0

    def see(self, step: Step) -> list[RunWarning]:
        """Note a step; returns the warnings to tell of now."""
        number = int(step["step"])
        broken = {name: (wrong, rule) for name, wrong, rule in self._broken(step)}
        self._since = {name: self._since.get(name, number) for name in broken}
        self._earlier = [*self._earlier[1 - EARLIER_STEPS :], step]
        return [
            self._all[name]
            for name, (wrong, rule) in broken.items()
            if self._counts(name, wrong, rule, number) and self._is_due(name, number)
        ]

    def note(self, kind: str, step: int, wrong: str, remedy: str, *, cause: str = "") -> list[RunWarning]:
        """Note an incident in a step; returns the warning to tell of now, if any."""
        self._incidents[kind] += 1
        causes = self._causes.setdefault(kind, Counter())
        causes.update([cause] if cause else [])
        more = self._incidents[kind] - TOLD_MAX
        name = f"{kind}/{min(self._incidents[kind], TOLD_MAX + 1)}"
        first = self._all[name].first if name in self._all else step
        if more > 0:
            by_cause = ", ".join(f"{count:,} {name}" for name, count in sorted(causes.items()))
            wrong = f"{more:,} more{f' (of all: {by_cause})' if by_cause else ''}, the last: {wrong}"
        self._all[name] = RunWarning(
            figure=name, wrong=wrong, remedy=remedy, since=step, first=first, last=step, steps=step - first + 1
        )
        return [self._all[name]] if self._is_due(name, step) else []

    def _broken(self, step: Step) -> Iterator[tuple[str, str, Rule]]:
        for name, value in numbers(step).items():
            rule = figure.rule if (figure := described(name)) else None
            judged = Judged(name=name, value=value, step=step, earlier=self._earlier, job=self._job)
            if rule is not None and (wrong := rule.breaks(judged)):
                yield name, wrong, rule
        if names := ", ".join(not_finite(step)):
            yield NOT_FINITE, f"figures are not finite, and written as null ({names})", _FINITE

    def _counts(self, name: str, wrong: str, rule: Rule, number: int) -> bool:
        """Note that the rule breaks, once it has for as many steps as its patience."""
        self._in_row[name] = self._in_row.get(name, 0) + 1 if self._since[name] < number else 1
        if self._in_row[name] < rule.patience:
            return False
        before = self._all.get(name)
        self._all[name] = RunWarning(
            figure=name,
            wrong=wrong,
            remedy=rule.remedy,
            since=self._since[name],
            first=self._since[name] if before is None else before.first,
            last=number,
            steps=(rule.patience if self._in_row[name] == rule.patience else 1) + (before.steps if before else 0),
        )
        return True

    def _is_due(self, name: str, number: int) -> bool:
        if number - self._told.get(name, -PAUSE_STEPS) < PAUSE_STEPS:
            return False
        self._told[name] = number
        return True
