"""A short supervised start, so that some sampled answers are right when reinforcement begins."""

import math

import torch
from torch import Tensor

from transferqueue.workflows.grpo.learning.problems import Split, problem_set
from transferqueue.workflows.grpo.learning.settings import LearningSettings
from transferqueue.workflows.grpo.model.prompt_packing import pack, token_logprobs
from transferqueue.workflows.grpo.model.tokenizer import encode_answer, encode_prompt
from transferqueue.workflows.grpo.model.transformer import Transformer


def warm_up(settings: LearningSettings) -> dict[str, Tensor]:
    """Train a new model on right answers for ``warmup_steps`` and return its weights by name (float32).

    A function of the settings alone: a caller may keep the result under their fields. Problems come from a split of
    their own, free of held-out ones. The learning rate rises over a tenth of the steps and falls as a half cosine.
    """
    generator = torch.Generator().manual_seed(settings.seed)
    model = Transformer(settings.model_shape())
    model.initialize(generator)
    problems = problem_set(settings.dataset)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.warmup_learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _share(step, settings.warmup_steps))
    for step in range(settings.warmup_steps):
        first = step * settings.warmup_rows
        rows = [
            problems.problem(Split.WARMUP, seed=settings.seed, ordinal=first + row)
            for row in range(settings.warmup_rows)
        ]
        packed = pack([encode_prompt(row.prompt) for row in rows], [encode_answer(row.answer) for row in rows])
        loss = -token_logprobs(model, packed, temperature=1.0).sum() / packed.mask_BT.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.gradient_norm_max)
        optimizer.step()
        schedule.step()
    return {name: weight.detach() for name, weight in model.state_dict().items()}


def _share(step: int, steps: int) -> float:
    rise = max(1, steps // 10)
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))
