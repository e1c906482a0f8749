"""How a model is run over rows: packed where that is exact for it, else padded. Found by experiment on the model
itself.

A model's name or class does not say whether rows that share a batch stay apart in it: attention takes a mask, a
convolution or a recurrent layer does not. So `plan_for` runs the model on two short rows, three times:

1. Packed, with two different first rows. The second row's outputs must not change. The shapes are equal, so the same
   kernels run: there is no rounding to allow for, but in a mixture of experts, which groups tokens of all rows by
   expert.
2. The second row alone. Its outputs must be the same but for rounding, so the model uses the given positions.

A model that passes runs a row that continues another one once more, beside it, with the shared tokens once: if its
outputs are again those of the row alone, rows of the model may form trees (`trees.RowTree`). A model that does not pass
is run padded on the right, which is exact for every causal model; the same experiment shows that it is causal. Of a
model that says ``takes_trees`` only the trees are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from transferqueue.adapters.engines.images import pixels_of, processor_of
from transferqueue.adapters.protocols import Unsupported
from transferqueue.adapters.scoring.forward_rows import ForwardRows, forward_rows
from transferqueue.adapters.scoring.row_attention import ARGUMENT
from transferqueue.adapters.scoring.trees import RowTree
from transferqueue.adapters.weight_shards import is_sharded
from transferqueue.errors import UsageError

_PLAN: Final = "transferqueue_plan"
_LAYERS: Final = frozenset({"full_attention", "sliding_attention"})
"""Kinds of layers that attention in rows computes."""
_ROWS: Final = ([6, 4, 9, 8, 10, 3], [3, 7, 5, 11, 2])
_OTHER: Final = [9, 2, 8, 4, 6, 7]
_CONTINUED: Final = [3, 7, 5, 8, 6, 4]
"""The second row of `_ROWS` continues it after `_SHARED` tokens."""
_SHARED: Final = 3
_ROUNDING: Final = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Greatest difference, as a share of the outputs' spread, that rounding may make."""
_LINEAR: Final = 8
"""Linear layers cost a token about as many hidden sizes of pairs of tokens in attention."""
_LEAK: Final = 0.1
"""Share of it that another row may make."""


@dataclass(frozen=True)
class ScoringPlan:
    """How rows are laid out. `packed`: rows are packed; `reason`: why not. `own_head`: the model's logits are the
    unchanged output of its output layer. `trees`: rows may share tokens, each computed once."""

    packed: bool
    reason: str = ""
    own_head: bool = False
    trees: bool = False


def plan_for(model: nn.Module) -> ScoringPlan:
    """Find out how a model is run over rows, by experiment at the first call.

    Sets the model's attention implementation if rows are packed.

    Args:
        model: a causal language model.

    Returns:
        The plan, which the model keeps.

    Raises:
        Unsupported: the model is not causal.
        UsageError: a first call with a model that is sharded or on the meta device: make the plan before.
    """
    inner = unwrapped(model)
    plan: ScoringPlan | None = getattr(inner, _PLAN, None)
    if plan is None:
        _check_whole(inner)
        plan = _found(inner)
        setattr(inner, _PLAN, plan)
    return plan


def plan_on_ranks(model: Any) -> None:
    """Make the plan of a sharded model, which `plan_for` returns then. Every rank calls it: the experiment is a
    collective.

    Args:
        model: a causal language model, sharded by ``fully_shard``.

    Raises:
        Unsupported: the model is not causal.
    """
    setattr(model, _PLAN, _found(model))
    model.reshard()  # FSDP2 leaves the root whole after a pass without gradients, and the next gives it no gradient


def is_packed(model: nn.Module) -> bool:
    """Return whether rows of a call of the model are packed; see `micro_batches`. Errors as of `plan_for`.

    Args:
        model: a causal language model.
    """
    return plan_for(model).packed


def shared_prompts(model: nn.Module, prompts: Sequence[Any], lengths: Sequence[int]) -> RowTree | None:
    """Return what rows share in a call of the model without a tree: prompts that are equal; None: nothing, since its
    rows form no trees. Errors as of `plan_for`.

    On a CPU a row with a long response shares nothing: its attention to a prompt that lies elsewhere goes over all
    pairs of tokens, not the causal half, which costs more than the prompt saves.

    Args:
        model: a causal language model.
        prompts: token ids of each row's prompt.
        lengths: tokens of each row.
    """
    if not plan_for(model).trees:
        return None
    tree, hidden = RowTree.of_prompts(prompts), getattr(_text_config(unwrapped(model)), "hidden_size", None)
    if hidden is None or device_of(model).type != "cpu":
        return tree
    own = np.asarray(lengths, np.int64)[tree.order] - tree.shared
    return RowTree(tree.order, np.where(tree.shared * hidden * _LINEAR >= own**2, tree.shared, 0))


