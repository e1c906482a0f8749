"""Compares the steps of two trainers on the same rows, and says what differs first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final, Literal

import msgspec

from transferqueue.errors.text import shown, visible
from transferqueue.workflows.adopt.apply import Line

BOUND: Final = 1e-5
"""Largest difference between two figures that count as equal, relative to those above 1; of learning rates always
relative."""
FIGURES: Final = ("reward", "loss", "kl", "gradient_norm", "lr")
"""Figures of a step, by the names that a run of ours has for them but ``kl``."""
_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "rows": ("data", "sampling", "trainer.prompts_per_step"),
    "rows in the loss": ("algorithm.mask_truncated", "sampling"),
    "prompt tokens": ("data", "model"),
    "reward": ("reward", "data.columns"),
    "advantage": ("algorithm", "reward"),
    "loss": ("algorithm", "trainer", "sampling"),
    "kl": ("algorithm.kl", "reference"),
    "gradient_norm": ("algorithm", "trainer"),
    "lr": ("trainer", "steps"),
}
"""Our keys that each figure depends on."""
ON_QUEUE: Final = "itself on this queue"
_REASONS_MAX: Final = 8
_SHOWN: Final = 60


class SideStep(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """A step of one side.

    figures: by the names of `FIGURES`. prompts: the tokens of each row's prompt. rows: the tokens of each response that
    counts in the loss, with its advantage. Of the stack's side too: steps of the whole run, for its schedule; data,
    each prompt's columns; completions, the tokens of all responses, prompt by prompt. Of verl's side: advantages, of
    each token of those; queue, the name of the module that it imported as ``transfer_queue``.
    """

    step: int
    figures: dict[str, float]
    prompts: list[list[int]]
    rows: list[tuple[list[int], float]]
    steps: int = 0
    data: list[dict[str, Any]] = []
    completions: list[list[int]] = []
    advantages: list[list[float]] = []
    queue: str = ""


class FirstDifference(msgspec.Struct, frozen=True, kw_only=True):
    """What differs first. theirs, ours: its values as texts. why: what may be the reason, the likeliest first."""

    step: int
    figure: str
    theirs: str
    ours: str
    why: list[str] = []


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome. other: what the stack was compared with: the native job on the stack's rows, or the stack itself on
    this queue, each run on its own rows. figures: of each step, by name, the stack's and the other's; None: that side
    has none. differs: None: nothing does. notes: what limits what the outcome says."""

    stack: str
    other: Literal["the native job", "itself on this queue"] = "the native job"
    bound: float
    figures: list[dict[str, tuple[float | None, float | None]]]
    differs: FirstDifference | None
    notes: list[str]

    def text(self) -> str:
        """Return the outcome for people."""
        whose = "the rows that each generated" if self.other == ON_QUEUE else f"the rows that {self.stack} generated"
        lines = [f"tried: {self.stack} and {self.other}, on {whose}"]
        for number, figures in enumerate(self.figures, 1):
            pairs = [f"{name} {_text(one)} and {_text(other)}" for name, (one, other) in figures.items()]
            lines.append(f"  step {number}: {', '.join(pairs)}")
        if self.differs is None:
            lines.append(f"  equal within {self.bound:g}: prompt tokens, advantages, {', '.join(self._compared())}")
        else:
            found = self.differs
            lines.append(
                f"  step {found.step} differs at {found.figure}: {found.theirs} in {self.stack}, {found.ours} here"
            )
            lines += [f"    {reason}" for reason in found.why]
        return "\n".join(visible(line) for line in [*lines, *(f"  note: {note}" for note in self.notes)])

    def _compared(self) -> list[str]:
        return [name for name in FIGURES if any(name in step for step in self.figures)]


