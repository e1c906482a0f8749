"""Sampling responses for a batch of prompts, one token of every row at a time.

All prompts are padded on the left to one length, read once each, and their cache rows repeated for the samples of
the prompt. Finished rows are dropped from the cache when they are many; until then they are computed and ignored,
since copying the cache costs more than a few idle rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from transferqueue.workflows.grpo.model.tokenizer import EOS_ID, PAD_ID
from transferqueue.workflows.grpo.model.transformer import Cache, Transformer

Ids = npt.NDArray[np.int32]
FinishReason = Literal["eos", "length", "abort"]

_BUSY_SHARE_MIN: Final = 0.6
"""Drop finished rows when fewer than this share is busy: then a copy of the cache pays within two tokens."""


@dataclass(frozen=True, slots=True)
class Response:
    """One sampled response.

    prompt: index of its prompt in the request. sample: its number among that prompt's. ids: int32
    ``[tokens]``, including eos. logprobs: float32 ``[tokens]``, of each token under the
    distribution that it was drawn from, temperature applied. finish_reason: ``"eos"``, ``"length"`` when the limit ended it, ``"abort"`` when it
    is unfinished.
    """

    prompt: int
    sample: int
    ids: Ids
    logprobs: npt.NDArray[np.float32]
    finish_reason: FinishReason


class SamplingRequest:
    """A request being generated: ``samples`` responses to each of ``prompts`` (int ``[tokens]`` each).

    ``step`` adds a token to every unfinished row. The weights are those of ``model`` at each step, so a caller
    that wants one policy version in a request changes them between requests only. ``temperature`` 0 is greedy: the
    distribution is one point, its log-probabilities 0. Draws come from ``generator`` alone.

    Raises ``ValueError`` for no prompts, an empty prompt, or prompts that with ``tokens_max`` exceed the context.
    """

    def __init__(
        self,
        model: Transformer,
        prompts: Sequence[npt.NDArray[np.integer]],
        *,
        samples: int,
        tokens_max: int,
        temperature: float,
        generator: torch.Generator,
    ) -> None:
        if not prompts or not all(len(prompt) for prompt in prompts):
            raise ValueError(
                f"{len(prompts)} prompts with {min(map(len, prompts), default=0)} tokens: none may be empty"
            )
        if samples < 1 or tokens_max < 1 or temperature < 0:
            raise ValueError(
                f"samples {samples} and tokens_max {tokens_max} must be positive, temperature {temperature} not negative"
            )
        self._model = model
        self._samples = samples
        self._tokens_max = tokens_max
        self._temperature = temperature
        self._generator = generator
        rows = len(prompts) * samples
        self._rows_A = torch.arange(rows)
        self._ids_BT = torch.zeros(rows, tokens_max, dtype=torch.int32)
        self._logprobs_BT = torch.zeros(rows, tokens_max)
        self._length = 0
        self._cache, self._logits_AV = self._read(prompts)
        self._busy_A = torch.ones(rows, dtype=torch.bool)

    @property
    def done(self) -> bool:
        """Whether every row has finished."""
        return not bool(self._busy_A.any())

    @torch.no_grad()
    def step(self) -> list[Response]:
        """Draw one token for each unfinished row, and return the responses that it completed."""
        if self.done:
            return []
        tokens_A, logprobs_A = draw(self._logits_AV, self._temperature, self._generator)
        self._ids_BT[self._rows_A, self._length] = tokens_A.int()
        self._logprobs_BT[self._rows_A, self._length] = logprobs_A
        self._length += 1
        ended_A = self._busy_A & ((tokens_A == EOS_ID) | (self._length == self._tokens_max))
        self._busy_A &= ~ended_A
        responses = [self._ended(row) for row in self._rows_A[ended_A].tolist()]
        if not self.done:
            tokens_A = self._drop_finished(tokens_A)
            self._logits_AV = self._model(tokens_A[:, None], self._cache)[:, -1]
        return responses

    def unfinished(self) -> list[Response]:
        """Return the unfinished responses with their tokens so far and finish reason abort."""
        return [self._response(row, "abort") for row in self._rows_A[self._busy_A].tolist()]

    def _read(self, prompts: Sequence[npt.NDArray[np.integer]]) -> tuple[Cache, Tensor]:
        longest = max(map(len, prompts))
        tokens_PT = torch.full((len(prompts), longest), PAD_ID)
        for row, prompt in enumerate(prompts):
            tokens_PT[row, longest - len(prompt) :] = torch.as_tensor(prompt, dtype=torch.int64)
        pads_P = torch.tensor([longest - len(prompt) for prompt in prompts])
        # The last token drawn is never read, hence one column less.
        cache = Cache(self._model.shape, pads_B=pads_P, columns_max=longest + self._tokens_max - 1)
        with torch.no_grad():
            logits_PV = self._model.head(self._model.features(tokens_PT, cache=cache)[:, -1])
        source_B = torch.arange(len(prompts)).repeat_interleave(self._samples)
        cache.select(source_B)
        return cache, logits_PV[source_B]

    def _drop_finished(self, tokens_A: Tensor) -> Tensor:
        if self._busy_A.float().mean() >= _BUSY_SHARE_MIN:
            return tokens_A
        busy = self._busy_A.nonzero().squeeze(1)
        self._cache.select(busy)
        self._rows_A, self._busy_A = self._rows_A[busy], self._busy_A[busy]
        return tokens_A[busy]

    def _ended(self, row: int) -> Response:
        return self._response(row, "eos" if self._ids_BT[row, self._length - 1] == EOS_ID else "length")

    def _response(self, row: int, reason: FinishReason) -> Response:
        ids = self._ids_BT[row, : self._length].numpy().copy()
        logprobs = self._logprobs_BT[row, : self._length].numpy().copy()
        return Response(row // self._samples, row % self._samples, ids, logprobs, reason)


def draw(logits_BV: Tensor, temperature: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw a token for each row of logits; return tokens int64 ``[rows]`` and their log-probabilities float32 ``[rows]``.

    ``temperature`` 0 takes the likeliest token with log-probability 0.
    """
    if temperature == 0:
        tokens_B = logits_BV.argmax(-1)
        return tokens_B, torch.zeros(len(tokens_B))
    logprobs_BV = torch.log_softmax(logits_BV / temperature, -1)
    tokens_B1 = torch.multinomial(logprobs_BV.exp(), 1, generator=generator)
    return tokens_B1.squeeze(1), logprobs_BV.gather(1, tokens_B1).squeeze(1)


def generate(
    model: Transformer,
    prompts: Sequence[npt.NDArray[np.integer]],
    *,
    samples: int,
    tokens_max: int,
    temperature: float,
    generator: torch.Generator,
) -> list[Response]:
    """Run a ``SamplingRequest`` to its end; return all responses by prompt, then sample."""
    generation = SamplingRequest(
        model, prompts, samples=samples, tokens_max=tokens_max, temperature=temperature, generator=generator
    )
    responses: list[Response] = []
    while not generation.done:
        responses += generation.step()
    return sorted(responses, key=lambda response: (response.prompt, response.sample))
