"""Tasks that a tiny model can learn: a question, its only answer, and a split that keeps test questions out of
training.

A question belongs to the test split by a hash of its text, so the splits are disjoint whatever seed draws them.
"""

from __future__ import annotations

import random
import string
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal

from transferqueue.errors import NotFound, UsageError, listing
from transferqueue.workflows.job.tiny_model.gym_tasks import DRAWS
from transferqueue.workflows.job.tiny_model.task_question import TaskQuestion

Split = Literal["train", "test"]


def _sum(draws: random.Random) -> TaskQuestion:
    left, right = draws.randrange(100), draws.randrange(100)
    return TaskQuestion(f"{left}+{right}=", str(left + right))


def _digits(draws: random.Random) -> str:
    return "".join(draws.choices("0123456789", k=draws.randint(4, 6)))


def _reverse(draws: random.Random) -> TaskQuestion:
    digits = _digits(draws)
    return TaskQuestion(f"reverse {digits}", digits[::-1])


def _sort(draws: random.Random) -> TaskQuestion:
    digits = _digits(draws)
    return TaskQuestion(f"sort {digits}", "".join(sorted(digits)))


def _tool(draws: random.Random) -> TaskQuestion:
    """The two turns of a sum with a calculator: the call, ``<12+34>``, and after the calculator's message, ``46``, that
    number."""
    left, right = draws.randrange(100), draws.randrange(100)
    question, call, result = f"{left}+{right}=", f"<{left}+{right}>", str(left + right)
    if draws.random() < 0.5:
        return TaskQuestion(question, result, (("assistant", call), ("tool", result)))
    return TaskQuestion(question, call)


def _count(draws: random.Random) -> TaskQuestion:
    """Count up to a number that is mostly small: half of the answers have at most 15 characters, a tenth more than 40,
    the longest 87."""
    last, unit = min(24, max(1, int(draws.lognormvariate(1.6, 0.8)))), "".join(draws.choices(string.ascii_letters, k=2))
    return TaskQuestion(f"count {last}{unit}", "".join(f"{number}{unit}" for number in range(1, last + 1)))


TASKS: Final[dict[str, Callable[[random.Random], TaskQuestion]]] = {
    "sort": _sort,
    "reverse": _reverse,
    "sum": _sum,
    "count": _count,
    "tool": _tool,
    **DRAWS,
}
"""Draws a problem, by the name of its task; the last two are of reasoning-gym (extra ``demo``)."""

_TEST_SHARE: Final = 0.2


def split_of(question: str) -> Split:
    """Return the split that a question belongs to; it depends on the text alone."""
    return "test" if zlib.crc32(question.encode()) < _TEST_SHARE * 2**32 else "train"


def problems(task: str, split: Split, *, seed: int = 0) -> Iterator[TaskQuestion]:
    """Yield problems of `task` without end, the same for the same seed. Raises `NotFound` for an unknown task.

    >>> next(problems("sort", "train", seed=1))
    TaskQuestion(question='sort 222393', answer='222339', history=(), columns={})
    """
    if task not in TASKS:
        raise NotFound(f'task "{task}" is unknown; there are {listing(TASKS)}')
    return _problems(TASKS[task], split, random.Random(f"{task} {split} {seed}"))


def _problems(
    draw: Callable[[random.Random], TaskQuestion], split: Split, draws: random.Random
) -> Iterator[TaskQuestion]:
    while True:
        problem = draw(draws)
        if split_of(problem.question) == split:
            yield problem


def exact(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """Reward function in TRL's form: 1 for a completion that is the answer, without surrounding space; otherwise 0.

    >>> exact(["7", "12", " 9 "], answer=["7", "8", "9"])
    [1.0, 0.0, 1.0]
    """
    if len(completions) != len(answer):
        raise UsageError(f"{len(completions)} completions for {len(answer)} answers; give one answer for each")
    return [float(said.strip() == right) for said, right in zip(completions, answer, strict=True)]
