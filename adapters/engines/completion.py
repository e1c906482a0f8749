"""What adapters of engines that take token ids and give token ids share: checks of a request, seeds, and how a completion that
was begun elsewhere goes on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from transferqueue.adapters.protocols import ABORT, LENGTH, STOP, Completion, Ids, Prompt, Sampling
from transferqueue.errors import UsageError

Span = tuple[int, int]


def check_request(prompts: Sequence[Prompt], sampling: Sampling, context_max: int | None) -> None:
    """`UsageError` for no prompts, one that does not fit the context (None: unknown), or one begun that has no tokens left."""
    if not prompts:
        raise UsageError("generate was called with 0 prompts; give at least one")
    longest = max(len(prompt.ids) for prompt in prompts) + sampling.tokens_max
    if context_max is not None and longest > context_max:
        raise UsageError(
            f"a prompt with tokens_max={sampling.tokens_max} comes to {longest} tokens; the engine's context is {context_max}"
        )
    for at, prompt in enumerate(prompts):
        if prompt.begun is not None and len(prompt.begun.ids) >= sampling.tokens_max:
            raise UsageError(
                f"prompt {at} was begun with {len(prompt.begun.ids)} tokens; tokens_max={sampling.tokens_max} leaves none"
            )


def context(prompt: Prompt) -> Ids:
    """What the engine reads: the prompt, and what was begun."""
    return prompt.ids if prompt.begun is None else np.concatenate([prompt.ids, prompt.begun.ids])


def tokens_left(prompt: Prompt, sampling: Sampling) -> int:
    """How many tokens may still be drawn."""
    return sampling.tokens_max - (0 if prompt.begun is None else len(prompt.begun.ids))


def seed_of(sampling: Sampling, index: int, sample: int, prompt: Prompt) -> int | None:
    """A seed for each completion: one for all of a prompt's samples would give them the same tokens; another one for what follows
    what was begun, or the same draws would be made twice."""
    if sampling.seed is None:
        return None
    begun = 0 if prompt.begun is None else len(prompt.begun.ids)
    return int(np.random.SeedSequence([sampling.seed, index, sample, begun]).generate_state(1)[0])


def ended_by(ids: Sequence[int], tokens_max: int, sampling: Sampling) -> str:
    """Finish reason of tokens that an engine drew and said no more about; `tokens_max`: how many it might draw."""
    if len(ids) and ids[-1] in sampling.stop_ids:
        return STOP
    return LENGTH if len(ids) >= tokens_max else ABORT


def completed(
    index: int,
    sample: int,
    prompt: Prompt,
    ids: Iterable[int],
    logprobs: Iterable[float],
    finish_reason: str,
    spans: Sequence[Span],
) -> Completion:
    """The completion of what was begun, if anything, and what the engine drew now."""
    begun = prompt.begun
    before = ((), (), (), sample) if begun is None else (begun.ids, begun.logprobs, begun.spans, begun.sample)
    return Completion(
        prompt=index,
        sample=before[3],
        ids=np.array([*before[0], *ids], np.int32),
        logprobs=np.array([*before[1], *logprobs], np.float32),
        finish_reason=finish_reason,
        spans=_joined(before[2], [span for span in spans if span[1]]),
    )


def _joined(before: Sequence[Span], after: Sequence[Span]) -> tuple[Span, ...]:
    if before and after and before[-1][0] == after[0][0]:
        return (*before[:-1], (after[0][0], before[-1][1] + after[0][1]), *after[1:])
    return (*before, *after)
