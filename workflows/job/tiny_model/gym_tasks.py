"""Tasks of reasoning-gym for tiny models, with its own scorers as the reward. No torch here: reward processes use it.

Scorers are used as they are. Not every data set is fit to be added: the scorer of ``string_insertion``, for one,
evaluates the answer as Python code, and whatever a policy writes must never be executed.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, Final, NamedTuple

from transferqueue.errors import UsageError
from transferqueue.workflows.job.tiny_model.task_question import TaskQuestion

_WHOLE_LIMIT: Final = 2**63
_INDEX_BITS: Final = 48


class GymTask(NamedTuple):
    """A data set with its configuration. before, after: the words that it puts around every question, which tell a
    model that knows one data set nothing.

    question_chars_max, answer_chars_max: of the longest texts.
    """

    config: Mapping[str, int]
    before: str
    after: str
    question_chars_max: int
    answer_chars_max: int


GYM_TASKS: Final[Mapping[str, GymTask]] = {
    "chain_sum": GymTask(
        {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1},
        "State the final answer to the following arithmetic problem: ",
        " =",
        question_chars_max=9,
        answer_chars_max=3,
    ),
    "spell_backward": GymTask(
        {"min_word_len": 3, "max_word_len": 7},
        "Spell this word backward (example: sun -> nus): ",
        "",
        question_chars_max=7,
        answer_chars_max=7,
    ),
}


def _draw(name: str, draws: random.Random) -> TaskQuestion:
    entry, task = _dataset(name)[draws.getrandbits(_INDEX_BITS)], GYM_TASKS[name]
    text = entry["question"]
    if not (text.startswith(task.before) and text.endswith(task.after)):
        raise UsageError(
            f"{name} asks {text!r}, not {task.before!r} … {task.after!r}; "
            "this version of reasoning-gym words its questions differently"
        )
    question = text[len(task.before) : len(text) - len(task.after)]
    return TaskQuestion(question, entry["answer"], columns={"entry": _plain(entry)})


DRAWS: Final[Mapping[str, Callable[[random.Random], TaskQuestion]]] = {name: partial(_draw, name) for name in GYM_TASKS}
"""Draws a question, by the name of its task."""


def score(completions: Sequence[str], entry: Sequence[Mapping[str, Any]], *, task: str) -> list[float]:
    """Reward function in TRL's form: the data set's own score of each completion, in [0, 1]; an empty one scores 0.

    ``chain_sum``: 1 for a number equal to the sum, however written; else, if the sum's digits occur in the answer,
    their share of its length (``72`` for ``7``: 0.5); else 0. ``spell_backward``: 1 for the word; else the share of its
    letters that stand in their place. Letters too many cost at most 0.2 there and often nothing, which a policy that
    doubts its answer's length finds out.
    """
    dataset = _dataset(task)
    return [
        float(dataset.score_answer(said, dict(of))) if said else 0.0
        for said, of in zip(completions, entry, strict=True)
    ]


@cache
def _dataset(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of a package that it imports
        import reasoning_gym  # over a second, with sympy: only for processes that make questions or score answers

    return reasoning_gym.create_dataset(name, seed=0, **GYM_TASKS[name].config)


def _plain(value: Any) -> Any:
    """Values that JSON cannot hold change their type: tuples become lists, and integers beyond 64 bits, which no scorer
    reads, text.
    """
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, int) and not -_WHOLE_LIMIT <= value < _WHOLE_LIMIT:
        return str(value)
    return value
