"""A generator of the stream generation service, as a process:
``python -m tests.workflows.stream_engine QUEUE [WEIGHTS]``.

Its model is a table of next tokens, the weights. A completion begins with the prompt's last token and ends at token 0;
each token is ``table[last]``. So a sample is known from its prompt and the weights, whoever generates it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

import numpy as np

import transferqueue as tq
from transferqueue.adapters.protocols import Completion, Completions, Pause, Prompt, Sampling, WeightSource
from transferqueue.workflows.service import serve

END: Final = 0
SAMPLING: Final = Sampling(tokens_max=64, temperature=0.0)
POISON: Final = 99
"""A prompt that begins with this kills the process that generates for it."""


def count_down(by: int) -> dict[str, np.ndarray]:
    """Weights under which every token is followed by one that is smaller by `by`, down to 0."""
    return {"next": np.maximum(np.arange(128) - by, END).astype(np.int32)}


def answer(prompt: np.ndarray, following: np.ndarray) -> list[int]:
    """What the model completes a prompt with."""
    found = [int(following[prompt[-1]])]
    while found[-1] != END and len(found) < SAMPLING.tokens_max:
        found.append(int(following[found[-1]]))
    return found


class Countdown:
    """An engine that completes prompts one after another, as fast as numpy can."""

    def __init__(self) -> None:
        self.version = -1
        self.following = np.zeros(128, np.int32)

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, *, timeout_s: float = 60.0) -> Completions:
        for at, prompt in enumerate(prompts):
            if prompt.ids[0] == POISON:
                raise SystemExit(1)
            ids = np.array(answer(prompt.ids, self.following), np.int32)
            yield Completion(
                prompt=at,
                sample=0,
                ids=ids,
                logprobs=np.zeros(len(ids), np.float32),
                finish_reason="stop",
                spans=((self.version, len(ids)),),
            )

    def pause(self, mode: Pause, *, timeout_s: float = 60.0) -> None:
        """Nothing runs between two calls."""

    def resume(self) -> None:
        """Nothing was paused."""

    def update_weights(self, source: WeightSource, version: int, *, timeout_s: float = 60.0) -> None:
        ((_, table),) = list(source)
        self.following, self.version = table.numpy().copy(), version

    def close(self) -> None:
        """Nothing is held."""


if __name__ == "__main__":
    with tq.connect(sys.argv[1], label="generator") as queue:
        if len(sys.argv) > 2:
            with tq.connect(sys.argv[2]) as site:
                serve(queue, Countdown(), SAMPLING, weights=site, rows=4, stall_s=60)
        else:
            serve(queue, Countdown(), SAMPLING, rows=4, stall_s=60)
