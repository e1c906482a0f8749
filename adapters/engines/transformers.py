"""A generator over Hugging Face transformers: any causal language model, sampled token by token in this process.

- All requests share one batch, which new rows join while others run (`running_batch`); or each request is a batch of
  its own, and then its numbers do not depend on what else is generated.
- Each row has its own random numbers (`sampling.RowDraws`), so only its seed and its logits decide its draws.
"""

from __future__ import annotations

from typing import Any, Final

from transferqueue.adapters.engines.images import processor_of
from transferqueue.adapters.engines.running_batch import Row, RunningBatch
from transferqueue.adapters.engines.stepped import SteppedGenerator, SteppedRequest
from transferqueue.adapters.protocols import Caches, Prompt, Sampling, WeightSource
from transferqueue.adapters.routes import routers_of
from transferqueue.adapters.weights import ModuleLoader
from transferqueue.errors import UsageError

ROWS_MAX: Final = 256
"""Rows that run at once, unless the caller says otherwise."""


class TransformersGenerator(SteppedGenerator):
    """A generator (`protocols.Generator`) over a loaded model. It owns the model's mode and weights until `close`.

    Args:
        model: a causal language model of transformers, on any device; one that reads images was loaded by
            `scoring.load_causal_lm`.
        version: of its current weights; default -1.
        rows_max: completions that run at once; default 256. Further ones wait.
        shared_batch: default True: all requests run in one batch. False: each request is a batch of its own, of any
            size: with a seed for each prompt its tokens and log-probabilities are then the same, bit for bit, whatever
            else is generated and whenever.
        routes: default False. True: completions have the experts that the model chose (`Completion.routes`).

    Raises:
        UsageError: `rows_max` is below 1.
        Unsupported: `routes` of a model without routers of experts.
    """

    def __init__(
        self,
        model: Any,
        *,
        version: int = -1,
        rows_max: int = ROWS_MAX,
        shared_batch: bool = True,
        routes: bool = False,
    ) -> None:
        if rows_max < 1:
            raise UsageError(f"rows_max={rows_max}: at least one completion must be able to run")
        super().__init__("generator", version)
        self._model = model.eval()
        self._loader = ModuleLoader(model)
        self._context_max = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self._images = processor_of(model)
        if routes:
            routers_of(model)
        self._routes = routes
        self._shared = RunningBatch(model, rows_max, self._caches, routes=routes) if shared_batch else None

    def _row(self, request: SteppedRequest, index: int, sample: int, prompt: Prompt, sampling: Sampling) -> Row:
        return Row(request, index, sample, prompt, sampling)

    def _batch(self, request: SteppedRequest) -> RunningBatch:
        if self._shared is not None:
            return self._shared
        return RunningBatch(self._model, len(request.rows), self._caches, routes=self._routes)

    def _caches(self) -> Caches:
        return self.kv

    def _check(self, source: WeightSource) -> None:
        self._loader.check(source)

    def _load(self, source: WeightSource, version: int, timeout_s: float) -> None:
        with self._changing_weights():
            self._loader.load(source)
