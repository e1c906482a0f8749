"""Evaluation of a policy on problems that it never trained on."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from transferqueue.workflows.grpo.learning.problems import Problem, ProblemSet
from transferqueue.workflows.grpo.model.sampling import Response, generate
from transferqueue.workflows.grpo.model.tokenizer import decode, encode_prompt
from transferqueue.workflows.grpo.model.transformer import Transformer

RIGHT = 1.0
"""The score that reasoning-gym's scorers give a right answer."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Mean reward of sampled answers at temperature 1, and the share of right greedy answers; both in [0, 1]."""

    reward: float
    accuracy: float


def evaluate(
    model: Transformer,
    problem_set: ProblemSet,
    *,
    tokens_max: int,
    samples: int,
    seed: int,
    problems: Sequence[Problem] | None = None,
) -> Evaluation:
    """Evaluate ``model`` on ``problems`` (all held-out ones if not given), ``samples`` draws each; same seed, same result."""
    chosen = problem_set.heldout() if problems is None else problems
    prompts = [encode_prompt(problem.prompt) for problem in chosen]
    generator = torch.Generator().manual_seed(seed)

    def answers(samples: int, temperature: float) -> list[Response]:
        return generate(
            model, prompts, samples=samples, tokens_max=tokens_max, temperature=temperature, generator=generator
        )

    def scores(responses: list[Response]) -> list[float]:
        return [problem_set.score(chosen[response.prompt], decode(response.ids)) for response in responses]

    return Evaluation(
        reward=float(np.mean(scores(answers(samples, 1.0)))),
        accuracy=float(np.mean([score == RIGHT for score in scores(answers(1, 0.0))])),
    )
