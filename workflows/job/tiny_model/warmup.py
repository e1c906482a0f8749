"""Short supervised training of tiny models: answers for a policy, judgements for a reward model and a critic.

Wrong answers, which a judge must see too, are right ones with one character replaced.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (torch's own name for it)

from transferqueue.workflows.job.tiny_model.tasks import TaskQuestion, problems

ROWS: Final = 64
"""Rows of a training step."""
_HELD_OUT_ROWS: Final = 256
_CHECK_EVERY: Final = 10
_LEARNING_RATE: Final = 3e-3
_RISE_STEPS: Final = 10


class PaddedRows(NamedTuple):
    """Prompts and responses, padded on the right. ids: int64 ``[rows, tokens]``; is_response: bool, the same shape; right: float32 ``[rows]``, 1 or 0."""

    ids_RT: Tensor
    is_response_RT: Tensor
    right_R: Tensor

    def last(self) -> Tensor:
        """Return the position of each row's last token: int64 ``[rows]``."""
        return self.is_response_RT.long().cumsum(1).argmax(1)


def rows_of(tokenizer: Any, drawn: Sequence[TaskQuestion], wrong: random.Random | None = None) -> PaddedRows:
    """Return problems as chats. wrong: makes the answer of every second row wrong."""
    parts = []
    for row, (question, answer) in enumerate(drawn):
        said = _wrong(answer, wrong) if wrong and row % 2 else answer
        chat = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        parts.append((prompt, [*tokenizer(said)["input_ids"], tokenizer.eos_token_id], said == answer))
    width = max(len(prompt) + len(response) for prompt, response, _ in parts)
    ids_RT = torch.full((len(parts), width), tokenizer.pad_token_id)
    is_response_RT = torch.zeros_like(ids_RT, dtype=torch.bool)
    for row, (prompt, response, _) in enumerate(parts):
        ids_RT[row, : len(prompt) + len(response)] = torch.tensor(prompt + response)
        is_response_RT[row, len(prompt) : len(prompt) + len(response)] = True
    return PaddedRows(ids_RT, is_response_RT, torch.tensor([float(right) for _, _, right in parts]))


def _wrong(answer: str, draws: random.Random) -> str:
    place = draws.randrange(len(answer))
    digit = draws.choice([digit for digit in "0123456789" if digit != answer[place]])
    return answer[:place] + digit + answer[place + 1 :]


def answer_logprobs(model: Any, rows: PaddedRows) -> Tensor:
    """Return the log-probability of each response token, 0 elsewhere: float32 ``[rows, tokens - 1]``, with a gradient."""
    logits_RTV = model(input_ids=rows.ids_RT[:, :-1]).logits.float()
    logprobs_RT = logits_RTV.log_softmax(-1).gather(-1, rows.ids_RT[:, 1:, None])[..., 0]
    masked_RT: Tensor = logprobs_RT * rows.is_response_RT[:, 1:]
    return masked_RT


def answer_loss(model: Any, rows: PaddedRows) -> Tensor:
    """Mean negative log-probability of the response tokens."""
    return -answer_logprobs(model, rows).sum() / rows.is_response_RT.sum()


def judge_loss(model: Any, rows: PaddedRows) -> Tensor:
    """Cross entropy of a classifier's score against whether the answer is right."""
    logits_R = model(input_ids=rows.ids_RT, attention_mask=_seen(rows)).logits[:, 0]
    return F.binary_cross_entropy_with_logits(logits_R.float(), rows.right_R)


def value_loss(model: Any, rows: PaddedRows) -> Tensor:
    """Squared error of the value before each response token against the reward that the row ends with."""
    values_RT = model(input_ids=rows.ids_RT[:, :-1]).logits[..., 0].float()
    mask_RT = rows.is_response_RT[:, 1:]
    loss: Tensor = ((values_RT - rows.right_R[:, None]).square() * mask_RT).sum() / mask_RT.sum()
    return loss


@torch.no_grad()
def expected_reward(model: Any, rows: PaddedRows) -> float:
    """Mean probability of the right answer: the expected reward of responses drawn at temperature 1."""
    return float(answer_logprobs(model, rows).sum(1).exp().mean())


@torch.no_grad()
def judge_accuracy(model: Any, rows: PaddedRows) -> float:
    """Share of rows whose score has the right sign."""
    logits_R = model(input_ids=rows.ids_RT, attention_mask=_seen(rows)).logits[:, 0]
    return float(((logits_R > 0) == (rows.right_R > 0)).float().mean())


@torch.no_grad()
def value_fit(model: Any, rows: PaddedRows) -> float:
    """Share of the variance of rewards that the value before the last token explains."""
    values_RT = model(input_ids=rows.ids_RT).logits[..., 0]
    last_R = values_RT.gather(1, rows.last()[:, None] - 1)[:, 0]
    return 1 - float((last_R - rows.right_R).square().mean() / rows.right_R.var(unbiased=False))


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
    judged: bool,
    steps: int,
    until: float,
    seed: int = 0,
) -> float:
    """Train `model` in place for at most `steps` steps, until `measure` of held-out rows reaches `until`; return that figure.

    judged: every second answer is wrong. The result depends on the arguments alone.
    """
    wrong = random.Random(seed + 1) if judged else None
    held_out = rows_of(tokenizer, list(islice(problems(task, "test", seed=seed), _HELD_OUT_ROWS)), wrong)
    train = _batches(problems(task, "train", seed=seed))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    for step in range(steps):
        if step % _CHECK_EVERY == 0 and measure(model, held_out) >= until:
            break
        for group in optimizer.param_groups:
            group["lr"] = _LEARNING_RATE * min(1.0, (step + 1) / _RISE_STEPS)
        optimizer.zero_grad()
        loss(model, rows_of(tokenizer, next(train), wrong)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return measure(model, held_out)


def _batches(drawn: Iterator[TaskQuestion]) -> Iterator[list[TaskQuestion]]:
    while True:
        yield list(islice(drawn, ROWS))
