"""Engines whose responses have the lengths of StreamRL's figure 7, scaled, and prompts that tell them in part.

The length of a response follows from its prompt's tokens and its seed: the published quantile at the rank of the
prompt's difficulty plus luck (`bench.published.prompts`). No token ends it earlier. A job names the functions here as
engines of its own (``kind = "factory"``); `core` is the place of the core that the engine has alone.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from statistics import NormalDist
from typing import Any, Final

import numpy as np

from bench.paced_engine import PacedEngine
from bench.published.dispatch import ptl_s, published_lengths
from bench.published.prompts import LUCK, difficulty_of
from transferqueue.adapters.protocols import GENERATE_S, Prompt, Sampling

SKEWS: Final = {"published": 1.0, "mild": 0.5}
"""Deviation of the logarithm of lengths over the published one's."""
_RANKS: Final = 20_000
_PUBLISHED_MAX: Final = 20_000
"""Tokens of the longest published length."""


def length_of(prompt: Prompt, longest: int, skew: str) -> int:
    """Tokens of the response to a prompt, from 1 to `longest`."""
    luck = np.random.default_rng([*prompt.ids.tolist(), prompt.seed or 0]).normal()
    rank = NormalDist().cdf((difficulty_of(prompt.ids) + LUCK * luck) / float(np.hypot(1, LUCK)))
    return int(_lengths(longest, skew)[int(rank * (_RANKS - 1))])


@cache
def _lengths(longest: int, skew: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    logs = np.log(np.sort(published_lengths(_RANKS, np.random.default_rng(7))))
    logs = logs.mean() + SKEWS[skew] * (logs - logs.mean())
    return np.clip(np.exp(logs) * longest / _PUBLISHED_MAX, 1, longest).astype(np.int64)


def texts(count: int, seed: int, tokens: int = 32) -> list[str]:
    """Draw prompts of a token a letter for the tiny tokenizer."""
    letters = [chr(code) for code in range(ord("!"), ord("~") + 1) if chr(code) not in '<>{}"\\']
    drawn = np.random.default_rng(seed).integers(0, len(letters), (count, tokens))
    return ["".join(letters[place] for place in row) for row in drawn.tolist()]


# ---------------------------------------------------------------- engines


def vllm(directory: str, *, slots: int, longest: int, skew: str, core: int | None = None) -> Any:
    """VLLM in this process."""
    from transferqueue.adapters.vllm.engine import VllmGenerator

    class Given(VllmGenerator):
        def _row(self, request: Any, index: int, sample: int, prompt: Prompt, sampling: Sampling) -> Any:
            return super()._row(request, index, sample, prompt, _limited(prompt, sampling, longest, skew))

    _on_core(core)
    options = {"enforce_eager": True, "kv_cache_memory_bytes": 256 << 20, "max_model_len": longest + 64}
    return Given(directory, version=-1, dtype="float32", max_num_seqs=slots, **options)


def transformers(directory: str, *, slots: int, longest: int, skew: str, core: int | None = None) -> Any:
    """A model of transformers in this process."""
    from transformers import AutoModelForCausalLM

    from transferqueue.adapters.engines.transformers import TransformersGenerator

    class Given(TransformersGenerator):
        asked = threading.local()

        def generate(self, prompts: Sequence[Prompt], sampling: Sampling, *, timeout_s: float = GENERATE_S) -> Any:
            self.asked.prompts = prompts
            yield from super().generate(prompts, sampling, timeout_s=timeout_s)

        def _enter(self, request: Any, deadline: float, timeout_s: float) -> None:
            for row in request.rows:
                row.sampling = _limited(self.asked.prompts[row.prompt], row.sampling, longest, skew)
            super()._enter(request, deadline, timeout_s)

    _on_core(core)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="float32")
    return Given(model, version=-1, rows_max=slots, shared_batch=True)


def paced(directory: str, *, slots: int, longest: int, skew: str, core: int | None = None) -> Any:
    """An engine that takes the published times of a 7B model, and no core."""
    return PacedEngine(ptl_s, lambda prompt: length_of(prompt, longest, skew))


ENGINES: Final[dict[str, Callable[..., Any]]] = {"vllm": vllm, "transformers": transformers, "paced": paced}


def _limited(prompt: Prompt, sampling: Sampling, longest: int, skew: str) -> Sampling:
    return replace(sampling, tokens_max=length_of(prompt, longest, skew), stop_ids=())


def _on_core(core: int | None) -> None:
    """Have this process compute on one core of those that it may use."""
    if core is None:
        return
    import torch

    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[core % len(cores)]})
    torch.set_num_threads(1)
