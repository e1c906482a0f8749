"""Log-probabilities of responses under a causal language model, with or without a gradient.

The model is called once. Its output layer does not return logits: for the time of the call it computes the requested
values from the logits, a chunk of response tokens at a time, and drops the logits; the backward pass computes each
chunk again. So memory holds the logits of a chunk, not of all tokens. Everything happens inside of the model's own
forward, so hooks of DDP and FSDP see one ordinary call.

logits of token t are the output at token t - 1, divided by the temperature: the distribution that the token was drawn
from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from transferqueue.adapters.routes import placed_routes, replayed_routes
from transferqueue.adapters.scoring.forward_rows import ForwardRows
from transferqueue.adapters.scoring.plan import inputs, lay_out, limits_of, plan_for, unwrapped
from transferqueue.adapters.scoring.trees import RowTree
from transferqueue.errors import UsageError

_LOGITS_MAX: Final = {"cpu": 2**24, "cuda": 2**27}
"""Logits of a chunk: 64 MiB of float32; 512 MiB keep a GPU busy."""


@dataclass(frozen=True)
class ResponseScores:
    """Scores of N response tokens, rows one after the other. Scores that were not asked for are None.

    Args:
        logprobs_N: of the tokens, float32, with a gradient unless gradients are off.
        entropy_N: of their distributions, in nats, with a gradient unless gradients are off.
        top_ids_NK: the most probable tokens, best first: int64.
        top_logprobs_NK: of the most probable tokens, without a gradient.
        logprobs_NK: of the tokens `at_ids`, with a gradient.
    """

    logprobs_N: Tensor
    entropy_N: Tensor | None = None
    top_ids_NK: Tensor | None = None
    top_logprobs_NK: Tensor | None = None
    logprobs_NK: Tensor | None = None


def response_logprobs(
    model: nn.Module,
    prompts: Iterable[Any],
    responses: Iterable[Any],
    *,
    temperature: float = 1.0,
    tree: RowTree | None = None,
) -> Tensor:
    """Return the log-probability of each response token: float32 ``[N]``, rows one after the other. Logits are float32.

    It has a gradient unless gradients are off. One forward pass for all rows: give a micro-batch (`micro_batches`). The
    result of a row does not depend on the others but for rounding. The model must not be used by another thread at the
    same time.

    Args:
        model: a causal language model.
        prompts: integers ``[P]`` of each row, in any number; of a row with several turns, the tokens before its first
            drawn one.
        responses: integers ``[T]`` of each row; of a row with several turns, all tokens after the prompt (mask those
            that the model did not draw).
        temperature: above 0, that the tokens were drawn with; default 1.0.
        tree: which tokens rows share, each computed once; default None: prompts that are equal. A model whose rows
            form no trees (`plan_for`) computes all tokens of each row.

    Raises:
        UsageError: rows that the model cannot take, a tree of other rows or tokens, or a temperature of 0 or less.
        Unsupported: a model that is not causal.

    Example:
        >>> logprobs_N = response_logprobs(model, [[5, 6], [7]], [[8, 1], [9, 9, 1]])  # doctest: +SKIP
    """
    return response_scores(model, prompts, responses, temperature=temperature, tree=tree).logprobs_N


def response_scores(
    model: nn.Module,
    prompts: Iterable[Any],
    responses: Iterable[Any],
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    top_k: int = 0,
    at_ids: Iterable[Any] | None = None,
    routes: Sequence[Any] | None = None,
    images: Sequence[Any] | None = None,
    tree: RowTree | None = None,
) -> ResponseScores:
    """Return log-probabilities, and other scores of the same logits, as `response_logprobs`.

    Args:
        model: a causal language model.
        prompts: as of `response_logprobs`.
        responses: as of `response_logprobs`.
        temperature: as of `response_logprobs`; default 1.0.
        entropy: return the entropy of each response token's distribution, in nats; default False.
        top_k: how many most probable tokens to return; default 0: none.
        at_ids: integers ``[T, K]`` of each row, whose log-probabilities are returned too; default None.
        routes: int16 ``[P + T - 1, layers, experts a token]`` of each row: the experts that a mixture of experts is to
            choose (`adapters.routes`); default None: its own. Rows with routes share no tokens: each brings the experts
            of its own copy.
        images: encoded images of each row, whose tokens are in its prompt; default None: no row has any. The model was
            loaded with ``images=True``.
        tree: as of `response_logprobs`; default None.

    Raises:
        UsageError: rows that the model cannot take, a tree of other rows or tokens, a temperature of 0 or less, `top_k`
            above the vocabulary, or routes of a model of another shape.
        Unsupported: a model that is not causal, or images of a model that was loaded for text alone.
    """
    if not temperature > 0:
        raise UsageError(
            f"temperature={temperature}: log-probs are of a distribution; give the temperature above 0 that drew"
        )
    responses = list(responses)
    rows = lay_out(model, prompts, responses, tree if routes is None else RowTree.apart(len(responses)), images)
    vocabulary = limits_of(unwrapped(model))[0]
    if top_k < 0 or (vocabulary is not None and top_k > vocabulary):
        raise UsageError(f"top_k={top_k}; give 0 to {vocabulary}, the size of the vocabulary")
    wanted = _Wanted(temperature, entropy, top_k, _at_ids(rows, at_ids))
    tops: list[tuple[Tensor, Tensor]] = []
    with nullcontext() if routes is None else _replaying(model, rows, routes):
        columns_NC = _run(model, rows, wanted, tops) if at_ids is not None else _run_once(model, rows, wanted, tops)
    one, others = 1, 0 if wanted.at_NK is None else wanted.at_NK.shape[1]
    return ResponseScores(
        logprobs_N=columns_NC[:, 0],
        entropy_N=columns_NC[:, -1] if entropy else None,
        top_ids_NK=tops[0][0] if top_k else None,
        top_logprobs_NK=tops[0][1] if top_k else None,
        logprobs_NK=columns_NC[:, one : one + others] if at_ids is not None else None,
    )


def _replaying(model: nn.Module, rows: ForwardRows, routes: Sequence[Any]) -> AbstractContextManager[None]:
    inner = unwrapped(model)
    before_R = rows.positions_BT.flatten()[rows.last_R]  # tokens before the last one of each row
    starts = (rows.last_R - before_R).tolist()
    placed = placed_routes(inner, routes, (before_R + 1).tolist(), starts, rows.ids_BT.numel())
    return replayed_routes(inner, placed)


@torch.no_grad()
def teacher_top_k(
    model: nn.Module,
    prompts: Iterable[Any],
    responses: Iterable[Any],
    *,
    k: int,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return the most probable tokens at each response token, best first, without a gradient.

    Args:
        model: a causal language model.
        prompts: as of `response_logprobs`.
        responses: as of `response_logprobs`.
        k: how many tokens; 0: the drawn token alone, ``[N, 1]``.
        temperature: as of `response_logprobs`; default 1.0.

    Returns:
        Ids int64 ``[N, k]`` and log-probs float32 ``[N, k]``.

    Raises:
        UsageError: as of `response_scores`.
        Unsupported: a model that is not causal.
    """
    responses = list(responses)
    scores = response_scores(model, prompts, responses, temperature=temperature, top_k=k)
    if scores.top_ids_NK is None or scores.top_logprobs_NK is None:
        drawn_N = torch.cat([torch.as_tensor(response, dtype=torch.int64) for response in responses])
        return drawn_N[:, None].to(scores.logprobs_N.device), scores.logprobs_N[:, None]
    return scores.top_ids_NK, scores.top_logprobs_NK


