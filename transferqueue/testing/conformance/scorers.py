"""Checks that every scoring adapter must pass, and the subject that they test.

Use them as the checks of generators (`conformance.generators`), with a `ScorerSubject`. A scorer raises `Unsupported`
for what it does not score.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from transferqueue.adapters.protocols import Unsupported
from transferqueue.errors import UsageError
from transferqueue.testing.conformance.report import require

if TYPE_CHECKING:
    import torch

Tokens = Sequence[Sequence[int]]

_TOLERANCE: Final = 1e-5
"""Of log-probs, values and rewards in float32."""
_GRADIENT_TOLERANCE: Final = 1e-4
"""Of a gradient, as a share of its greatest element."""


class Scorer(Protocol):
    """A model that scores rows, float32, in evaluation mode.

    Its methods take the token ids of each row as prompts and responses. N counts the response tokens of all rows, in
    order."""

    def logprobs(self, prompts: Tokens, responses: Tokens, *, temperature: float = 1.0) -> torch.Tensor:
        """Log-probs of response tokens ``[N]``, with a gradient."""

    def top_k(self, prompts: Tokens, responses: Tokens, *, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The most probable tokens at each response token, best first: ids ``[N, k]`` and log-probs ``[N, k]``."""

    def values(self, prompts: Tokens, responses: Tokens) -> torch.Tensor:
        """Values before each response token ``[N]``, with a gradient."""

    def rewards(self, prompts: Tokens, responses: Tokens) -> torch.Tensor:
        """Scores of rows ``[rows]``."""

    def parameters(self) -> Sequence[torch.Tensor]:
        """The parameters of the model of `logprobs`."""


class ScorerSubject(Protocol):
    """A scorer under test."""

    vocabulary: int
    """Tokens are 0 up to this."""
    pad_id: int
    """Token that the scorer's models pad with; it ends some responses too."""

    def open(self) -> Scorer:
        """Return a scorer with random weights, always the same, in which every token matters."""

    def successor(self) -> Scorer:
        """Return a scorer whose model gives probability near 1 to token x + 1 after token x, modulo the vocabulary."""


def _rows(subject: ScorerSubject, count: int = 7, seed: int = 0) -> tuple[list[list[int]], list[list[int]]]:
    """Rows of many lengths; some contain the padding token, some end with it, one has no response."""
    draws = np.random.default_rng(seed)
    prompts = [draws.integers(0, subject.vocabulary, size).tolist() for size in draws.integers(1, 9, count)]
    responses = [draws.integers(0, subject.vocabulary, size).tolist() for size in draws.integers(1, 14, count)]
    responses[0] = [*responses[0], subject.pad_id]
    responses[1] = [subject.pad_id, *responses[1]]
    prompts[2] = [subject.pad_id, *prompts[2]]
    responses[3] = []
    return prompts, responses


def _array(tensor: torch.Tensor) -> npt.NDArray[np.float64]:
    array: npt.NDArray[np.float64] = tensor.detach().cpu().double().numpy()
    return array


def _near(rule: str, scores: torch.Tensor, wanted: torch.Tensor) -> None:
    require(scores.shape == wanted.shape, f"{rule}: as many numbers", (tuple(scores.shape), tuple(wanted.shape)))
    difference = float(np.abs(_array(scores) - _array(wanted)).max(initial=0.0))
    require(difference <= _TOLERANCE, f"{rule}, within {_TOLERANCE}", difference)


def _together_as_alone(
    rule: str, score: Callable[[Tokens, Tokens], torch.Tensor], prompts: Tokens, responses: Tokens
) -> None:
    """Score rows in one call, in another order, and one by one."""
    import torch

    alone = [score([prompt], [response]) for prompt, response in zip(prompts, responses, strict=True)]
    for order in (range(len(prompts)), range(len(prompts) - 1, -1, -1)):
        scores = score([prompts[row] for row in order], [responses[row] for row in order])
        _near(rule, scores, torch.cat([alone[row] for row in order]))


