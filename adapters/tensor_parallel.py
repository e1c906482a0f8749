"""Weights for the workers of a tensor-parallel engine: each pulls its part of each tensor, and no more crosses to its
host.

Two ways, depending on the engine:

- Parameters that say which part they are (`DTensor`): `parts_of` a module, which `WeightChannel.pull` takes as
  ``only=``, and `copy_parts`.
- An engine's own ``load_weights``, which takes whole tensors and cuts them (vLLM, SGLang): `PartsLoader` gives it
  tensors that are read when used, and records the parts it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import transferqueue as tq
from transferqueue.adapters.lora_weights import is_adapter
from transferqueue.adapters.protocols import Unsupported
from transferqueue.adapters.weights import in_layers_of
from transferqueue.errors import SchemaError, UsageError, listing

Box = list[tuple[int, int]]
"""The wanted range of each dimension of a tensor."""
LoadWeights = Callable[[Iterator[tuple[str, Tensor]]], object]
"""Takes the tensors of a model by name, as ``load_weights`` of vLLM's models does."""

_aten: Final = torch.ops.aten


# ---------------------------------------------------------------- parameters that know their part


def parts_of(module: nn.Module) -> dict[str, tq.Slice | None]:
    """Return the part of each parameter and buffer that this rank has, for ``pull(only=)``.

    Tensors without a part on this rank are left out.

    Args:
        module: with `DTensor` parameters.

    Returns:
        A `Slice` by name; None: all of the tensor.

    Raises:
        Unsupported: a parameter that is split otherwise than in even chunks along its dimensions.
    """
    return {name: _slice_of(box, tensor) for name, tensor, box in _placed(module) if all(a < b for a, b in box)}


def copy_parts(weights: tq.Weights, module: nn.Module) -> None:
    """Copy weights that were pulled with ``only=parts_of(module)`` into the parameters that this rank has.

    Dtypes are converted.

    Args:
        weights: the weights.
        module: the module.

    Raises:
        SchemaError: a tensor that is missing, in another shape, or no part of the module. Nothing was copied.
    """
    into = {
        name: getattr(tensor, "to_local", lambda whole=tensor: whole)()
        for name, tensor, box in _placed(module)
        if all(a < b for a, b in box)
    }
    fields = weights.fields()
    for name, local in into.items():
        if name not in fields or fields[name].fixed != tuple(local.shape):
            there = fields[name].fixed if name in fields else "nothing"
            raise SchemaError(f'of tensor "{name}" {there} was pulled, and this rank has {tuple(local.shape)}')
    if more := fields.keys() - into.keys():
        raise SchemaError(f"{listing(sorted(more))}: pulled, and not of the module; pull with only=parts_of(module)")
    with torch.no_grad():
        for name, local in into.items():
            local.copy_(weights[name])


def _placed(module: nn.Module) -> Iterator[tuple[str, Any, Box]]:
    """Each tensor of the module's state with the part that this rank has. Tied ones come once."""
    state, seen = module.state_dict(keep_vars=True), set[int]()
    for name, tensor in state.items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            detached = tensor.detach()
            yield name, detached, _local_box(name, detached)