@dataclass(frozen=True)
class _Wanted:
    """Values computed from logits."""

    temperature: float
    entropy: bool
    top_k: int
    at_NK: Tensor | None

    def of(self, logits_CV: Tensor, at_C1: Tensor) -> tuple[Tensor, ...]:
        """Return of a chunk: log-probs of the tokens `at_C1` with the entropy behind them, and the most probable tokens
        with theirs."""
        logits_CV = logits_CV.float() if self.temperature == 1.0 else logits_CV.float() / self.temperature
        normal_C1 = logits_CV.logsumexp(-1, keepdim=True)
        columns_C1 = logits_CV.gather(-1, at_C1) - normal_C1
        if self.entropy:
            mean_C1 = ((logits_CV - normal_C1).exp() * logits_CV).sum(-1, keepdim=True)
            columns_C1 = torch.cat([columns_C1, normal_C1 - mean_C1], dim=1)
        if not self.top_k:
            return (columns_C1,)
        top_CK, ids_CK = logits_CV.detach().topk(self.top_k, dim=-1)
        return columns_C1, ids_CK, top_CK - normal_C1.detach()


def _at_ids(rows: ForwardRows, at_ids: Iterable[Any] | None) -> Tensor | None:
    if at_ids is None:
        return None
    parts = [torch.as_tensor(part, dtype=torch.int64) for part in at_ids]
    if any(part.ndim != 2 for part in parts) or sum(map(len, parts)) != len(rows.targets_S):
        raise UsageError(
            f"at_ids of shapes {[tuple(part.shape) for part in parts[:4]]} for {len(rows.targets_S)} response tokens; "
            "give [T, K] for each row, of its T response tokens"
        )
    return torch.cat(parts).to(rows.targets_S.device)


