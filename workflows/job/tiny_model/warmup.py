"""Short supervised training of tiny models: answers for a policy, judgements for a reward model and a critic.

A judge learns at every token whether the answer is right so far: from its last token alone it learns a third as fast.
Which answers it sees says `answers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (torch's own name for it)

from transferqueue.workflows.job.tiny_model.answers import Answers, ids_of
from transferqueue.workflows.job.tiny_model.task_question import TaskQuestion
from transferqueue.workflows.job.tiny_model.tasks import problems

ROWS: Final = 64
"""Rows of a training step."""
_HELD_OUT_ROWS: Final = 256
_CHECK_EVERY: Final = 10
_STEPS_AT_ONCE: Final = 16
"""Steps whose answers are made together."""
LEARNING_RATE: Final = 3e-3
_RISE_STEPS: Final = 10


class PaddedRows(NamedTuple):
    """Prompts and responses, padded on the right. ids: int64 ``[rows, tokens]``. is_response: bool. right: float32, 1
    where the response so far is right, else 0."""

    ids_RT: Tensor
    is_response_RT: Tensor
    right_RT: Tensor

    def right(self) -> Tensor:
        """Return whether each whole answer is right: float32 ``[rows]``, 1 or 0."""
        return self.right_RT.gather(1, self.last()[:, None])[:, 0]

    def last(self) -> Tensor:
        """Return the position of each row's last token: int64 ``[rows]``."""
        return self.is_response_RT.long().cumsum(1).argmax(1)


def rows_of(tokenizer: Any, questions: Sequence[TaskQuestion], answers: Sequence[Sequence[int]]) -> PaddedRows:
    """Return questions and the tokens of their answers; as chats, if the tokenizer has a template."""
    parts = []
    for question, response in zip(questions, answers, strict=True):
        prompt = _prompt(tokenizer, question)
        parts.append((prompt, response, _right_so_far(response, ids_of(tokenizer, question.answer))))
    width = max(len(prompt) + len(response) for prompt, response, _ in parts)
    ids_RT = torch.full((len(parts), width), tokenizer.pad_token_id)
    is_response_RT, right_RT = torch.zeros_like(ids_RT, dtype=torch.bool), torch.zeros(ids_RT.shape)
    for row, (prompt, response, right) in enumerate(parts):
        here = slice(len(prompt), len(prompt) + len(response))
        ids_RT[row, : here.stop] = torch.tensor([*prompt, *response])
        is_response_RT[row, here] = True
        right_RT[row, here] = torch.tensor(right)
    return PaddedRows(ids_RT, is_response_RT, right_RT)


def _prompt(tokenizer: Any, question: TaskQuestion) -> list[int]:
    if not tokenizer.chat_template:
        return list(tokenizer(question.question)["input_ids"])
    return list(tokenizer.apply_chat_template(question.chat(), add_generation_prompt=True, return_dict=False))


def _right_so_far(response: Sequence[int], truth: Sequence[int]) -> list[float]:
    first = next(
        (at for at, pair in enumerate(zip(response, truth, strict=False)) if pair[0] != pair[1]), len(response)
    )
    return [float(at < first) for at in range(len(response))]


def answer_logprobs(model: Any, rows: PaddedRows) -> Tensor:
    """Return the log-probability of each response token, 0 elsewhere: float32 ``[rows, tokens - 1]``, with a
    gradient."""
    logits_RTV = model(input_ids=rows.ids_RT[:, :-1]).logits.float()
    logprobs_RT = logits_RTV.log_softmax(-1).gather(-1, rows.ids_RT[:, 1:, None])[..., 0]
    masked_RT: Tensor = logprobs_RT * rows.is_response_RT[:, 1:]
    return masked_RT


def answer_loss(model: Any, rows: PaddedRows) -> Tensor:
    """Mean negative log-probability of the response tokens."""
    return -answer_logprobs(model, rows).sum() / rows.is_response_RT.sum()


def judge_loss(model: Any, rows: PaddedRows) -> Tensor:
    """Cross entropy of a classifier's score at each response token against whether the answer is right so far."""
    scores_RT = model.score(model.base_model(input_ids=rows.ids_RT).last_hidden_state)[..., 0]
    mask_RT = rows.is_response_RT
    return F.binary_cross_entropy_with_logits(scores_RT[mask_RT].float(), rows.right_RT[mask_RT])


def value_loss(model: Any, rows: PaddedRows) -> Tensor:
    """Squared error of the value before each response token against the reward that the row ends with."""
    values_RT = model(input_ids=rows.ids_RT[:, :-1]).logits[..., 0].float()
    mask_RT = rows.is_response_RT[:, 1:]
    loss: Tensor = ((values_RT - rows.right()[:, None]).square() * mask_RT).sum() / mask_RT.sum()
    return loss


@torch.no_grad()
def expected_reward(model: Any, rows: PaddedRows) -> float:
    """Mean probability of the right answer: the expected reward of responses drawn at temperature 1."""
    return float(answer_logprobs(model, rows).sum(1).exp().mean())


@torch.no_grad()
def judge_accuracy(model: Any, rows: PaddedRows) -> float:
    """Share of rows whose score has the right sign."""
    logits_R = model(input_ids=rows.ids_RT, attention_mask=_seen(rows)).logits[:, 0]
    return float(((logits_R > 0) == (rows.right() > 0)).float().mean())


@torch.no_grad()
def value_fit(model: Any, rows: PaddedRows) -> float:
    """Share of the variance of rewards that the value before the last token explains."""
    values_RT = model(input_ids=rows.ids_RT).logits[..., 0]
    last_R = values_RT.gather(1, rows.last()[:, None] - 1)[:, 0]
    return 1 - float((last_R - rows.right()).square().mean() / rows.right().var(unbiased=False))


def _seen(rows: PaddedRows) -> Tensor:
    width = rows.ids_RT.shape[1]
    return (torch.arange(width) <= rows.last()[:, None]).long()


def warm_up(
    model: Any,
    tokenizer: Any,
    task: str,
    *,
    loss: Callable[[Any, PaddedRows], Tensor],
    measure: Callable[[Any, PaddedRows], float],
    answers: Answers,
    steps: int,
    until: float,
    seed: int = 0,
    lr: float = LEARNING_RATE,
) -> float:
    """Train `model` in place for at most `steps` steps, until `measure` of held-out rows reaches `until`; return that
    figure.

    answers: the training data. The result depends on the arguments alone, and on torch's global generator where
    `answers` draw from it.
    """
    questions = list(islice(problems(task, "test", seed=seed), _HELD_OUT_ROWS))
    held_out = rows_of(tokenizer, questions, answers(questions))
    train = _batches(tokenizer, problems(task, "train", seed=seed), answers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    for step in range(steps):
        if step % _CHECK_EVERY == 0 and measure(model, held_out) >= until:
            break
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / _RISE_STEPS)
        optimizer.zero_grad()
        loss(model, next(train)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return measure(model, held_out)


def _batches(tokenizer: Any, drawn: Iterator[TaskQuestion], answers: Answers) -> Iterator[PaddedRows]:
    """Yield rows for each step. Answers come for many steps at once: a policy draws them much faster that way."""
    while True:
        questions = list(islice(drawn, _STEPS_AT_ONCE * ROWS))
        responses = answers(questions)
        for at in range(0, len(questions), ROWS):
            yield rows_of(tokenizer, questions[at : at + ROWS], responses[at : at + ROWS])
