"""Problem sets: procedural tasks of reasoning-gym, with its own scorers as the reward.

A problem is a pure function of ``(set, split, seed, ordinal)``: nothing is stored, so a stream may be left and
resumed at any ordinal, and any process can rebuild a problem to score an answer to it.

reasoning-gym draws problem ``index`` of a data set with ``Random(seed + index)``: streams of seeds 0 and 1 would
be one stream, shifted. So its seed stays 0 here, and split, seed, ordinal and attempt are packed into disjoint bits
of the index, which Python's ``Random`` hashes at any size.

The train and warm-up splits step past every problem whose question is held out (the attempt counts up), so no trained
prompt has the text of a held-out one. This module loads no torch: reward processes use it.

Scorers are used as they are. Not every data set is fit to be added: the scorer of ``string_insertion``, for one, evaluates
the answer as Python code, and whatever a policy writes must never be executed.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache
from types import MappingProxyType
from typing import Any, Final

SEED_LIMIT: Final = 2**32
ORDINAL_LIMIT: Final = 2**48
_ATTEMPT_LIMIT: Final = 2**16

HELDOUT_PROBLEMS: Final = 512
"""Held-out problems of each set: a mean of 512 rewards in [0, 1] has a standard error of at most 0.022."""


class Split(IntEnum):
    """What a problem is for; problems of ``HELDOUT`` never occur in the others."""

    HELDOUT = 0
    WARMUP = 1
    TRAIN = 2


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem: what the model reads, a right answer, and reasoning-gym's entry, which its scorer reads."""

    prompt: str
    answer: str
    entry: Mapping[str, Any] = field(repr=False, compare=False)


@dataclass(frozen=True, kw_only=True)
class ProblemSet:
    """A reasoning-gym data set with its configuration, and bounds of its texts in characters.

    ``before`` and ``after`` are the words that the data set puts around every problem. They tell a model that knows
    one data set nothing and would make up most of the prompt, so the prompt is what stands between them.
    """

    name: str
    config: Mapping[str, int]
    before: str
    after: str = ""
    prompt_chars_max: int
    answer_chars_max: int

    def problem(self, split: Split, *, seed: int, ordinal: int) -> Problem:
        """Return problem ``ordinal`` of the stream of ``seed``; the same arguments always give the same problem.

        Raises ``ValueError`` when ``seed`` is outside [0, 2**32) or ``ordinal`` outside [0, 2**48).
        """
        if not 0 <= seed < SEED_LIMIT:
            raise ValueError(f"seed {seed} is outside [0, {SEED_LIMIT})")
        if not 0 <= ordinal < ORDINAL_LIMIT:
            raise ValueError(f"ordinal {ordinal} is outside [0, {ORDINAL_LIMIT})")
        if split is Split.HELDOUT:
            return self._draw(split, seed, ordinal, attempt=0)
        heldout = _heldout_prompts(self.name)
        for attempt in range(_ATTEMPT_LIMIT):
            problem = self._draw(split, seed, ordinal, attempt)
            if problem.prompt not in heldout:
                return problem
        raise ValueError(f"problem set {self.name} has no problems besides the held-out ones; make its config wider")

    def heldout(self) -> tuple[Problem, ...]:
        """Return the ``HELDOUT_PROBLEMS`` distinct problems kept from training; the same for all seeds."""
        return _heldout(self.name)

    def score(self, problem: Problem, answer: str) -> float:
        """Return the data set's own score of ``answer``, in [0, 1]; an empty answer scores 0.

        ``chain_sum``: 1 for a number equal to the sum, however written; else, if the sum's digits occur in the answer,
        their share of its length (``72`` for ``7``: 0.5); else 0. ``spell_backward``: 1 for the word; else the share of the
        word's letters that stand in their place. Letters too many cost at most 0.2 there and often nothing, which a
        policy that doubts its answer's length finds out.
        """
        if not answer:
            return 0.0
        return float(_dataset(self.name).score_answer(answer, problem.entry))

    def _draw(self, split: Split, seed: int, ordinal: int, attempt: int) -> Problem:
        index = ((int(split) * SEED_LIMIT + seed) * ORDINAL_LIMIT + ordinal) * _ATTEMPT_LIMIT + attempt
        entry = _dataset(self.name)[index]
        return Problem(self._prompt(entry["question"]), entry["answer"], MappingProxyType(entry))

    def _prompt(self, question: str) -> str:
        if not (question.startswith(self.before) and question.endswith(self.after)):
            raise ValueError(
                f"{self.name} asks {question!r}, not {self.before!r} … {self.after!r}; "
                "this version of reasoning-gym words its questions differently"
            )
        return question[len(self.before) : len(question) - len(self.after)]


PROBLEM_SETS: Final[Mapping[str, ProblemSet]] = MappingProxyType(
    {
        problem_set.name: problem_set
        for problem_set in (
            ProblemSet(
                name="chain_sum",
                config=MappingProxyType({"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}),
                before="State the final answer to the following arithmetic problem: ",
                after=" =",
                prompt_chars_max=9,
                answer_chars_max=3,
            ),
            ProblemSet(
                name="spell_backward",
                config=MappingProxyType({"min_word_len": 3, "max_word_len": 7}),
                before="Spell this word backward (example: sun -> nus): ",
                prompt_chars_max=7,
                answer_chars_max=7,
            ),
        )
    }
)


def problem_set(name: str) -> ProblemSet:
    """Return the problem set called ``name``; raises ``ValueError`` naming those that exist."""
    try:
        return PROBLEM_SETS[name]
    except KeyError:
        raise ValueError(f"no problem set is called {name!r}; there are {', '.join(PROBLEM_SETS)}") from None


@cache
def _dataset(name: str) -> Any:
    import reasoning_gym  # over a second, with sympy and matplotlib: only for those who make problems or score answers

    return reasoning_gym.create_dataset(name, seed=0, **problem_set(name).config)


@cache
def _heldout(name: str) -> tuple[Problem, ...]:
    chosen: dict[str, Problem] = {}
    for ordinal in itertools.count():
        problem = problem_set(name).problem(Split.HELDOUT, seed=0, ordinal=ordinal)
        chosen.setdefault(problem.prompt, problem)
        if len(chosen) == HELDOUT_PROBLEMS:
            break
    return tuple(chosen.values())


@cache
def _heldout_prompts(name: str) -> frozenset[str]:
    return frozenset(problem.prompt for problem in _heldout(name))
