"""Parts shared by adapters of engines that work on token ids: request checks, seeds, and how a partial completion is
continued."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from transferqueue.adapters.engines.images import VisionProcessor
from transferqueue.adapters.protocols import ABORT, LENGTH, STOP, Completion, Ids, Prompt, Sampling, Unsupported
from transferqueue.errors import UsageError

Span = tuple[int, int]


def check_request(
    prompts: Sequence[Prompt], sampling: Sampling, context_max: int | None, processor: VisionProcessor | None = None
) -> None:
    """Check a request before it is sent to an engine.

    Args:
        prompts: of the request.
        sampling: of the request.
        context_max: context length of the engine in tokens; None: unknown.
        processor: of the images that the engine reads; default None: it reads text alone.

    Raises:
        UsageError: no prompts, a prompt longer than the context, a begun completion with no tokens left to draw, or a
            prompt with other image tokens than its images make.
        Unsupported: a prompt with images, of an engine that reads none.
    """
    if not prompts:
        raise UsageError("generate was called with 0 prompts; give at least one")
    if processor is not None:
        processor.pixels([prompt.ids for prompt in prompts], [prompt.images for prompt in prompts])
    elif any(prompt.images for prompt in prompts):
        raise Unsupported("a prompt has images, and this engine reads text alone; load its model with images=True")
    longest = max(len(prompt.ids) for prompt in prompts) + sampling.tokens_max
    if context_max is not None and longest > context_max:
        raise UsageError(
            f"a prompt with tokens_max={sampling.tokens_max} comes to {longest} tokens; the engine's context is "
            f"{context_max}"
        )
    for at, prompt in enumerate(prompts):
        if prompt.begun is not None and len(prompt.begun.ids) >= sampling.tokens_max:
            raise UsageError(
                f"prompt {at} was begun with {len(prompt.begun.ids)} tokens; tokens_max={sampling.tokens_max} leaves "
                "none"
            )


def context(prompt: Prompt) -> Ids:
    """Return the engine's input: the prompt, then the tokens that were begun."""
    return prompt.ids if prompt.begun is None else np.concatenate([prompt.ids, prompt.begun.ids])


def tokens_left(prompt: Prompt, sampling: Sampling) -> int:
    """Return how many tokens may still be drawn."""
    return sampling.tokens_max - (0 if prompt.begun is None else len(prompt.begun.ids))


def seed_of(sampling: Sampling, index: int, sample: int, prompt: Prompt) -> int | None:
    """Return a seed for each completion, or None without a seed.

    Samples of one prompt need different seeds, or they would be identical. A continuation needs another seed than its
    beginning, or it would repeat the same draws.
    """
    begun = 0 if prompt.begun is None else len(prompt.begun.ids)
    if prompt.seed is not None:
        return int(np.random.SeedSequence([prompt.seed, sample, begun]).generate_state(1)[0])
    if sampling.seed is None:
        return None
    return int(np.random.SeedSequence([sampling.seed, index, sample, begun]).generate_state(1)[0])


def ended_by(ids: Sequence[int], tokens_max: int, sampling: Sampling) -> str:
    """Return the finish reason of `ids`, drawn by an engine that reports none. It was allowed to draw `tokens_max`."""
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
    """Join the tokens that were begun, if any, and the tokens drawn now into one completion.

    Args:
        index: of the prompt in the request.
        sample: index of the sample of that prompt.
        prompt: the prompt.
        ids: ids of the tokens drawn now.
        logprobs: log-probabilities of the tokens drawn now.
        finish_reason: ``"stop"``, ``"length"`` or ``"abort"``.
        spans: pairs of a version and a number of tokens drawn now, in order.
    """
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
