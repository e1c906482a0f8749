"""What a run generated beside what it trained: `costs_of`.

A trainer that dies goes back to a checkpoint, so a step may be trained several times. The last time of each counts: its
rows are those that the final weights have learned from.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple


class Response(NamedTuple):
    """One response: digests of its prompt and of both, and the number of its tokens."""

    prompt: str
    digest: str
    tokens: int


class TrainedStep(NamedTuple):
    """One step that a trainer took, with its rows. at: end, by the clock that all processes share."""

    step: int
    at: float
    rows: list[Response]


class Costs(NamedTuple):
    """What a run did in vain, and what it left out.

    Attributes:
        rows_in_vain: Responses that were generated to their end, and that the final weights did not learn from.
        tokens_in_vain: Tokens that were drawn, less those of the responses that the final weights learned from. Those
            of unfinished responses count.
        rows_twice: Rows that the final weights learned from beyond those of each prompt.
        rows_missing: Rows of prompts that the final weights did not learn from.
        steps_again: Steps that were computed again.
    """

    rows_in_vain: int
    tokens_in_vain: int
    rows_twice: int
    rows_missing: int
    steps_again: int


def response_of(prompt_ids: Sequence[int], response_ids: Sequence[int]) -> Response:
    """Return a response by its tokens."""
    prompt, response = [*map(int, prompt_ids)], [*map(int, response_ids)]
    return Response(_digest(prompt), _digest([prompt, response]), len(response))


def _digest(value: object) -> str:
    return hashlib.sha1(json.dumps(value).encode(), usedforsecurity=False).hexdigest()[:12]


def last_of_each(taken: Sequence[TrainedStep]) -> list[TrainedStep]:
    """Return the steps that the final weights have: a step replaces the one of its number and all after it."""
    kept: list[TrainedStep] = []
    for each in taken:
        kept = [earlier for earlier in kept if earlier.step < each.step]
        kept.append(each)
    return kept


def costs_of(
    drawn: int, responses: Sequence[Response], taken: Sequence[TrainedStep], *, prompts: int, group: int
) -> Costs:
    """Compare what was generated with what was trained.

    Args:
        drawn: tokens, by all generators.
        responses: those that were generated to their end.
        taken: steps in the order in which trainers took them.
        prompts: of the whole run, each of which is to be trained once.
        group: responses to each.
    """
    kept = last_of_each(taken)
    trained = [row for step in kept for row in step.rows]
    of_prompt = Counter(row.prompt for row in trained).values()
    return Costs(
        rows_in_vain=(Counter(row.digest for row in responses) - Counter(row.digest for row in trained)).total(),
        tokens_in_vain=drawn - sum(row.tokens for row in trained),
        rows_twice=sum(max(0, rows - group) for rows in of_prompt),
        rows_missing=prompts * group - sum(min(rows, group) for rows in of_prompt),
        steps_again=len(taken) - len(kept),
    )