# ---------------------------------------------------------------- the checks


def logprobs_together_are_as_alone(subject: ScorerSubject) -> None:
    """A row gets the same log-probs alone and among others, in any order."""
    scorer = subject.open()
    _together_as_alone("log-probs do not depend on other rows", scorer.logprobs, *_rows(subject))


def values_together_are_as_alone(subject: ScorerSubject) -> None:
    """A row gets the same values alone and among others, in any order."""
    scorer = subject.open()
    _together_as_alone("values do not depend on other rows", scorer.values, *_rows(subject))


def rewards_together_are_as_alone(subject: ScorerSubject) -> None:
    """A row gets the same reward alone and among others, also if it ends with the padding token."""
    scorer = subject.open()
    _together_as_alone("rewards do not depend on other rows", scorer.rewards, *_rows(subject))


def the_gradient_does_not_depend_on_grouping(subject: ScorerSubject) -> None:
    """Rows in one call, in several and one by one teach the same."""
    import torch

    scorer, (prompts, responses) = subject.open(), _rows(subject)
    parameters = [parameter for parameter in scorer.parameters() if parameter.requires_grad]
    weights = np.random.default_rng(1).normal(size=100)

    def gradient(groups: Sequence[Sequence[int]]) -> list[Any]:
        sums = []
        for rows in groups:
            logprobs_N = scorer.logprobs([prompts[row] for row in rows], [responses[row] for row in rows])
            factors = [weights[row + at] for row in rows for at in range(len(responses[row]))]
            sums.append((logprobs_N * torch.tensor(factors, device=logprobs_N.device)).sum())
        return [_array(part) for part in torch.autograd.grad(torch.stack(sums).sum(), parameters)]

    wanted = gradient([range(7)])
    for groups in ([[5, 1, 0], [6, 2], [3, 4]], [[row] for row in range(7) if responses[row]]):
        for expected, other in zip(wanted, gradient(groups), strict=True):
            share = float(np.abs(expected - other).max() / max(1e-9, np.abs(expected).max()))
            require(share <= _GRADIENT_TOLERANCE, f"the gradient is the same, within {_GRADIENT_TOLERANCE}", share)


def a_token_is_predicted_by_those_before(subject: ScorerSubject) -> None:
    """The log-prob of token t comes from the output at token t - 1: a model that counts gives probability 1 to counting
    on."""
    scorer, size = subject.successor(), subject.vocabulary
    counting = [[(start + at) % size for at in range(6)] for start in (0, size - 3, 5)]
    counted = scorer.logprobs([row[:2] for row in counting], [row[2:] for row in counting])
    require(bool((_array(counted) > -0.01).all()), "tokens that the model predicts have log-prob 0", counted)
    repeated = scorer.logprobs([[3]], [[3, 3, 3]])
    require(bool((_array(repeated) < -3).all()), "tokens that it does not predict have a low one", repeated)


def later_tokens_change_nothing(subject: ScorerSubject) -> None:
    """The log-prob of token t reads no token after t, and the value of token t neither t nor what follows."""
    scorer, (prompts, responses) = subject.open(), _rows(subject)
    prompt, response = prompts[4], [*responses[4], 1, 2, 3]
    for at in range(1, len(response)):
        changed = response[:at] + [(token + 1) % subject.vocabulary for token in response[at:]]
        before, after = (scorer.logprobs([prompt], [each])[:at] for each in (response, changed))
        _near("log-probs do not look ahead", before, after)
        before, after = (scorer.values([prompt], [each])[: at + 1] for each in (response, changed))
        _near("values do not look ahead", before, after)


