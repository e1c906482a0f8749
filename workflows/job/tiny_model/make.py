"""Makes tiny models and the data of their task in directories, offline."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import torch

from transferqueue.adapters.builtin.tokenizer import CharacterTokenizer
from transferqueue.errors import NotFound, UsageError, listing
from transferqueue.workflows.job.tiny_model import warmup
from transferqueue.workflows.job.tiny_model.answers import Answers, DrawnAnswers, MistakenAnswers, right_answers
from transferqueue.workflows.job.tiny_model.task_question import TaskQuestion
from transferqueue.workflows.job.tiny_model.tasks import TASKS, problems
from transferqueue.workflows.job.tiny_model.tokenizer import build_tokenizer

Kind = Literal["builtin", "qwen3", "classifier", "value"]


class _Recipe(NamedTuple):
    """How a kind of model is made: its class in transformers, its loss, when it is good enough.

    judged: it learns from right and wrong answers. drawn_alone: where a policy draws answers, from those alone.
    """

    architecture: str
    loss: Callable[[Any, warmup.PaddedRows], torch.Tensor]
    measure: Callable[[Any, warmup.PaddedRows], float]
    until: float
    figure: str
    judged: bool = False
    drawn_alone: bool = False


KINDS: Final[Mapping[str, _Recipe]] = {
    "builtin": _Recipe("BuiltinModel", warmup.answer_loss, warmup.expected_reward, 0.35, "expected reward"),
    "qwen3": _Recipe("AutoModelForCausalLM", warmup.answer_loss, warmup.expected_reward, 0.35, "expected reward"),
    "classifier": _Recipe(
        "AutoModelForSequenceClassification", warmup.judge_loss, warmup.judge_accuracy, 0.93, "accuracy", judged=True
    ),
    "value": _Recipe(
        "AutoModelForTokenClassification",
        warmup.value_loss,
        warmup.value_fit,
        0.4,
        "share of variance explained",
        judged=True,
        drawn_alone=True,
    ),
}
"""builtin: a policy that needs no library of Hugging Face (`adapters.builtin`). qwen3: a policy. classifier: a reward
model, whose score is above 0 for right answers. value: a critic, which predicts the reward before each token."""


def config(tokenizer: Any, **changes: Any) -> Any:
    """Return the configuration of a tiny Qwen3, of about 140,000 parameters. changes: other values of its fields."""
    import transformers

    fields = {
        "vocab_size": -(-len(tokenizer) // 16) * 16,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "initializer_range": 0.08,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "use_cache": True,
    }
    return transformers.Qwen3Config(**{**fields, **changes})


def make(
    directory: str | Path,
    *,
    kind: Kind = "qwen3",
    task: str = "sort",
    steps: int = 0,
    until: float | None = None,
    seed: int = 0,
    policy: str | Path | None = None,
    lr: float = warmup.LEARNING_RATE,
    **changes: Any,
) -> float:
    """Write a model and its tokenizer into `directory`; return its held-out figure (0.0 without a warm-up).

    steps: most steps of the warm-up, each of 64 rows. until: held-out figure at which it ends earlier; of a policy, the
    expected reward at temperature 1. policy: a directory whose model draws answers for a reward model (every second
    one) or a critic (all): they then know its own mistakes. lr: learning rate of the warm-up. changes: of the
    configuration. Weights are float32 and a function of the arguments. Raises `NotFound` for an unknown kind, task or
    policy and `UsageError` for a negative number of steps and for a policy that learns from another, before anything is
    written.
    """
    if kind not in KINDS:
        raise NotFound(f'kind "{kind}" is unknown; there are {listing(KINDS)}')
    if task not in TASKS:
        raise NotFound(f'task "{task}" is unknown; there are {listing(TASKS)}')
    if steps < 0:
        raise UsageError(f"steps={steps}: give 0 for random weights, or a positive number")
    if policy is not None and not KINDS[kind].judged:
        raise UsageError(
            f'policy={str(policy)!r} with kind "{kind}": only a judge learns from drawn answers; leave it out'
        )
    recipe = KINDS[kind]
    tokenizer, model = _new(kind, seed, changes)
    answers = _answers(recipe, tokenizer, policy, seed)
    figure = 0.0
    if steps:
        figure = warmup.warm_up(
            model,
            tokenizer,
            task,
            loss=recipe.loss,
            measure=recipe.measure,
            answers=answers,
            steps=steps,
            until=recipe.until if until is None else until,
            seed=seed,
            lr=lr,
        )
    model.save_pretrained(directory)
    if kind != "builtin":
        tokenizer.save_pretrained(directory)
    return figure


def _new(kind: Kind, seed: int, changes: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return a tokenizer, and a model with random weights."""
    if kind == "builtin":
        from transferqueue.adapters.builtin.model import BuiltinModel, ModelShape

        return CharacterTokenizer(), BuiltinModel(ModelShape(**changes), seed=seed)
    import transformers

    tokenizer = build_tokenizer()
    own: dict[str, Any] = {} if kind == "qwen3" else {"num_labels": 1, "tie_word_embeddings": False}
    own |= {"classifier_dropout": 0.0} if kind == "value" else {}
    torch.manual_seed(seed)
    return tokenizer, getattr(transformers, KINDS[kind].architecture).from_config(
        config(tokenizer, **{**own, **changes})
    )


def _answers(recipe: _Recipe, tokenizer: Any, policy: str | Path | None, seed: int) -> Answers:
    if not recipe.judged:
        return right_answers(tokenizer)
    mistaken = MistakenAnswers(tokenizer, random.Random(seed + 1))
    return mistaken if policy is None else DrawnAnswers(policy, mistaken, alone=recipe.drawn_alone)


def write_data(directory: str | Path, *, task: str = "sort", train: int = 4096, test: int = 256, seed: int = 0) -> None:
    """Write ``train.jsonl`` and ``test.jsonl``: one object a line, with question, answer and the task's other columns.
    No question is twice in a file or in both."""
    if task not in TASKS:
        raise NotFound(f'task "{task}" is unknown; there are {listing(TASKS)}')
    place = Path(directory)
    place.mkdir(parents=True, exist_ok=True)
    for split, rows in (("train", train), ("test", test)):
        distinct = _distinct(task, split, rows, seed + 1)
        lines = [json.dumps({"question": q.question, "answer": q.answer, **q.columns}) + "\n" for q in distinct]
        (place / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")


def _distinct(task: str, split: Any, rows: int, seed: int) -> Iterable[TaskQuestion]:
    """Draw until there are `rows` different questions. Raises `UsageError` if the task seems to have fewer."""
    distinct: dict[str, TaskQuestion] = {}
    for problem in islice(problems(task, split, seed=seed), 20 * rows):
        if not problem.history:
            distinct[problem.question] = problem
        if len(distinct) == rows:
            return distinct.values()
    raise UsageError(f'task "{task}" has only about {len(distinct)} {split} questions, not {rows}; ask for fewer')
