"""Environments in Gymnasium's form for training jobs: a tool (a calculator), a puzzle with several attempts, and a
game.

A job file names one by its factory::

    environment = [{ factory = "examples/jobs/environments.py:calculator" }]

An environment is told the text that the model drew in a turn, and answers with a text. Run this file to see an episode
of each, played by hand.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

Step = tuple[str, float, bool, bool, dict[str, Any]]
"""Observation, reward, terminated, truncated, info: as `gymnasium.Env.step` returns them."""

TERM = re.compile(r"\d{1,9}(?:[-+*]\d{1,9})+")


def result(expression: str) -> int:
    """The value of a sum of products of whole numbers, such as ``12+3*4``. Nothing is evaluated as code."""
    total = 0
    for sign, product in re.findall(r"([-+]?)([\d*]+)", expression):
        value = 1
        for factor in product.split("*"):
            value *= int(factor)
        total += -value if sign == "-" else value
    return total


class Calculator:
    """Questions such as ``12+34=``. The model may write ``<12+34>`` and reads the result; what it writes without an
    operator is its answer.

    A call of the tool with the expression of the question is worth `call` once, the right answer 1. role: observations
    come as messages of the tool.
    """

    role = "tool"

    def __init__(self, call: float = 0.2, turns: int = 3) -> None:
        self._call, self._turns = call, turns
        self._expression, self._turn, self._called = "", 0, False

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[None, dict[str, Any]]:
        """The question is in the prompt, and in the data's column ``question``: there is nothing more to read."""
        found = TERM.search(str((options or {}).get("question", "")))
        if found is None:
            raise ValueError(f"no sum or product in {options}; the data needs a column question such as 12+34=")
        self._expression, self._turn, self._called = found.group(), 0, False
        return None, {}

    def step(self, action: str) -> Step:
        self._turn += 1
        asked = TERM.search(action)
        if asked is None:
            numbers = re.findall(r"\d+", action)
            return "", float(numbers == [str(result(self._expression))]), True, False, {}
        reward = self._call if asked.group() == self._expression and not self._called else 0.0
        self._called = self._called or reward > 0
        return str(result(asked.group())), reward, False, self._turn >= self._turns, {}

    def close(self) -> None:
        """Nothing to free."""


class Attempts:
    """A question that may be answered again: after a wrong answer the model reads the question once more.

    The right answer, of the data's column ``answer``, is worth 1 at the first attempt, and `cost` less for each one
    before it.
    """

    def __init__(self, cost: float = 0.3, turns: int = 3) -> None:
        self._cost, self._turns = cost, turns
        self._question, self._answer, self._turn = "", "", 0

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[None, dict[str, Any]]:
        """The question is in the prompt: there is nothing more to read."""
        row = options or {}
        if "question" not in row or "answer" not in row:
            raise ValueError(f"no question and answer in {options}; the data needs these columns")
        self._question, self._answer, self._turn = str(row["question"]), str(row["answer"]), 0
        return None, {}

    def step(self, action: str) -> Step:
        self._turn += 1
        if action.strip() == self._answer:
            return "", 1.0 - self._cost * (self._turn - 1), True, False, {}
        return self._question, 0.0, False, self._turn >= self._turns, {}

    def close(self) -> None:
        """Nothing to free."""


class GuessNumber:
    """A number from 0 to 9, drawn by the seed, which responses to one prompt share. Each turn the model says a digit
    and reads ``higher`` or ``lower``.

    The number is worth 1, less `cost` for each turn before; what is no digit ends the game.
    """

    def __init__(self, cost: float = 0.1, turns: int = 5) -> None:
        self._cost, self._turns = cost, turns
        self._number, self._turn = 0, 0

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self._number, self._turn = (0 if seed is None else seed) % 10, 0
        return "", {}

    def step(self, action: str) -> Step:
        self._turn += 1
        digit = re.fullmatch(r"\s*([0-9])\s*", action)
        if digit is None:
            return "", 0.0, True, False, {}
        guess = int(digit[1])
        if guess == self._number:
            return "", 1.0 - self._cost * (self._turn - 1), True, False, {}
        return "higher" if self._number > guess else "lower", 0.0, False, self._turn >= self._turns, {}

    def close(self) -> None:
        """Nothing to free."""


def calculator(call: float = 0.2, turns: int = 3) -> Calculator:
    """A factory; the job's ``args`` are its arguments."""
    return Calculator(call, turns)


def attempts(cost: float = 0.3, turns: int = 3) -> Attempts:
    """A factory; the job's ``args`` are its arguments."""
    return Attempts(cost, turns)


def guess_number(cost: float = 0.1, turns: int = 5) -> GuessNumber:
    """A factory; the job's ``args`` are its arguments."""
    return GuessNumber(cost, turns)


def main() -> None:
    tool = calculator()
    tool.reset(options={"question": "12+34="})
    for action in ("<12+34>", "46"):
        print("calculator:", action, "->", tool.step(action)[:3])
    puzzle = attempts()
    puzzle.reset(options={"question": "sort 312", "answer": "123"})
    for action in ("132", "123"):
        print("attempts:", action, "->", puzzle.step(action)[:3])
    game = guess_number()
    game.reset(seed=7)
    for action in ("5", "8", "7"):
        print("guess_number:", action, "->", game.step(action)[:3])


if __name__ == "__main__":
    main()