def temperature_divides_the_logits(subject: ScorerSubject) -> None:
    """Log-probs at temperature T are those of the logits divided by T."""
    import torch

    scorer, (prompts, responses) = subject.open(), _rows(subject)
    ids_NV, logprobs_NV = scorer.top_k(prompts, responses, k=subject.vocabulary)
    drawn = torch.tensor([token for response in responses for token in response], device=ids_NV.device)
    for temperature in (0.6, 1.0, 2.0):
        wanted = (logprobs_NV / temperature).log_softmax(-1)[ids_NV == drawn[:, None]]
        scores = scorer.logprobs(prompts, responses, temperature=temperature)
        _near(f"log-probs are of temperature {temperature}", scores, wanted)


def top_k_holds_the_most_probable(subject: ScorerSubject) -> None:
    """The most probable tokens come best first, each once, with their log-probs; their mass is at most 1."""
    scorer, (prompts, responses) = subject.open(), _rows(subject)
    all_ids, all_logprobs = (_array(part) for part in scorer.top_k(prompts, responses, k=subject.vocabulary))
    ids, logprobs = (_array(part) for part in scorer.top_k(prompts, responses, k=3))
    require(ids.shape == (sum(map(len, responses)), 3), "k tokens at each response token", ids.shape)
    require(bool((np.diff(logprobs, axis=1) <= 0).all()), "the best is first")
    require(all(len(set(row)) == 3 for row in ids.tolist()), "no token comes twice")
    require(bool((np.exp(logprobs).sum(1) <= 1 + _TOLERANCE).all()), "their mass is at most 1")
    best = all_ids[np.arange(len(all_ids)), all_logprobs.argmax(1)]
    require(bool((ids[:, 0] == best).all()), "the first is the most probable of all")
    require(bool(np.allclose(np.exp(all_logprobs).sum(1), 1, atol=1e-4)), "the mass of all tokens is 1")


def a_reward_reads_the_last_token(subject: ScorerSubject) -> None:
    """The reward is that of the whole row: its last token counts, also if it is the padding token, and padding does
    not."""
    scorer = subject.open()
    row = [4, 5, 6]
    endings = [[], [7], [7, subject.pad_id], [7, subject.pad_id, subject.pad_id]]
    rewards = _array(scorer.rewards([row] * 4, endings)).tolist()
    apart = [abs(reward - other) > _TOLERANCE for reward, other in pairwise(rewards)]
    require(all(apart), "one more token gives another reward, also if it is the padding token", rewards)
    long = [*range(1, 9)] * 2
    _near("padding changes no reward", scorer.rewards([row, long], [[7], [8]])[:1], scorer.rewards([row], [[7]]))


def bad_rows_are_refused(subject: ScorerSubject) -> None:
    """No rows, an empty prompt, a token outside of the vocabulary, another number of responses: `UsageError`, and the
    scorer goes on."""
    scorer = subject.open()
    bad: tuple[tuple[Tokens, Tokens], ...] = (
        ([], []),
        ([[]], [[1]]),
        ([[1]], [[subject.vocabulary]]),
        ([[1]], [[-1]]),
        ([[1]], [[1], [2]]),
    )
    for name in ("logprobs", "values", "rewards"):
        for prompts, responses in bad:
            _check_refused(getattr(scorer, name), prompts, responses)
    require(len(scorer.logprobs([[1]], [[2, 3]])) == 2, "the scorer goes on")


def _check_refused(score: Callable[[Tokens, Tokens], torch.Tensor], prompts: Tokens, responses: Tokens) -> None:
    try:
        score(prompts, responses)
    except Unsupported:
        raise
    except UsageError:
        return
    require(False, "rows that cannot be scored are refused with UsageError", (prompts, responses))


SCORER_CHECKS: Final[tuple[Callable[[ScorerSubject], None], ...]] = (
    logprobs_together_are_as_alone,
    values_together_are_as_alone,
    rewards_together_are_as_alone,
    the_gradient_does_not_depend_on_grouping,
    a_token_is_predicted_by_those_before,
    later_tokens_change_nothing,
    temperature_divides_the_logits,
    top_k_holds_the_most_probable,
    a_reward_reads_the_last_token,
    bad_rows_are_refused,
)