def first_difference(theirs: Sequence[SideStep], ours: Sequence[SideStep]) -> FirstDifference | None:
    """Return what differs first between the steps of a stack and of the other side, without a reason; None: nothing.

    In each step: rows, tokens of prompts, `FIGURES` with the advantages of all rows after the reward: those of each
    token, where both sides have them.
    """
    for number, (one, other) in enumerate(zip_longest(theirs, ours), 1):
        for figure, left, right in _differences(one, other):
            return FirstDifference(step=number, figure=figure, theirs=_text(left), ours=_text(right))
    return None


def reasons(
    found: FirstDifference,
    steps: tuple[int, int],
    changed: Mapping[str, tuple[Any, Any]],
    lines: Sequence[Line],
) -> list[str]:
    """Return why a figure may differ, the likeliest first.

    Args:
        found: the difference.
        steps: of the whole run, in the stack and here.
        changed: keys of the tried job file that are not as adopt wrote them: their values, then and now.
        lines: of adopt's report.
    """
    keys = _KEYS[found.figure]
    why = []
    if found.figure == "lr" and steps[0] != steps[1]:
        why.append(f"the schedule is over {steps[0]} steps there and steps={steps[1]} here: set steps = {steps[0]}")
    if found.figure == "prompt tokens":
        why.append("a prompt that is a text is a message of the user here, where the model has a chat template")
    near = sorted(changed.items(), key=lambda item: not item[0].startswith(keys))
    why += [f"{key} is {_text(now)}, where adopt writes {_text(then)}" for key, (then, now) in near]
    for verdict in ("refused", "unknown"):
        why += [f"{line.key}={line.value} is {verdict}: {line.why}" for line in lines if line.verdict == verdict]
    return why[:_REASONS_MAX] or [f"no key is refused, unknown or changed; it depends on {', '.join(keys)}"]


def figures_of(theirs: Sequence[SideStep], ours: Sequence[SideStep]) -> list[dict[str, Any]]:
    """Return the figures of each step that both sides took, by name, the stack's and ours."""
    return [
        {
            name: (one.figures.get(name), other.figures.get(name))
            for name in FIGURES
            if name in one.figures or name in other.figures
        }
        for one, other in zip(theirs, ours, strict=False)
    ]


def _differences(one: SideStep | None, other: SideStep | None) -> Iterator[tuple[str, Any, Any]]:
    """Yield what differs in a step: its name, and both values. None: that side did not take it."""
    if one is None or other is None or len(one.prompts) != len(other.prompts):
        yield "rows", len(one.prompts) if one else 0, len(other.prompts) if other else 0
        return
    for prompt, own in zip(sorted(one.prompts), sorted(other.prompts), strict=True):
        if prompt != own:
            yield "prompt tokens", prompt, own
    for name in FIGURES:
        left, right = one.figures.get(name), other.figures.get(name)
        if left is None or right is None:
            if left is not right:
                yield name, left, right
        elif not _near(left, right, least=0.0 if name == "lr" else 1.0):
            yield name, left, right
        if name == "reward":
            yield from _of_advantages(one, other)


def _of_advantages(one: SideStep, other: SideStep) -> Iterator[tuple[str, Any, Any]]:
    if len(one.rows) != len(other.rows):
        yield "rows in the loss", len(one.rows), len(other.rows)
        return
    for (ids, left), (own, right) in zip(sorted(one.rows), sorted(other.rows), strict=True):
        if ids != own or not _near(left, right, least=1.0):
            yield "advantage", left, right
    if not (one.advantages and other.advantages):
        return
    for (ids, each), (own, others) in zip(_by_token(one), _by_token(other), strict=True):
        if ids != own or len(each) != len(others):
            yield "advantage", each, others
        for token, another in zip(each, others, strict=False):
            if not _near(token, another, least=1.0):
                yield "advantage", token, another


def _by_token(step: SideStep) -> list[tuple[list[int], list[float]]]:
    return sorted(zip(step.completions, step.advantages, strict=True))


def _near(left: float, right: float, *, least: float) -> bool:
    return math.isclose(left, right, rel_tol=BOUND, abs_tol=BOUND * least)


def _text(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:.8g}" if isinstance(value, float) else shown(value, _SHOWN)
