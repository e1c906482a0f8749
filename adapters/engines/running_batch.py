"""The rows that a transformers model generates together, with one key-value cache. Not safe for threads:
`TransformersGenerator` takes turns.

- A step either *begins* waiting rows (the model reads their contexts, and each draws its first token) or *extends* all
  running rows by a token.
- Waiting rows join the running ones when they are at least a share of them, or have waited some steps: joining copies
  the cache. Models whose cache cannot be joined begin the next rows when none is left.
- Prompts that several rows share are read once.
- Finished rows leave the cache when they are many; until then they are computed and ignored.
- After a change of weights, every unfinished row begins again with its tokens so far, so that later tokens have the
  log-probabilities of the new weights; or each goes on with its own cache. Rows that begin later share neither.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from transferqueue.adapters.engines.completion import seed_of
from transferqueue.adapters.engines.images import pixels_of, processor_of
from transferqueue.adapters.engines.key_value_cache import Part, joined
from transferqueue.adapters.engines.sampling import RowDraws, draw_by
from transferqueue.adapters.protocols import ABORT, LENGTH, STOP, Caches, Completion, Prompt, Sampling
from transferqueue.adapters.routes import Routes, captured_routes, stacked_routes

_LIVE_SHARE_MIN: Final = 0.6
_JOIN_SHARE: Final = 8
"""Waiting rows join when they are at least this fraction of the running rows: one in eight."""
_JOIN_STEPS: Final = 8
_BEGIN_TOKENS_MAX: Final = 16384
"""Most tokens, padding included, that one step reads."""


class Row:
    """A completion that is being generated. `owner` is the caller's; the batch does not read it."""

    __slots__ = (
        "context",
        "draws",
        "ids",
        "images",
        "logprobs",
        "owner",
        "prompt",
        "routes",
        "sample",
        "sampling",
        "spans",
    )

    def __init__(self, owner: Any, index: int, sample: int, prompt: Prompt, sampling: Sampling) -> None:
        begun = prompt.begun
        self.owner, self.sampling = owner, sampling
        self.prompt, self.sample = index, sample if begun is None else begun.sample
        self.context: list[int] = np.asarray(prompt.ids).tolist()
        self.images = prompt.images
        self.ids: list[int] = [] if begun is None else begun.ids.tolist()
        self.logprobs: list[float] = [] if begun is None else begun.logprobs.tolist()
        self.spans: list[tuple[int, int]] = [] if begun is None else list(begun.spans)
        self.routes: list[Routes] = []
        """Of the tokens that the model has read, where they are captured."""
        self.draws = RowDraws(
            seed_of(sampling, index, self.sample, replace(prompt, begun=None, samples=1)), drawn=len(self.ids)
        )

    def add(self, token: int, logprob: float, version: int) -> str | None:
        """Append a token; return the finish reason if it was the last."""
        self.ids.append(token)
        self.logprobs.append(logprob)
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1] = (version, self.spans[-1][1] + 1)
        else:
            self.spans.append((version, 1))
        if token in self.sampling.stop_ids:
            return STOP
        return LENGTH if len(self.ids) >= self.sampling.tokens_max else None

    def tokens(self) -> tuple[int, ...]:
        """Its context and its tokens so far."""
        return (*self.context, *self.ids)

    def completion(self, reason: str) -> Completion:
        """Its tokens so far."""
        return Completion(
            prompt=self.prompt,
            sample=self.sample,
            ids=np.array(self.ids, np.int32),
            logprobs=np.array(self.logprobs, np.float32),
            finish_reason=reason,
            spans=tuple(self.spans),
            routes=np.concatenate(self.routes) if self.routes else None,
        )


Finished = list[tuple[Row, Completion]]
_Context = tuple[tuple[bytes, ...], tuple[int, ...]]
"""What a row has read: its images, and its tokens."""


@dataclass
class _Cached:
    """Rows in one cache, aligned at their last token. `rows`: None where one has finished. `lengths_B`: tokens of each
    row in the cache. `width`: of the cache."""

    rows: list[Row | None]
    cache: Any
    lengths_B: Tensor
    width: int

    def mask(self) -> Tensor:
        """True where a row has a token: bool ``[rows, width]``."""
        return torch.arange(self.width, device=self.lengths_B.device) >= self.width - self.lengths_B[:, None]

    def part(self) -> tuple[Part, list[Row | None], Tensor]:
        """The unfinished rows, for `joined`: their cache and places, the rows, and their lengths."""
        at_R = torch.tensor([at for at, row in enumerate(self.rows) if row is not None], device=self.lengths_B.device)
        lengths_R = self.lengths_B[at_R]
        return (self.cache, at_R, int(lengths_R.max())), [row for row in self.rows if row is not None], lengths_R


