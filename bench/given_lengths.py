"""Engines whose responses have the lengths of StreamRL's figure 7, scaled, and prompts that tell them in part.

StreamRL (arXiv 2504.15930) published no prompts. Here the *difficulty* of a prompt is the sum of fixed weights of its
tokens, which a ranker does not know, and the length of a response is the published quantile at the rank of difficulty
plus luck. So it follows from the tokens and the seed, and no token ends it earlier. A job names the functions here as
engines of its own (``kind = "factory"``); `core` is the place of the core that the engine has alone.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Any, Final

import numpy as np

from bench.paced_engine import PacedEngine
from transferqueue.adapters.protocols import GENERATE_S, Prompt, Sampling
from transferqueue.workflows.planner.engine_times import DecodeCurve, Lengths

SKEWS: Final = {"published": 1.0, "mild": 0.5}
"""Deviation of the logarithm of lengths over the published one's."""
LUCK: Final = 0.25
"""Deviation of responses to one prompt over that of prompts. It bounds every ranker: one that knew the difficulty would
have about the recall of the published 7B (0.87 of the longest fifth)."""
PTL_MS: Final = (8.3, 8.8, 8.9, 9.0, 9.4, 10.2, 11.7, 15.2, 21.8, 36.9)
PTL: Final = DecodeCurve(tuple(float(2**power) for power in range(len(PTL_MS))), PTL_MS)
"""Published milliseconds a token of a 7B model, by rows at once; interpolated between them."""
_RANKS: Final = 20_000
_PUBLISHED_MAX: Final = 20_000
"""Tokens of the longest published length."""
_VOCABULARY: Final = 256
_SEED: Final = 7


def length_of(prompt: Prompt, longest: int, skew: str) -> int:
    """Tokens of the response to a prompt, from 1 to `longest`."""
    luck = np.random.default_rng([*prompt.ids.tolist(), prompt.seed or 0]).normal()
    rank = NormalDist().cdf((difficulty_of(prompt.ids) + LUCK * luck) / float(np.hypot(1, LUCK)))
    return int(_lengths(longest, skew)[int(rank * (_RANKS - 1))])


def difficulty_of(ids: np.ndarray[Any, np.dtype[Any]]) -> float:
    """Difficulty of a prompt, of mean 0 and variance 1 over all prompts."""
    weights = np.random.default_rng(_SEED).normal(size=_VOCABULARY)
    found = (weights[ids % _VOCABULARY] - weights.mean()).sum()
    return float(found / (weights.std() * np.sqrt(len(ids))))


def published_lengths(rows: int, rng: np.random.Generator) -> Lengths:
    """Draw lengths in tokens from the digitised histogram."""
    path = Path(__file__).parent / "published" / "streamrl_output_lengths.csv"
    low, high, share = np.loadtxt(path, delimiter=",", skiprows=1, unpack=True)
    share = np.maximum(share, 0)
    at = rng.choice(low.size, rows, p=share / share.sum())
    lengths: Lengths = rng.uniform(low[at], high[at]).astype(np.int64)
    return lengths


@cache
def _lengths(longest: int, skew: str) -> Lengths:
    logs = np.log(np.sort(published_lengths(_RANKS, np.random.default_rng(_SEED))))
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
    return PacedEngine(lambda rows: PTL.token_ms(rows) / 1000, lambda prompt: length_of(prompt, longest, skew))


ENGINES: Final[dict[str, Callable[..., Any]]] = {"vllm": vllm, "transformers": transformers, "paced": paced}


def _limited(prompt: Prompt, sampling: Sampling, longest: int, skew: str) -> Sampling:
    """Sampling that ends at the prompt's length; as it is where nothing may end a response, as profiles time tokens."""
    if not sampling.stop_ids:
        return sampling
    return replace(sampling, tokens_max=length_of(prompt, longest, skew), stop_ids=())


def _on_core(core: int | None) -> None:
    """Have this process compute on one core of those that it may use."""
    if core is None:
        return
    import torch

    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[core % len(cores)]})
    torch.set_num_threads(1)
