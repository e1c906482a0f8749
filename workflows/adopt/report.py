"""Adopts a job: its report, and the files that run it."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from transferqueue.errors import AlreadyExists, Impossible, UsageError
from transferqueue.errors.text import visible
from transferqueue.lazy import install_line
from transferqueue.workflows.adopt.apply import ALWAYS, VERDICTS, Line, apply
from transferqueue.workflows.adopt.job_file import added, as_text, job_values
from transferqueue.workflows.adopt.mapping import REWARDS, Refuse
from transferqueue.workflows.adopt.read import read_job
from transferqueue.workflows.adopt.trial.compare import Tried
from transferqueue.workflows.job.settings.read import job_from_values

JOB: Final = "job.toml"
_COLUMNS: Final = 120
_MEANING: Final = {
    "kept": "the same value here",
    "mapped": "another form of it here",
    "assumed": "left out, or always so: the stack's value",
    "added": "needed here, and not said there",
    "no effect": "changes nothing here",
    "unknown": "not in the table of this stack: not kept",
    "refused": "cannot be kept: the native job differs",
}


class Adopted(msgspec.Struct, frozen=True, kw_only=True):
    """The result.

    stack, version: the stack, and the version whose keys its table has. counts: of `lines` by verdict. job, rewards:
    texts of the files; job is empty if the rules of our job file refuse it, and `problem` says why. on_queue: how the
    stack's own trainer uses the queue. tried: the outcomes of a trial, if there was one.
    """

    stack: str
    version: str
    source: str
    counts: dict[str, int]
    lines: list[Line]
    notes: list[str]
    on_queue: list[str]
    job: str
    rewards: str
    problem: str
    tried: list[Tried] = []

    def text(self) -> str:
        """Return the report for people: what is to be looked at comes last."""
        parts = [f"{self.source}: a job of {self.stack} (keys of {self.version})"]
        for verdict in VERDICTS:
            lines = [line for line in self.lines if line.verdict == verdict]
            if lines:
                shown = _by_reason(lines) if verdict == "no effect" else [f"  {_shown(line)}" for line in lines]
                parts += ["", f"{verdict}: {_MEANING[verdict]} ({len(lines)})", *shown]
        if self.notes:
            parts += ["", *(f"note: {note}" for note in self.notes)]
        parts += ["", ", ".join(f"{count} {verdict}" for verdict, count in self.counts.items())]
        return "\n".join(map(visible, parts))


def adopt(words: Sequence[str], *, stack: str = "") -> Adopted:
    """Read a job of another stack, and return its report with a job of ours.

    Args:
        words: a file, then words of a command line; or the words alone (`read_job`).
        stack: name of its stack. Default "": it is recognised.

    Raises:
        NotFound: A file does not exist.
        UsageError: The job cannot be read, or its stack is not recognised.
    """
    found = read_job(words, stack=stack)
    lines = apply(found.stack, found.settings)
    job, problem, rewards = "", "", ""
    try:
        rewards = found.stack.rewards(found.settings)
        lines += added(found.stack, found.settings, lines)
        values = job_values(lines)
        job_from_values(values, named=Path(found.source).stem)
        job = as_text(
            values, lines, f"The job {Path(found.source).name} of {found.stack.name}, by transferqueue adopt."
        )
    except (UsageError, Impossible, Refuse) as error:
        problem = str(error)
    counts = Counter(line.verdict for line in lines)
    return Adopted(
        stack=found.stack.name,
        version=found.stack.version,
        source=found.source,
        counts={verdict: counts[verdict] for verdict in VERDICTS if counts[verdict]},
        lines=lines,
        notes=list(found.notes),
        on_queue=[install_line(found.stack.extra), *found.stack.on_queue] if found.stack.on_queue else [],
        job=job,
        rewards=rewards if '"adopted_rewards:reward"' in job else "",
        problem=problem,
    )


def write(adopted: Adopted, folder: Path) -> list[Path]:
    """Write the job, and the module of its rewards if it has one, to `folder`, which exists. Returns their paths.

    Raises:
        AlreadyExists: A file of that name is there with another text; nothing is written.
    """
    texts = {folder / JOB: adopted.job, folder / REWARDS: adopted.rewards}
    texts = {path: text for path, text in texts.items() if text}
    for path, text in texts.items():
        if path.exists() and path.read_text(encoding="utf-8") != text:
            raise AlreadyExists(f"{path} is there already; name another folder with --out, or move it away")
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return list(texts)


def _by_reason(lines: Sequence[Line]) -> list[str]:
    """Return the keys of each reason as a paragraph."""
    keys: dict[str, list[str]] = {}
    for line in lines:
        keys.setdefault(line.why, []).append(f"{line.key}={line.value}")
    text: list[str] = []
    for why, each in keys.items():
        text.append(f"  {why}:")
        text += textwrap.wrap(
            ", ".join(each),
            _COLUMNS,
            initial_indent="    ",
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    return text


def _shown(line: Line) -> str:
    given = line.key if line.key == ALWAYS else f"{line.key}={line.value}"
    to = ", ".join(f"{key}={value}" for key, value in line.to.items())
    parts = [part for part in (given if line.key else "", to) if part]
    return " -> ".join(parts) + (f"  ({line.why})" if line.why else "")