def unwrapped(model: nn.Module) -> Any:
    """Return the model inside of ``DistributedDataParallel``."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's first parameter."""
    return next(model.parameters()).device


def inputs(rows: ForwardRows) -> dict[str, Any]:
    """Return the keyword arguments of the model's forward."""
    if rows.packed is None:
        return {"input_ids": rows.ids_BT, "use_cache": False, **rows.pixels}
    return {
        "input_ids": rows.ids_BT,
        "position_ids": rows.positions_BT,
        # Four dimensions: transformers takes it as made, and does not build a mask of tokens x tokens. Attention in
        # rows reads none.
        "attention_mask": rows.ids_BT.new_ones(1, 1, 1, 1, dtype=torch.bool),
        "use_cache": False,
        ARGUMENT: rows.packed,
    }


def limits_of(model: Any) -> tuple[int | None, int | None]:
    """Return the model's number of tokens in the vocabulary and its longest row, None where its configuration says
    nothing."""
    config = _text_config(model)
    return getattr(config, "vocab_size", None), getattr(config, "max_position_embeddings", None)


def _text_config(model: Any) -> Any:
    return model.config.get_text_config()


def lay_out(
    model: nn.Module, prompts: Any, responses: Any, tree: RowTree | None = None, images: Sequence[Any] | None = None
) -> ForwardRows:
    """Lay out rows as the model's plan says, on its device. tree: what they share; None: prompts that are equal. A
    model whose rows form no trees computes all tokens of each. images: of each row, encoded; None: no row has any.
    Raises as `forward_rows`, and as `pixels_of` of images."""
    plan, (vocabulary, length_max) = plan_for(model), limits_of(unwrapped(model))
    prompts, responses = list(prompts), list(responses)
    if tree is None or not plan.trees:
        lengths = [len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=False)]
        tree = shared_prompts(model, prompts[: len(lengths)], lengths)
    rows = forward_rows(
        prompts,
        responses,
        packed=plan.packed,
        device=device_of(model),
        vocabulary=vocabulary,
        length_max=length_max,
        tree=tree,
    )
    return _with_images(unwrapped(model), rows, prompts, images)


def _with_images(model: Any, rows: ForwardRows, prompts: Sequence[Any], images: Sequence[Any] | None) -> ForwardRows:
    """Return padded rows with their pixels, in the order of their lines. An image token that was drawn has no
    features."""
    pixels = pixels_of(model, prompts, images, rows.last_R.argsort().tolist())
    if (processor := processor_of(model)) is None:
        return rows
    ids_N = rows.ids_BT.view(-1)
    drawn_S = rows.from_S + 1
    ids_N[drawn_S] = ids_N[drawn_S].masked_fill(ids_N[drawn_S] == processor.token_id, 0)
    return replace(rows, pixels=pixels)


# ---------------------------------------------------------------- the experiment


def _check_whole(model: nn.Module) -> None:
    first = next(model.parameters())
    if first.is_meta or is_sharded(first):
        state = "on the meta device" if first.is_meta else "sharded"
        raise UsageError(f"{type(model).__name__} is {state}; call scoring.plan_for(model) once before that")


def _found(model: Any) -> ScoringPlan:
    if getattr(model, "takes_trees", False):
        return ScoringPlan(packed=True, own_head=True, trees=_takes_trees(model))
    reason = _refusal(model)
    if not reason:
        reason = _tried_packed(model)
    if reason:
        _check_causal(model)
    return ScoringPlan(
        packed=not reason,
        reason=reason,
        own_head=_has_own_head(model, packed=not reason),
        trees=not reason and _takes_trees(model),
    )


def _refusal(model: Any) -> str:
    """Why rows of the model cannot be packed, as far as its configuration says."""
    config = model.config.get_text_config()
    others = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYERS)
    if others:
        return f"it has layers of {', '.join(others)}"
    if processor_of(model) is not None:
        return "it reads images"
    if not getattr(model, "_supports_attention_backend", False):
        return "its attention cannot be replaced"
    return ""


