"""The conformance kit of scorers fails those that make a usual mistake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from transferqueue.errors import UsageError  # noqa: E402
from transferqueue.testing.conformance import scorers as kit  # noqa: E402
from transferqueue.testing.conformance.report import Verdict, run  # noqa: E402

SIZE = 12


class BigramScorer:
    """Logits are a table of the previous token; the value adds up the table over all tokens before; all by hand, a row
    at a time."""

    def __init__(self, table_VV: Any) -> None:
        self.table_VV = table_VV.requires_grad_()

    def _rows(self, prompts: Any, responses: Any) -> list[Any]:
        if not prompts or len(prompts) != len(responses) or not all(map(len, prompts)):
            raise UsageError("bad rows")
        rows = [[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]
        if any(not 0 <= token < SIZE for row in rows for token in row):
            raise UsageError("bad token")
        return [torch.tensor(row) for row in rows]

    def _logits(self, prompts: Any, responses: Any, shift: int = -1) -> Any:
        parts = [
            self.table_VV[row[[at + shift for at in range(len(prompt), len(row))]]]
            for prompt, row in zip(prompts, self._rows(prompts, responses), strict=True)
        ]
        return torch.cat(parts)

    def logprobs(self, prompts: Any, responses: Any, *, temperature: float = 1.0) -> Any:
        drawn = torch.tensor([token for response in responses for token in response], dtype=torch.long)
        return (self._logits(prompts, responses) / temperature).log_softmax(-1).gather(-1, drawn[:, None])[:, 0]

    def top_k(self, prompts: Any, responses: Any, *, k: int) -> Any:
        top = self._logits(prompts, responses).log_softmax(-1).topk(k)
        return top.indices, top.values

    def values(self, prompts: Any, responses: Any, last: int = 0) -> Any:
        rows = self._rows(prompts, responses)
        return torch.cat(
            [
                torch.stack([self.table_VV[row[: at + last]].sum() for at in range(len(prompt), len(row))])
                for prompt, row in zip(prompts, rows, strict=True)
                if len(row) > len(prompt)
            ]
            or [torch.zeros(0)]
        )

    def rewards(self, prompts: Any, responses: Any) -> Any:
        return torch.stack([self.table_VV[row].sum() for row in self._rows(prompts, responses)])

    def parameters(self) -> list[Any]:
        return [self.table_VV]


class OffByOne(BigramScorer):
    def logprobs(self, prompts: Any, responses: Any, *, temperature: float = 1.0) -> Any:
        drawn = torch.tensor([token for response in responses for token in response], dtype=torch.long)
        logits = self._logits(prompts, responses, shift=0)
        return (logits / temperature).log_softmax(-1).gather(-1, drawn[:, None])[:, 0]


class NoTemperature(BigramScorer):
    def logprobs(self, prompts: Any, responses: Any, *, temperature: float = 1.0) -> Any:
        return super().logprobs(prompts, responses)


class ValueReadsItsToken(BigramScorer):
    def values(self, prompts: Any, responses: Any, last: int = 1) -> Any:
        return super().values(prompts, responses, last)


class PaddingIsOverlooked(BigramScorer):
    def rewards(self, prompts: Any, responses: Any) -> Any:
        return torch.stack([self.table_VV[row[row != 0]].sum() for row in self._rows(prompts, responses)])


class RowsMeet(BigramScorer):
    def logprobs(self, prompts: Any, responses: Any, *, temperature: float = 1.0) -> Any:
        return super().logprobs(prompts, responses, temperature=temperature) + 1e-3 * self.table_VV[0, 0] * len(prompts)


class WorstFirst(BigramScorer):
    def top_k(self, prompts: Any, responses: Any, *, k: int) -> Any:
        ids, logprobs = super().top_k(prompts, responses, k=SIZE)
        return ids.flip(1)[:, :k], logprobs.flip(1)[:, :k]


class MeanOfRows(BigramScorer):
    """Its log-probs are right, but their gradient is that of a mean over the rows of a call."""

    def logprobs(self, prompts: Any, responses: Any, *, temperature: float = 1.0) -> Any:
        found = super().logprobs(prompts, responses, temperature=temperature)
        return found / len(prompts) + (found - found / len(prompts)).detach()


class TakesAnything(BigramScorer):
    def _rows(self, prompts: Any, responses: Any) -> list[Any]:
        return [torch.tensor([*p, *r]) % SIZE for p, r in zip(prompts, responses, strict=False)] or [
            torch.zeros(1).long()
        ]


class Subject:
    vocabulary, pad_id = SIZE, 0

    def __init__(self, scorer: Callable[[Any], Any]) -> None:
        self.scorer = scorer

    def open(self) -> Any:
        return self.scorer(torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0)))

    def successor(self) -> Any:
        return self.scorer(20 * torch.eye(SIZE).roll(1, 1))


def failed(scorer: Callable[[Any], Any]) -> set[str]:
    outcomes = run(kit.SCORER_CHECKS, Subject(scorer))
    assert all(outcome.verdict is not Verdict.UNSUPPORTED for outcome in outcomes)
    return {outcome.check for outcome in outcomes if outcome.verdict is Verdict.FAILED}


def test_a_right_scorer_passes() -> None:
    assert failed(BigramScorer) == set()


@pytest.mark.parametrize(
    ("scorer", "check"),
    [
        (OffByOne, kit.a_token_is_predicted_by_those_before),
        (NoTemperature, kit.temperature_divides_the_logits),
        (ValueReadsItsToken, kit.later_tokens_change_nothing),
        (PaddingIsOverlooked, kit.a_reward_reads_the_last_token),
        (RowsMeet, kit.logprobs_together_are_as_alone),
        (WorstFirst, kit.top_k_holds_the_most_probable),
        (MeanOfRows, kit.the_gradient_does_not_depend_on_grouping),
        (TakesAnything, kit.bad_rows_are_refused),
    ],
    ids=lambda value: value.__name__,
)
def test_a_usual_mistake_fails_its_check(scorer: Callable[[Any], Any], check: Callable[[Any], None]) -> None:
    assert check.__name__ in failed(scorer)
