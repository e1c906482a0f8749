"""The experts that a mixture of experts chose, captured where tokens are drawn and replayed where they are trained.

Engine and trainer compute the same router with other rounding, so now and then they choose other experts for a token,
and its log-prob jumps. Replay takes the engine's choice (R3: "Stabilizing MoE Reinforcement Learning by Aligning
Training and Inference Routers", 2025): the trainer's router computes the gates of those experts, so gradients reach it.

A route is int16 ``[tokens, layers, experts a token]``, layers in the order of the model. It covers all tokens of a row
but the last, which no engine reads.

A router is a module whose class is called ``…TopKRouter``, as in transformers, that returns its logits, the gates, and
the chosen experts. Its gates must be the softmax of its logits at those experts, normalized or not: tried once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from transferqueue.adapters.protocols import Unsupported
from transferqueue.errors import UsageError

Routes = npt.NDArray[np.int16]

_KNOWN: Final = "transferqueue_routers"
_TRIED_TOKENS: Final = 4
_TRIED_SPREAD: Final = 3.0
"""Standard deviation of the logits of a trial: with small ones the gates of a softmax and others are alike."""


def routers_of(model: nn.Module) -> list[nn.Module]:
    """Return the routers of a model, in the order of its layers; the model keeps them.

    Args:
        model: a language model.

    Raises:
        Unsupported: it has none, or one whose gates are no softmax of its logits.
    """
    found: list[nn.Module] | None = model.__dict__.get(_KNOWN)
    if found is None:
        found = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
        if not found:
            raise Unsupported(
                f"{type(model).__name__} has no router of experts (a module called …TopKRouter), so there is nothing "
                "to replay; leave algorithm.router_replay out"
            )
        for router in found:
            _try(router)
        model.__dict__[_KNOWN] = found
    return found


@contextmanager
def captured_routes(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the experts that each layer chooses in a forward pass.

    Args:
        model: a language model, which is called once in the block.

    Yields:
        A list that gets int64 ``[tokens, experts a token]`` for each layer.
    """
    chosen: list[Tensor] = []

    def capture(router: nn.Module, inputs: Any, output: Any) -> None:
        chosen.append(output[2].detach())

    with ExitStack() as stack:
        for router in routers_of(model):
            stack.callback(router.register_forward_hook(capture).remove)
        yield chosen


@contextmanager
def replayed_routes(model: nn.Module, routes_NLK: Tensor) -> Iterator[None]:
    """Let the routers of a model choose given experts in the block. Gates have a gradient.

    Args:
        model: a language model.
        routes_NLK: int64 ``[tokens, layers, experts a token]``; where it is -1, the router chooses.
    """

    def replay(router: nn.Module, inputs: Any, output: Any, given_NK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits_NE, _, own_NK = output
        chosen_NK = torch.where(given_NK < 0, own_NK, given_NK)
        return logits_NE, _gates(router, logits_NE, chosen_NK), chosen_NK

    with ExitStack() as stack:
        for layer, router in enumerate(routers_of(model)):

            def hook(module: nn.Module, inputs: Any, output: Any, given_NK: Tensor = routes_NLK[:, layer]) -> Any:
                return replay(module, inputs, output, given_NK)

            stack.callback(router.register_forward_hook(hook).remove)
        yield


def stacked_routes(chosen: Sequence[Tensor], rows: int) -> Routes:
    """Return what `captured_routes` collected: int16 ``[rows, tokens of a row, layers, experts a token]``.

    Args:
        chosen: of each layer.
        rows: of the forward pass.
    """
    stacked: Routes = torch.stack(list(chosen), dim=1).to(torch.int16).cpu().numpy()
    return stacked.reshape(rows, -1, *stacked.shape[1:])


def placed_routes(
    model: nn.Module, routes: Sequence[Any], lengths: Sequence[int], starts: Sequence[int], tokens: int
) -> Tensor:
    """Lay out the routes of rows as their tokens lie in a forward pass: int64 ``[tokens, layers, experts a token]``.

    Args:
        model: which replays them.
        routes: of each row.
        lengths: tokens of each row, the last included.
        starts: place of each row's first token.
        tokens: of the pass, padding included.

    Raises:
        UsageError: routes of a model of another shape, or of another number of tokens.
    """
    routers: list[Any] = routers_of(model)
    wanted, experts = (len(routers), routers[0].top_k), int(routers[0].weight.shape[0])
    placed = np.full((tokens, *wanted), -1, np.int64)
    for row, (given, length, start) in enumerate(zip(routes, lengths, starts, strict=True)):
        shape = np.shape(given)
        if shape != (length - 1, *wanted):
            raise UsageError(
                f"routes of row {row} have the shape {list(shape)}, and the trainer's model takes {length - 1} tokens "
                f"x {wanted[0]} layers x {wanted[1]} experts, {[length - 1, *wanted]}; generate with a model of the "
                "same shape"
            )
        placed[start : start + length - 1] = given
    if placed.max(initial=-1) >= experts or placed.min(initial=-1) < -1:
        raise UsageError(
            f"routes with expert {placed.max()}; the trainer's model has experts 0 to {experts - 1}: generate with a "
            "model of the same shape"
        )
    return torch.from_numpy(placed).to(next(model.parameters()).device)


def _gates(router: Any, logits_NE: Tensor, chosen_NK: Tensor) -> Tensor:
    gates_NK = logits_NE.softmax(-1, dtype=torch.float32).gather(-1, chosen_NK)
    if getattr(router, "norm_topk_prob", True):
        gates_NK = gates_NK / gates_NK.sum(-1, keepdim=True)
    return gates_NK.to(logits_NE.dtype)


@torch.no_grad()
def _try(router: Any) -> None:
    """Compare its gates with those that replay computes, for a few tokens."""
    weight_EH = router.weight
    tokens_NH = torch.linspace(-1.0, 1.0, _TRIED_TOKENS * weight_EH.shape[-1], device=weight_EH.device)
    tokens_NH = tokens_NH.reshape(_TRIED_TOKENS, -1)
    tokens_NH *= _TRIED_SPREAD / (tokens_NH @ weight_EH.float().T).std().clamp(min=1e-3)
    try:
        output = router(tokens_NH.to(weight_EH.dtype))
    except TypeError:  # it takes more than the tokens
        output = None
    if isinstance(output, tuple) and len(output) == 3 and output[0].shape == (_TRIED_TOKENS, len(weight_EH)):
        logits_NE, gates_NK, chosen_NK = output
        if torch.allclose(gates_NK.float(), _gates(router, logits_NE, chosen_NK).float(), atol=1e-2):
            return
    raise Unsupported(
        f"{type(router).__name__} does not return its logits, the gates of their softmax and the chosen experts, so "
        "its routes cannot be replayed; leave algorithm.router_replay out"
    )
