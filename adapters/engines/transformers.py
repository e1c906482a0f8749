"""A generator over Hugging Face transformers: any causal language model, sampled token by token in this process.

Rules:

- One lock protects the model. A request holds it while it draws one token, so a pause or new weights take effect between
  two tokens, at most one step late, and several requests alternate.
- Rows of a request share a batch, padded on the left, with one cache. Finished rows leave the batch when there are many of them; until
  then they are computed and ignored, since copying a cache costs more than a few idle rows.
- After a change of weights the context of every unfinished row is computed again, so that later tokens have
  the log-probabilities of the new weights.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from transferqueue.adapters.engines.completion import check_request
from transferqueue.adapters.engines.sampling import draw
from transferqueue.adapters.protocols import (
    ABORT,
    GENERATE_S,
    LENGTH,
    PAUSE_S,
    STOP,
    Completion,
    Completions,
    Pause,
    Prompt,
    Sampling,
    WeightSource,
)
from transferqueue.adapters.weights import ModuleWeights, check_fits
from transferqueue.errors import DeadlineExceeded, Disconnected

_BUSY_SHARE_MIN: Final = 0.6


class TransformersGenerator:
    """A generator (`protocols.Generator`) over a loaded model. It owns the model's mode and weights until `close`.

    model: a causal language model of transformers, on any device. version: of its current weights.
    """

    def __init__(self, model: Any, *, version: int = -1) -> None:
        self._model = model.eval()
        self._version = version
        self._turn = threading.Condition(threading.Lock())
        self._stepping = False
        self._paused: Pause | None = None
        self._running: set[_Request] = set()
        self._closed = False

    @property
    def version(self) -> int:
        """Version of the weights that the next token will be drawn with."""
        return self._version

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, *, timeout_s: float = GENERATE_S) -> Completions:
        """Yield each completion when it is finished (`protocols.Generator.generate`)."""
        return self._generate(_Request(self._model, prompts, sampling), time.monotonic() + timeout_s, timeout_s)

    def _generate(self, request: _Request, deadline: float, timeout_s: float) -> Completions:
        self._enter(request, deadline, timeout_s)
        try:
            while request.left:
                with self._my_turn(request, deadline, timeout_s):
                    finished = request.aborted() if request.abort else request.step(self._version)
                yield from finished
        finally:
            self._leave(request)

    def pause(self, mode: Pause, *, timeout_s: float = PAUSE_S) -> None:
        """Stop drawing tokens (`protocols.Generator.pause`)."""
        with self._turn:
            before, self._paused = self._paused, mode
            if mode is Pause.ABORT:
                for request in self._running:
                    request.abort = True
            self._turn.notify_all()
            if not self._turn.wait_for(self._is_still, timeout_s):
                self._paused = before
                self._turn.notify_all()
                raise DeadlineExceeded(f"pause ({mode.value}) was not in force after {timeout_s:g} s: {self._busy()}")

    def resume(self) -> None:
        """End the pause."""
        with self._turn:
            self._paused = None
            self._turn.notify_all()

    def update_weights(self, source: WeightSource, version: int, *, timeout_s: float = PAUSE_S) -> None:
        """Copy new weights into the model between two tokens (`protocols.Generator.update_weights`)."""
        specs = ModuleWeights(self._model).metadata()
        check_fits(source, specs)
        with self._turn:
            if not self._turn.wait_for(lambda: not self._stepping, timeout_s):
                raise DeadlineExceeded(
                    f"weights of version {version} were not taken after {timeout_s:g} s: {self._busy()}"
                )
            with torch.no_grad():
                tensors = self._model.state_dict()
                for name, tensor in source:
                    tensors[name].copy_(tensor)
            self._version = version

    def close(self) -> None:
        """Abort the running requests; they raise `Disconnected`."""
        with self._turn:
            self._closed = True
            self._turn.notify_all()

    # ------------------------------------------------------------ whose turn it is

    def _enter(self, request: _Request, deadline: float, timeout_s: float) -> None:
        with self._turn:
            self._wait(lambda: self._paused is None, deadline, timeout_s)
            self._running.add(request)

    def _leave(self, request: _Request) -> None:
        with self._turn:
            self._running.discard(request)
            self._turn.notify_all()

    @contextmanager
    def _my_turn(self, request: _Request, deadline: float, timeout_s: float) -> Iterator[None]:
        with self._turn:
            self._wait(
                lambda: not self._stepping and (self._paused is not Pause.KEEP or request.abort), deadline, timeout_s
            )
            self._stepping = True
        try:
            yield
        finally:
            with self._turn:
                self._stepping = False
                self._turn.notify_all()

    def _wait(self, ready: Any, deadline: float, timeout_s: float) -> None:
        left_s = deadline - time.monotonic()
        in_time = left_s > 0 and self._turn.wait_for(lambda: self._closed or ready(), left_s)
        if self._closed:
            raise Disconnected("the generator was closed")
        if not in_time:
            paused = f"it is paused ({self._paused.value})" if self._paused else self._busy()
            raise DeadlineExceeded(f"the request was not finished after {timeout_s:g} s: {paused}")

    def _is_still(self) -> bool:
        return not self._running if self._paused is Pause.WAIT else not self._stepping

    def _busy(self) -> str:
        rows = sum(request.left for request in self._running)
        return f"{len(self._running)} requests with {rows} unfinished completions are being generated"


class _Row:
    """A completion that is being generated."""

    __slots__ = ("context", "ids", "logprobs", "prompt", "sample", "spans")

    def __init__(self, index: int, sample: int, prompt: Prompt) -> None:
        begun = prompt.begun
        self.prompt, self.sample = index, sample if begun is None else begun.sample
        self.context = [int(token) for token in prompt.ids]
        self.ids: list[int] = [] if begun is None else [int(token) for token in begun.ids]
        self.logprobs: list[float] = [] if begun is None else [float(value) for value in begun.logprobs]
        self.spans: list[tuple[int, int]] = [] if begun is None else list(begun.spans)

    def add(self, token: int, logprob: float, version: int) -> None:
        self.ids.append(token)
        self.logprobs.append(logprob)
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1] = (version, self.spans[-1][1] + 1)
        else:
            self.spans.append((version, 1))

    def completion(self, reason: str) -> Completion:
        return Completion(
            prompt=self.prompt,
            sample=self.sample,
            ids=np.array(self.ids, np.int32),
            logprobs=np.array(self.logprobs, np.float32),
            finish_reason=reason,
            spans=tuple(self.spans),
        )


class _Request:
    """The unfinished rows of one call, and their cache."""

    def __init__(self, model: Any, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        check_request(prompts, sampling, getattr(model.config, "max_position_embeddings", None))
        self._model, self._sampling = model, sampling
        self._rows = [_Row(index, sample, p) for index, p in enumerate(prompts) for sample in range(p.samples)]
        self._draws = torch.Generator(device=model.device)
        self._draws.manual_seed(sampling.seed) if sampling.seed is not None else self._draws.seed()
        self._in_cache: list[_Row | None] = []
        self._cache: Any = None
        self._mask_BT = torch.empty(0)
        self._version: int | None = None
        self.abort = False

    @property
    def left(self) -> int:
        """Number of completions that are not finished."""
        return len(self._rows)

    def aborted(self) -> list[Completion]:
        """End all unfinished rows and return them with their tokens so far."""
        ended, self._rows = [row.completion(ABORT) for row in self._rows], []
        return ended

    @torch.inference_mode()
    def step(self, version: int) -> list[Completion]:
        """Draw a token for every unfinished row; return the completions that this finished."""
        logits_BV = self._extend() if self._cache is not None and version == self._version else self._begin(version)
        places = [place for place, row in enumerate(self._in_cache) if row is not None]
        tokens_R, logprobs_R = draw(logits_BV[places], self._sampling, self._draws)
        finished = []
        for place, token, logprob in zip(places, tokens_R.tolist(), logprobs_R.tolist(), strict=True):
            row = self._in_cache[place]
            if row is not None:
                row.add(token, logprob, version)
                if (reason := self._ended(row)) is not None:
                    finished.append(row.completion(reason))
                    self._in_cache[place] = None
        self._rows = [row for row in self._in_cache if row is not None]
        return finished

    def _ended(self, row: _Row) -> str | None:
        if row.ids[-1] in self._sampling.stop_ids:
            return STOP
        return LENGTH if len(row.ids) >= self._sampling.tokens_max else None

    def _begin(self, version: int) -> Tensor:
        """Run the model on the whole context of every unfinished row; return logits ``[rows, vocabulary]`` of the next tokens."""
        self._version, self._in_cache = version, list(self._rows)
        contexts = [row.context + row.ids for row in self._rows]
        width = max(map(len, contexts))
        ids_BT = torch.zeros(len(contexts), width, dtype=torch.long)
        self._mask_BT = torch.zeros_like(ids_BT)
        for place, context in enumerate(contexts):
            ids_BT[place, width - len(context) :] = torch.tensor(context)
            self._mask_BT[place, width - len(context) :] = 1
        ids_BT, self._mask_BT = ids_BT.to(self._model.device), self._mask_BT.to(self._model.device)
        positions_BT = (self._mask_BT.cumsum(1) - 1).clamp(min=0)
        return self._forward(ids_BT, positions_BT, None)

    def _extend(self) -> Tensor:
        """Run the model on the last token of each row; return logits ``[rows, vocabulary]`` of the next tokens."""
        if len(self._rows) < _BUSY_SHARE_MIN * len(self._in_cache):
            self._drop_finished()
        last_B1 = torch.tensor(
            [[0 if row is None else row.ids[-1]] for row in self._in_cache], device=self._model.device
        )
        self._mask_BT = torch.cat([self._mask_BT, self._mask_BT.new_ones(len(last_B1), 1)], dim=1)
        return self._forward(last_B1, self._mask_BT.sum(1, keepdim=True) - 1, self._cache)

    def _drop_finished(self) -> None:
        places = torch.tensor([place for place, row in enumerate(self._in_cache) if row is not None])
        places = places.to(self._model.device)
        self._cache.batch_select_indices(places)
        self._mask_BT = self._mask_BT[places]
        self._in_cache = list(self._rows)

    def _forward(self, ids_BT: Tensor, positions_BT: Tensor, cache: Any) -> Tensor:
        output = self._model(
            input_ids=ids_BT,
            attention_mask=self._mask_BT,
            position_ids=positions_BT,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self._cache = output.past_key_values
        logits_BV: Tensor = output.logits[:, -1].float()
        return logits_BV