class RunningBatch:
    """Rows of one model, waiting or running. At most `rows_max` run at once; more wait. `kv`: returns what becomes of
    their caches when weights change. `routes`: capture the experts that the model chooses."""

    def __init__(
        self,
        model: Any,
        rows_max: int,
        kv: Callable[[], Caches] = lambda: Caches.RECOMPUTE,
        *,
        routes: bool = False,
    ) -> None:
        self._model, self._rows_max, self._kv, self._routes = model, rows_max, kv, routes
        self._joins = _empty_cache(model) is not None
        self._images = processor_of(model)
        self._waiting: deque[Row] = deque()
        self._cached: _Cached | None = None
        self._version: int | None = None
        self._steps_waited = 0

    def __len__(self) -> int:
        """Number of rows, waiting or running."""
        return len(self._waiting) + len(self._running())

    def add(self, rows: Iterable[Row]) -> None:
        """Let `rows` wait for their beginning."""
        self._waiting.extend(rows)

    def take(self, owner: Any) -> Finished:
        """Remove the unfinished rows of `owner`. Returns them with their tokens so far, ended by `ABORT`."""
        taken = [row for row in (*self._running(), *self._waiting) if row.owner is owner]
        self._waiting = deque(row for row in self._waiting if row.owner is not owner)
        if self._cached is not None:
            self._cached.rows = [None if row is None or row.owner is owner else row for row in self._cached.rows]
        return [(row, row.completion(ABORT)) for row in taken]

    def cached_tokens(self) -> int:
        """Tokens in the cache of the running rows. The last token of each is read in the next step."""
        return sum(len(row.tokens()) - 1 for row in self._running())

    @torch.inference_mode()
    def step(self, version: int) -> Finished:
        """Draw a token for rows of the batch; return those that this finished. `version`: of the model's weights
        now."""
        if version != self._version and self._kv() is Caches.RECOMPUTE:
            self._waiting.extendleft(reversed(self._running()))
            self._cached = None
        self._version = version
        if self._shall_begin():
            return self._begin(version)
        if self._cached is None:
            return []
        if len(self._running()) < _LIVE_SHARE_MIN * len(self._cached.rows):
            self._drop_finished(self._cached)
        return self._draw(self._cached, range(len(self._cached.rows)), self._extend(self._cached), version)

    # ------------------------------------------------------------ which rows

    def _running(self) -> list[Row]:
        return [] if self._cached is None else [row for row in self._cached.rows if row is not None]

    def _shall_begin(self) -> bool:
        running = len(self._running())
        if not self._waiting or running >= self._rows_max:
            return False
        if not running:
            self._cached = None
            return True
        self._steps_waited += 1
        return self._joins and (len(self._waiting) * _JOIN_SHARE >= running or self._steps_waited >= _JOIN_STEPS)

    def _next_rows(self) -> list[Row]:
        """Take waiting rows, in order, while they fit; at least one. Rows with the same context count once."""
        rows: list[Row] = []
        contexts: set[_Context] = set()
        longest, room = 0, self._rows_max - len(self._running())
        while self._waiting and len(rows) < room:
            context = self._context(self._waiting[0])
            longest = max(longest, len(context[1]))
            if rows and (len(contexts) + (context not in contexts)) * longest > _BEGIN_TOKENS_MAX:
                break
            contexts.add(context)
            rows.append(self._waiting.popleft())
        return rows

    def _drop_finished(self, cached: _Cached) -> None:
        part, rows, lengths_R = cached.part()
        if self._joins:
            cache, width = joined(_empty_cache(self._model), [part])
        else:
            cache, width = cached.cache, cached.width
            cache.batch_select_indices(part[1])
        self._cached = _Cached(rows, cache, lengths_R, width)

    # ------------------------------------------------------------ the model

    def _context(self, row: Row) -> _Context:
        """What the model reads of a row. An image token that it drew has no features."""
        drawn = row.ids if self._images is None else self._images.unread(row.ids).tolist()
        return row.images, (*row.context, *drawn)

    def _begin(self, version: int) -> Finished:
        """Read the contexts of waiting rows, join the rows to those that run, and draw their first tokens."""
        self._steps_waited = 0
        rows = self._next_rows()
        read, index_R = _distinct([self._context(row) for row in rows], self._model.device, self._joins)
        contexts = [tokens for _, tokens in read]
        pixels = pixels_of(self._model, contexts, [images for images, _ in read])
        ids_CT, lengths_C = _left_padded(contexts, self._model.device)
        begun = _Cached([], None, lengths_C, ids_CT.shape[1])
        mask_CT = begun.mask()
        positions_CT = (mask_CT.long().cumsum(1) - 1).clamp(min=0)
        empty = _empty_cache(self._model) if self._joins else None
        logits_CV, begun.cache, routes = self._forward(ids_CT, mask_CT, positions_CT, empty, pixels)
        if routes is not None:
            for row, at in zip(rows, index_R.tolist(), strict=True):
                row.routes = [routes[at, -len(contexts[at]) :]]
        cached = self._with_new(rows, begun, index_R)
        at = range(len(cached.rows) - len(rows), len(cached.rows))
        return self._draw(cached, at, logits_CV[index_R], version)

    def _with_new(self, rows: list[Row], begun: _Cached, index_R: Tensor) -> _Cached:
        """Return the running rows, then `rows`, whose contexts are rows `index_R` of the cache of `begun`, in one
        cache."""
        lengths_R = begun.lengths_B[index_R]
        if self._cached is None and len(index_R) == len(begun.lengths_B):
            self._cached = _Cached([*rows], begun.cache, lengths_R, begun.width)
            return self._cached
        parts: list[Part] = [(begun.cache, index_R, begun.width)]
        before: list[Row | None] = []
        lengths = [lengths_R]
        if self._cached is not None:
            part, before, lengths_B = self._cached.part()
            parts, lengths = [part, *parts], [lengths_B, *lengths]
        cache, width = joined(_empty_cache(self._model), parts)
        self._cached = _Cached([*before, *rows], cache, torch.cat(lengths), width)
        return self._cached

    def _extend(self, cached: _Cached) -> Tensor:
        """Run the model on the last token of each row; return logits ``[rows, vocabulary]`` of the next tokens."""
        last = np.array([0 if row is None else row.ids[-1] for row in cached.rows])
        last = last if self._images is None else self._images.unread(last)
        last_B1 = torch.from_numpy(last).to(self._model.device)[:, None]
        # A row that has finished is computed with the others; a model may have no position for what it would read.
        finished_B = torch.tensor([row is None for row in cached.rows], device=self._model.device)
        positions_B1 = cached.lengths_B.masked_fill(finished_B, 0)[:, None]
        cached.lengths_B, cached.width = cached.lengths_B + 1, cached.width + 1
        logits_BV, cached.cache, routes = self._forward(last_B1, cached.mask(), positions_B1, cached.cache)
        if routes is not None:
            for row, read in zip(cached.rows, routes, strict=True):
                if row is not None:
                    row.routes.append(read)
        return logits_BV

    def _forward(
        self,
        ids_BT: Tensor,
        mask_BT: Tensor,
        positions_BT: Tensor,
        cache: Any,
        pixels: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> tuple[Tensor, Any, Routes | None]:
        """Call the model; return the last logits, the cache, and the routes ``[rows, tokens, layers, experts]``."""
        none: AbstractContextManager[list[Tensor]] = nullcontext([])
        with captured_routes(self._model) if self._routes else none as chosen:
            output = self._model(
                input_ids=ids_BT,
                attention_mask=mask_BT,
                position_ids=positions_BT,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
                **pixels,
            )
        routes = stacked_routes(chosen, len(ids_BT)) if self._routes else None
        return output.logits[:, -1].float(), output.past_key_values, routes

    def _draw(self, cached: _Cached, at: range, logits_BV: Tensor, version: int) -> Finished:
        """Draw a token for each unfinished row of places `at`, whose logits are `logits_BV`; return those that this
        finished."""
        unfinished = [(place, row) for place in at if (row := cached.rows[place]) is not None]
        finished: Finished = []
        for (temperature, top_p), group in groupby(sorted(unfinished, key=_distribution), key=_distribution):
            places = [*group]
            rows_R = logits_BV if len(places) == len(at) else logits_BV[[place - at.start for place, _ in places]]
            numbers_R = torch.tensor([row.draws.next() for _, row in places], dtype=torch.float64)
            drawing = Sampling(tokens_max=1, temperature=temperature, top_p=top_p)
            tokens_R, logprobs_R = draw_by(rows_R, drawing, numbers_R.to(rows_R.device))
            for (place, row), token, logprob in zip(places, tokens_R.tolist(), logprobs_R.tolist(), strict=True):
                if (reason := row.add(token, logprob, version)) is not None:
                    finished.append((row, row.completion(reason)))
                    cached.rows[place] = None
        return finished


def _empty_cache(model: Any) -> Any | None:
    """Return an empty growing cache for `model`; None for one whose layers keep something else (sliding windows,
    recurrent states)."""
    if (own := getattr(model, "new_cache", None)) is not None:
        return own()
    from transferqueue.adapters.engines.transformers_cache import growing_cache

    return growing_cache(model.config)


def _distribution(placed: tuple[int, Row]) -> tuple[float, float]:
    sampling = placed[1].sampling
    return sampling.temperature, sampling.top_p


def _distinct(contexts: Sequence[_Context], device: Any, distinct: bool) -> tuple[list[_Context], Tensor]:
    """Return the different contexts, and which of them each is: int64 ``[rows]``. Without `distinct`, all of them in
    order."""
    if not distinct:
        return list(contexts), torch.arange(len(contexts), device=device)
    places: dict[_Context, int] = {}
    index = [places.setdefault(context, len(places)) for context in contexts]
    return list(places), torch.tensor(index, device=device)


def _left_padded(contexts: Sequence[tuple[int, ...]], device: Any) -> tuple[Tensor, Tensor]:
    """Return ids int64 ``[contexts, longest]``, padded on the left with 0, and their lengths int64 ``[contexts]``."""
    longest = max(map(len, contexts))
    ids_CT = torch.tensor([(0,) * (longest - len(context)) + context for context in contexts], device=device)
    return ids_CT, torch.tensor([*map(len, contexts)], device=device)