def _local_box(name: str, tensor: Any) -> Box:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    box = [(0, size) for size in tensor.shape]
    if not isinstance(tensor, DTensor):
        return box
    for axis, placement in enumerate(tensor.placements):
        if type(placement) is Shard:
            start, stop = box[placement.dim]
            chunk = -(-(stop - start) // tensor.device_mesh.size(axis))
            first = min(start + tensor.device_mesh.get_local_rank(axis) * chunk, stop)
            box[placement.dim] = first, min(first + chunk, stop)
        elif not isinstance(placement, Replicate):
            raise Unsupported(f'tensor "{name}" is placed as {placement}; parts are chunks along dimensions')
    shape = tuple(stop - start for start, stop in box)
    if tuple(tensor.to_local().shape) != shape:
        raise Unsupported(f'this rank has {tuple(tensor.to_local().shape)} of tensor "{name}", and not {shape}')
    return box


def _slice_of(box: Box, tensor: Any) -> tq.Slice | None:
    parts = [None if bounds == (0, size) else bounds for bounds, size in zip(box, tensor.shape, strict=True)]
    return tq.Slice(*parts) if any(part is not None for part in parts) else None


# ---------------------------------------------------------------- engines that cut whole tensors


class PartsLoader:
    """Loads versions of a channel in one worker of an engine, by the engine's own ``load_weights``, which gets the
    layers that have a changed tensor (`adapters.weights.layer_of`).

    Of each tensor only the part that the worker takes is read. The loader gives `load_weights` tensors without bytes,
    which can be narrowed, indexed, split and transposed; the part that remains is read when it is used. Of the first
    version whole tensors are pulled, and the part that the worker takes of each is noted: later versions are pulled in
    these parts, in one pull, so that a version is held until it is loaded. Where memory is mapped, parts are views, as
    whole tensors are. Of parts that are held of the version before, only differences are fetched. For one thread.

    Args:
        channel: the weight channel.
        layers: give `load_weights` only the layers that have a changed tensor; default True. False: all tensors.
    """

    def __init__(self, channel: tq.WeightChannel, *, layers: bool = True) -> None:
        self._channel, self._layers = channel, layers
        self._published: dict[str, tq.Field] = {}
        self._taken: dict[str, Box | None] = {}
        self._held: tq.Weights | None = None
        self._pulled: tq.Weights | None = None
        self._timeout_s = 0.0

    @property
    def parts(self) -> dict[str, tq.Slice | None]:
        """The part of each tensor that is pulled of the next version; None: all of it. Empty: all tensors, whole."""
        return {name: _slice_of(box, self._published[name]) for name, box in self._taken.items() if box is not None}

    def load(self, load_weights: LoadWeights, *, version: int, timeout_s: float) -> None:
        """Load one version: `pull`, then `load_pulled`.

        Args:
            load_weights: takes the tensors of the model by name, as ``load_weights`` of vLLM's models does.
            version: to load.
            timeout_s: seconds to wait for it.
        """
        self.pull(version=version, timeout_s=timeout_s)
        self.load_pulled(load_weights)

    def pull(self, *, version: int, timeout_s: float) -> None:
        """Pull one version for `load_pulled`, in place of another that was pulled and not loaded.

        Raises the errors of `WeightChannel.pull`, and `Unsupported` for a version with adapters apart.

        Args:
            version: to pull.
            timeout_s: seconds to wait for it.
        """
        if self._pulled is not None:
            self._pulled.release()
            self._pulled = None
        self._pulled, self._timeout_s = self._pull(version, timeout_s, self._held), timeout_s

    def load_pulled(self, load_weights: LoadWeights) -> None:
        """Load the version of the last `pull`. It is held until `unpin`, and as long as any tensor passed to
        `load_weights`.

        Args:
            load_weights: takes the tensors of the model by name, as ``load_weights`` of vLLM's models does. Its errors
                are raised.

        Raises:
            UsageError: no version was pulled since the last load.
        """
        if self._pulled is None:
            raise UsageError("no version was pulled since the last load: call pull first")
        self._held = None  # after a load that fails, the next one is whole
        weights, self._pulled = self._pulled, None
        held = {name: self._taken[name] or _whole(self._published[name]) for name in weights}
        names = in_layers_of(weights.changed(), self._published) if self._layers else list(self._published)
        load_weights(_Loading(weights, held, self._published, self._taken, self._more).tensors(names))
        self._held = weights

    def unpin(self) -> None:
        """Return the server's memory of the version: all of it was read, also what `load_weights` left for later."""
        if self._held is not None:
            self._held.unpin()

    def _pull(self, version: int, timeout_s: float, since: tq.Weights | None) -> tq.Weights:
        if parts := self.parts:
            weights = self._channel.pull(version=version, only=parts, since=since, timeout_s=timeout_s)
            if weights.published() == self._published:
                return weights
            weights.release()
        weights = self._channel.pull(version=version, timeout_s=timeout_s)
        if any(map(is_adapter, weights)):
            weights.release()
            raise Unsupported(
                f'version {version} of channel "{self._channel.name}" has adapters apart, and workers that pull parts '
                'of tensors take merged weights: set weights.lora = "merged"'
            )
        self._published, self._taken = weights.published(), dict.fromkeys(weights)
        return weights

    def _more(self, version: int, name: str, box: Box) -> Tensor:
        """Parts that the worker took of no earlier version."""
        only = {name: _slice_of(box, self._published[name])}
        with self._channel.pull(version=version, only=only, timeout_s=self._timeout_s) as weights:
            return weights.torch()[name].clone()


class _Loading:
    """One version while it is loaded. `held`: pulled parts by tensor. `taken`: parts that the worker has taken,
    recorded here. `more` pulls missing parts."""

    def __init__(
        self,
        weights: tq.Weights,
        held: Mapping[str, Box],
        published: Mapping[str, tq.Field],
        taken: dict[str, Box | None],
        more: Callable[[int, str, Box], Tensor],
    ) -> None:
        self._weights, self._held, self._published = weights, held, published
        self._taken, self._more = taken, more
        self._last: tuple[str, Tensor] | None = None

    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """These tensors of the version, each without bytes."""
        for name in names:
            field = self._published[name]
            yield name, _PartTensor(self, name, _whole(field), list(range(len(field.fixed))), field.dtype)

    def take(self, name: str, box: Box) -> Tensor:
        """These bytes of a tensor."""
        if any(start >= stop for start, stop in box):
            return torch.empty([stop - start for start, stop in box], dtype=getattr(torch, self._published[name].dtype))
        before = self._taken[name]
        self._taken[name] = box if before is None else _around(before, box)
        held = self._held.get(name)
        if held is None or _around(held, box) != held:
            return self._more(self._weights.version, name, box)
        if self._last is None or self._last[0] != name:
            self._last = name, self._weights[name]
        part = self._last[1]
        for axis, ((start, stop), (first, _)) in enumerate(zip(box, held, strict=True)):
            part = part.narrow(axis, start - first, stop - start)
        return part


def _whole(field: tq.Field) -> Box:
    return [(0, size) for size in field.fixed]


def _around(one: Box, other: Box) -> Box:
    return [(min(a, c), max(b, d)) for (a, b), (c, d) in zip(one, other, strict=True)]


class _PartTensor(Tensor):
    """A part of a tensor that is read when it is used: narrowed, indexed and split without a byte. `dims`: the
    dimensions of the tensor that it has, in its own order; of the others its box has one element."""

    _loading: _Loading
    _name: str
    _box: Box
    _dims: list[int]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, loading: _Loading, name: str, box: Box, dims: list[int], dtype: str) -> Self:
        shape = [box[axis][1] - box[axis][0] for axis in dims]
        made: Self = Tensor._make_wrapper_subclass(cls, shape, dtype=getattr(torch, dtype))
        made._loading, made._name, made._box, made._dims = loading, name, box, dims
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<part of tensor {self._name!r}: {self._box}>"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is _aten.copy_.default and args[0].is_meta:  # a rehearsal, such as vLLM's: nothing is copied
            return args[0]
        of_part = _VIEWS.get(func)
        if of_part is not None and isinstance(args[0], _PartTensor):
            result = of_part(*args, **(kwargs or {}))
            if result is not None:
                return result
        given, named = tree_map_only(_PartTensor, _PartTensor._read, (tuple(args), kwargs or {}))
        return func(*given, **named)

    def _read(self) -> Tensor:
        part = self._loading.take(self._name, self._box)
        left = sorted(self._dims)
        for axis in reversed(range(part.dim())):
            if axis not in left:
                part = part.select(axis, 0)
        return part.permute([left.index(axis) for axis in self._dims])

    def _other(self, box: Box, dims: list[int]) -> _PartTensor:
        return _PartTensor(self._loading, self._name, box, dims, str(self.dtype).removeprefix("torch."))

    def _narrowed(self, axis: int, start: int, stop: int) -> _PartTensor:
        box = list(self._box)
        first = box[self._dims[axis]][0]
        box[self._dims[axis]] = first + start, first + stop
        return self._other(box, self._dims)


