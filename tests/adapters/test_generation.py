"""The stage `Generate`: which completions go back for another lease."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import transferqueue as tq
from transferqueue.adapters.protocols import ABORT, LENGTH, Completion, Prompt, Sampling
from transferqueue.adapters.stages.generation import BEGUN, Generate


class Ends:
    """An engine that ends every completion after so many tokens, for this reason."""

    def __init__(self, tokens: int, reason: str) -> None:
        self._tokens, self._reason = tokens, reason

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, **terms: Any) -> Iterator[Completion]:
        for at in range(len(prompts)):
            ids = np.zeros(min(self._tokens, sampling.tokens_max), np.int32)
            yield Completion(
                prompt=at,
                sample=0,
                ids=ids,
                logprobs=np.zeros(len(ids), np.float32),
                finish_reason=self._reason,
                spans=((0, len(ids)),),
            )


@pytest.mark.parametrize(
    ("tokens", "reason", "budget", "goes_on"),
    [
        (8, LENGTH, 4, True),
        (3, LENGTH, 4, False),  # at a limit of its own, where it would end again
        (3, LENGTH, 0, False),
        (3, ABORT, 0, True),
        (16, LENGTH, 0, False),
    ],
)
def test_a_completion_goes_on_if_its_lease_or_a_pause_ended_it(
    tokens: int, reason: str, budget: int, goes_on: bool
) -> None:
    stage = Generate(Ends(tokens, reason), Sampling(tokens_max=16), budget=budget, parts=True)  # type: ignore[arg-type]
    nothing: dict[str, Any] = {name: [np.empty(0, np.float32 if "log" in name else np.int32)] for name in BEGUN}
    with tq.connect("embedded") as queue:
        table = queue.create_table("t", tasks=[tq.Task("generate", needs=["prompt_ids", *BEGUN])])
        table.put(prompt_ids=[[1, 2]], **nothing)
        with table.lease("generate", rows=1) as batch:
            (part,) = stage(batch)
    assert part.unfinished == goes_on
