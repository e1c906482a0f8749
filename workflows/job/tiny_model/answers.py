"""Answers that a tiny model learns from: the right ones, and for a judge also ones with a mistake and ones that a
policy drew.

A judge that saw only right answers with one mistake calls other mistakes right: of a policy's own wrong answers, one in
six. A policy that is trained on its score finds them. So a judge may learn from answers that the policy draws.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from transferqueue.errors import NotFound
from transferqueue.workflows.job.tiny_model.task_question import TaskQuestion

Answers = Callable[[Sequence[TaskQuestion]], list[list[int]]]
"""Gives the tokens of one answer to each question; with its end token, unless it was cut."""

TOKENS_MAX: Final = 16
"""Longest answer that a policy draws."""


def right_answers(tokenizer: Any) -> Answers:
    """Return a source of right answers."""
    return lambda questions: [ids_of(tokenizer, question.answer) for question in questions]


def ids_of(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of an answer, with its end token."""
    return [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


class MistakenAnswers:
    """Right answers, and in every second row one with a mistake: a digit replaced, dropped, added, or two exchanged."""

    def __init__(self, tokenizer: Any, draws: random.Random) -> None:
        self._tokenizer, self._draws = tokenizer, draws

    def __call__(self, questions: Sequence[TaskQuestion]) -> list[list[int]]:
        """See `Answers`."""
        return [
            ids_of(self._tokenizer, self._mistaken(question.answer) if row % 2 else question.answer)
            for row, question in enumerate(questions)
        ]

    def _mistaken(self, answer: str) -> str:
        said = answer
        while said == answer:
            at, digit = self._draws.randrange(len(answer)), self._draws.choice("0123456789")
            before, here, after = answer[:at], answer[at], answer[at + 1 :]
            changed = (digit + after, after, here + digit + after, after[:1] + here + after[1:])
            said = before + self._draws.choice(changed)
        return said


class DrawnAnswers:
    """Answers that a policy draws at temperature 1. alone: all rows; else one row of two, and those of `others` in
    between.

    policy: a directory that `make.make` wrote. Raises `NotFound` if it has no model. Draws from torch's global
    generator.
    """

    def __init__(self, policy: str | Path, others: Answers, *, alone: bool) -> None:
        import transformers

        if not (Path(policy) / "config.json").is_file():
            raise NotFound(f"policy {str(policy)!r}: there is no model; make one first, with --kind qwen3")
        self._model = transformers.AutoModelForCausalLM.from_pretrained(policy).eval()
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(policy, padding_side="left")
        self._others, self._alone = others, alone

    def __call__(self, questions: Sequence[TaskQuestion]) -> list[list[int]]:
        """See `Answers`."""
        if self._alone:
            return self._drawn(questions)
        answers: list[list[int]] = [[] for _ in questions]
        answers[::2] = self._drawn(questions[::2])
        answers[1::2] = self._others(questions[1::2])
        return answers

    @torch.no_grad()
    def _drawn(self, questions: Sequence[TaskQuestion]) -> list[list[int]]:
        chats = [question.chat() for question in questions]
        prompts = self._tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, return_dict=True, padding=True, return_tensors="pt"
        )
        ids_RT = self._model.generate(
            **prompts,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=TOKENS_MAX,
            pad_token_id=self._tokenizer.pad_token_id,
        )
        return [self._to_the_end(row) for row in ids_RT[:, prompts["input_ids"].shape[1] :].tolist()]

    def _to_the_end(self, ids: list[int]) -> list[int]:
        end = self._tokenizer.eos_token_id
        return ids[: ids.index(end) + 1] if end in ids else ids