def _run_once(model: nn.Module, rows: ForwardRows, wanted: _Wanted, tops: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Run with the logits of each response token once, however many rows share it."""
    if rows.once is None:
        return _run(model, rows, wanted, tops)
    first_U, again_N = rows.once
    once = replace(rows, from_S=rows.from_S[first_U], targets_S=rows.targets_S[first_U])
    columns_UC = _run(model, once, wanted, tops)
    tops[:] = [(ids_UK[again_N], logprobs_UK[again_N]) for ids_UK, logprobs_UK in tops]
    return columns_UC.index_select(0, again_N)


def _run(model: nn.Module, rows: ForwardRows, wanted: _Wanted, tops: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Call the model once; return its columns ``[N, C]`` and append the most probable tokens to `tops`."""
    inner = unwrapped(model)
    if not plan_for(model).own_head:
        logits_BTV = model(**inputs(rows)).logits
        picked_NV = logits_BTV.reshape(-1, logits_BTV.shape[-1]).index_select(0, rows.from_S)
        return _in_chunks(lambda logits_CV: logits_CV, picked_NV, picked_NV.shape[-1], rows, wanted, tops)

    def head_forward(hidden_BTH: Tensor) -> Tensor:
        hidden_NH = hidden_BTH.reshape(-1, hidden_BTH.shape[-1]).index_select(0, rows.from_S)
        logits_of, vocabulary = _logits_of(inner.get_output_embeddings())
        return _in_chunks(logits_of, hidden_NH, vocabulary, rows, wanted, tops)[None]

    with _forward_replaced(inner.get_output_embeddings(), head_forward):
        columns_NC: Tensor = model(**inputs(rows)).logits[0]
    return columns_NC


@contextmanager
def _forward_replaced(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Let `module` compute `forward` until the end of the block."""
    module.forward = forward
    try:
        yield
    finally:
        del module.forward


def _logits_of(head: nn.Module) -> tuple[Callable[[Tensor], Tensor], int]:
    """Return the output layer as a function that computes in float32, and the number of its outputs."""
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        forward: Callable[[Tensor], Tensor] = partial(type(head).forward, head)
        return forward, head.get_parameter("weight").shape[0]
    weight_VH, bias_V = head.weight.float(), None if head.bias is None else head.bias.float()

    def logits(hidden_CH: Tensor) -> Tensor:
        with torch.autocast(hidden_CH.device.type, enabled=False):
            return linear(hidden_CH.float(), weight_VH, bias_V)

    return logits, weight_VH.shape[0]


def _in_chunks(
    logits_of: Callable[[Tensor], Tensor],
    source_NH: Tensor,
    vocabulary: int,
    rows: ForwardRows,
    wanted: _Wanted,
    tops: list[tuple[Tensor, Tensor]],
) -> Tensor:
    """Compute the requested values from the logits, which `logits_of` makes from a chunk of `source_NH` at a time."""
    at_N1 = rows.targets_S[:, None] if wanted.at_NK is None else torch.cat([rows.targets_S[:, None], wanted.at_NK], 1)
    size = max(1, _LOGITS_MAX.get(source_NH.device.type, _LOGITS_MAX["cpu"]) // vocabulary)
    again = torch.is_grad_enabled() and len(source_NH) > size

    def scored(source_CH: Tensor, at_C1: Tensor) -> tuple[Tensor, ...]:
        return wanted.of(logits_of(source_CH), at_C1)

    chunks = [
        checkpoint(scored, *chunk, use_reentrant=False, preserve_rng_state=False) if again else scored(*chunk)
        for chunk in zip(source_NH.split(size), at_N1.split(size), strict=True)
    ]
    columns_NC, *top = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    tops.extend([(top[0], top[1])] if top else [])
    return columns_NC