def _sliced(part: _PartTensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> _PartTensor | None:
    first, stop, _ = slice(start, end).indices(part.shape[dim])
    return part._narrowed(dim, first, max(first, stop)) if step == 1 else None


def _selected(part: _PartTensor, dim: int, index: int) -> _PartTensor:
    dim, index = dim % part.dim(), index % part.shape[dim]
    narrowed = part._narrowed(dim, index, index + 1)
    return part._other(narrowed._box, [*part._dims[:dim], *part._dims[dim + 1 :]])


def _split(part: _PartTensor, size: int, dim: int = 0) -> list[_PartTensor]:
    length = part.shape[dim]
    return [part._narrowed(dim, at, min(at + size, length)) for at in range(0, length, size)] or [part]


def _split_at(part: _PartTensor, sizes: Sequence[int], dim: int = 0) -> list[_PartTensor]:
    ends = [sum(sizes[: at + 1]) for at in range(len(sizes))]
    return [part._narrowed(dim, end - size, end) for end, size in zip(ends, sizes, strict=True)]


def _transposed(part: _PartTensor, one: int, other: int) -> _PartTensor:
    dims = list(part._dims)
    dims[one], dims[other] = dims[other], dims[one]
    return part._other(part._box, dims)


_VIEWS: Final[dict[Any, Callable[..., Any]]] = {
    _aten.slice.Tensor: _sliced,
    _aten.select.int: _selected,
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split_at,
    _aten.transpose.int: _transposed,
    _aten.t.default: lambda part: _transposed(part, 0, 1) if part.dim() == 2 else None,
    _aten.permute.default: lambda part, dims: part._other(part._box, [part._dims[dim] for dim in dims]),
    _aten.detach.default: lambda part: part._other(part._box, part._dims),
    _aten.alias.default: lambda part: part._other(part._box, part._dims),
}
"""Operations that need no bytes. None: not with these arguments."""