def _tried_packed(model: Any) -> str:
    """Set attention in rows and try it; if it fails, restore the attention and say why."""
    from transferqueue.adapters.scoring.attention import NAME

    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    reason = "its attention cannot be replaced" if model.config._attn_implementation != NAME else ""
    if not reason:
        try:
            reason = _difference(lambda rows: _outputs(model, rows, packed=True))
        except Unsupported as error:
            reason = str(error)
    if reason:
        model.set_attn_implementation(before)
    return reason


@torch.no_grad()
def _has_own_head(model: Any, *, packed: bool) -> bool:
    """Whether the logits are the output layer's: some models scale or cap them afterwards."""
    head = model.get_output_embeddings()
    if head is None:
        return False
    with _evaluating(model):
        rows = forward_rows(_ROWS, [[]] * len(_ROWS), packed=packed, device=device_of(model))
        with _outputs_of(head) as outputs:
            logits = model(**inputs(rows)).logits
        wanted = outputs[-1] if _is_sharded(model) else head(_hidden(model, inputs(rows)))
    return logits.shape == wanted.shape and torch.allclose(logits, wanted, rtol=1e-3, atol=1e-3)


def _check_causal(model: Any) -> None:
    reason = _difference(lambda rows: _outputs(model, rows, packed=False))
    if reason:
        raise Unsupported(f"{type(model).__name__} cannot score padded rows: {reason}; give a causal language model")


def _difference(run: Callable[[list[list[int]]], list[Tensor]]) -> str:
    """Run the second row beside two different first rows, and alone; say what differs."""
    second, beside = run(list(_ROWS))[1], run([_OTHER, _ROWS[1]])[1]
    alone = run([_ROWS[1]])[0]
    if float((second - beside).abs().max()) > _LEAK * _rounding(alone):
        return "a row of a batch reads another one"
    if float((second - alone).abs().max()) > _rounding(alone):
        return "a row in a batch gets other outputs than alone"
    return ""


def _rounding(outputs: Tensor) -> float:
    return _ROUNDING.get(outputs.dtype, 0.1) * (float(outputs.float().std()) or 1.0)


def _takes_trees(model: Any) -> bool:
    """Whether a row that continues another one gets, for its own tokens, the outputs that it gets alone: on a GPU also
    with the kernel of 16-bit numbers, in which trainers compute."""
    if device_of(model).type == "cuda" and not _continues(model, torch.autocast("cuda", torch.bfloat16)):
        return False
    return _continues(model, nullcontext())


def _continues(model: Any, numbers: AbstractContextManager[Any]) -> bool:
    own, tree = len(_ROWS[1]) - _SHARED, RowTree.of([-1, 0], [0, _SHARED])
    with numbers:
        alone = _outputs(model, [_ROWS[1]], packed=True)[0]
        continued = _outputs(model, [_CONTINUED, _ROWS[1]], packed=True, tree=tree)[1]
    return float((continued[-own:] - alone[-own:]).abs().max()) <= _rounding(alone)


@torch.no_grad()
def _outputs(model: Any, rows: list[list[int]], *, packed: bool, tree: RowTree | None = None) -> list[Tensor]:
    """Return the model's outputs over each row: ``[tokens, …]``."""
    with _evaluating(model):
        laid = forward_rows(rows, [[]] * len(rows), packed=packed, device=device_of(model), tree=tree)
        output = _hidden(model, inputs(laid))
    flat = output.reshape(-1, output.shape[-1])
    return [flat[int(last) + 1 - len(row) : int(last) + 1] for row, last in zip(rows, laid.last_R, strict=True)]


def _hidden(model: Any, arguments: dict[str, Any]) -> Tensor:
    """Return what the body of the model gives to its output layer. Of a sharded model the weights around its layers are
    whole only within its own forward."""
    if getattr(model, "takes_trees", False):
        return model(**arguments).logits  # type: ignore[no-any-return]
    if not _is_sharded(model):
        return model.base_model(**arguments).last_hidden_state  # type: ignore[no-any-return]
    with _outputs_of(model.base_model) as outputs:
        model(**arguments)
    return outputs[-1].last_hidden_state  # type: ignore[no-any-return]


def _is_sharded(model: nn.Module) -> bool:
    return is_sharded(next(model.parameters()))


@contextmanager
def _outputs_of(module: nn.Module) -> Iterator[list[Any]]:
    """Collect what calls of a module return until the end of the block."""
    outputs: list[Any] = []
    handle = module.register_forward_hook(lambda module, arguments, output: outputs.append(output))
    try:
        yield outputs
    finally:
        handle.remove()


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
